"""Scaling studies of benchmarks/scripts/scale/laws.py, for planted_laws.py and next_size.py.

Each study is a folder as ``paceline scale`` writes it. A run whose figures are there is not
repeated, so a benchmark that was ended goes on where it was.
"""

import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import BIN, SCRIPTS, launch

from paceline.analyze.records.load_run import load_run
from paceline.analyze.scaling.figures_of_run import figures_of_run
from paceline.analyze.scaling.study_folder import (
    FORMAT,
    RECORD_FOLDER,
    RUNS_FOLDER,
    STUDY_FILE,
    VERSION,
    PlannedPoint,
    StoredStudy,
    read_runs,
    read_study,
    write_run,
    write_study,
)
from paceline.analyze.scaling.study_model import (
    STRONG,
    TEMPLATE,
    BatchSource,
    ScalingStudy,
    Setup,
    StudyRequest,
    StudyRun,
)

SCRIPT = SCRIPTS / "scale" / "laws.py"
GLOBAL_BATCH, RANK_BATCH = 64, 24  # of strong and of weak scaling


@dataclass(frozen=True)
class Case:
    """A script with planted losses, and what its study should say.

    Attributes:
        name: Unique name.
        kind: STRONG or WEAK.
        options: Of laws.py.
        causes: Causes that may be named as the main reason.
        truth: Planted parameters of the cost model, by name, in its units.
        mbit: Rate of each host's link in Mbit/s, one rank a host; 0: on this machine.
    """

    name: str
    kind: str
    options: dict[str, float]
    causes: tuple[str, ...] = ()
    truth: dict[str, float] = field(default_factory=dict)
    mbit: int = 0


def setup_of(case: Case, ranks: int) -> Setup:
    return Setup(ranks, GLOBAL_BATCH if case.kind == STRONG else RANK_BATCH * ranks)


def open_study(folder: Path, case: Case, sizes: Sequence[int], steps: int) -> None:
    """Create the study's folder, or check that it is of the same case."""
    arguments = [word for name, value in case.options.items() for word in _words(name, value)]
    arguments += ["--steps", str(steps)]
    request = StudyRequest(str(SCRIPT), arguments, str(SCRIPT.parent), [case.kind], list(sizes))
    base = setup_of(case, sizes[0]).global_batch
    points = [PlannedPoint(case.kind, setup_of(case, one)) for one in sizes]
    stored = StoredStudy(
        FORMAT, VERSION, request, BatchSource(TEMPLATE, base, "by an argument"), points
    )
    if (folder / STUDY_FILE).exists() and not _is_of(folder, request):
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_study(folder, stored)


def _is_of(folder: Path, request: StudyRequest) -> bool:
    """Return whether a folder has this study; not if another version of Paceline wrote it."""
    try:
        return read_study(folder).request == request
    except ValueError:
        return False


def _words(name: str, value: float) -> list[str]:
    flag = "--" + name.replace("_", "-")
    return [flag] if value is True else [flag, f"{value:g}"]


def measure(
    folder: Path, case: Case, ranks: int, start: Callable[[list[str]], object] = launch
) -> float:
    """Run one size unless its figures are there; return the seconds that it took.

    start: Runs the command.
    """
    setup = setup_of(case, ranks)
    if any(run.setup == setup for run in read_runs(folder)[0]):
        return 0.0
    run = folder / RUNS_FOLDER / setup.name
    shutil.rmtree(run, ignore_errors=True)
    run.mkdir(parents=True)
    words = read_study(folder).request.args
    where = ["-n", str(ranks)]
    if case.mbit:
        where = ["-H", ",".join(f"host{i + 1}:1" for i in range(ranks))]
        where += ["--env", f"PACELINE_LINK_MBIT={case.mbit}"]  # the interfaces do not know of tc
    command = [str(BIN / "paceline"), "run", *where, "--record", str(run / RECORD_FOLDER)]
    command += [str(SCRIPT), "--batch", str(setup.rank_batch), *words]
    began, started = time.time(), time.monotonic()
    start(command)
    took = time.monotonic() - started
    figures = figures_of_run(load_run(run / RECORD_FOLDER))
    hosts = len({one.host for one in figures.placement}) or 1
    write_run(
        folder,
        StudyRun(f"{RUNS_FOLDER}/{setup.name}", setup, 0, figures, "", hosts, took, began),
    )
    shutil.rmtree(run / RECORD_FOLDER)
    return took


def study_of(folder: Path) -> ScalingStudy:
    return read_study(folder)


def share_target(claim: str, wrong: int, count: int, most: float) -> dict[str, Any]:
    """Return a target for ``common.finish``: a share of cases, with Wilson's 95 % interval."""
    share, z = wrong / count, 1.96
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z / (1 + z**2 / count) * math.sqrt(share * (1 - share) / count + (z / count / 2) ** 2)
    return {
        "claim": f"{claim}: {wrong} of {count}",
        "limit": most,
        "value": share,
        "interval": [middle - half, middle + half],
        "met": share <= most,
        "decided": not middle - half <= most <= middle + half,
    }
