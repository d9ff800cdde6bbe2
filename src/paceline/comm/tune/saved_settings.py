"""What was found, as a settings file: for the next run of the same model on as many ranks and
hosts, and for ``paceline run --settings``."""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ...cost.machine.dataclass_tree import shown
from ...knobs.settings import Setting, fitting, read, write
from ...knobs.tuning import BY, made
from .choice import Choice
from .successive_halving import Verdict


def signature(
    parameters: list[Any], ranks: int, hosts: int, sockets: bool, bf16: bool
) -> dict[str, Any]:
    """Of whom the answer is: parameters that have gradients, ranks and hosts of their exchange and
    whether it may go by sockets, the machine, and whether gradients might travel as bfloat16."""
    return {
        "compression": bf16,
        "ranks": ranks,
        "hosts": hosts,
        "sockets": sockets,
        "gradients": len(parameters),
        "gradient_bytes": sum(one.numel() * one.element_size() for one in parameters),
        "machine": platform.machine(),
        "cores": os.cpu_count() or 0,
        "torch": version("torch"),
    }


def known(path: Path, mine: dict[str, Any], default: Choice) -> tuple[Choice | None, str]:
    """What the file says for this signature, ``default`` where nothing was faster; None where it
    says nothing, and why.

    Raises ValueError where it is no file of the tuner's."""
    if not path.exists():
        return None, ""
    tree = read(path)
    told = made(path, tree)
    for name, value in mine.items():
        if told.get(name) != value:
            before = shown(told.get(name))
            return None, f"{path} was made with {name} = {before}, and this is {value}"
    knobs, notes = fitting(path, tree)
    if notes:
        return None, notes[0]
    return Choice.of(knobs) if knobs else default, ""


def keep(path: Path, verdict: Verdict, mine: dict[str, Any], script: str) -> None:
    """Raises OSError where that can't be."""
    said = (
        f"{verdict.choice}: {1e3 * verdict.seconds:.2f} ms a step, with {verdict.default} "
        f"{1e3 * verdict.before:.2f}",
    )
    knobs = verdict.choice.knobs() if verdict.kept else {}
    settings = {name: Setting(value, said) for name, value in knobs.items()}
    of = {"script": script, "by": BY, **mine}
    figures = {"step_ms": 1e3 * verdict.seconds, "step_before_ms": 1e3 * verdict.before}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    write(path, settings, {**of, **(figures if verdict.kept else {}), "date": date})
