"""Find unwanted differences between hosts, and limits that are too low."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import median
from typing import TypeVar

from ..machine.machine_file import UNLIMITED, HostFacts, Machine
from ..machine.units import format_value, join_words, size
from .outlier import Outlier

FILES = 4096  # open files that a process needs: sockets to peers, tensors of workers
_CORES = 16  # with this many cores there may be enough workers to need these files
SHM, SHM_FREE = 1 << 30, 1 << 28  # bytes: workers pass batches through /dev/shm
CLOCK_S = 1.0
T = TypeVar("T")
WAITING = 2.0  # ratio of time to CPU time above which an import mostly waits for files
# Width of the vector units by PyTorch's name of their instructions. DEFAULT: those that every
# processor of the architecture has.
VECTOR_BITS = {"DEFAULT": 128, "NO AVX": 128, "AVX2": 256, "SVE256": 256, "AVX512": 512}
_MEMORY = 0.02  # relative difference of the sizes of two memories of one kind


def host_differences(machine: Machine) -> list[Outlier]:
    """Return outliers that are not speeds.

    These are unreachable hosts, missing measurements, versions, parts, masks, limits, vector units
    that PyTorch does not use, the import of torch, and clocks.
    """
    found = [
        Outlier("unreachable", (host,), "reach", "", "", f"{host} can't be reached: {why}")
        for host, why in machine.unreachable.items()
    ]
    hosts = machine.hosts
    for (what, why), names in _group_by_item(hosts, lambda host: list(host.missing.items())):
        sentence = f"{what} is not known of {join_words(names)}: {why}"
        found.append(Outlier("missing", tuple(names), what, "", "", sentence))
    found += _versions(machine)
    found += _parts(machine)
    for (value, all_of_it), names in _group_by_item(hosts, _mask):
        may = f"processes on {join_words(names)} may run on"
        sentence = f"{may} only {value} of {all_of_it} hardware threads"
        found.append(Outlier("mask", tuple(names), "mask", value, all_of_it, sentence))
    for (what, value, enough, why), names in _group_by_item(
        hosts, lambda host: _limits(host, machine)
    ):
        sentence = f"{what} is {value} on {join_words(names)}: {why}"
        found.append(Outlier("limit", tuple(names), what, value, enough, sentence))
    for (used, there, why), names in _group_by_item(hosts, _vector_units):
        sentence = (
            f"PyTorch's kernels use {used} on {join_words(names)}, whose processor has {there}"
        )
        outlier = Outlier("vector", tuple(names), "vector units", used, there, f"{sentence}: {why}")
        found.append(outlier)
    return found + _imports(machine) + _clocks(machine)


def _group_by_item(
    hosts: tuple[HostFacts, ...], told_of: Callable[[HostFacts], list[T]]
) -> list[tuple[T, list[str]]]:
    """Return each item that ``told_of`` returns once, with the names of its hosts."""
    found: dict[T, list[str]] = defaultdict(list)
    for host in hosts:
        for one in told_of(host):
            found[one].append(host.name)
    return list(found.items())


def _versions(machine: Machine) -> list[Outlier]:
    names = dict.fromkeys(name for host in machine.hosts for name in host.versions)
    found = []
    for name in names:
        values = {host.name: host.versions.get(name, "none") for host in machine.hosts}
        found += _differing("version", name, values)
    return found


def _parts(machine: Machine) -> list[Outlier]:
    """Return hosts whose hardware differs in kind or number from most hosts."""
    known = [(host.name, host) for host in machine.hosts]
    found = _differing("parts", "processor", {n: h.processor for n, h in known if h.processor})
    for what, counts in (
        ("sockets", {name: host.sockets for name, host in known}),
        ("cores", {name: host.cores for name, host in known}),
        ("hardware threads", {name: host.threads for name, host in known}),
        ("NUMA nodes", {name: host.numa_nodes for name, host in known}),
    ):
        told_of = {name: str(count) for name, count in counts.items() if count is not None}
        found += _differing("parts", what, told_of)
    found += _differing("parts", "GPUs", {name: _gpus(host) for name, host in known})
    memory = {name: host.memory_bytes for name, host in known if host.memory_bytes}
    middle = median(memory.values()) if memory else 0
    near = {n: middle if abs(b - middle) <= _MEMORY * middle else b for n, b in memory.items()}
    return found + _differing("parts", "memory", {name: size(b) for name, b in near.items()})


def _gpus(host: HostFacts) -> str:
    kinds = dict.fromkeys(gpu.name for gpu in host.gpus)
    counts = [sum(gpu.name == kind for gpu in host.gpus) for kind in kinds]
    return join_words([f"{n} {kind}" for n, kind in zip(counts, kinds, strict=True)]) or "none"


def _differing(kind: str, what: str, values: Mapping[str, str]) -> list[Outlier]:
    """Return hosts whose value differs from the majority; all hosts if there is no majority."""
    groups: dict[str, list[str]] = defaultdict(list)
    for host, value in values.items():
        groups[value].append(host)
    if len(groups) < 2:
        return []
    usual = max(groups, key=lambda value: len(groups[value]))
    if 2 * len(groups[usual]) <= len(values):
        each = join_words([f"{value} on {join_words(hosts)}" for value, hosts in groups.items()])
        sentence = f"hosts differ in {what}: {each}"
        return [Outlier(kind, tuple(values), what, join_words(list(groups)), "", sentence)]
    return [
        Outlier(
            *(kind, tuple(hosts), what, value, usual),
            f"{join_words(hosts)} differ{'s' if len(hosts) == 1 else ''} in {what}: {value}; "
            f"most hosts: {usual}",
        )
        for value, hosts in groups.items()
        if value != usual
    ]


def _mask(host: HostFacts) -> list[tuple[str, str]]:
    cpus = len(host.cpus)
    if not cpus or host.threads is None or cpus >= host.threads:
        return []
    return [(str(cpus), str(host.threads))]


def _limits(host: HostFacts, machine: Machine) -> list[tuple[str, str, str, str]]:
    limits, found = host.limits, []
    crowded = len(machine.hosts) > 1 or len(host.cpus) >= _CORES or (host.ranks or 0) > 8
    if limits.nofile is not None and limits.nofile < (FILES if crowded else FILES // 4):
        why = (
            "many ranks and loader workers need more open files. "
            f"HINT: ulimit -n {FILES}, or set it in limits.conf"
        )
        found.append(("limit on open files", str(limits.nofile), str(FILES), why))
    shm, free = limits.shm_bytes, limits.shm_free_bytes
    batches = "loader workers pass their batches through it. HINT: "
    if shm is not None and shm < SHM:
        why = f"{batches}in a container use --shm-size or --ipc=host; else mount it with more space"
        found.append(("/dev/shm", size(shm), size(SHM), why))
    elif free is not None and free < SHM_FREE:
        why = f"{batches}remove the files of ended jobs from it"
        found.append(("free /dev/shm", size(free), size(SHM_FREE), why))
    lock = limits.memlock_bytes
    card = next((one for one in host.networks if one.layer.lower() == "infiniband"), None)
    if card is not None and lock is not None and lock < (host.memory_bytes or UNLIMITED):
        why = (
            f"{card.name} (InfiniBand) needs locked memory. HINT: set ulimit -l unlimited where "
            "the scheduler's daemon starts"
        )
        found.append(("limit on locked memory", size(lock), "unlimited", why))
    return found


def _vector_units(host: HostFacts) -> list[tuple[str, str, str]]:
    build = host.torch_build
    used, there = build.get("capability", ""), build.get("processor", "")
    if VECTOR_BITS.get(used, 0) >= VECTOR_BITS.get(there, 0) or used not in VECTOR_BITS:
        return []
    limit = build.get("limited_by")
    why = (
        f"ATEN_CPU_CAPABILITY={limit} is set. HINT: unset it"
        if limit
        else f"this build has no kernels for {there}. HINT: install PyTorch's wheels with pip"
    )
    names = {"DEFAULT": "no AVX" if there.startswith("AVX") else "NEON", "NO AVX": "no AVX"}
    return [(names.get(used, used), there, why)]


def _imports(machine: Machine) -> list[Outlier]:
    """Return hosts where ``import torch`` mostly waits for files, described by the slowest one."""
    waits = {host.name: _waiting(host) for host in machine.hosts}
    slow = {name: wait for name, wait in waits.items() if wait[0] >= WAITING * wait[1]}
    if not slow:
        return []
    most = max(slow, key=lambda name: slow[name][0] / max(slow[name][1], 1e-9))
    seconds, busy, which = slow[most]
    where = f"on {join_words(list(slow))}" + f" (most on {most})" * (len(slow) > 1)
    sentence = (
        f"{which} waited {format_value(seconds - busy, 's')} of "
        f"{format_value(seconds, 's')} for files {where}: "
        f"from one packed file it may be up to {seconds / busy:.2g} times faster. "
        "HINT: paceline check --pack-env"
    )
    wanted = f"{format_value(busy, 's')} of a core"
    return [
        Outlier("import", tuple(slow), "import torch", format_value(seconds, "s"), wanted, sentence)
    ]


def _waiting(host: HostFacts) -> tuple[float, float, str]:
    """Return the seconds and CPU-seconds of an import, and which import it was.

    It is the repeated import if that already waits, else the first. Zero seconds mean unknown, or a
    negligible time.
    """
    again, busy = host.import_torch, host.import_torch_busy
    if again is not None and busy is not None and again.median >= WAITING * busy.median > 0:
        return again.median, busy.median, "import torch"
    first, first_busy = host.import_torch_first_s, host.import_torch_first_busy_s
    if first and first_busy:
        return first, first_busy, "the first import torch"
    return 0.0, 1.0, ""


def _clocks(machine: Machine) -> list[Outlier]:
    if len(machine.hosts) < 2:
        return []
    found = []
    for (value, about), names in _group_by_item(machine.hosts, _clock):
        clocks = f"the clock{'s' if len(names) > 1 else ''} of {join_words(names)}"
        peers = format_value(CLOCK_S, "s") if value else ""
        sentence = f"{clocks} {'are' if len(names) > 1 else 'is'} {about}"
        found.append(Outlier("clock", tuple(names), "clock", value or "not known", peers, sentence))
    return found


def _clock(host: HostFacts) -> list[tuple[str, str]]:
    offset, unsure = host.clock_offset_s, host.clock_uncertainty_s or 0.0
    if offset is None:
        return [("", "not compared with the launcher's")]
    if unsure > CLOCK_S:
        return [("", f"known only to {format_value(unsure, 's')}")]
    if abs(offset) - unsure <= CLOCK_S:
        return []
    value = format_value(abs(offset), "s")
    why = "and times of files and logs are wrong. HINT: run chrony or ntpd"
    return [(value, f"{value} {'ahead' if offset > 0 else 'behind'}, {why}")]
