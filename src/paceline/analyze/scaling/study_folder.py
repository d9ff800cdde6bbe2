"""The folder of a scaling study. The format is described in docs/reference/formats/study-folder.md.

    study.json          the request, how the batch is set, the setups of the points
    predictions.json    predictions, stored before their sizes were measured
    runs/NAME/          one run: ``figures.json``, its record in ``record/``, its output in ``log``

A run without ``figures.json`` has not ended: it still runs, or was killed. The folder is all that
is known of a study, so a study that was killed can be continued.
"""

import json
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from ...security.files import InvalidFileError
from ...security.folders import replace_file
from ...security.schema import Count, read_json
from ...security.text import printable
from .study_model import (
    BatchSource,
    Kind,
    Prediction,
    ScalingStudy,
    Setup,
    SizePoint,
    StudyRequest,
    StudyRun,
)
from .study_notes import study_notes

FORMAT, VERSION = "paceline-scaling-study", 1
STUDY_FILE, PREDICTIONS_FILE, FIGURES_FILE = "study.json", "predictions.json", "figures.json"
RUNS_FOLDER, RECORD_FOLDER, LOG_FILE = "runs", "record", "log"
MAX_STUDY_BYTES = 4 << 20
MAX_FIGURES_BYTES = 256 << 20
MAX_RUNS = 1 << 14


@dataclass(frozen=True)
class PlannedPoint:
    """A size of a kind, and the setup that measures it; "why_not" if no setup can."""

    kind: Kind
    setup: Setup
    why_not: str = ""


@dataclass(frozen=True)
class StoredFile:
    """What all files of a study begin with."""

    format: str
    version: Annotated[int, Meta(ge=1)]

    def check(self, path: Path, known: str = FORMAT, newest: int = VERSION) -> None:
        """Raise InvalidFileError unless the file is of a format and version that can be read."""
        if self.format != known or self.version > newest:
            raise InvalidFileError(
                path,
                f"is no file of a scaling study that this version of Paceline reads (format "
                f"{printable(self.format[:40])!r}, version {self.version}). HINT: update Paceline",
            )


@dataclass(frozen=True)
class StoredStudy(StoredFile):
    """Contents of ``study.json``.

    Attributes:
        steps: Measured steps of each run; 0: not chosen yet.
    """

    request: StudyRequest
    batch: BatchSource | None = None
    points: list[PlannedPoint] = field(default_factory=list)
    steps: Count = 0
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _StoredRun(StoredFile):
    run: StudyRun


@dataclass(frozen=True)
class _StoredPredictions(StoredFile):
    predictions: list[Prediction]


def write_study(folder: Path, study: StoredStudy) -> None:
    """Write ``study.json``. Raises OSError."""
    _write(folder / STUDY_FILE, asdict(study))


def read_stored(folder: Path) -> StoredStudy:
    """Read ``study.json``.

    Raises:
        ValueError: The folder has none, or it does not match the format.
    """
    path = folder / STUDY_FILE
    try:
        stored = read_json(path, StoredStudy, MAX_STUDY_BYTES, escape=False)
    except FileNotFoundError:
        raise ValueError(
            f"{folder} has no {STUDY_FILE}, so it is not the folder of a scaling study. HINT: "
            f"paceline scale --output {folder} SCRIPT makes one"
        ) from None
    except NotADirectoryError:
        raise ValueError(f"{folder} is no folder. HINT: give the folder of a study") from None
    stored.check(path)
    return stored


def read_study(folder: Path) -> ScalingStudy:
    """Read a study with all that was measured until now.

    A run's file that cannot be read is left out, and named in ``notes``.

    Raises:
        ValueError: The folder is not one of a study.
    """
    stored = read_stored(folder)
    runs, notes = read_runs(folder)
    predictions = read_predictions(folder)
    points = [_point(point, runs, predictions) for point in stored.points]
    name = printable(str(folder))
    return ScalingStudy(
        str(folder),
        stored.request,
        _batch(stored.batch, runs),
        sorted(points, key=lambda point: (point.kind, point.ranks)),
        runs,
        predictions,
        [*map(printable, stored.notes), *notes, *study_notes(name, stored.request, points, runs)],
    )


def write_run(folder: Path, run: StudyRun) -> None:
    """Write the ``figures.json`` of a run that ended. Raises OSError."""
    _write(folder / run.folder / FIGURES_FILE, {**_head(), "run": asdict(run)})


def read_runs(folder: Path) -> tuple[list[StudyRun], list[str]]:
    """Return the runs that ended, in the order of their start, and notes on unreadable ones."""
    found, notes = [], []
    for path in sorted((folder / RUNS_FOLDER).glob(f"*/{FIGURES_FILE}"))[:MAX_RUNS]:
        try:
            stored = read_json(path, _StoredRun, MAX_FIGURES_BYTES)
            stored.check(path)
        except (ValueError, OSError) as error:
            notes.append(f"a run was left out: {printable(str(error))}")
            continue
        found.append(replace(stored.run, folder=f"{RUNS_FOLDER}/{path.parent.name}"))
    return sorted(found, key=lambda run: (run.started, run.folder)), notes


def store_predictions(folder: Path, predictions: list[Prediction]) -> None:
    """Add predictions to those of the study; sizes that were measured already are left out.

    Raises:
        OSError: The file can't be written.
        ValueError: The existing file can't be read.
    """
    known = read_predictions(folder)
    setups = (run.setup for run in read_runs(folder)[0])
    measured = {(setup.ranks, setup.global_batch) for setup in setups}
    new = [
        replace(prediction, made=prediction.made or time.time())
        for prediction in predictions
        if (prediction.ranks, prediction.global_batch) not in measured
    ]
    if new:
        rows = [asdict(prediction) for prediction in (*known, *new)]
        _write(folder / PREDICTIONS_FILE, {**_head(), "predictions": rows})


def read_predictions(folder: Path) -> list[Prediction]:
    """Return the predictions that were stored. Raises ValueError."""
    path = folder / PREDICTIONS_FILE
    try:
        stored = read_json(path, _StoredPredictions, MAX_STUDY_BYTES)
    except FileNotFoundError:
        return []
    stored.check(path)
    return stored.predictions


def _batch(stored: BatchSource | None, runs: list[StudyRun]) -> BatchSource | None:
    """Return how the batch is set, as the runs have shown."""
    shown = next((run for run in runs if run.batch_how), None)
    if stored is None or shown is None:
        return stored
    return BatchSource.of(shown.batch_how, stored.base, shown.batch_parts)


def _point(planned: PlannedPoint, runs: list[StudyRun], predictions: list[Prediction]) -> SizePoint:
    mine = [run for run in runs if run.setup == planned.setup]
    good = [run for run in mine if run.figures is not None]
    failed = [run for run in mine if run.figures is None]
    failure = planned.why_not or (failed[0].failure if failed and not good else "")
    begun = min((run.started for run in mine), default=float("inf"))
    held = [
        prediction
        for prediction in predictions
        if (prediction.kind, prediction.ranks, prediction.global_batch)
        == (planned.kind, planned.setup.ranks, planned.setup.global_batch)
        and prediction.made <= begun
    ]
    return SizePoint(planned.kind, planned.setup, good, printable(failure), len(failed), held)


def _head() -> dict[str, Any]:
    return {"format": FORMAT, "version": VERSION}


def _write(path: Path, tree: dict[str, Any]) -> None:
    data = json.dumps(tree, allow_nan=False).encode()
    replace_file(path, data + b"\n")
