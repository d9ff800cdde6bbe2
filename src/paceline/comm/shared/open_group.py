"""Choose the shared-memory kernel of a process group.

Either all ranks of the group use the same kernel, or none uses any.
"""

import itertools
import os
import platform
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ...cluster.topology.topology import read_sysfs_int
from ...plurals import parse_ranges
from ...record.ring.launcher_messages import notify
from . import memory
from .c_kernel import CKernel, library
from .torch_kernel import MAX_ELEMENT_BYTES, TorchKernel

X86_MACHINES = ("x86_64", "AMD64", "i686")
MAX_SLOT_BYTES = 1 << 20
SLOTS_PER_RANK = 3  # as RING in kernel.c
MAX_HOST_SLOT_BYTES = 16 << 20  # of all ranks of a host together
MIN_SLOT_BYTES = 16 << 10
# Algorithm of all-reduces between hosts, or SOCKET_REDUCTION.
ALGORITHM_VARIABLE = "PACELINE_ALGORITHM"
SOCKET_REDUCTION = "sockets"
ON_SEVERAL_HOSTS = "its ranks are on several nodes"
DIFFERENT_USERS = "the ranks of a node run as different users"
DISABLED_BY_USER = "PACELINE_EXCHANGE=gloo"
_socket_groups = itertools.count()


# Socket of this process. Ranks on one socket read each other's memory faster.

SOCKET_VARIABLE = (
    "PACELINE_SOCKETS"  # hardware threads of the sockets, separated by spaces: "0-31 32-63"
)
UNKNOWN_SOCKET = -1


def socket_of(
    cpus: Collection[int],
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/"),
) -> int:
    """Return the number of the socket that all of these hardware threads are on.

    UNKNOWN_SOCKET if they are on several sockets, or if the socket is unknown. PACELINE_SOCKETS
    lists the hardware threads of each socket (or of each part of a socket, such as a NUMA node).
    Without it, the sockets are read from sysfs.

    Raises:
        ValueError: PACELINE_SOCKETS is not a list of hardware threads.
    """
    if text := environment.get(SOCKET_VARIABLE):
        try:
            each = [set(parse_ranges(ranges)) for ranges in text.split()]
        except ValueError:
            hint = 'give a list for each socket, as in "0-31 32-63"'
            raise ValueError(
                f"{SOCKET_VARIABLE}={text} is not a list of hardware threads. HINT: {hint}"
            ) from None
        return next(
            (at for at, threads in enumerate(each) if cpus and set(cpus) <= threads), UNKNOWN_SOCKET
        )
    found = UNKNOWN_SOCKET
    for cpu in cpus:
        package = read_sysfs_int(
            root / f"sys/devices/system/cpu/cpu{cpu}/topology/physical_package_id"
        )
        if package is None or package < 0 or (found != UNKNOWN_SOCKET and found != package):
            return UNKNOWN_SOCKET  # for an unbound process, this returns after reading a few files
        found = package
    return found


def slot_bytes(size: int) -> int:
    """Return the bytes of one slot for ``size`` ranks.

    All slots together fit MAX_HOST_SLOT_BYTES, unless there are so many ranks that they would be
    shorter than MIN_SLOT_BYTES or could not hold an element for each rank.
    """
    if size == 1:
        return MIN_SLOT_BYTES  # nothing is exchanged
    return max(
        min(MAX_SLOT_BYTES, MAX_HOST_SLOT_BYTES // (SLOTS_PER_RANK * size) // 4096 * 4096),
        MIN_SLOT_BYTES,
        -(-MAX_ELEMENT_BYTES * size // 4096) * 4096,
    )


def open_kernel(
    store: Any, rank: int, size: int, timeout: float, names: Sequence[int] = ()
) -> tuple[CKernel | TorchKernel | None, str]:
    """Return the kernel of a group of ``size`` ranks that meet in ``store``.

    Return None and the reason where one of the ranks can't take part, or is on another host.
    timeout: seconds. names: numbers of the group's ranks in the job.

    Raises RuntimeError of torch's store if a rank is missing; ValueError if ranks of a node run as
    different users, if the user's description of the sockets can't be parsed, or if reduction by
    sockets is set on some ranks only.
    """
    socket = _own_socket()
    kernel_class, own_reason = _available_kernel()
    must_match = f"{os.getuid()} {memory.sharing_domain()} {kernel_class.__name__}"
    reason = agree(store, "may", rank, size, own_reason, must_match)
    if reason.startswith(DIFFERENT_USERS):
        raise ValueError(reason)
    if reason:
        return None, reason
    kernel, own_error = None, ""
    try:
        slot = slot_bytes(size)
        fd = memory.open_shared_memory(
            store, rank, size, kernel_class.required_bytes(size, slot), timeout
        )
        kernel = kernel_class(fd, rank, size, slot, names)
        if isinstance(kernel, CKernel):
            kernel.set_socket(socket, os.environ.get(ALGORITHM_VARIABLE) == SOCKET_REDUCTION)
    except (OSError, ValueError) as error:
        own_error = f"rank {rank}: {error}"
    # From here on every rank holds the lock by which the others see that it is alive.
    reason = agree(store, "has", rank, size, own_error, "")
    if reason and kernel is not None:
        kernel.close()
    elif kernel_class is TorchKernel and rank == 0:
        _warn_torch_kernel()
    if not reason and isinstance(kernel, CKernel):
        _enable_socket_reduction(kernel)
    return (None if reason else kernel), reason


@cache
def _own_socket() -> int:
    return socket_of(os.sched_getaffinity(0))


def _enable_socket_reduction(kernel: CKernel) -> None:
    """Detect sockets, once all ranks have published theirs, and use them where asked to."""
    if not kernel.detect_sockets():
        raise ValueError(
            f"{ALGORITHM_VARIABLE}={SOCKET_REDUCTION} is set on some ranks of a node only. HINT: "
            f"set it on all ranks: paceline run --env {ALGORITHM_VARIABLE}={SOCKET_REDUCTION}"
        )
    if os.environ.get(ALGORITHM_VARIABLE) == SOCKET_REDUCTION:
        kernel.use_socket_reduction(True)
        # a later group may well have all its ranks on one socket
        is_first = next(_socket_groups) == 0
        if is_first and not kernel.sockets and kernel.size > 1 and kernel.rank == 0:
            notify(
                f"paceline: {ALGORITHM_VARIABLE}={SOCKET_REDUCTION} has no effect, because the "
                "ranks of this node are not bound to several sockets, each rank to one. HINT: "
                f"paceline run --bind core, or {SOCKET_VARIABLE}='0-31 32-63' if the node does not "
                "report its sockets\n"
            )


@cache
def _warn_torch_kernel() -> None:
    notify(
        "paceline: the ranks of this node exchange through PyTorch's operations over shared "
        "memory, because the kernel in C was not built. HINT: install a C compiler, then "
        "Paceline again\n"
    )


def _available_kernel() -> tuple[type[CKernel] | type[TorchKernel], str]:
    """Return the kernel class of this process, and the reason why none is usable, or ""."""
    if os.environ.get("PACELINE_EXCHANGE") == "gloo":
        return CKernel, DISABLED_BY_USER
    try:
        library()
    except OSError as error:
        machine = platform.machine()
        reason = f"the kernel in C was not built at the installation ({error})"
        return (
            TorchKernel,
            ""
            if machine in X86_MACHINES
            else f"{reason}, and PyTorch's operations do not suffice on {machine}",
        )
    return CKernel, ""


def agree(store: Any, key: str, rank: int, size: int, reason: str, must_match: str) -> str:
    """Return the first reason of any rank not to take part, the same on all ranks, or "".

    reason: of this rank. must_match: text that has to be equal on all ranks.
    """
    store.set(f"{key}/{rank}", f"{reason}\n{must_match}")
    if rank == 0:
        answers = [
            answer.decode() for answer in store.multi_get([f"{key}/{r}" for r in range(size)])
        ]
        reasons = [answer.partition("\n")[0] for answer in answers]
        values = [answer.partition("\n")[2] for answer in answers]
        agreed_reason = next(
            (answer for answer in reasons if answer),
            _mismatch(values) if len(set(values)) > 1 else "",
        )
        store.set(f"{key}/all", agreed_reason)
    return str(store.get(f"{key}/all").decode())


def _mismatch(values: list[str]) -> str:
    """Return why ranks can't share memory. Values: user, and node with kernel, of each rank."""
    users_of_node: dict[str, dict[str, int]] = {}  # the first rank of each user
    for rank, value in enumerate(values):
        user, _, node = value.partition(" ")
        users_of_node.setdefault(node, {}).setdefault(user, rank)
    for users in users_of_node.values():
        if len(users) > 1:
            named = ", ".join(f"rank {rank} as user {user}" for user, rank in users.items())
            return f"{DIFFERENT_USERS}: {named}. HINT: start all ranks as the same user"
    return ON_SEVERAL_HOSTS
