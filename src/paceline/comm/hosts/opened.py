"""Whether ranks on several hosts exchange by the hierarchy, and what does it if they do: all of
them, or none."""

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from ...cluster.links import Link as Interface
from ..shared import memory
from ..shared import opened as shared
from ..shared.native import Kernel
from .connect import Connections, Door, links_here
from .hierarchy import ANY, Hierarchy
from .native import Wire, library
from .places import Places, places
from .schedules import ALL_REDUCE, Link
from .trouble import Trouble

ALGORITHM = "PACELINE_ALGORITHM"  # of an all-reduce between hosts
NO_KERNEL = "the kernel in C was not built at the installation"
MBIT = "PACELINE_LINK_MBIT"  # of a link that does not know what it can do, or shares it
SPEED = 1000.0  # Mbit/s, of one that does not say
RAIL = 2500  # Mbit/s that one connection keeps busy; more of them get into each other's way


def over_hosts(
    store: Any, rank: int, size: int, timeout: float, names: Sequence[int] = ()
) -> tuple[Hierarchy | None, str]:
    """What exchanges for a group of ``size`` ranks on several hosts, which meet in ``store``; None,
    and why, where one of them can't take part. names: the ranks' numbers in the job.

    Raises ValueError on all ranks where they are told to use different algorithms, or something
    that there is none of; RuntimeError of torch's store where a rank does not come.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    times = store.add(f"{attempt}/{rank}", 1)  # a store may outlive a group, and its successor's
    store = PrefixStore(f"{attempt}/{times}", store)
    here, no_link = _links()
    mine = {
        "host": memory.identity(),
        "name": socket.gethostname(),
        "algorithm": os.environ.get(ALGORITHM, ANY),
        "mbit": [os.environ.get(MBIT) or one.speed or SPEED for one in here],
    }
    each = _all_told(store, "who", rank, size, mine)
    algorithm = _same_algorithm([one["algorithm"] for one in each], names)
    speeds = [[_mbit(mbit) for mbit in one["mbit"]] or [SPEED] for one in each]
    most = min(sum(max(1, round(mbit / RAIL)) for mbit in links) for links in speeds)
    found = places([one["host"] for one in each], [one["name"] for one in each], rank, most)
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


def _mbit(said: str | float) -> float:
    """What the user has said, or the link itself."""
    try:
        mbit = float(said)
    except ValueError:
        mbit = 0.0
    if not 0 < mbit < float("inf"):
        raise ValueError(f"{MBIT}={said}: a number of Mbit/s is expected")
    return mbit


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


def _same_algorithm(each: list[str], names: Sequence[int]) -> str:
    for rank, one in enumerate(each):
        if one != ANY and one not in ALL_REDUCE:
            hint = f"one of {', '.join(ALL_REDUCE)}"
            raise ValueError(f"{ALGORITHM}={one}: no such algorithm. HINT: {hint}")
        if one != each[0]:
            first, other = (names[0], names[rank]) if names else (0, rank)
            raise ValueError(
                f"ranks are told to use different algorithms: rank {first} has {ALGORITHM}="
                f"{each[0]}, and rank {other} {ALGORITHM}={one}. HINT: the same on all ranks"
            )
    return each[0]
