"""Data model of a scaling study: what was asked, the figures of each run, and its sizes.

Everything here is data of the study's folder (study_folder.py). Times are in seconds. "A step and
rank" means: the mean over all measured steps and over all ranks.
"""

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Annotated, Any

from msgspec import Meta

from ...cost.layout import MAX_TEXT_CHARS, Layout
from ...security.schema import Count, Size

STRONG, WEAK = "strong", "weak"
# How the batch of a size is set.
SHARD, KNOB, TEMPLATE, UNKNOWN = "world.shard", "loader knob", "template", "unknown"
FIXED = "fixed"  # in studies that were not made by running a script
WAYS = {
    SHARD: "world.shard takes the global batch of each size",
    KNOB: "Paceline sets the batch_size of the training's DataLoader on each rank",
    TEMPLATE: "the script gets the batch of each size in its arguments",
}
MIN_REPEATS, MAX_REPEATS = 3, 12  # runs of a setup
MAX_RANKS = 1 << 20
MAX_SIZES = 64
Kind = Annotated[str, Meta(pattern=f"^({STRONG}|{WEAK})$")]
Seconds = Annotated[float, Meta(ge=0, le=1e12)]
Number = Annotated[float, Meta(ge=-1e300, le=1e300)]
Amount = Annotated[float, Meta(ge=0, le=1e300)]
Factor = Annotated[float, Meta(ge=0, le=1 + 1e-6)]
Ranks = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
LayoutText = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]


@dataclass(frozen=True)
class StateSeconds:
    """Mean seconds per step and rank in each state (docs/reference/measures.md)."""

    useful: Seconds = 0.0
    input: Seconds = 0.0
    checkpoint: Seconds = 0.0
    validation: Seconds = 0.0
    starved: Seconds = 0.0
    other: Seconds = 0.0
    wait: Seconds = 0.0
    transfer: Seconds = 0.0
    bubble: Seconds = 0.0


@dataclass(frozen=True)
class WaitCause:
    """A part of the wait: for which rank, and what this rank was doing.

    Attributes:
        rank: The rank that was waited for; None if it is unknown, or for the sum of many ranks.
        doing: Its state; None if it is unknown.
        seconds: Mean seconds per step and rank.
    """

    rank: int | None
    doing: str | None
    seconds: Seconds


@dataclass(frozen=True)
class CollectiveLoad:
    """One kind of collective of one process group.

    Attributes:
        group: Name of the group.
        size: Number of its members.
        kind: As in the report: "all-reduce", ...
        calls: Calls per step of the job.
        bytes: Bytes per step of the whole vector, summed over the calls.
        wait, transfer: Exposed seconds per step and member.
        overlapped: Seconds per step and member in flight while the member was not blocked.
        busbw: Median bus bandwidth in GB/s; None if no call is large enough.
    """

    group: str
    size: Size
    kind: str
    calls: Amount
    bytes: Amount
    wait: Seconds
    transfer: Seconds
    overlapped: Seconds
    busbw: Amount | None = None


@dataclass(frozen=True)
class Spread:
    """How the time of steps differs between ranks and from step to step.

    ``own`` is the useful time; ``busy`` is all time outside communication (b of measures.md).

    Attributes:
        own_mean_s, busy_mean_s: By rank, mean of a step.
        busy_sd_s: Standard deviation of a rank's busy time from step to step, mean of the ranks.
        busy_max_s: Mean over the steps of the longest busy time of a rank.
        busy_quantiles_s: 0, 5, ..., 100 % quantiles of the busy times of all ranks and steps.
    """

    own_mean_s: list[Seconds] = field(default_factory=list)
    busy_mean_s: list[Seconds] = field(default_factory=list)
    busy_sd_s: Seconds = 0.0
    busy_max_s: Seconds = 0.0
    busy_quantiles_s: list[Seconds] = field(default_factory=list)


@dataclass(frozen=True)
class HostPlacement:
    """Where ranks of a run were: as in the report's placement."""

    host: str
    ranks: str  # as "0-3,8"
    cores: str | None = None
    sockets: list[int] = field(default_factory=list)
    threads: Count | None = None
    device: str | None = None


@dataclass(frozen=True)
class EnergyReading:
    """Energy of the measured steps from one source.

    Attributes:
        source: "package", "dram", "gpu", "node", ...
        joules: Charged to the job.
        is_estimate: Whether it is a share of a counter that covers more than the job.
        how: How it was read and charged, in words.
    """

    source: str
    joules: Amount
    is_estimate: bool
    how: str


@dataclass(frozen=True)
class MachineState:
    """The machine during a run.

    Attributes:
        core_mhz: Mean clock frequency of the job's cores; None if it cannot be read.
        core_mhz_low: Lowest frequency that was seen.
        other_cores: Mean number of cores that other processes used, on the launcher's host.
        notes: What could not be read, and why.
    """

    core_mhz: Amount | None = None
    core_mhz_low: Amount | None = None
    other_cores: Amount | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TargetResult:
    """How a run to a target ended (``--until``).

    Attributes:
        target: As typed: "accuracy>=0.97".
        reached: Whether the target was reached.
        best: The value nearest to the target.
        steps, samples, seconds: Until the target, or until the end.
        learning_rate: Largest of the run; None if it is not known.
    """

    target: str
    reached: bool
    best: Number | None
    steps: Count
    samples: Count
    seconds: Seconds
    learning_rate: Amount | None = None


@dataclass(frozen=True)
class NoiseFigures:
    """Gradient noise scale of a run, as ``NoiseScale``; ``samples`` None: undetermined."""

    samples: Amount | None
    low: Amount
    high: Amount | None
    global_batch: Count
    steps: Count


@dataclass(frozen=True)
class RunFigures:
    """Figures of one run, over its measured steps: those after the warm-up.

    Attributes:
        first_step: Number of the first measured step.
        warm_up: Number of steps that were dropped by the rule of figures_of_run.py.
        steady: Whether the rule found a steady part; else the figures may contain warm-up.
        step_s: Duration of each measured step on the job: from the last rank's end of a step to
            its end of the next one.
        samples_per_step: Samples of the whole job per step, as recorded (mean).
        usual_samples: Median of the same; differs where the last batch of an epoch is smaller.
        batches_per_step: Batches that a rank's loaders gave in a step (median).
        seconds: By state. The states add up to the mean of ``step_s``.
        pop: POP factors by name (Efficiencies): "load_balance", "communication",
            "serialisation", "transfer", "parallel", "checkpoint", ..., "useful".
        flops_per_step: None if they were not counted.
        memory_bytes: Largest resident memory of each rank.
        device_bytes: Largest memory on the device of each rank, if there is one.
        startup_s: From the start of the ranks to the first batch.
        wall_s: Of the whole run, with start-up.
        recording_share: Share of the time that recording took, on the rank where it is largest.
        noise: Gradient noise scale; None with one rank, or too few sampled steps.
        layout: Layouts of the models, as the record has them; "" without world.distribute.
        confidence: Of the record, in [0, 1], with the reasons in ``doubts``.
    """

    first_step: Count
    warm_up: Count
    steady: bool
    step_s: list[Seconds]
    samples_per_step: Amount
    usual_samples: Amount
    seconds: StateSeconds
    pop: dict[str, Factor | None]
    spread: Spread
    collectives: list[CollectiveLoad] = field(default_factory=list)
    waits: list[WaitCause] = field(default_factory=list)
    placement: list[HostPlacement] = field(default_factory=list)
    memory_bytes: list[Count] = field(default_factory=list)
    device_bytes: list[Count] = field(default_factory=list)
    flops_per_step: Amount | None = None
    batches_per_step: Size = 1
    energy: list[EnergyReading] = field(default_factory=list)
    energy_notes: list[str] = field(default_factory=list)
    machine: MachineState = field(default_factory=MachineState)
    seed: Count | None = None
    to_target: TargetResult | None = None
    startup_s: Seconds = 0.0
    wall_s: Seconds = 0.0
    recording_share: Amount = 0.0
    noise: NoiseFigures | None = None
    layout: str = ""
    confidence: Factor = 1.0
    doubts: list[str] = field(default_factory=list)

    @property
    def mean_step_s(self) -> float:
        return sum(self.step_s) / len(self.step_s) if self.step_s else 0.0

    @property
    def throughput(self) -> float:
        """Samples/s of the whole job over the measured steps."""
        return self.samples_per_step / self.mean_step_s if self.mean_step_s else 0.0


@dataclass(frozen=True)
class Setup:
    """One configuration that is run: a number of ranks and a global batch.

    The points of both kinds of scaling may share a setup, and then its runs.

    Attributes:
        layout: The layout over these ranks; "": as the script says.
    """

    ranks: Ranks
    global_batch: Size
    layout: LayoutText = ""

    @property
    def data_ranks(self) -> int:
        """Number of ranks that train different samples."""
        return data_ranks(self.layout, self.ranks)

    @property
    def rank_batch(self) -> int:
        """Samples of a rank, which others may share."""
        return self.global_batch // self.data_ranks

    @property
    def name(self) -> str:
        """Name in the study's folder."""
        return f"n{self.ranks}-b{self.global_batch}"


def data_ranks(layout: str, ranks: int) -> int:
    """Return how many of the ranks train different samples.

    Raises:
        ValueError: The layout does not fit the number of ranks.
    """
    return Layout.parse(layout).over(ranks).dp or 1 if layout else ranks


def layout_over(text: str, ranks: int) -> str:
    """Return a recorded layout with all extents; that of several models is returned unchanged."""
    try:
        return str(Layout.parse(text).over(ranks)) if text else ""
    except ValueError:
        return text


@dataclass(frozen=True)
class StudyRun:
    """One run of a setup.

    Attributes:
        folder: Folder of the run, relative to the study's.
        repeat: Number of the run among those of its setup, from 0 on.
        figures: None if it failed.
        failure: Why it failed, in the words of the script; "" if it did not.
        hosts: Number of nodes.
        took_s: Wall time of the whole run.
        started: When it started (s since 1970).
        batch_how: How the batch was set: SHARD, KNOB or TEMPLATE; "" if the run failed.
        batch_parts: Parts of the global batch; one part was set, and a step trains all.
    """

    folder: str
    setup: Setup
    repeat: Count
    figures: RunFigures | None = None
    failure: str = ""
    hosts: Size = 1
    took_s: Seconds = 0.0
    started: Seconds = 0.0
    batch_how: str = ""
    batch_parts: Size = 1


@dataclass(frozen=True)
class Prediction:
    """Prediction of one size, stored before it was measured.

    Attributes:
        kind: STRONG or WEAK.
        throughput, low, high: In samples/s.
        model: Name of the model that predicted it.
        sizes: Ranks of the sizes that it was fitted to.
        made: When it was stored (s since 1970).
    """

    kind: Kind
    ranks: Ranks
    global_batch: Size
    throughput: Amount
    low: Amount
    high: Amount
    model: str
    sizes: list[int]
    made: Seconds


@dataclass(frozen=True)
class SizePoint:
    """One size of one kind of scaling.

    Attributes:
        kind: STRONG or WEAK.
        runs: The runs that succeeded.
        failure: Why the size has no figures; "" if it has. The first failed run's words.
        failed_runs: Number of runs that failed.
        predicted: Predictions of this size that were stored before its first run.
    """

    kind: Kind
    setup: Setup
    runs: list[StudyRun] = field(default_factory=list)
    failure: str = ""
    failed_runs: int = 0
    predicted: list[Prediction] = field(default_factory=list)

    @property
    def ranks(self) -> int:
        return self.setup.ranks

    @property
    def hosts(self) -> int:
        return max((run.hosts for run in self.runs), default=1)

    @property
    def layout(self) -> str:
        """The layout of its runs over all ranks; "" if they do not call world.distribute."""
        recorded = (layout_over(figures.layout, self.ranks) for figures in self.figures)
        return self.setup.layout or next(recorded, "")

    @property
    def figures(self) -> list[RunFigures]:
        return [run.figures for run in self.runs if run.figures is not None]


@dataclass(frozen=True)
class BatchSource:
    """How the batch of a size is set.

    Attributes:
        how: SHARD, KNOB or TEMPLATE; UNKNOWN until the first run has shown it.
        base: Global batch at the smallest size, from which the others follow.
        text: The same in words, for the user; "" if it is unknown.
    """

    how: str
    base: Size
    text: str = ""

    @classmethod
    def of(cls, how: str, base: int, parts: int = 1) -> "BatchSource":
        """Return it with its text. parts: As in ``StudyRun``."""
        way = WAYS.get(how)
        split = f", in {parts} batches" if parts > 1 else ""
        text = f"{way}; {base} samples a step at the smallest size{split}" if way else ""
        return cls(how, base, text)


@dataclass(frozen=True)
class StudyRequest:
    """What was asked, as stored in the study's folder.

    Attributes:
        script, args: As typed; the arguments may have templates ({per_rank}, {global}, {ranks}).
        cwd: Working directory of the runs.
        where, options: Options of ``paceline run`` for all runs: hosts, and others.
        settings: Knobs that are set in all runs.
        layout: Layout of all sizes, which fits each of them; "": as the script says.
        kinds: STRONG, WEAK or both.
        sizes: Numbers of ranks, ascending.
        global_batch: Batch of all ranks at the smallest size; None: that of the script.
        steps: Measured steps of a run; None: chosen from the first run.
        precision: Relative half width of the interval of a throughput that is asked for.
        minutes: Time budget of all runs; of each job under ``--submit``.
        oversubscribe: Whether ranks may outnumber cores and GPUs.
        ranks_per_host: Ranks on a full host; None: as many as the largest size has.
        side_by_side: Whether sizes run at the same time that fit on different hosts.
        weak_if_time: Whether weak scaling may be left out if the time is too short for both.
        efficiency: Lowest efficiency of a size that is called worthwhile.
        until: Target of the runs, or "".
        seeds: Runs to the target for each setup.
    """

    script: str
    args: list[str]
    cwd: str
    kinds: list[Kind]
    sizes: Annotated[list[Ranks], Meta(min_length=1, max_length=MAX_SIZES)]
    where: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    global_batch: Size | None = None
    steps: Size | None = None
    precision: Annotated[float, Meta(gt=0, le=1)] = 0.03
    minutes: Amount | None = None
    oversubscribe: bool = False
    ranks_per_host: Size | None = None
    side_by_side: bool = False
    weak_if_time: bool = False
    efficiency: Annotated[float, Meta(gt=0, le=1)] = 0.8
    until: str = ""
    metric: str = ""
    layout: LayoutText = ""
    seeds: Size = 1


@dataclass(frozen=True)
class ScalingStudy:
    """A study: the request, how the batch is set, and what was measured.

    Attributes:
        folder: Where it lies.
        batch: None until the first run has shown how the script takes its batch.
        points: Every size of every kind, by kind and then by ranks.
        runs: All runs, in the order of their start.
        predictions: All that were stored, also of sizes that are not in the study.
        notes: What the user should know: sizes left out, noise, runs that failed.
    """

    folder: str
    request: StudyRequest
    batch: BatchSource | None = None
    points: list[SizePoint] = field(default_factory=list)
    runs: list[StudyRun] = field(default_factory=list)
    predictions: list[Prediction] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.request.script

    @property
    def file_name(self) -> str:
        """The name without the folder, for a document."""
        return PurePath(self.name).name

    def of_kind(self, kind: str) -> list[SizePoint]:
        """Return the points of a kind, by ascending ranks."""
        return sorted((p for p in self.points if p.kind == kind), key=lambda p: p.ranks)
