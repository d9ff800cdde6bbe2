"""The steps of each all-reduce algorithm between hosts, as one host sees them, and their cost.

A vector is cut into parts, one for each host, part p from ``cuts[p]`` to ``cuts[p + 1]``. With H
hosts, a link with a latency of a seconds and b seconds per byte, and a vector of n bytes
(Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH"):

    algorithm   steps       seconds                            is best for
    doubling    log2 H      log2 H (a + n b)                   short vectors
    tree        2 log2 H    2 log2 H (a + n b)                 (doubling has fewer steps)
    direct      2           2 (a + (H - 1) n b / H) and more   few hosts: each sends to all at once
    halving     2 log2 H    2 log2 H a + 2 (H - 1) n b / H     long vectors on many hosts
    ring        2 (H - 1)   2 (H - 1) (a + n b / H)            long vectors
    racks       4           4 a + 2 (H - 1) n b / H and more   hosts in racks that share a way out

The cost of TCP is added: a connection that was idle starts slowly (those of a ring are never idle),
and connections that share a link do not end at the same time.

Where H is not a power of two, the hosts beyond the largest one send their vectors to a partner
first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

ALIGN = 64  # bytes; parts begin at multiples of it
MAX_DIRECT_HOSTS = 8  # a host sends to all others at once: with more hosts, switches drop packets
EXTRA_MESSAGE_LATENCY = 0.25  # of a link's latency, for each further message in a step
# of the transfer time, for each further message: connections that share a link do not end together
EXTRA_MESSAGE_DELAY = 0.07
# a connection that was idle sends so many at once (RFC 6928), then speeds up
INITIAL_WINDOW_BYTES = 14_600
SLOW_START_LATENCIES = 10  # that a connection that was idle needs to speed up

Cuts = Sequence[int]
Message = tuple[int, int, int]  # host, place, bytes


@dataclass(frozen=True)
class Step:
    """Sends and receives of one host that proceed at the same time, in the order of hosts.

    fold: received data is reduced with the data in place. All receives of such a step are for the
    same offset, where a send may also begin, but not reach into it.
    """

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    fold: bool = False


@dataclass(frozen=True)
class LinkModel:
    """What a link between hosts can do.

    Attributes:
        latency_s: Time until a message begins to arrive.
        bytes_per_s: Bandwidth in one direction.
    """

    latency_s: float = 50e-6
    bytes_per_s: float = 1.17e8  # 1 Gbit/s


def cut_parts(nbytes: int, parts: int) -> list[int]:
    """Return the offsets of a vector's parts, and its end; the last parts may be empty."""
    each = -(-nbytes // (parts * ALIGN)) * ALIGN
    return [min(each * part, nbytes) for part in range(parts + 1)]


def _part(cuts: Cuts, host: int, first: int, last: int | None = None) -> Message:
    """Return a message of or to ``host`` with the parts from first up to, without, last."""
    start, end = cuts[first], cuts[first + 1 if last is None else last]
    return host, start, end - start


def ring_scatter(cuts: Cuts, me: int, hosts: int) -> Iterator[Step]:
    """Reduce-scatter in a ring: part p is reduced host by host and ends at host p.

    step, host 0 of 3    sends to 1    gets from 2
    0                    part 2        part 1
    1                    part 1        part 0: its own
    """
    for step in range(hosts - 1):
        sent, received = (me - step - 1) % hosts, (me - step - 2) % hosts
        yield Step(
            (_part(cuts, (me + 1) % hosts, sent),), (_part(cuts, (me - 1) % hosts, received),), True
        )


def ring_gather(cuts: Cuts, me: int, hosts: int) -> Iterator[Step]:
    """All-gather in a ring: each part visits all hosts, starting at its own.

    step, host 0 of 3    sends to 1    gets from 2
    0                    part 0        part 2
    1                    part 2        part 1
    """
    for step in range(hosts - 1):
        sent, received = (me - step) % hosts, (me - step - 1) % hosts
        yield Step(
            (_part(cuts, (me + 1) % hosts, sent),), (_part(cuts, (me - 1) % hosts, received),)
        )


def direct_scatter(cuts: Cuts, me: int, hosts: int) -> Iterator[Step]:
    """Reduce-scatter in one step: part p goes to host p, from all hosts."""
    others = [host for host in range(hosts) if host != me]
    yield Step(
        tuple(_part(cuts, host, host) for host in others),
        tuple(_part(cuts, host, me) for host in others),
        True,
    )


def direct_gather(cuts: Cuts, me: int, hosts: int) -> Iterator[Step]:
    """All-gather in one step: each host sends its part to all hosts."""
    others = [host for host in range(hosts) if host != me]
    yield Step(
        tuple(_part(cuts, host, me) for host in others),
        tuple(_part(cuts, host, host) for host in others),
    )


def ring(nbytes: int, me: int, hosts: int) -> Iterator[Step]:
    cuts = cut_parts(nbytes, hosts)
    yield from ring_scatter(cuts, me, hosts)
    yield from ring_gather(cuts, me, hosts)


def direct(nbytes: int, me: int, hosts: int) -> Iterator[Step]:
    cuts = cut_parts(nbytes, hosts)
    yield from direct_scatter(cuts, me, hosts)
    yield from direct_gather(cuts, me, hosts)


def racks(nbytes: int, me: int, hosts: int, hosts_per_rack: int) -> Iterator[Step]:
    """Two levels, for racks of ``each`` hosts that are next to each other: a reduce-scatter in the
    rack, an all-reduce of each part between the hosts that hold it, one in every rack, and an
    all-gather in the rack. As much leaves a rack as with a ring, which is the least.

    step, host 0 of racks 0 1 and 2 3    sends                       gets
    0, in the rack                       half 1 to 1                 half 0 from 1
    1 and 2, between racks               quarters of half 0 to 2     from 2
    3, in the rack                       half 0 to 1                 half 1 from 1
    """
    rack, place = divmod(me, hosts_per_rack)
    cuts, is_small = cut_parts(nbytes, hosts_per_rack), hosts_per_rack <= MAX_DIRECT_HOSTS
    scatter, gather = (direct_scatter, direct_gather) if is_small else (ring_scatter, ring_gather)
    between = direct if hosts // hosts_per_rack <= MAX_DIRECT_HOSTS else ring
    first, end = cuts[place], cuts[place + 1]
    yield from _relocate(
        scatter(cuts, place, hosts_per_rack), lambda at: rack * hosts_per_rack + at
    )
    others = between(end - first, rack, hosts // hosts_per_rack)
    yield from _relocate(others, lambda at: at * hosts_per_rack + place, first)
    yield from _relocate(gather(cuts, place, hosts_per_rack), lambda at: rack * hosts_per_rack + at)


def _relocate(steps: Iterator[Step], host: Callable[[int], int], first: int = 0) -> Iterator[Step]:
    """Return the steps with hosts renumbered and offsets moved by ``first``: for a subset of the
    hosts, or a part of the vector.
    """

    def moved(messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple((host(at), first + place, count) for at, place, count in messages)

    for step in steps:
        yield Step(moved(step.sends), moved(step.receives), step.fold)


Core = Callable[[int, int, int], Iterator[Step]]


def _with_remaining_hosts(core: Core, nbytes: int, me: int, hosts: int) -> Iterator[Step]:
    """Run ``core`` on the largest power of two of hosts.

    Of the remaining hosts, number power + i sends its vector to host i first, and receives the sum
    from it afterwards.
    """
    power = 1 << (hosts.bit_length() - 1)
    remaining = hosts - power
    if me >= power:
        yield Step(((me - power, 0, nbytes),), ())
        yield Step((), ((me - power, 0, nbytes),))
        return
    if me < remaining:
        yield Step((), ((me + power, 0, nbytes),), True)
    yield from core(nbytes, me, power)
    if me < remaining:
        yield Step(((me + power, 0, nbytes),), ())


def doubling(nbytes: int, me: int, hosts: int) -> Iterator[Step]:
    """Recursive doubling: exchange whole vectors with the host 1, 2, 4, ... away.

    After s steps each host has the sum of 2^s hosts.

    step, of 4 hosts    pairs
    0                   0-1  2-3
    1                   0-2  1-3
    """

    def core(nbytes: int, me: int, hosts: int) -> Iterator[Step]:
        for bit in range(hosts.bit_length() - 1):
            whole = (me ^ 1 << bit, 0, nbytes)
            yield Step((whole,), (whole,), True)

    return _with_remaining_hosts(core, nbytes, me, hosts)


def halving(nbytes: int, me: int, hosts: int) -> Iterator[Step]:
    """Recursive halving and doubling: exchange half of the vector, then a quarter, and so on.

    Each host then has the sum of its own part; the way back gathers the parts.

    step, host 0 of 4    sends         gets, from
    0                    parts 2 3     parts 0 1, host 2
    1                    part 1        part 0, host 1
    2                    part 0        part 1, host 1
    3                    parts 0 1     parts 2 3, host 2
    """

    def core(nbytes: int, me: int, hosts: int) -> Iterator[Step]:
        cuts, bits = cut_parts(nbytes, hosts), range(hosts.bit_length() - 1)
        for bit in reversed(bits):
            other, (first, last) = me ^ 1 << bit, _block(me, bit)
            theirs = _part(cuts, other, *_block(other, bit))
            yield Step((theirs,), (_part(cuts, other, first, last),), True)
        for bit in bits:
            other, (first, last) = me ^ 1 << bit, _block(me, bit)
            theirs = _part(cuts, other, *_block(other, bit))
            yield Step((_part(cuts, other, first, last),), (theirs,))

    return _with_remaining_hosts(core, nbytes, me, hosts)


def _block(host: int, bit: int) -> tuple[int, int]:
    """Return the parts of the 2^bit hosts that differ from this one in lower bits only."""
    first = host >> bit << bit
    return first, first + (1 << bit)


def tree_reduce(nbytes: int, me: int, hosts: int) -> Iterator[Step]:
    """Reduce to host 0 on a binomial tree: of 4 hosts 1 to 0 and 3 to 2, then 2 to 0."""
    for bit in range((hosts - 1).bit_length()):
        if me >> bit & 1:
            yield Step(((me - (1 << bit), 0, nbytes),), ())
            return
        if me + (1 << bit) < hosts:
            yield Step((), ((me + (1 << bit), 0, nbytes),), True)


def broadcast(nbytes: int, me: int, hosts: int, root: int = 0) -> Iterator[Step]:
    """Broadcast on a binomial tree: of 4 hosts 0 to 2, then 0 to 1 and 2 to 3, counted from the
    root.
    """
    relative = (me - root) % hosts
    for bit in reversed(range((hosts - 1).bit_length())):
        if relative & ((1 << bit) - 1):
            continue  # takes part in a later step
        if relative >> bit & 1:
            yield Step((), (((relative - (1 << bit) + root) % hosts, 0, nbytes),))
        elif relative + (1 << bit) < hosts:
            yield Step((((relative + (1 << bit) + root) % hosts, 0, nbytes),), ())


def tree(nbytes: int, me: int, hosts: int) -> Iterator[Step]:
    yield from tree_reduce(nbytes, me, hosts)
    yield from broadcast(nbytes, me, hosts)


# All-reduces by name: (nbytes, me, hosts). Of two that cost the same the first is chosen.
ALL_REDUCE: dict[str, Core] = {
    "direct": direct,
    "doubling": doubling,
    "halving": halving,
    "ring": ring,
    "tree": tree,
}


def cost(steps: Iterator[Step], link: LinkModel) -> float:
    """Return the seconds that the steps of one host take."""
    total, previous_peers = 0.0, None
    for step in steps:
        directions = [messages for messages in (step.sends, step.receives) if messages]
        extra_messages = max(len(messages) for messages in directions) - 1
        nbytes = max(sum(message[2] for message in messages) for messages in directions)
        peers = {message[0] for message in step.sends}
        slow_start = (
            SLOW_START_LATENCIES
            if previous_peers not in (None, peers) and nbytes > INITIAL_WINDOW_BYTES
            else 0
        )
        total += link.latency_s * (1 + EXTRA_MESSAGE_LATENCY * extra_messages + slow_start)
        total += nbytes / link.bytes_per_s * (1 + EXTRA_MESSAGE_DELAY * extra_messages)
        previous_peers = peers
    return total


RACKS = "racks"


def all_reduce(
    name: str, nbytes: int, me: int, hosts: int, hosts_per_rack: int = 0
) -> Iterator[Step]:
    """Return the steps of an all-reduce.

    hosts_per_rack: where the hosts are in racks of equal size, else 0.
    """
    return (
        racks(nbytes, me, hosts, hosts_per_rack)
        if name == RACKS
        else ALL_REDUCE[name](nbytes, me, hosts)
    )


def algorithm_names(hosts: int, hosts_per_rack: int = 0) -> list[str]:
    """Return the names of the all-reduces that ``hosts`` hosts may use."""
    candidates = [name for name in ALL_REDUCE if name != "direct" or hosts <= MAX_DIRECT_HOSTS]
    return [*candidates, RACKS] if hosts_per_rack else candidates


@lru_cache(512)
def cheapest_algorithm(nbytes: int, hosts: int, link: LinkModel, hosts_per_rack: int = 0) -> str:
    """Return the all-reduce of the least cost, as host 0 sees it: no other host has more to do.

    For long vectors between racks, algorithms that send more out of a rack than a ring are left
    out.
    """
    candidates = algorithm_names(hosts, hosts_per_rack)
    if hosts_per_rack and nbytes > INITIAL_WINDOW_BYTES:
        candidates = [name for name in candidates if name in ("ring", RACKS)]
    return min(
        candidates, key=lambda name: cost(all_reduce(name, nbytes, 0, hosts, hosts_per_rack), link)
    )
