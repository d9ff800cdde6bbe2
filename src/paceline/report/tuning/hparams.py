"""A study for TensorBoard's HParams: a run for each trial, by ``torch.utils.tensorboard``."""

import math
from pathlib import Path
from typing import Any

from ..numbers import counted
from .tuning_view import TrialRow, TuningView


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
