"""Whether ranks on several hosts exchange by the hierarchy, and what does it if they do: all of
them, or none."""

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from ...cluster.topology.network_interfaces import Link as Interface
from ...cluster.topology.racks import RACKS, rack_of
from ...record.ring.launcher_messages import notify
from ..shared import memory
from ..shared import open_group as shared
from ..shared.c_kernel import Kernel
from ..shared.open_group import ALGORITHM, BY_SOCKET
from . import schedules
from .c_wire import Wire, library
from .connect import Connections, Door, links_here
from .failure_agreement import Trouble
from .hierarchy import ANY, Hierarchy
from .rank_placement import Places, places
from .schedules import Link

NO_KERNEL = "the kernel in C was not built at the installation"
MBIT = "PACELINE_LINK_MBIT"  # of a link that does not know what it can do, or shares it
SPEED = 1000.0  # Mbit/s, of one that does not say
WIDELY = 2.0  # times as fast as another host's: links that differ so much are told
RAIL = 2500  # Mbit/s that one connection keeps busy; more of them get into each other's way

_told = False  # that links differ


def over_hosts(
    store: Any, rank: int, size: int, timeout: float, names: Sequence[int] = ()
) -> tuple[Hierarchy | None, str]:
    """What exchanges for a group of ``size`` ranks on several hosts, which meet in ``store``; None,
    and why, where one of them can't take part. names: the ranks' numbers in the job.

    Raises ValueError on all ranks where they are told to use different algorithms, or something
    that there is none of, or racks that one of the hosts is in none of; RuntimeError of torch's
    store where a rank does not come.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    times = store.add(f"{attempt}/{rank}", 1)  # a store may outlive a group, and its successor's
    store = PrefixStore(f"{attempt}/{times}", store)
    here, no_link = _links()
    rack, mistake = _rack()
    mine = {
        "host": memory.identity(),
        "name": socket.gethostname(),
        "rack": rack,
        "mistake": mistake,
        "algorithm": os.environ.get(ALGORITHM, ANY),
        "links": [one.interface for one in here],
        "mbit": [os.environ.get(MBIT) or one.speed or SPEED for one in here],
    }
    each = _all_told(store, "who", rank, size, mine)
    if mistakes := [one["mistake"] for one in each if one["mistake"]]:
        raise ValueError(mistakes[0])
    speeds = [[_mbit(mbit) for mbit in one["mbit"]] or [SPEED] for one in each]
    if rank == 0 and (not names or names[0] == 0):  # one rank of the job, whatever its groups
        _differ(each, speeds)
    most = min(sum(max(1, round(mbit / RAIL)) for mbit in links) for links in speeds)
    said = {key: [one[key] for one in each] for key in ("host", "name", "rack", "algorithm")}
    found = places(said["host"], said["name"], rank, most, said["rack"])
    known = [*schedules.ALL_REDUCE, *[schedules.RACKS] * (found.in_rack > 0), BY_SOCKET]
    algorithm = _same_algorithm(said["algorithm"], known, names)
    sharing = -(-found.rails // min(map(len, speeds)))  # ranks a link
    link = Link(rate=min(map(min, speeds)) * 1e6 / 8 / sharing)

    mates = found.ranks[found.host]
    inside = [names[mate] if names else mate for mate in mates]
    host_store = PrefixStore(f"host/{found.host}", store)
    kernel, why = shared.opened(host_store, found.local, len(mates), timeout, inside)
    if not why and not isinstance(kernel, Kernel):
        why = NO_KERNEL
    why = shared.agreed(store, "kernel", rank, size, why, "")
    if why:
        return None, _closed(kernel, why)
    assert isinstance(kernel, Kernel)
    met, why = _connected(store, found, size, here, no_link)
    why = shared.agreed(store, "met", rank, size, why, "")
    if why:
        met.close()
        return None, _closed(kernel, why)
    wire = None
    if found.local < found.wired:
        fds = {host: one.fileno() for host, one in met.sockets.items()}
        wire = Wire(len(found.ranks), found.host, fds, kernel.broken)
    trouble = Trouble(store, found, met, names)
    return Hierarchy(found, kernel, wire, link, trouble, algorithm), ""


def _closed(kernel: Any, why: str) -> str:
    if kernel is not None:
        kernel.close()
    return why


def _links() -> tuple[list[Interface], str]:
    """This host's, and why there are none."""
    try:
        library()
        return links_here(), ""
    except OSError as error:
        return [], f"{socket.gethostname()}: {error.strerror or error}"


def _rack() -> tuple[str, str]:
    """This host's, and what is wrong with what the user has said."""
    try:
        return rack_of(socket.gethostname()), ""
    except ValueError as mistake:
        return "", str(mistake)


def _mbit(said: str | float) -> float:
    """What the user has said, or the link itself."""
    try:
        mbit = float(said)
    except ValueError:
        mbit = 0.0
    if not 0 < mbit < float("inf"):
        raise ValueError(f"{MBIT}={said}: a number of Mbit/s is expected")
    return mbit


def _differ(each: list[dict[str, Any]], speeds: list[list[float]]) -> None:
    """Links of which one is much slower than others are named, once."""
    global _told
    slowest, fastest = min(speeds, key=min), max(map(min, speeds))
    if _told or fastest < WIDELY * min(slowest):
        return
    _told = True
    slow = {
        f"{one['name']} ({', '.join(one['links'])}) {min(mbit):,.0f}"
        for one, mbit in zip(each, speeds, strict=True)
        if fastest >= WIDELY * min(mbit)
    }
    notify(
        f"paceline: links between hosts differ, in Mbit/s: {'; '.join(sorted(slow))}; others up to "
        f"{fastest:,.0f}. The slowest one sets the pace of every exchange. HINT: "
        f"GLOO_SOCKET_IFNAME names other interfaces, {MBIT} a rate that a link can't know, -H the "
        "hosts without these\n"
    )


def _connected(
    store: Any, found: Places, size: int, here: list[Interface], why: str
) -> tuple[Connections, str]:
    """This rank's connections, where it has some, and why not."""
    door, told = None, ""
    if found.local < found.wired and here:
        try:
            door = Door(here[found.local % len(here)])
            told = door.told
        except OSError as error:
            why = f"{found.names[found.host]}: {error.strerror or error}"
    each = _all_told(store, "door", found.rank, size, told)
    if door is None:
        return Connections(), why
    like = {at: ranks[found.local] for at, ranks in enumerate(found.ranks) if at != found.host}
    doors = {host: each[peer] for host, peer in like.items()}
    if not all(doors.values()):
        door.close()
        return Connections(), why
    try:
        return door.meet(found.host, doors, dict(enumerate(found.names))), why
    except OSError as error:
        why = f"{found.names[found.host]}: {error.strerror or error}"
    return Connections(), why


def _all_told(store: Any, key: str, rank: int, size: int, mine: Any) -> list[Any]:
    """What each rank has to say."""
    store.set(f"{key}/{rank}", json.dumps(mine))
    return [json.loads(one) for one in store.multi_get([f"{key}/{r}" for r in range(size)])]


def _same_algorithm(each: list[str], known: list[str], names: Sequence[int]) -> str:
    for rank, one in enumerate(each):
        if one != ANY and one not in known:
            racks = f", and {schedules.RACKS} where {RACKS} names racks of as many hosts each"
            hint = f"one of {', '.join(known)}{'' if schedules.RACKS in known else racks}"
            raise ValueError(f"{ALGORITHM}={one}: no such algorithm here. HINT: {hint}")
        if one != each[0]:
            first, other = (names[0], names[rank]) if names else (0, rank)
            raise ValueError(
                f"ranks are told to use different algorithms: rank {first} has {ALGORITHM}="
                f"{each[0]}, and rank {other} {ALGORITHM}={one}. HINT: the same on all ranks"
            )
    return each[0]
