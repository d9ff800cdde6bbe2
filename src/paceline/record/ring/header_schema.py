"""The JSON in a record's header, as a schema: what each key holds, and in which range.

The header of a record may have been written by anyone. ``parse`` returns only keys that the
schema names, so what reads ``Record.meta`` needs no checks of its own.
"""

from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from ...security.files import InvalidFileError
from ...security.schema import parse_json
from ...security.text import printable

MAX_RANKS = 1 << 20
MAX_RESTARTS = 1 << 20
MAX_TIME_NS = 1 << 60  # no node has been up for 36 years

Whole = Annotated[int, Meta(ge=0, lt=MAX_TIME_NS)]
Time = Whole  # ns
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]
Positive = Annotated[float, Meta(ge=0, le=1e300)]
RankNumber = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
WorldSize = Annotated[int, Meta(ge=1, le=MAX_RANKS)]
GroupNumber = Annotated[str, Meta(pattern="^[1-9][0-9]{0,4}$")]
MAX_GROUP_NUMBER = (1 << 16) - 1  # an event has 16 bits for it


class GroupMember(TypedDict):
    """One process group that the rank is a member of."""

    name: str
    size: WorldSize
    rank: RankNumber


class CountedWork(TypedDict):
    """FLOPs and bytes of one step (record/hooks/flop_counter.py)."""

    step: NotRequired[Whole]
    seconds: NotRequired[Positive]
    flops: Positive
    bytes: Positive
    device: str
    precision: str
    ops: list[tuple[str, Positive, Positive, Positive, Positive]]
    uncounted: list[str]


class LoaderTotals(TypedDict):
    """What a rank's ``paceline.data.Loader`` did."""

    seconds: Positive
    busy_s: Positive
    workers: Whole
    processes: bool
    left_out: Whole


class Knob(TypedDict):
    """Whether a knob was set in this rank (knobs/apply.py)."""

    set: bool
    why_not: str


class LoaderAlone(TypedDict):
    """A loader that was measured without training (record/experiments/experiment.py)."""

    batches: Whole
    seconds: Positive
    busy_s: Finite
    system_s: Finite
    read: Finite
    stored: Finite
    opened: Finite
    open_s: Positive
    workers: Whole


class OtherThread(TypedDict, total=False):
    """The busiest other Python thread of a phase (record/ring/resource_usage.py)."""

    seconds: Finite
    name: str
    file: str
    line: Whole


class Elements(TypedDict):
    """How the time of steps depends on the elements in their batches
    (record/experiments/observer.py)."""

    mean: Finite
    spread: Finite
    slope: Finite
    correlation: Finite


class Used(TypedDict, total=False):
    """What one phase of a diagnosis used of the machine (record/ring/resource_usage.py)."""

    seconds: Finite
    thread: Finite
    delayed: Finite
    crowded: Finite
    process: Finite
    system: Finite
    children: Finite
    faults: Finite
    host: Finite
    squeezed: Finite
    searching: Finite
    starting: Finite
    starts: Whole
    others: OtherThread
    elements: Elements


class Replica(TypedDict):
    """Options and figures of DistributedDataParallel."""

    bytes: Whole
    bucket_bytes: Whole
    searches: bool
    unused_bytes: NotRequired[Whole]


class RungTotals(TypedDict, total=False):
    """What a run of ``paceline diagnose`` found (record/experiments/experiment.py,
    record/experiments/observer.py)."""

    cached: Whole
    silent: Whole
    stopped: str
    loss: float  # of the user's script: NaN is possible
    workers: Whole
    threads: Whole
    convolutions: Whole
    channels_last: bool
    gpu: bool
    host_cores: Whole | None
    kernel: str
    mask: str
    mask_at_start: str
    loader: LoaderAlone
    used: dict[str, Used]
    parameters: dict[str, Whole]
    ddp: Replica
    fault_s: Positive
    product_s: dict[str, Positive]


class About(TypedDict):
    """All keys of a record's header that Paceline reads."""

    rank: RankNumber
    size: WorldSize
    host: str
    started_ns: Time
    joined_ns: NotRequired[Time]
    wall_time: NotRequired[Positive]
    run: NotRequired[str]
    attempt: NotRequired[Annotated[int, Meta(ge=0, lt=MAX_RESTARTS)]]
    clock: NotRequired[str]
    pid: NotRequired[Annotated[int, Meta(ge=0, lt=1 << 31)]]
    python: NotRequired[str]
    paceline: NotRequired[str]
    torch: NotRequired[str]
    cores: NotRequired[Annotated[str, Meta(max_length=2048)]]  # hexadecimal: 8,192 cores
    threads: NotRequired[Whole]
    device: NotRequired[str]
    devices: NotRequired[str]
    exchange: NotRequired[str]
    groups: NotRequired[dict[GroupNumber, GroupMember]]
    work: NotRequired[CountedWork]
    loader: NotRequired[LoaderTotals]
    knobs: NotRequired[dict[str, Knob]]
    rung: NotRequired[RungTotals]


def parse(text: bytes, name: str) -> About:
    """Return the checked header of the record ``name``.

    Raises:
        InvalidFileError: It is no JSON, lacks a key, or has a value of another type or range.
    """
    about: About = in_a_line(parse_json(text, About, name))
    if about["rank"] >= about["size"]:
        raise InvalidFileError(name, f"says rank {about['rank']} of {about['size']} ranks")
    for number, group in about.get("groups", {}).items():
        if int(number) > MAX_GROUP_NUMBER:
            raise InvalidFileError(name, f"says {number} is a process group's number")
        if group["rank"] >= group["size"]:
            said = f"rank {group['rank']} of {group['size']}"
            raise InvalidFileError(name, f"says {said} in the process group {group['name']}")
    return about


def in_a_line(tree: Any) -> Any:
    """Return a checked tree whose texts have no line ends: names are printed inside of lines."""
    if isinstance(tree, str):
        return printable(tree)
    if isinstance(tree, dict):
        return {in_a_line(key): in_a_line(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(map(in_a_line, tree))
    return tree
