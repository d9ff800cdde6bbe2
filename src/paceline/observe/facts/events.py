"""Facts of single events: random draws, collectives, outputs, files, restored states, seeds."""

from dataclasses import dataclass, field

from .samples import Phase


@dataclass
class DrawFacts:
    """Random numbers that were drawn, or could have been.

    Attributes:
        place: "fetch" (a dataset's samples), "forward" or "construction" (of the first model).
        generator: "torch", "cuda", "numpy" or "python".
        worker: Number of the loader's worker process; None in the rank itself.
        loader: Key of the loader for "fetch", key of the model otherwise.
        pass_number: Pass of the loader; 0 otherwise.
        number: Batch of the pass, or number of the forward.
        state: Checksum of the generator's state before.
        has_drawn: Whether the state has changed.
        line: The line that drew, or the closest one known.
    """

    place: str
    generator: str
    worker: int | None
    loader: int
    pass_number: int
    number: int
    state: int
    has_drawn: bool
    line: str


@dataclass
class CollectiveFacts:
    """A collective, or a send or receive, of the script (not those of verify).

    Attributes:
        kind: Such as "allreduce", without underscores.
        nbytes: Bytes of its tensors.
        phase: What the training did.
        step: Optimizer steps before it.
        is_in_backward: Whether a backward ran.
        line: The line of the script; "" within a backward.
        removes_repeated: Whether a library gathers results of an evaluation, and removes those of
            samples that its sampler has repeated.
    """

    kind: str
    nbytes: int
    phase: Phase
    step: int
    is_in_backward: bool
    line: str
    removes_repeated: bool = False


@dataclass
class OutputFacts:
    """A line of text that the rank wrote to its standard output or error, or logged as a scalar.

    Attributes:
        text: The line.
        line: The line of code that wrote it.
        phase: What the training did at last.
        step: Optimizer steps before it.
        collectives: Number of collectives (in ``RankFacts.collectives``) before it.
        batches: Number of batches (in ``RankFacts.batches``) before it.
    """

    text: str
    line: str
    phase: Phase
    step: int
    collectives: int
    batches: int


@dataclass
class MetricFacts:
    """A value that a LightningModule logs.

    Attributes:
        name: Of the metric.
        value: On this rank, in this batch.
        is_reduced: Whether Lightning or the metric itself combines the values of all ranks.
        line: The line that logs it.
        phase: Training with gradients, or evaluation without.
    """

    name: str
    value: float
    is_reduced: bool
    line: str
    phase: Phase


@dataclass
class FileFacts:
    """A checkpoint that was saved or loaded.

    Attributes:
        path: Path as the script gave it.
        is_save: Saved, or loaded.
        line: The line that did.
        step: Optimizer steps before it.
        keys: Top-level keys; with a dot, those of one level below.
        contains: Which of "model", "optimizer", "schedule", "scaler", "random" states are in it.
        rows: By parameter (of the model state), the row of its values.
        is_distributed: Whether all ranks write it together (torch.distributed.checkpoint).
    """

    path: str
    is_save: bool
    line: str
    step: int
    keys: list[str]
    contains: list[str]
    rows: dict[str, int] = field(default_factory=dict)
    is_distributed: bool = False


@dataclass
class RestoreFacts:
    """A call of ``load_state_dict``.

    Attributes:
        what: "model", "optimizer" or "schedule".
        line: The line that called it.
        step: Optimizer steps before it.
    """

    what: str
    line: str
    step: int


@dataclass
class SeedFacts:
    """A call that seeded a generator.

    Attributes:
        generator: "torch", "numpy", "python", or "own" for an object that the script made.
        value: The seed.
        line: The line that called it.
        step: Optimizer steps before it.
    """

    generator: str
    value: int
    line: str
    step: int


@dataclass
class OperatorFacts:
    """An operator of the first step of a training.

    Attributes:
        name: Such as "aten.addmm".
        line: The line of the script; "" within a backward.
        checksum: Of the values of its first result; 0 if it has none.
    """

    name: str
    line: str
    checksum: int
