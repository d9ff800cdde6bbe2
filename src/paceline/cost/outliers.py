"""Find the outliers of a machine: hosts, links, versions and limits that differ or are too low."""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from ..plurals import counted
from ..significance import student_quantile
from .machine.machine_file import UNLIMITED, HostFacts, Machine
from .machine.named_figures import NamedFigure, host_figures, link_figures, typical_deviation
from .machine.units import format_value, join_words, size

_MANY = 0.25  # share of the links: if more are slow, the network itself consists of parts


# Find the figures of one kind that are worse than the others by more than the variation of all.

_ALONE = 0.05  # relative difference between two devices of one kind that is normal
MIN_DEVIATIONS = 4.0  # threshold in usual deviations of one repetition, and ...
_MAD_SCALE = 1.4826  # from the MAD to a normal distribution's standard deviation
MIN_MADS = 4 * _MAD_SCALE  # ... in median absolute deviations between the peers
# Standard deviation between equal hosts, devices or links in one measurement, relative to it, as
# assumed where there are few; it counts as much as this number of peers.
EQUAL_MEMBERS = 0.02
EQUAL_MEMBERS_DEGREES = 4
FALSE_SLOW_LEVEL = 0.05  # probability of calling one of equal members slow in one kind of figure
_MAD_EFFICIENCY = 0.37  # degrees of freedom of the MAD over those of a standard deviation
MEDIAN_VARIANCE = 1.57  # variance of a median over that of a mean, for a normal distribution
_EACH = 64  # members; with more, leaving one out does not change the median


@dataclass(frozen=True)
class Outlier:
    """Outlier of a machine.

    Attributes:
        kind: "unreachable", "missing", "slow", "link", "version", "parts", "mask", "limit",
            "vector", "import" or "clock".
        hosts: Names of the affected hosts.
        what: Name of the quantity.
        value: Value of the outlier.
        peers: Value of the peers, or a sufficient value; empty if unknown.
        sentence: Description for the user.
        by: Lost share of the speed, if the quantity is a speed.
    """

    kind: str
    hosts: tuple[str, ...]
    what: str
    value: str
    peers: str
    sentence: str
    by: float = 0.0


@dataclass(frozen=True)
class SlowerFigure:
    """Figure that is worse than its peers.

    Attributes:
        named: The figure.
        peers: Median of the peers.
        by: Lost share of the speed.
    """

    named: NamedFigure
    peers: float
    by: float

    @property
    def texts(self) -> tuple[str, str]:
        """The figure, and the median of its peers, with their unit."""
        unit = self.named.figure.unit
        return format_value(self.named.figure.median, unit), format_value(self.peers, unit)

    def outlier(self, kind: str, hosts: tuple[str, ...], what: str, sentence: str) -> Outlier:
        """Return the outlier that this figure is."""
        return Outlier(kind, hosts, what, *self.texts, sentence, self.by)


def find_slower(members: Sequence[NamedFigure]) -> list[SlowerFigure]:
    """Return the members that are worse than the median of their peers.

    The difference must exceed the member's own spread, the usual spread, the differences among
    the peers, and ``worst_by_chance``. At least three members are needed, so that the outlier
    itself can't be the median. Of two members it is unknown which is the outlier: see ``differ``.
    """
    if len(members) < 3:
        return []
    noise = MIN_DEVIATIONS * typical_deviation([named.figure for named in members])
    values = [named.figure.median for named in members]
    all_of_them = around(values)
    found = []
    for i, named in enumerate(members):
        middle, apart = all_of_them if len(values) > _EACH else around(values[:i] + values[i + 1 :])
        worse = behind(named, middle)
        if worse is None:
            continue
        chance = worst_by_chance(middle, apart, len(members) - 1)
        if _gap(named, middle) > max(noise, MIN_MADS * apart, chance):
            found.append(worse)
    return sorted(found, key=lambda worse: -worse.by)


def differ(members: Sequence[NamedFigure]) -> SlowerFigure | None:
    """Return the worse of two members if they differ by more than their spreads."""
    first, second = members
    if not first.figure.median or not second.figure.median:
        return None
    if (first.figure.median < second.figure.median) != first.more_is_better:
        first, second = second, first
    noise = MIN_DEVIATIONS * typical_deviation([first.figure, second.figure])
    gap = _gap(first, second.figure.median)
    worse = behind(first, second.figure.median)
    chance = worst_by_chance(second.figure.median, 0.0, 1)
    return worse if gap > max(noise, second.figure.spread, chance) else None


def worst_by_chance(middle: float, apart: float, peers: int) -> float:
    """Return by how much the worst of equal members is worse than the median of its peers.

    Exceeded in ``FALSE_SLOW_LEVEL`` of cases. Few peers may be alike by chance: their variance is
    averaged with the assumed one, weighted by degrees of freedom (as in Smyth 2004).

    Args:
        middle: Median of the peers.
        apart: Median absolute deviation of the peers from it.
        peers: Number of peers.
    """
    known = int(_MAD_EFFICIENCY * (peers - 1))
    degrees = EQUAL_MEMBERS_DEGREES + known
    assumed, seen = EQUAL_MEMBERS * middle, _MAD_SCALE * apart
    variance = (EQUAL_MEMBERS_DEGREES * assumed**2 + known * seen**2) / degrees
    quantile = student_quantile(FALSE_SLOW_LEVEL / (peers + 1), degrees)
    return quantile * math.sqrt(variance * (1 + (MEDIAN_VARIANCE if peers > 2 else 1) / peers))


def around(values: Sequence[float]) -> tuple[float, float]:
    """Return the median, and the median absolute deviation from it."""
    middle = median(values)
    return middle, median(abs(value - middle) for value in values)


def behind(named: NamedFigure, middle: float) -> SlowerFigure | None:
    """Return a figure as worse than ``middle``; None if the difference is irrelevant.

    The difference must exceed the figure's spread and the smallest relevant difference.
    """
    value = named.figure.median
    slow, fast = (value, middle) if named.more_is_better else (middle, value)
    by = 1 - slow / fast if fast > 0 else 0.0
    real = by > max(named.worth, _ALONE) and _gap(named, middle) > named.figure.spread
    return SlowerFigure(named, middle, by) if real else None


def _gap(named: NamedFigure, middle: float) -> float:
    gap = middle - named.figure.median
    return gap if named.more_is_better else -gap


# Find slow links between two hosts, and hosts all of whose links are slow.


def find_slow_links(machine: Machine) -> list[Outlier]:
    """Return the outliers among the links; needs three hosts.

    Hosts come first, so that a bad network card is not reported as many bad links.
    """
    found = []
    every = link_figures(machine)
    for metric in ("bandwidth", "latency"):
        rest = [named for named in every if named.what == metric]
        while (bad := _worst_host(rest)) is not None:
            host, worse = bad
            found.append(_of_host(host, worse))
            rest = [named for named in rest if host not in named.hosts]
        found += _of_links(rest)
    return found


def _worst_host(rest: Sequence[NamedFigure]) -> tuple[str, SlowerFigure] | None:
    """Return the host whose best link is worse than the usual link between other hosts."""
    if len(rest) < 3:
        return None
    of_host: dict[str, list[NamedFigure]] = {}
    for named in rest:
        for host in named.hosts:
            of_host.setdefault(host, []).append(named)
    noise = MIN_DEVIATIONS * typical_deviation([named.figure for named in rest])
    found = []
    for host, own in of_host.items():
        others = [named.figure.median for named in rest if host not in named.hosts]
        if len(own) < 2 or not others:
            continue
        choose = max if own[0].more_is_better else min
        best = choose(own, key=lambda named: named.figure.median)
        middle, apart = around(others)
        worse = behind(best, middle)
        gap = abs(best.figure.median - middle)
        if worse is not None and gap > max(noise, MIN_MADS * apart):
            found.append((host, worse))
    return max(found, key=lambda pair: pair[1].by, default=None)


def _of_host(host: str, worse: SlowerFigure) -> Outlier:
    named, (value, peers) = worse.named, worse.texts
    sentence = (
        f"all links of {host} are slow: {named.what} is {value} at best, {peers} between other "
        "hosts. HINT: check its network card and cable"
    )
    return worse.outlier("link", (host,), f"{named.what} of all links", sentence)


def _of_links(rest: Sequence[NamedFigure]) -> list[Outlier]:
    bad = find_slower(rest)
    if len(bad) > max(2, _MANY * len(rest)):
        return [_many_links(bad, len(rest))]
    return [_of_link(worse) for worse in bad]


def _of_link(worse: SlowerFigure) -> Outlier:
    named, (value, peers) = worse.named, worse.texts
    sentence = (
        f"the link between {join_words(named.hosts)} is slow: {named.what} is {value}, that of "
        f"other links {peers}"
    )
    return worse.outlier("link", named.hosts, f"{named.what} of the link", sentence)


def _many_links(bad: list[SlowerFigure], count: int) -> Outlier:
    """Report many slow links as one outlier: their number indicates the network's structure."""
    named, peers = bad[0].named, bad[0].peers
    middle = median(worse.named.figure.median for worse in bad)
    value, fast = format_value(middle, named.figure.unit), format_value(peers, named.figure.unit)
    hosts = tuple(dict.fromkeys(host for worse in bad for host in worse.named.hosts))
    sentence = (
        f"{len(bad)} of {counted(count, 'link')} {'is' if len(bad) == 1 else 'are'} slower than "
        f"the others: {named.what} is {value} instead "
        f"of {fast}, as between hosts on different switches; the slowest is between "
        f"{join_words(named.hosts)}"
    )
    return Outlier(
        "link", hosts, f"{named.what} of {len(bad)} links", value, fast, sentence, bad[0].by
    )


# Find hosts or GPUs that compute, read or communicate slower than their peers.


def find_slow_hosts(machine: Machine) -> list[Outlier]:
    """Return hosts that are slower than their peers by more than the spread.

    Each GPU is compared with all GPUs of its kind.
    """
    kinds: dict[tuple[str, str, str], list[NamedFigure]] = defaultdict(list)
    for named in host_figures(machine):
        kinds[named.what, named.device.partition(":")[0], named.like].append(named)
    found = []
    for members in kinds.values():
        names = {named.hosts[0] for named in members}
        if len(members) == 2:
            pair = differ(members)
            found += [_pair_outlier(pair, members)] if pair is not None else []
            continue
        worse: dict[str, list[SlowerFigure]] = defaultdict(list)
        for one in find_slower(members):
            worse[one.named.hosts[0]].append(one)
        for host, ones in worse.items():
            whole = len(ones) == sum(named.hosts[0] == host for named in members)
            if whole and len(names) == 2:
                found.append(_pair_outlier(ones[0], members))
            elif whole and len(ones) > 1:
                found.append(_host_outlier(ones, members))
            else:
                found += [_single_outlier(each, members) for each in ones]
    return found


def _single_outlier(worse: SlowerFigure, members: list[NamedFigure]) -> Outlier:
    named, (value, peers) = worse.named, worse.texts
    part = "processors" if named.device == "cpu" else named.device
    whose = f"{named.what} of its {part}" if part else named.what
    who = _describe_peers({member.hosts[0] for member in members} - set(named.hosts), members)
    sentence = f"{named.hosts[0]} is slow: {whose} is {value}, that of {who} {peers}"
    return worse.outlier("slow", named.hosts, named.what, sentence)


def _host_outlier(ones: list[SlowerFigure], members: list[NamedFigure]) -> Outlier:
    """Report a host all of whose devices are slow."""
    first = ones[0]
    host, (value, peers) = first.named.hosts[0], first.texts
    who = _describe_peers({member.hosts[0] for member in members} - {host}, members)
    sentence = (
        f"{host} is slow: {first.named.what} of all its {counted(len(ones), 'GPU')} is {value} at "
        f"worst, that of {who} {peers}"
    )
    return first.outlier("slow", (host,), first.named.what, sentence)


def _pair_outlier(worse: SlowerFigure, members: list[NamedFigure]) -> Outlier:
    """Report two members that differ: it is unknown which of them is the outlier."""
    slow, (value, peers) = worse.named, worse.texts
    both = tuple(dict.fromkeys(named.hosts[0] for named in members))
    other = next(named for named in members if named is not slow)
    if len(both) > 1:
        other = next(named for named in members if named.hosts != slow.hosts)
    names = (slow.hosts[0], other.hosts[0]) if len(both) > 1 else (slow.member, other.member)
    sentence = (
        f"{names[0]} and {names[1]} differ: {slow.what} is {value} and {peers}; with only "
        "two it is unknown which one is the outlier"
    )
    return worse.outlier("slow", both, slow.what, sentence)


def _describe_peers(others: set[str], members: list[NamedFigure]) -> str:
    if not others:
        return "its other devices"
    if any(":" in named.device for named in members):
        return "the others"
    return join_words(sorted(others)) if len(others) < 4 else f"the {len(others)} others"


# Find unwanted differences between hosts, and limits that are too low.

FILES = 4096  # open files that a process needs: sockets to peers, tensors of workers
_CORES = 16  # with this many cores there may be enough workers to need these files
SHM, SHM_FREE = 1 << 30, 1 << 28  # bytes: workers pass batches through /dev/shm
CLOCK_S = 1.0
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
    found += _alike(machine, "missing", _missing, "{what} is not known of {names}: {why}")
    found += _versions(machine)
    found += _parts(machine)
    may = "processes on {names} may run on only {value} of {peers} hardware threads"
    found += _alike(machine, "mask", _mask, may)
    limits = partial(_limits, len(machine.hosts) > 1)
    found += _alike(machine, "limit", limits, "{what} is {value} on {names}: {why}")
    uses = "PyTorch's kernels use {value} on {names}, whose processor has {peers}: {why}"
    found += _alike(machine, "vector", _vector_units, uses)
    return found + _imports(machine) + _clocks(machine)


@dataclass(frozen=True)
class _Item:
    """Something that hosts may have in common: fields of an ``Outlier``, and the reason."""

    what: str
    value: str = ""
    peers: str = ""
    why: str = ""


def _group_by_item(
    machine: Machine, items_of: Callable[[HostFacts], list[_Item]]
) -> dict[_Item, list[str]]:
    """Return each item once, with the names of its hosts."""
    found: dict[_Item, list[str]] = defaultdict(list)
    for host in machine.hosts:
        for item in items_of(host):
            found[item].append(host.name)
    return found


def _alike(
    machine: Machine, kind: str, items_of: Callable[[HostFacts], list[_Item]], text: str
) -> list[Outlier]:
    """Return one outlier for each item. text: The sentence, with names of fields in braces."""
    return [
        Outlier(
            *(kind, tuple(names), item.what, item.value, item.peers),
            text.format(names=join_words(names), **vars(item)),
        )
        for item, names in _group_by_item(machine, items_of).items()
    ]


def _missing(host: HostFacts) -> list[_Item]:
    return [_Item(what, why=why) for what, why in host.missing.items()]


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
    for what in ("sockets", "cores", "hardware threads", "NUMA nodes"):
        counts = {name: str(h.counts[what]) for name, h in known if what in h.counts}
        found += _differing("parts", what, counts)
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


def _mask(host: HostFacts) -> list[_Item]:
    cpus = len(host.cpus)
    if not cpus or host.threads is None or cpus >= host.threads:
        return []
    return [_Item("mask", str(cpus), str(host.threads))]


def _limits(has_peers: bool, host: HostFacts) -> list[_Item]:
    limits, found = host.limits, []
    crowded = has_peers or len(host.cpus) >= _CORES or (host.ranks or 0) > 8
    if limits.nofile is not None and limits.nofile < (FILES if crowded else FILES // 4):
        why = (
            "many ranks and loader workers need more open files. "
            f"HINT: ulimit -n {FILES}, or set it in limits.conf"
        )
        found.append(_Item("limit on open files", str(limits.nofile), str(FILES), why))
    shm, free = limits.shm_bytes, limits.shm_free_bytes
    batches = "loader workers pass their batches through it. HINT: "
    if shm is not None and shm < SHM:
        why = f"{batches}in a container use --shm-size or --ipc=host; else mount it with more space"
        found.append(_Item("/dev/shm", size(shm), size(SHM), why))
    elif free is not None and free < SHM_FREE:
        why = f"{batches}remove the files of ended jobs from it"
        found.append(_Item("free /dev/shm", size(free), size(SHM_FREE), why))
    lock = limits.memlock_bytes
    card = next(
        (network for network in host.networks if network.layer.lower() == "infiniband"), None
    )
    if card is not None and lock is not None and lock < (host.memory_bytes or UNLIMITED):
        why = (
            f"{card.name} (InfiniBand) needs locked memory. HINT: set ulimit -l unlimited where "
            "the scheduler's daemon starts"
        )
        found.append(_Item("limit on locked memory", size(lock), "unlimited", why))
    return found


def _vector_units(host: HostFacts) -> list[_Item]:
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
    return [_Item("vector units", names.get(used, used), there, why)]


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
    for item, names in _group_by_item(machine, _clock).items():
        clocks = f"the clock{'s' if len(names) > 1 else ''} of {join_words(names)}"
        sentence = f"{clocks} {'are' if len(names) > 1 else 'is'} {item.why}"
        value = item.value or "not known"
        found.append(Outlier("clock", tuple(names), "clock", value, item.peers, sentence))
    return found


def _clock(host: HostFacts) -> list[_Item]:
    offset, unsure = host.clock_offset_s, host.clock_uncertainty_s or 0.0
    if offset is None:
        return [_Item("clock", why="not compared with the launcher's")]
    if unsure > CLOCK_S:
        return [_Item("clock", why=f"known only to {format_value(unsure, 's')}")]
    if abs(offset) - unsure <= CLOCK_S:
        return []
    value = format_value(abs(offset), "s")
    why = "and times of files and logs are wrong. HINT: run chrony or ntpd"
    text = f"{value} {'ahead' if offset > 0 else 'behind'}, {why}"
    return [_Item("clock", value, format_value(CLOCK_S, "s"), text)]


def find_outliers(machine: Machine) -> list[Outlier]:
    """Return all outliers: facts first, then slow hosts and links, the slowest first."""
    speeds = [*find_slow_hosts(machine), *find_slow_links(machine)]
    return [*host_differences(machine), *sorted(speeds, key=lambda outlier: -outlier.by)]
