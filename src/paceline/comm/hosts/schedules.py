"""Who sends what to whom: the steps of each algorithm, as one host sees them, and what they cost.

A vector is cut into parts, one for each host, part p from ``cuts[p]`` to ``cuts[p + 1]``. With H
hosts, a link that takes a seconds to begin and b seconds a byte, and a vector of n bytes
(Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective Communication Operations in MPICH"):

    algorithm   steps       seconds                            is best for
    doubling    log2 H      log2 H (a + n b)                   short vectors
    tree        2 log2 H    2 log2 H (a + n b)                 (doubling has fewer steps)
    direct      2           2 (a + (H - 1) n b / H) and more   few hosts: each sends to all at once
    halving     2 log2 H    2 log2 H a + 2 (H - 1) n b / H     long vectors on many hosts
    ring        2 (H - 1)   2 (H - 1) (a + n b / H)            long vectors
    racks       4           4 a + 2 (H - 1) n b / H and more   hosts in racks that share a way out

To these is added what TCP takes: a connection that was idle begins slowly, which a ring's are not
in its steps, and those that share a link do not end at the same time.

Where H is no power of two, the hosts beyond the largest one hand theirs to a partner first.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

ALIGN = 64  # bytes at a multiple of which a part begins
AT_ONCE = 8  # hosts, of which one sends to all others at once: with more, switches drop packets
SHARE = 0.25  # of a link's latency is what a further message in the same step takes
UNEVEN = 0.07  # more time a further message: connections that share a link do not end together
WINDOW = 14_600  # bytes that a connection that was idle sends at once (RFC 6928); then it speeds up
AGAIN = 10  # latencies that this takes

Cuts = Sequence[int]
Message = tuple[int, int, int]  # host, place, bytes


@dataclass(frozen=True)
class Step:
    """Sends and receives at the same time, in the order of hosts. fold: what is received is summed
    up with what is there; all receives of such a step are for the same place, where a send may
    begin too, but not reach into."""

    sends: tuple[Message, ...]
    receives: tuple[Message, ...]
    fold: bool = False


@dataclass(frozen=True)
class Link:
    """latency: seconds until a message begins to arrive. rate: bytes/s one way."""

    latency: float = 50e-6
    rate: float = 1.17e8  # 1 Gbit/s


def cut(nbytes: int, parts: int) -> list[int]:
    """Where parts begin, and the end; the last ones may be empty."""
    each = -(-nbytes // (parts * ALIGN)) * ALIGN
    return [min(each * part, nbytes) for part in range(parts + 1)]


def _part(cuts: Cuts, host: int, first: int, last: int | None = None) -> Message:
    """A message of or to ``host`` with the parts from first up to last, without that."""
    start, end = cuts[first], cuts[first + 1 if last is None else last]
    return host, start, end - start


def ring_scatter(cuts: Cuts, me: int, hosts: int) -> Iterator[Step]:
    """Part p goes round once and is summed up on its way, which ends at host p.

    step, host 0 of 3    sends to 1    gets from 2
    0                    part 2        part 1
    1                    part 1        part 0: its own
    """
    for s in range(hosts - 1):
        out, come = (me - s - 1) % hosts, (me - s - 2) % hosts
        yield Step(
            (_part(cuts, (me + 1) % hosts, out),), (_part(cuts, (me - 1) % hosts, come),), True
        )


def ring_gather(cuts: Cuts, me: int, hosts: int) -> Iterator[Step]:
    """Each part goes round once, from its host.

    step, host 0 of 3    sends to 1    gets from 2
    0                    part 0        part 2
    1                    part 2        part 1
    """
    for s in range(hosts - 1):
        out, come = (me - s) % hosts, (me - s - 1) % hosts
        yield Step((_part(cuts, (me + 1) % hosts, out),), (_part(cuts, (me - 1) % hosts, come),))


def direct_scatter(cuts: Cuts, me: int, hosts: int) -> Iterator[Step]:
    """One step: part p to host p, from all."""
    others = [host for host in range(hosts) if host != me]
    yield Step(
        tuple(_part(cuts, host, host) for host in others),
        tuple(_part(cuts, host, me) for host in others),
        True,
    )


def direct_gather(cuts: Cuts, me: int, hosts: int) -> Iterator[Step]:
    """One step: each host's part to all."""
    others = [host for host in range(hosts) if host != me]
    yield Step(
        tuple(_part(cuts, host, me) for host in others),
        tuple(_part(cuts, host, host) for host in others),
    )


def ring(nbytes: int, me: int, hosts: int) -> Iterator[Step]:
    cuts = cut(nbytes, hosts)
    yield from ring_scatter(cuts, me, hosts)
    yield from ring_gather(cuts, me, hosts)


def direct(nbytes: int, me: int, hosts: int) -> Iterator[Step]:
    cuts = cut(nbytes, hosts)
    yield from direct_scatter(cuts, me, hosts)
    yield from direct_gather(cuts, me, hosts)


def racks(nbytes: int, me: int, hosts: int, each: int) -> Iterator[Step]:
    """Two levels, for racks of ``each`` hosts that are next to each other: a reduce-scatter in the
    rack, an all-reduce of each part between the hosts that hold it, one in every rack, and an
    all-gather in the rack. As much leaves a rack as with a ring, which is the least.

    step, host 0 of racks 0 1 and 2 3    sends                       gets
    0, in the rack                       half 1 to 1                 half 0 from 1
    1 and 2, between racks               quarters of half 0 to 2     from 2
    3, in the rack                       half 0 to 1                 half 1 from 1
    """
    rack, place = divmod(me, each)
    cuts, few = cut(nbytes, each), each <= AT_ONCE
    scatter, gather = (direct_scatter, direct_gather) if few else (ring_scatter, ring_gather)
    between = direct if hosts // each <= AT_ONCE else ring
    first, end = cuts[place], cuts[place + 1]
    yield from _moved(scatter(cuts, place, each), lambda at: rack * each + at)
    others = between(end - first, rack, hosts // each)
    yield from _moved(others, lambda at: at * each + place, first)
    yield from _moved(gather(cuts, place, each), lambda at: rack * each + at)


def _moved(steps: Iterator[Step], host: Callable[[int], int], first: int = 0) -> Iterator[Step]:
    """The steps of some of the hosts, of a part of the vector."""

    def moved(messages: Sequence[Message]) -> tuple[Message, ...]:
        return tuple((host(at), first + place, count) for at, place, count in messages)

    for step in steps:
        yield Step(moved(step.sends), moved(step.receives), step.fold)


Core = Callable[[int, int, int], Iterator[Step]]


def _with_the_rest(core: Core, nbytes: int, me: int, hosts: int) -> Iterator[Step]:
    """The algorithm among the largest power of two of hosts: host p + i of the rest hands its
    vector to host i before, and gets the sum from it afterwards."""
    power = 1 << (hosts.bit_length() - 1)
    rest = hosts - power
    if me >= power:
        yield Step(((me - power, 0, nbytes),), ())
        yield Step((), ((me - power, 0, nbytes),))
        return
    if me < rest:
        yield Step((), ((me + power, 0, nbytes),), True)
    yield from core(nbytes, me, power)
    if me < rest:
        yield Step(((me + power, 0, nbytes),), ())


def doubling(nbytes: int, me: int, hosts: int) -> Iterator[Step]:
    """Whole vectors, with the host 1, 2, 4, ... further: after s steps each has the sum of 2^s.

    step, of 4 hosts    pairs
    0                   0-1  2-3
    1                   0-2  1-3
    """

    def core(nbytes: int, me: int, hosts: int) -> Iterator[Step]:
        for bit in range(hosts.bit_length() - 1):
            whole = (me ^ 1 << bit, 0, nbytes)
            yield Step((whole,), (whole,), True)

    return _with_the_rest(core, nbytes, me, hosts)


def halving(nbytes: int, me: int, hosts: int) -> Iterator[Step]:
    """Half of the vector, then a quarter, ... until each has the sum of its own part; and back.

    step, host 0 of 4    sends         gets, from
    0                    parts 2 3     parts 0 1, host 2
    1                    part 1        part 0, host 1
    2                    part 0        part 1, host 1
    3                    parts 0 1     parts 2 3, host 2
    """

    def core(nbytes: int, me: int, hosts: int) -> Iterator[Step]:
        cuts, bits = cut(nbytes, hosts), range(hosts.bit_length() - 1)
        for bit in reversed(bits):
            other, (first, last) = me ^ 1 << bit, _block(me, bit)
            theirs = _part(cuts, other, *_block(other, bit))
            yield Step((theirs,), (_part(cuts, other, first, last),), True)
        for bit in bits:
            other, (first, last) = me ^ 1 << bit, _block(me, bit)
            theirs = _part(cuts, other, *_block(other, bit))
            yield Step((_part(cuts, other, first, last),), (theirs,))

    return _with_the_rest(core, nbytes, me, hosts)


def _block(host: int, bit: int) -> tuple[int, int]:
    """The parts of the 2^bit hosts that differ from this one in lower bits alone."""
    first = host >> bit << bit
    return first, first + (1 << bit)


def tree_reduce(nbytes: int, me: int, hosts: int) -> Iterator[Step]:
    """To host 0, on a binomial tree: of 4 hosts 1 to 0 and 3 to 2, then 2 to 0."""
    for bit in range((hosts - 1).bit_length()):
        if me >> bit & 1:
            yield Step(((me - (1 << bit), 0, nbytes),), ())
            return
        if me + (1 << bit) < hosts:
            yield Step((), ((me + (1 << bit), 0, nbytes),), True)


def broadcast(nbytes: int, me: int, hosts: int, root: int = 0) -> Iterator[Step]:
    """The way back: of 4 hosts 0 to 2, then 0 to 1 and 2 to 3, counted from the root."""
    mine = (me - root) % hosts
    for bit in reversed(range((hosts - 1).bit_length())):
        if mine & ((1 << bit) - 1):
            continue  # its turn comes later
        if mine >> bit & 1:
            yield Step((), (((mine - (1 << bit) + root) % hosts, 0, nbytes),))
        elif mine + (1 << bit) < hosts:
            yield Step((((mine + (1 << bit) + root) % hosts, 0, nbytes),), ())


def tree(nbytes: int, me: int, hosts: int) -> Iterator[Step]:
    yield from tree_reduce(nbytes, me, hosts)
    yield from broadcast(nbytes, me, hosts)


# All-reduce, by name: nbytes, me, hosts. The first of two that cost the same is taken.
ALL_REDUCE: dict[str, Core] = {
    "direct": direct,
    "doubling": doubling,
    "halving": halving,
    "ring": ring,
    "tree": tree,
}


def cost(steps: Iterator[Step], link: Link) -> float:
    """Seconds that the steps of one host take."""
    total, before = 0.0, None
    for step in steps:
        ways = [way for way in (step.sends, step.receives) if way]
        more = max(len(way) for way in ways) - 1
        most = max(sum(message[2] for message in way) for way in ways)
        peers = {message[0] for message in step.sends}
        again = AGAIN if before not in (None, peers) and most > WINDOW else 0
        total += link.latency * (1 + SHARE * more + again)
        total += most / link.rate * (1 + UNEVEN * more)
        before = peers
    return total


RACKS = "racks"


def all_reduce(name: str, nbytes: int, me: int, hosts: int, each: int = 0) -> Iterator[Step]:
    """each: hosts of a rack, where they are in racks that are alike."""
    return racks(nbytes, me, hosts, each) if name == RACKS else ALL_REDUCE[name](nbytes, me, hosts)


def names(hosts: int, each: int = 0) -> list[str]:
    """Of the all-reduces that so many hosts may use."""
    found = [name for name in ALL_REDUCE if name != "direct" or hosts <= AT_ONCE]
    return [*found, RACKS] if each else found


def best(nbytes: int, hosts: int, link: Link, each: int = 0) -> str:
    """The all-reduce of the least cost, as host 0 sees it: no other host has more to do. Of long
    vectors between racks, those that send more out of a rack than a ring does are left out."""
    found = names(hosts, each)
    if each and nbytes > WINDOW:
        found = [name for name in found if name in ("ring", RACKS)]
    return min(found, key=lambda name: cost(all_reduce(name, nbytes, 0, hosts, each), link))
