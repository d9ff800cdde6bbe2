"""The tuned settings as a settings file.

They are for the next run of the same model on as many ranks and hosts, and for ``paceline run
--settings``.
"""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...cost.machine.dataclass_tree import shorten
from ...knobs.settings import Setting, fitting_settings, read, write_settings
from ...knobs.tuning import BY, Tuning, made
from .choice import S
from .successive_halving import TuningResult


def signature(
    parameters: list[Any], ranks: int, hosts: int, sockets: bool, bf16: bool
) -> dict[str, Any]:
    """Return the conditions under which tuned settings are valid.

    parameters: those that have gradients. ranks, hosts: of the exchange. sockets: whether it may
    reduce by sockets. bf16: whether gradients may be exchanged as bfloat16.
    """
    return {
        "compression": bf16,
        "ranks": ranks,
        "hosts": hosts,
        "sockets": sockets,
        "gradients": len(parameters),
        "gradient_bytes": sum(
            parameter.numel() * parameter.element_size() for parameter in parameters
        ),
        "machine": platform.machine(),
        "cores": os.cpu_count() or 0,
        "torch": version("torch"),
    }


def load_settings(path: Path, expected: dict[str, Any], default: S) -> tuple[S | None, str]:
    """Return the settings of the file, or ``default`` where nothing was faster.

    Return None and the reason where the file was made under other conditions. Raises ValueError
    where it is not a file of the tuner.
    """
    if not path.exists():
        return None, ""
    tree = read(path)
    stored = made(path, tree)
    for name, value in expected.items():
        if stored.get(name) != value:
            before = shorten(stored.get(name))
            return None, f"{path} was made with {name} = {before}, and this run has {value}"
    knobs, notes = fitting_settings(path, tree)
    if notes:
        return None, notes[0]
    return type(default).from_knobs(knobs) if knobs else default, ""


def store(wanted: Tuning, result: TuningResult[S], conditions: dict[str, Any]) -> str:
    """Write the result to the tuner's file; return the end of a message about it."""
    try:
        save_settings(Path(wanted.file), result, conditions, wanted.script)
    except OSError as error:
        return f"; {wanted.file} can't be written: {error.strerror}"
    return f"; stored in {wanted.file}"


def save_settings(
    path: Path, result: TuningResult[S], conditions: dict[str, Any], script: str
) -> None:
    """Write the result. Raises OSError where the file can't be written."""
    comments = (
        f"{result.choice}: {1e3 * result.step_s:.2f} ms a step, with {result.default} "
        f"{1e3 * result.default_step_s:.2f}",
    )
    knobs = result.choice.to_knobs() if result.is_faster else {}
    settings = {name: Setting(value, comments) for name, value in knobs.items()}
    of = {"script": script, "by": BY, **conditions}
    figures = {"step_ms": 1e3 * result.step_s, "step_before_ms": 1e3 * result.default_step_s}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    write_settings(path, settings, {**of, **(figures if result.is_faster else {}), "date": date})
