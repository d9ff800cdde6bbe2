"""The machine file: what ``paceline check`` measured of a machine, each figure with its spread.

The format is versioned TOML; docs/reference/formats/machine-file.md lists every key, its unit and
what measures it.
"""

import re
import statistics
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from ...plurals import parse_ranges
from ...security.files import InvalidFileError, error_reason
from ...security.outputs import write_output
from ..collectives import bus_factor
from .dataclass_tree import UNLIMITED as UNLIMITED
from .dataclass_tree import from_tree, shorten, to_tree
from .toml_files import dumps, read_toml

VERSION = 1
MAX_BYTES = 32 << 20  # enough for 100,000 links between hosts
MAX_MASK_CHARS = 4096
_MASK = re.compile(r"(\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*)?")  # up to core 9,999
FLOPS, BANDWIDTH, SECONDS, FILES = "FLOP/s", "B/s", "s", "files/s"
# Field metadata: the unit of a figure, and whether a number may be unlimited (dataclass_tree.py).
_FLOPS, _BANDWIDTH, _SECONDS, _FILES = ({"unit": u} for u in (FLOPS, BANDWIDTH, SECONDS, FILES))
_LIMIT = {"unlimited": True}


@dataclass(frozen=True)
class Figure:
    """Measured value.

    Attributes:
        median: Median of the repetitions.
        low: Lower quartile.
        high: Upper quartile.
        n: Number of repetitions.
        unit: Unit of the values.
    """

    median: float
    low: float
    high: float
    n: int
    unit: str

    def __post_init__(self) -> None:
        if not self.low <= self.median <= self.high:
            raise ValueError(
                f"low = {self.low}, median = {self.median}, high = {self.high} are not in order"
            )
        if self.n < 1:
            raise ValueError(f"n = {self.n}, and a figure needs at least one repetition")

    @classmethod
    def of(cls, values: Iterable[float], unit: str) -> "Figure":
        """Return the figure of these repetitions. Raises ValueError if there are none."""
        known = [float(value) for value in values]
        if not known:
            raise ValueError("no repetition was measured. HINT: leave the figure out (None)")
        median = statistics.median(known)
        if len(known) == 1:
            return cls(median, median, median, 1, unit)
        low, _, high = statistics.quantiles(known, n=4, method="inclusive")
        return cls(median, min(low, median), max(high, median), len(known), unit)

    @property
    def spread(self) -> float:
        """Distance between the quartiles."""
        return self.high - self.low


@dataclass(frozen=True)
class Gpu:
    """GPU, named as its driver names it; its index in the list is the number in "cuda:0"."""

    name: str
    memory_bytes: int | None = None
    free_memory_bytes: int | None = None


@dataclass(frozen=True)
class Network:
    """Network port as sysfs describes it: "mlx5_0", "InfiniBand", "100 Gb/sec (4X EDR)"."""

    name: str
    layer: str = ""
    rate: str = ""


@dataclass(frozen=True)
class Limits:
    """Limits of one process on a host; None if unknown."""

    nofile: int | None = field(default=None, metadata=_LIMIT)  # maximum number of open files
    memlock_bytes: int | None = field(default=None, metadata=_LIMIT)
    stack_bytes: int | None = field(default=None, metadata=_LIMIT)
    shm_bytes: int | None = None  # size of /dev/shm
    shm_free_bytes: int | None = None
    cgroup_memory_bytes: int | None = field(default=None, metadata=_LIMIT)


@dataclass(frozen=True)
class Arithmetic:
    """Arithmetic rate of a device; "cpu" means all cores of the mask together."""

    device: str  # "cpu", "cuda:0"
    operation: str  # "matrix product", "convolution"
    precision: str  # "float64", "float32", "tf32", "bfloat16", "float16", "float8"
    rate: Figure = field(metadata=_FLOPS)


@dataclass(frozen=True)
class Memory:
    """Memory bandwidth of a device: the bytes of a = b + s c over the time."""

    device: str
    triad: Figure = field(metadata=_BANDWIDTH)


@dataclass(frozen=True)
class Storage:
    """Folder as one host reaches it.

    ``cache`` tells whether reads were partly served from the page cache: "out" (no), "in" (yes) or
    "unknown".
    """

    folder: str
    filesystem: str = ""
    cache: str = "unknown"
    read: Figure | None = field(default=None, metadata=_BANDWIDTH)
    write: Figure | None = field(default=None, metadata=_BANDWIDTH)
    cached_read: Figure | None = field(default=None, metadata=_BANDWIDTH)
    small_create: Figure | None = field(default=None, metadata=_FILES)
    small_read: Figure | None = field(default=None, metadata=_FILES)

    def __post_init__(self) -> None:
        if self.cache not in ("out", "in", "unknown"):
            raise ValueError(f"cache = {self.cache!r}, and must be 'out', 'in' or 'unknown'")


@dataclass(frozen=True)
class HostFacts:
    """One host: its hardware, the part that a process may use, and its measured speed.

    None or an empty list means unknown; ``missing`` then gives the reason, by the field's name.
    """

    name: str
    processor: str = ""  # name reported by lscpu
    sockets: int | None = None
    cores: int | None = None
    threads: int | None = None  # hardware threads
    numa_nodes: int | None = None
    ranks: int | None = None  # ranks on this host, of the job that measured
    mask: str = ""  # hardware threads that a process may run on, as "0-43"
    memory_bytes: int | None = None
    free_memory_bytes: int | None = None
    free_disk_bytes: int | None = None
    clock_offset_s: float | None = field(default=None, metadata={"signed": True})
    clock_uncertainty_s: float | None = None
    import_torch: Figure | None = field(default=None, metadata=_SECONDS)
    # CPU-seconds of the import, and time and CPU-seconds of the first import alone. The rest of
    # the time is spent waiting for files.
    import_torch_busy: Figure | None = field(default=None, metadata=_SECONDS)
    import_torch_first_s: float | None = None
    import_torch_first_busy_s: float | None = None
    import_torch_calls: int | None = None
    versions: dict[str, str] = field(default_factory=dict)
    torch_build: dict[str, str] = field(default_factory=dict)  # see study/probe/measure
    limits: Limits = Limits()
    missing: dict[str, str] = field(default_factory=dict)
    gpus: tuple[Gpu, ...] = ()
    networks: tuple[Network, ...] = ()
    arithmetic: tuple[Arithmetic, ...] = ()
    memory: tuple[Memory, ...] = ()
    storage: tuple[Storage, ...] = ()

    def __post_init__(self) -> None:
        if not _MASK.fullmatch(self.mask) or len(self.mask) > MAX_MASK_CHARS:
            raise ValueError(f"mask = {shorten(self.mask)} is not a list of cores such as '0-3,8'")

    @property
    def counts(self) -> dict[str, int]:
        """Number of sockets, cores and other parts of the node, as far as known, by name."""
        known = {
            "sockets": self.sockets,
            "cores": self.cores,
            "hardware threads": self.threads,
            "NUMA nodes": self.numa_nodes,
        }
        return {what: count for what, count in known.items() if count is not None}

    @property
    def cpus(self) -> list[int]:
        """Hardware threads of the mask."""
        return parse_ranges(self.mask)

    def hardware(self, device: str) -> str:
        """Return the name of a device's hardware: the processor, or the GPU of that number."""
        kind, _, number = device.partition(":")
        if kind == "cpu":
            return self.processor
        at = int(number) if number.isdecimal() else 0
        return self.gpus[at].name if at < len(self.gpus) else kind


@dataclass(frozen=True)
class AtSize:
    """Time of one collective on vectors of ``bytes`` bytes."""

    bytes: int
    seconds: Figure = field(metadata=_SECONDS)

    @property
    def algbw(self) -> Figure | None:
        """Algorithm bandwidth: bytes over seconds."""
        s = self.seconds
        if not s.low:
            return None
        median, low, high = (self.bytes / time for time in (s.median, s.high, s.low))
        return Figure(median, low, high, s.n, BANDWIDTH)


@dataclass(frozen=True)
class Collective:
    """One operation within a group of ranks.

    The group is "in host" (``hosts`` is that host), "between hosts" (one rank per host) or "all".
    """

    group: str
    operation: str  # "all-reduce", "reduce-scatter", "all-gather", "all-to-all", "broadcast"
    ranks: int = field(metadata={"least": 1})
    hosts: tuple[str, ...]
    backend: str = ""  # "gloo", "nccl"
    device: str = "cpu"
    latency: Figure | None = field(default=None, metadata=_SECONDS)  # time of the smallest vector
    sizes: tuple[AtSize, ...] = ()

    def busbw(self, size: AtSize) -> Figure | None:
        """Return the bus bandwidth, defined as in nccl-tests."""
        rate = size.algbw
        if rate is None:
            return None
        factor = bus_factor(self.operation, self.ranks)
        factor = 1.0 if factor is None else factor
        median, low, high = (factor * x for x in (rate.median, rate.low, rate.high))
        return Figure(median, low, high, rate.n, BANDWIDTH)


@dataclass(frozen=True)
class Pair:
    """Link between two hosts.

    The latency is half the round trip of a small message, the bandwidth the rate of a large one.
    """

    first: str
    second: str
    latency: Figure | None = field(default=None, metadata=_SECONDS)
    bandwidth: Figure | None = field(default=None, metadata=_BANDWIDTH)


@dataclass(frozen=True)
class Machine:
    """All results of one ``paceline check``."""

    version: int = field(default=VERSION, kw_only=True)
    made: str  # ISO 8601 with time zone
    hosts: tuple[HostFacts, ...]
    command: str = ""
    job: str = ""
    unreachable: dict[str, str] = field(default_factory=dict)  # reasons by host that did not answer
    collectives: tuple[Collective, ...] = ()
    pairs: tuple[Pair, ...] = ()

    def __post_init__(self) -> None:
        try:
            datetime.fromisoformat(self.made)
        except ValueError:
            raise ValueError(
                f"made = {self.made!r} is not a time such as 2026-01-31T12:00:00Z"
            ) from None
        names = Counter(host.name for host in self.hosts)
        for name, count in names.items():
            if count > 1:
                raise ValueError(f"hosts: {name!r} occurs {count} times")
        for pair in self.pairs:
            for name in (pair.first, pair.second):
                if name not in names:
                    raise ValueError(f"pairs: {name!r} is not one of the hosts")


def load(path: str | Path) -> Machine:
    """Read a machine file. Unknown keys are listed in one warning.

    Raises:
        ValueError: The file is not a machine file of this version. The message names the key, its
            value and a solution.
    """
    again = "HINT: paceline check writes a new one"
    try:
        data = read_toml(path, MAX_BYTES)
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error_reason(error)}. {again}") from None
    except InvalidFileError as error:
        raise InvalidFileError(path, f"{error.reason}. {again}") from None
    if "version" not in data:
        raise InvalidFileError(path, f"is not a machine file: version is missing. {again}")
    if data["version"] != VERSION or isinstance(data["version"], bool):
        raise InvalidFileError(
            path,
            f"is a machine file of version {shorten(data['version'])}; this Paceline reads "
            f"version {VERSION}. {again}, or use the Paceline that wrote it",
        )
    unknown: list[str] = []
    try:
        machine: Machine = from_tree(Machine, data, "", unknown)
    except ValueError as error:
        hint = "HINT: paceline check writes one; keys: docs/reference/formats/machine-file.md"
        raise InvalidFileError(path, f"{error}. {hint}") from None
    if unknown:
        more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
        names = ", ".join(unknown[:5]) + more
        warnings.warn(f"{path}: ignored unknown keys: {names}", stacklevel=2)
    return machine


def save(machine: Machine, path: str | Path) -> None:
    """Write a machine file completely or not at all. Raises ValueError if that fails."""
    data = to_tree(machine)
    from_tree(Machine, data, "", [])
    path = Path(path)
    try:
        write_output(path, dumps(data))
    except OSError as error:
        raise ValueError(
            f"{path} can't be written: {error_reason(error)}. HINT: choose a folder that exists, "
            "may be written to and has room"
        ) from None


def as_json(machine: Machine) -> dict[str, Any]:
    """Return every key of the file, null if unknown, and derived values.

    Derived values are algbw and busbw for each size of the collectives.
    """
    result: dict[str, Any] = to_tree(machine, complete=True)
    for collective, data in zip(machine.collectives, result["collectives"], strict=True):
        for size, each in zip(collective.sizes, data["sizes"], strict=True):
            each["algbw"] = to_tree(size.algbw, complete=True)
            each["busbw"] = to_tree(collective.busbw(size), complete=True)
    return result
