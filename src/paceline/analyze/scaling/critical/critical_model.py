"""The data of a measurement of the critical batch, and its file.

``critical-batch.json`` in the study's folder has the request, what the first run has shown, and all
runs. It is written after each run, so that a measurement that was interrupted can be continued.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from ....security.files import InvalidFileError
from ....security.folders import replace_file
from ....security.schema import Count, Size, read_json
from ..study_folder import StoredFile
from ..study_model import Amount, Ranks, Seconds

FORMAT, VERSION = "paceline-critical-batch", 1
FILE = "critical-batch.json"
MAX_BYTES, MAX_RUNS = 256 << 20, 4096
MAX_MULTIPLE = 1024
LINEAR, SQUARE_ROOT = "linear", "sqrt"
Rule = Annotated[str, Meta(pattern=f"^({LINEAR}|{SQUARE_ROOT}|)$")]
Multiple = Annotated[int, Meta(ge=1, le=MAX_MULTIPLE)]
Loss = float | None  # None: not finite
Square = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True)
class CriticalRequest:
    """What was asked.

    Attributes:
        script, args, cwd, where, options, settings: As in ``StudyRequest``.
        ranks: Number of ranks of all runs.
        multiples: Multiples of the batch, ascending, from 1 on.
        global_batch: Batch of all ranks in a step of the base; None: that of the script.
        rule: How the learning rate follows the batch; "": as the optimizer needs.
        tolerance: Relative difference of the loss up to which a batch is as good as the base.
        seeds: Runs of each multiple.
        steps: Steps of a run of the base; None: from the time budget.
        minutes: Time budget; None: the default.
        metric: Value of ``--metric``; "": the loss of each backward.
    """

    script: str
    args: list[str]
    cwd: str
    ranks: Ranks
    multiples: Annotated[list[Multiple], Meta(min_length=2, max_length=16)]
    where: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    global_batch: Size | None = None
    rule: Rule = ""
    tolerance: Annotated[float, Meta(gt=0, le=1)] = 0.01
    seeds: Size = 3
    steps: Size | None = None
    minutes: Amount | None = None
    metric: str = ""


@dataclass(frozen=True)
class BranchPoint:
    """What the first run from the checkpoint has shown.

    Attributes:
        step: Steps in the checkpoint; 0 where the script does not count them.
        batch: Samples of a step of all ranks.
        batches: Batches that a rank's loaders give in a step.
        optimizers: Their classes.
        rule: How the learning rate follows the batch.
        steps: Steps of a run of the base.
        start_s, step_s: Time of a run outside of its steps, and of a step.
    """

    step: Count
    batch: Size
    batches: Size
    optimizers: list[str]
    rule: Annotated[str, Meta(pattern=f"^({LINEAR}|{SQUARE_ROOT})$")]
    steps: Size
    start_s: Seconds
    step_s: Seconds

    @property
    def window(self) -> int:
        """Samples of each run."""
        return self.steps * self.batch

    def rate_factor(self, multiple: int) -> float:
        """Return the factor of the learning rate for a multiple of the batch."""
        return float(multiple) if self.rule == LINEAR else float(multiple) ** 0.5


@dataclass(frozen=True)
class BranchRun:
    """One run from the checkpoint.

    Attributes:
        multiple: Of the base's batch.
        seed: Runs of a seed see the same samples in the same order.
        parts: Batches into which the batch is split, with accumulated gradients; 1: none.
        samples: Samples of all ranks since the checkpoint, at the end of each step.
        losses: Mean loss of each step.
        noise: Sampled steps for the gradient noise scale, as ``sampled_steps`` returns them.
        failure: Why it has no losses, or "".
        diverged: Whether it failed because its loss was not finite.
        took_s: Wall time.
    """

    multiple: Multiple
    seed: Count
    parts: Size = 1
    samples: list[Amount] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    noise: list[tuple[Square, Square, Square, Square]] = field(default_factory=list)
    failure: str = ""
    diverged: bool = False
    took_s: Seconds = 0.0


@dataclass(frozen=True)
class StoredCritical(StoredFile):
    """Contents of ``critical-batch.json``.

    Attributes:
        point: None before the first run.
        notes: What the user should know.
    """

    request: CriticalRequest
    point: BranchPoint | None = None
    runs: Annotated[list[BranchRun], Meta(max_length=MAX_RUNS)] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def new(cls, request: CriticalRequest) -> "StoredCritical":
        return cls(FORMAT, VERSION, request)

    def of(self, multiple: int) -> list[BranchRun]:
        """Return the runs of a multiple."""
        return [run for run in self.runs if run.multiple == multiple]


def write_critical(folder: Path, stored: StoredCritical) -> None:
    """Write ``critical-batch.json``. Raises OSError."""
    replace_file(folder / FILE, json.dumps(asdict(stored)).encode() + b"\n")


def is_critical(folder: Path) -> bool:
    """Return whether a folder has a measurement of the critical batch."""
    return (folder / FILE).exists()


def read_critical(folder: Path) -> StoredCritical:
    """Read ``critical-batch.json``. Raises ValueError: it does not match the format."""
    path = folder / FILE
    try:
        stored = read_json(path, StoredCritical, MAX_BYTES, escape=False)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(
            f"{folder} has no {FILE}, so it is no measurement of a critical batch. HINT: paceline "
            f"scale --critical-batch -n 2 -o {folder} SCRIPT makes one"
        ) from None
    stored.check(path, FORMAT, VERSION)
    wrong = [run for run in stored.runs if len(run.samples) != len(run.losses)]
    if wrong or stored.request.multiples != sorted({1, *stored.request.multiples}):
        raise InvalidFileError(path, "contradicts itself. HINT: measure again")
    return stored
