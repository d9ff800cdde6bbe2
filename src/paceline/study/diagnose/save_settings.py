"""Save the settings that ``paceline diagnose --try`` kept, for ``paceline run --settings``."""

import os
import socket
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from ...analyze.diagnosis.diagnosis import Diagnosis
from ...analyze.diagnosis.remedy import TrialResults
from ...knobs.settings import Setting, write_settings
from ...report.diagnosis.intervals import format_gain
from ...report.numbers import percent


def save_kept_settings(found: Diagnosis, path: Path) -> str:
    """Write the settings that were kept, and return a message for the user.

    No file is written if no setting was kept.
    """
    assert found.tried is not None
    kept = found.tried.kept
    if not kept:
        return f"no remedy was kept, so {path} is not written"
    settings = {
        name: Setting(value, _why(found, found.tried, name)) for name, value in kept.items()
    }
    write_settings(
        path,
        settings,
        {
            "script": Path(found.command[0]).name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "cores": os.cpu_count() or 0,
            "ranks": found.report.size,
            "torch": version("torch"),
        },
    )
    return f"the kept settings are in {path}; apply them with paceline run --settings {path} ..."


def _why(found: Diagnosis, tried: TrialResults, name: str) -> tuple[str, ...]:
    trial = next((one for one in tried.trials if one.remedy.knob == name), None)
    if trial is None:
        return ("set before the trials",)
    cause = next((one for one in found.causes if one.id == trial.remedy.cause), None)
    if cause is not None:
        why = [f"{cause.id}: {percent(cause.share)} of a step's time"]
    else:  # the cause was found in a later pass, or the remedy was requested without a cause
        why = [f"{trial.remedy.cause}, found with the settings that were kept before"] * bool(
            trial.remedy.cause
        )
    foreseen = f"predicted {format_gain(trial.predicted)} from {trial.source}, "
    measured = f"measured {format_gain(trial.gain)} of the throughput"
    return (*why, (foreseen if trial.predicted is not None else "") + measured)
