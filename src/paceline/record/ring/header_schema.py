"""Schema of the JSON in a record's header: the type and the range of each key.

A record's header is untrusted input. ``parse_header`` returns only keys of the schema, with
checked values, so code that reads ``Record.meta`` needs no further checks.
"""

from math import prod
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from ...plurals import counted
from ...security.files import InvalidFileError
from ...security.schema import parse_json
from ...security.text import printable_tree

MAX_RANKS = 1 << 20
MAX_RESTARTS = 1 << 20
MAX_FAILURE_CHARS = 300  # of the text of an exception
MAX_BLOCKS = 512  # of sharded models
MAX_BLOCK_CHARS = 200  # of the name of one
MAX_HALO_LAYERS = 64
MAX_LAYOUT_CHARS = 512
MAX_LAYOUTS_CHARS = 64  # of the axes of all models
MAX_AXES = 8
MAX_TIME_NS = 1 << 60  # no node has been up for 36 years

NonNegativeInt = Annotated[int, Meta(ge=0, lt=MAX_TIME_NS)]
TimeNs = NonNegativeInt  # ns
FiniteFloat = Annotated[float, Meta(ge=-1e300, le=1e300)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=1e300)]
RankNumber = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
WorldSize = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
BlockName = Annotated[str, Meta(max_length=MAX_BLOCK_CHARS)]
GroupNumber = Annotated[str, Meta(pattern="^[1-9][0-9]{0,4}$")]
MAX_GROUP_NUMBER = (1 << 16) - 1  # an event stores the group number in 16 bits


class GroupMember(TypedDict):
    """A process group of which the rank is a member."""

    name: str
    size: WorldSize
    rank: RankNumber


AxisName = Annotated[str, Meta(pattern="^[a-z]{1,16}$")]


class MeshPlace(TypedDict):
    """The mesh of ``world.distribute``, and this rank's place (parallel/mesh.py)."""

    axes: Annotated[list[tuple[AxisName, WorldSize]], Meta(min_length=1, max_length=MAX_AXES)]
    place: Annotated[list[RankNumber], Meta(min_length=1, max_length=MAX_AXES)]
    # by the name of a process group: its axes
    groups: NotRequired[Annotated[dict[str, str], Meta(max_length=256)]]


class PipelineHeader(TypedDict):
    """The pipeline of a model (parallel/pipeline).

    ``balance`` has the modules with which the later stages would begin in a faster division.
    """

    schedule: Annotated[str, Meta(pattern="^[a-z0-9-]{1,32}$")]
    stages: Annotated[int, Meta(ge=1, lt=MAX_RANKS)]
    micro_batches: Annotated[int, Meta(ge=1, lt=1 << 31)]
    balance: NotRequired[Annotated[list[BlockName], Meta(max_length=MAX_RANKS)]]


class StepWork(TypedDict):
    """FLOPs and bytes of one step (record/hooks/sampled_steps.py)."""

    step: NonNegativeInt
    seconds: NotRequired[NonNegativeFloat]
    flops: NonNegativeFloat
    bytes: NonNegativeFloat
    device: str
    precision: str
    ops: list[tuple[str, NonNegativeFloat, NonNegativeFloat, NonNegativeFloat, NonNegativeFloat]]
    uncounted: list[str]


class LoaderTotals(TypedDict):
    """Totals of a rank's ``paceline.data.Loader``; times in seconds."""

    seconds: NonNegativeFloat
    busy_s: NonNegativeFloat
    workers: NonNegativeInt
    processes: bool
    left_out: NonNegativeInt


class HaloTotals(TypedDict):
    """Halos of a rank by layer: name, exchanges, bytes received, seconds waited for them.

    Attributes:
        seconds: Since the first one.
    """

    seconds: NonNegativeFloat
    layers: Annotated[
        list[tuple[BlockName, NonNegativeInt, NonNegativeInt, NonNegativeFloat]],
        Meta(max_length=MAX_HALO_LAYERS),
    ]


class Knob(TypedDict):
    """Whether a knob was set on this rank, and if not, why (knobs/knob.py)."""

    set: bool
    why_not: str
    how: NotRequired[str]  # which of several ways


class LoaderOnly(TypedDict):
    """Measurements of a loader without training (record/experiments/experiment.py)."""

    batches: NonNegativeInt
    seconds: NonNegativeFloat
    busy_s: FiniteFloat
    system_s: FiniteFloat
    read: FiniteFloat
    stored: FiniteFloat
    opened: FiniteFloat
    open_s: NonNegativeFloat
    workers: NonNegativeInt
    waited_s: NotRequired[NonNegativeFloat]
    busy_threads: NotRequired[NonNegativeInt]
    keras: NotRequired[NonNegativeInt]  # 1: Keras has made the loader


class OtherThread(TypedDict, total=False):
    """The busiest other Python thread of a phase (record/ring/resource_usage.py)."""

    seconds: FiniteFloat
    name: str
    file: str
    line: NonNegativeInt


class Collections(TypedDict, total=False):
    """Garbage collections of a phase, and the line with most (record/experiments/switches.py)."""

    seconds: FiniteFloat
    count: NonNegativeInt
    file: str
    line: NonNegativeInt


class Elements(TypedDict):
    """Dependence of the step time on the number of elements in a batch.

    Written by record/experiments/observer.py.
    """

    mean: FiniteFloat
    spread: FiniteFloat
    slope: FiniteFloat
    correlation: FiniteFloat


class ResourceUsage(TypedDict, total=False):
    """Resources used in one phase of a diagnosis (record/ring/resource_usage.py)."""

    seconds: FiniteFloat
    thread: FiniteFloat
    delayed: FiniteFloat
    crowded: FiniteFloat
    process: FiniteFloat
    system: FiniteFloat
    children: FiniteFloat
    faults: FiniteFloat
    host: FiniteFloat
    squeezed: FiniteFloat
    searching: FiniteFloat
    starting: FiniteFloat
    starts: NonNegativeInt
    others: OtherThread
    collecting: Collections
    paused: NonNegativeInt
    broadcasting: NonNegativeInt
    gave_up: bool
    elements: Elements


class DdpOptions(TypedDict):
    """Options and sizes of DistributedDataParallel."""

    bytes: NonNegativeInt
    bucket_bytes: NonNegativeInt
    searches: bool
    unused_bytes: NotRequired[NonNegativeInt]


class GrowingContainer(TypedDict):
    """A container that grows in each step (record/experiments/observer.py)."""

    name: str
    kind: str
    elements: NonNegativeFloat
    bytes: NonNegativeInt
    graphs: bool


class RungTotals(TypedDict, total=False):
    """Results of one run of ``paceline diagnose``.

    Written by record/experiments/experiment.py and record/experiments/observer.py.
    """

    cached: NonNegativeInt
    silent: NonNegativeInt
    stopped: str
    growing: Annotated[list[GrowingContainer], Meta(max_length=16)]
    loss: float  # of the user's script: NaN is possible
    workers: NonNegativeInt
    epoch_batches: NonNegativeInt
    threads: NonNegativeInt
    convolutions: NonNegativeInt
    channels_last: bool
    gpu: bool
    host_cores: NonNegativeInt | None
    kernel: str
    mask: str
    mask_at_start: str
    loader: LoaderOnly
    used: dict[str, ResourceUsage]
    parameters: dict[str, NonNegativeInt]
    ddp: DdpOptions
    fault_s: NonNegativeFloat
    product_s: dict[str, NonNegativeFloat]


class TensorBytes(TypedDict):
    """Bytes of a rank's models and optimizers (world/layouts/distribution.py)."""

    layout: Annotated[str, Meta(max_length=MAX_LAYOUTS_CHARS)]
    parameters: NonNegativeInt
    buffers: NonNegativeInt
    gradients: NonNegativeInt
    optimizer_states: NonNegativeInt
    offloaded: NotRequired[NonNegativeInt]
    device_peak: NotRequired[NonNegativeInt]
    predicted_peak: NotRequired[NonNegativeInt]


class ChildProcesses(TypedDict):
    """Processes that a rank started, which trained without a process group (observe/attach.py)."""

    count: NonNegativeInt
    steps: NonNegativeInt


class RecordHeader(TypedDict):
    """All keys of a record's header that Paceline reads."""

    rank: RankNumber
    size: WorldSize
    host: str
    started_ns: TimeNs
    joined_ns: NotRequired[TimeNs]
    wall_time: NotRequired[NonNegativeFloat]
    run: NotRequired[str]
    attempt: NotRequired[Annotated[int, Meta(ge=0, lt=MAX_RESTARTS)]]
    clock: NotRequired[str]
    pid: NotRequired[Annotated[int, Meta(ge=0, lt=1 << 31)]]
    python: NotRequired[str]
    paceline: NotRequired[str]
    torch: NotRequired[str]
    cores: NotRequired[Annotated[str, Meta(max_length=2048)]]  # hexadecimal: 8,192 cores
    threads: NotRequired[NonNegativeInt]
    device: NotRequired[str]
    devices: NotRequired[str]
    exchange: NotRequired[str]
    horovod: NotRequired[str]
    groups: NotRequired[dict[GroupNumber, GroupMember]]
    layout: NotRequired[Annotated[str, Meta(max_length=MAX_LAYOUT_CHARS)]]
    mesh: NotRequired[MeshPlace]
    pipeline: NotRequired[PipelineHeader]
    # of sharded models, by number in the events
    blocks: NotRequired[Annotated[list[BlockName], Meta(max_length=MAX_BLOCKS)]]
    work: NotRequired[StepWork]
    loader: NotRequired[LoaderTotals]
    halos: NotRequired[HaloTotals]
    knobs: NotRequired[dict[str, Knob]]
    rung: NotRequired[RungTotals]
    children: NotRequired[ChildProcesses]
    tensors: NotRequired[TensorBytes]
    failed_hooks: NotRequired[dict[str, str]]  # of the recorder: the exception of each
    failure: NotRequired[str]  # exception or exit code that ended the script
    batches: NotRequired[list[NonNegativeInt]]  # checksums of the first batches of a loader
    inputs: NotRequired[list[NonNegativeInt]]  # the same of a model's inputs, without a loader


def parse_header(text: bytes, name: str) -> RecordHeader:
    """Return the checked header of the record ``name``.

    Raises:
        InvalidFileError: The text is not JSON, lacks a key, or has a value of a wrong type or out
            of range.
    """
    about: RecordHeader = without_line_breaks(parse_json(text, RecordHeader, name))
    if about["rank"] >= about["size"]:
        raise InvalidFileError(
            name, f"is of rank {about['rank']} of {counted(about['size'], 'rank')}"
        )
    mesh = about.get("mesh")
    if mesh is not None and not _is_place(mesh, about["size"]):
        raise InvalidFileError(name, "has a place outside of its mesh")
    for number, group in about.get("groups", {}).items():
        if int(number) > MAX_GROUP_NUMBER:
            raise InvalidFileError(name, f"has a process group of the number {number}")
        if group["rank"] >= group["size"]:
            place = f"rank {group['rank']} of {group['size']}"
            raise InvalidFileError(name, f"has {place} in the process group {group['name']}")
    return about


def _is_place(mesh: MeshPlace, size: int) -> bool:
    extents = [extent for _, extent in mesh["axes"]]
    is_inside = len(extents) == len(mesh["place"]) and all(
        at < extent for at, extent in zip(mesh["place"], extents, strict=True)
    )
    names = {axis for axis, _ in mesh["axes"]}
    return is_inside and prod(extents) == size and len(names) == len(extents)


def without_line_breaks(tree: Any) -> Any:
    """Return the tree with line breaks removed from its strings, which are printed within lines."""
    return printable_tree(tree, lines=False)
