"""Whether a group's ranks share memory, and the kernel over it if they do: all of them, or none."""

import itertools
import os
import platform
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch._C._distributed_c10d import PrefixStore

from ...cluster.topology.sockets import SOCKETS, socket_of
from ...record.ring.launcher_messages import notify
from . import memory
from .c_kernel import Kernel, library
from .torch_kernel import InTorch

X86 = ("x86_64", "AMD64", "i686")
SLOT = 1 << 20  # bytes: of each rank's slots
RING = 3  # of these a rank has, as in kernel.c
MOST = 16 << 20  # bytes of all slots of a host together
LEAST_SLOT = 16 << 10
ALGORITHM = "PACELINE_ALGORITHM"  # of an all-reduce between hosts, or by sockets:
BY_SOCKET = "sockets"
ELSEWHERE = "its ranks are on several hosts"
BY_CHOICE = "PACELINE_EXCHANGE=gloo"

_groups = itertools.count()


def slot_of(size: int) -> int:
    """Bytes of a slot where so many ranks share MOST."""
    if size == 1:
        return LEAST_SLOT  # nothing to exchange
    return max(min(SLOT, MOST // (RING * size) // 4096 * 4096), LEAST_SLOT)


def opened(
    store: Any, rank: int, size: int, timeout: float, names: Sequence[int] = ()
) -> tuple[Kernel | InTorch | None, str]:
    """The kernel of a group of ``size`` ranks, which meet in ``store``; None, and why, where one
    of them can't take part, or is elsewhere. names: the ranks' numbers in the job.

    Raises RuntimeError of torch's store where a rank does not come; ValueError where sockets are
    not said in words that can be read, or only some ranks are told to sum up by them.
    """
    socket = _socket_here()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    times = store.add(f"{attempt}/{rank}", 1)  # a store may outlive a group, and its successor's
    store = PrefixStore(f"{attempt}/{times}", store)
    how, why_not = _can()
    why = agreed(store, "may", rank, size, why_not, f"{memory.identity()} {how.__name__}")
    if why:
        return None, why
    kernel, failed = None, ""
    try:
        slot = slot_of(size)
        fd = memory.shared(store, rank, size, how.needs(size, slot), timeout)
        kernel = how(fd, rank, size, slot, names)
        if isinstance(kernel, Kernel):
            kernel.on_socket(socket, os.environ.get(ALGORITHM) == BY_SOCKET)
    except (OSError, ValueError) as error:
        failed = f"rank {rank}: {error}"
    # Only now does every rank hold the lock by which the others see that it is alive.
    why = agreed(store, "has", rank, size, failed, "")
    if why and kernel is not None:
        kernel.close()
    elif how is InTorch and rank == 0:
        _slower()
    if not why and isinstance(kernel, Kernel):
        _by_socket(kernel)
    return (None if why else kernel), why


@cache
def _socket_here() -> int:
    return socket_of(os.sched_getaffinity(0))


def _by_socket(kernel: Kernel) -> None:
    """Once all ranks have said where they are, and what they are told."""
    if not kernel.find_sockets():
        raise ValueError(
            f"only some ranks of a host have {ALGORITHM}={BY_SOCKET}. HINT: the same on all ranks"
        )
    if os.environ.get(ALGORITHM) == BY_SOCKET:
        kernel.by_socket(True)
        first = next(_groups) == 0  # a part of its ranks may well be on one
        if first and not kernel.sockets and kernel.size > 1 and kernel.rank == 0:
            notify(
                f"paceline: {ALGORITHM}={BY_SOCKET} has no effect: ranks of this host are not "
                "bound to several sockets, or to one each. HINT: paceline run --bind core, or "
                f"{SOCKETS} where the host itself does not say\n"
            )


@cache
def _slower() -> None:
    notify(
        "paceline: ranks of this host exchange through torch's own operations over shared memory, "
        "as the kernel in C was not built. HINT: a C compiler, and install Paceline again\n"
    )


def _can() -> tuple[type[Kernel] | type[InTorch], str]:
    """What this process can use, and why it can't, or ""."""
    if os.environ.get("PACELINE_EXCHANGE") == "gloo":
        return Kernel, BY_CHOICE
    try:
        library()
    except OSError as error:
        here = platform.machine()
        why = f"the kernel in C was not built at the installation ({error})"
        return InTorch, "" if here in X86 else f"{why}, and on {here} torch alone can't do it"
    return Kernel, ""


def agreed(store: Any, key: str, rank: int, size: int, why: str, same: str) -> str:
    """The first reason of any rank not to, the same on all; also where ``same`` is not."""
    store.set(f"{key}/{rank}", f"{why}\n{same}")
    if rank == 0:
        told = [one.decode() for one in store.multi_get([f"{key}/{r}" for r in range(size)])]
        reasons = [one.partition("\n")[0] for one in told]
        others = {one.partition("\n")[2] for one in told}
        first = next((one for one in reasons if one), ELSEWHERE if len(others) > 1 else "")
        store.set(f"{key}/all", first)
    return str(store.get(f"{key}/all").decode())
