"""Latency and bandwidth of collectives within a group of ranks, by size.

The time of a repetition is the mean over the group's ranks, as in nccl-tests and the OSU
benchmarks: ranks call the collective repeatedly without a pause, and a rank that arrives early
waits inside its call. All ranks of a group choose the same number of repetitions and the
same largest size, because they decide from shared times.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ....comm.group_device import all_gather_flat, reduce_scatter_flat
from ....comm.shared_memory_group import SharedMemoryGroup
from ....cost.machine.machine_file import SECONDS, AtSize, Collective, Figure
from ....record.hooks.collectives import RecordedGroup

LATENCY = 8  # size in bytes of the vector whose time counts as the latency
SIZES = tuple(1 << power for power in range(10, 27, 2))  # 1 KiB to 64 MiB
QUICK = tuple(1 << power for power in range(12, 25, 4))  # 4 KiB to 16 MiB
OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
LEAST, MOST = 5, 200  # minimum and maximum number of repetitions


@dataclass(frozen=True)
class Members:
    """A group of ranks that measures together.

    Attributes:
        group: Process group of torch.distributed.
        size: Number of ranks in the group.
        device: Device of the vectors.
    """

    group: Any
    size: int
    device: torch.device

    def share(self, values: list[float]) -> list[float]:
        """Return the mean of each value over all members; must be called by every member."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, group=self.group)
        found: list[float] = (tensor / self.size).tolist()
        return found


def collectives(
    members: Members, name: str, hosts: tuple[str, ...], seconds: float, sizes: tuple[int, ...]
) -> list[Collective]:
    """Measure every collective within the group.

    Args:
        name: Name of the kind of group; see ``Collective`` in cost.machine.
        hosts: Names of the group's hosts.
        seconds: Approximate time for each collective.
        sizes: Vector sizes in bytes.
    """
    cuda = members.device.type == "cuda"
    found = []
    for operation in OPERATIONS:
        try:
            latency, table = _measured(members, operation, seconds, sizes)
        except RuntimeError as error:
            if "support" not in str(error):
                raise
            continue  # this version of the backend lacks the collective, on all ranks alike
        found.append(
            Collective(
                name,
                operation,
                members.size,
                hosts,
                "nccl" if cuda else backend_of(members.group),
                members.device.type,
                latency,
                tuple(table),
            )
        )
    return found


def backend_of(group: Any) -> str:
    """Return the name of the backend that transfers CPU tensors in a group."""
    inner = group.inner if isinstance(group, RecordedGroup) else group
    return "paceline" if isinstance(inner, SharedMemoryGroup) else "gloo"


def _measured(
    members: Members, operation: str, seconds: float, sizes: tuple[int, ...]
) -> tuple[Figure, list[AtSize]]:
    _, times = _timed(members, operation, LATENCY, seconds / 8)
    latency, left = Figure.of(times, SECONDS), seconds - sum(times)
    table: list[AtSize] = []
    for i, size in enumerate(sizes):
        if _expected(latency, table, size) * (LEAST + 2) > 2 * seconds:
            break
        exact, times = _timed(members, operation, size, left / (len(sizes) - i))
        # With many ranks, the minimum of one element per rank may give two sizes the same bytes.
        if not table or table[-1].bytes < exact:
            table.append(AtSize(exact, Figure.of(times, SECONDS)))
        left -= sum(times)
    return latency, table


def _expected(latency: Figure, table: list[AtSize], size: int) -> float:
    """Return the expected seconds for a larger vector, extrapolated linearly from the last two."""
    if not table:
        return 0.0
    points = [(LATENCY, latency.low), *((one.bytes, one.seconds.low) for one in table)]
    (less, before), (bytes_, seconds) = points[-2:]
    return seconds + (size - bytes_) * max(0.0, seconds - before) / (bytes_ - less)


def _timed(members: Members, operation: str, size: int, seconds: float) -> tuple[int, list[float]]:
    """Return the vector's bytes and the seconds of each repetition, the same on all members."""
    exact, call = prepared(members, operation, size)
    call()
    once = min(members.share([_once(call), _once(call)]))
    count = min(MOST, max(LEAST, int(seconds / max(once, 1e-7))))
    return exact, members.share([_once(call) for _ in range(count)])


def _once(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def prepared(members: Members, operation: str, size: int) -> tuple[int, Callable[[], Any]]:
    """Return the number of bytes of the vector, and a function that calls the collective once.

    The size of a vector is defined in docs/reference/measures.md; for all-gather it is that of all
    parts together. It may differ slightly from ``size`` if that is not divisible by the ranks.
    """
    group, item = members.group, torch.float32.itemsize
    each = max(1, size // item // members.size)
    count = max(1, size // item) if operation == "all-reduce" else each * members.size
    whole = torch.zeros(count, device=members.device)
    other = torch.zeros(count, device=members.device)
    part = torch.zeros(each, device=members.device)
    calls: dict[str, Callable[[], Any]] = {
        "all-reduce": lambda: dist.all_reduce(whole, group=group),
        "all-gather": lambda: all_gather_flat(whole, part, group=group),
        "reduce-scatter": lambda: reduce_scatter_flat(part, whole, group=group),
        "all-to-all": lambda: dist.all_to_all_single(other, whole, group=group),
    }
    call = calls[operation]
    if members.device.type == "cpu":
        return count * item, call

    def finished() -> None:
        call()
        torch.cuda.synchronize(members.device)

    return count * item, finished
