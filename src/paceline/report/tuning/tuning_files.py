"""A study of ``paceline tune`` as CSV, JSON and TOML, and for TensorBoard's HParams."""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...cost.machine.toml_files import dumps
from ..numbers import counted, finite
from .tuning_view import TrialRow, TuningView

_FIXED = ("trial", "state")
_LAST = (
    *("step", "last", "rung", "generation", "parent", "ranks", "seconds", "node_hours", "known"),
    *("failure", "reason"),
)


_JSON_FIELDS = (
    *("rung", "generation", "parent", "ranks", "seconds", "node_hours", "failure", "reason"),
    *("known", "waits_for", "waits"),
)


def csv_text(view: TuningView) -> str:
    """Return one line for each trial, with a header; unknown cells are empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_FIXED, *view.parameters, *view.metrics, *_LAST])
    for row in view.rows:
        values: Sequence[object] = row.values or [""] * len(view.metrics)
        writer.writerow(
            [
                *(row.number, row.state),
                *(row.parameters.get(name, "") for name in view.parameters),
                *values,
                *("" if (cell := getattr(row, name)) is None else cell for name in _LAST),
            ]
        )
    return text.getvalue()


def tuning_json(view: TuningView) -> dict[str, Any]:
    """Return the study as a tree of JSON; numbers that are not finite are None."""
    tree = {
        "format": "paceline-tune",
        "version": 1,
        "name": view.name,
        "journal": view.journal,
        "command": view.command,
        "search": view.search,
        "metrics": list(view.metrics),
        "goals": list(view.goals),
        "planned": view.planned,
        "best": list(view.best),
        "best_command": view.best_command,
        "importances": view.importances,
        "gain": asdict(view.gain) if view.gain is not None else None,
        "trials": [_trial(row) for row in view.rows],
        "notes": list(view.notes),
    }
    found: dict[str, Any] = finite(tree)
    return found


def best_text(view: TuningView) -> str:
    """Return the parameters of the best trial as TOML.

    Raises:
        ValueError: There is no best trial, or there are several metrics.
    """
    if not view.best:
        raise ValueError(f"the study {view.name} has no complete trial yet")
    if len(view.metrics) > 1:
        raise ValueError(
            f"the study {view.name} has {len(view.metrics)} metrics, and no single best trial. "
            "HINT: --csv FILE has all trials; --show marks those of the Pareto front"
        )
    row = view.rows[view.best[0]]
    lines = [
        f"# Best of {len(view.rows)} trials of the study {view.name}: trial {row.number}, "
        f"{view.metrics[0]} = {row.values[0]!r}"
    ]
    if view.best_command:
        lines.append(f"# paceline run {view.best_command}")
    if row.generation is None:
        return "\n".join(lines) + "\n" + dumps(dict(row.parameters))
    lines.append("# It changed its parameters during the training: first and last epoch of each.")
    schedule = [
        {
            "first": trial.first_step + 1,
            "last": trial.step or 0,
            "trial": trial.number,
            "parameters": trial.parameters,
        }
        for trial in view.ancestry(row.number)
    ]
    return "\n".join(lines) + "\n" + dumps({"schedule": schedule})


def _trial(row: TrialRow) -> dict[str, Any]:
    return {
        **{name: getattr(row, name) for name in ("number", "state", "parameters")},
        "values": list(row.values),
        "intermediate": [[step, value] for step, value in sorted(row.intermediate.items())],
        **{name: getattr(row, name) for name in _JSON_FIELDS},
        "noise_scale": list(row.noise) or None,
        "started": row.started,
    }


def check_folder(folder: Path) -> None:
    """Raise ValueError if the package is not installed, or the folder has files already."""
    _writer()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"--tensorboard {folder} is not an empty folder: TensorBoard would show the trials of "
            "both. HINT: name a new folder"
        )


def _writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise ValueError(
            "--tensorboard needs the package tensorboard, which is not installed. HINT: pip "
            "install tensorboard; or --csv FILE"
        ) from None
    return SummaryWriter


def write_hparams(view: TuningView, folder: Path) -> str:
    """Write the trials that have a value; return what was written.

    Raises:
        ValueError: The package is not installed, or the folder has files already.
        OSError: A file can't be written.
    """
    check_folder(folder)
    make = _writer()
    rows = [row for row in view.rows if row.values or row.last is not None]
    for row in rows:
        _write_trial(make, row, view, folder)
    return f"{counted(len(rows), 'trial')} for TensorBoard"


def _write_trial(make: Any, row: TrialRow, view: TuningView, folder: Path) -> None:
    values = list(row.values) or [row.last or 0.0]
    metrics = {
        f"hparam/{name}": float(value)
        for name, value in zip(view.metrics, values, strict=False)
        if math.isfinite(value)
    }
    name = f"trial-{row.number:05}"
    with make(log_dir=str(folder / name)) as writer:
        writer.add_hparams(dict(row.parameters), metrics, run_name=".")
        for step, value in sorted(row.intermediate.items()):
            writer.add_scalar(view.metrics[0], value, step)
