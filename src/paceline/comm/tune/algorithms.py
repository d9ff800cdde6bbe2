"""The methods that a group's all-reduces can use, and how long each takes on this machine."""

import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from ...record.hooks.collectives import RecordedGroup
from ..hosts.hierarchy import CHEAPEST, HierarchicalKernel
from ..hosts.schedules import Step, algorithm_names, all_reduce
from ..shared.c_kernel import CKernel
from ..shared.open_group import ALGORITHM_VARIABLE, SOCKET_REDUCTION
from ..shared_memory_group import SharedMemoryGroup
from .choice import GLOO, PACELINE, UNCHANGED

MEASURED_BYTES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)  # bytes
REPETITIONS = 3  # measurements of each size, of which the median counts
MAX_MEASURED_S = 0.15  # after an all-reduce that takes so long no larger ones are measured
COMPARED_BYTES = 1 << 20  # algorithms with the same steps for a vector of this size count as one


class ExchangeMethods:
    """The exchange methods of a replica's process group; created on all of its ranks.

    device_type: Type of the replica's device. Gradients of a GPU have one method.
    """

    def __init__(self, group: Any, device_type: str = "cpu") -> None:
        self.group = group
        inner: Any = group.inner if isinstance(group, RecordedGroup) else group
        is_shared = isinstance(inner, SharedMemoryGroup) and device_type == "cpu"
        self._shared: SharedMemoryGroup | None = inner if is_shared else None
        self.default, self.all, self.sockets = UNCHANGED, [UNCHANGED], False
        if self._shared is not None:
            self.default = GLOO if self._shared.instead_of_gloo else PACELINE
            self.sockets = can_reduce_by_sockets(group)
            use_socket_reduction = [SOCKET_REDUCTION] * self.sockets
            self.all = [PACELINE, *use_socket_reduction, *_algorithms(self._shared.kernel), GLOO]

    @property
    def hosts(self) -> int:
        kernel = self._shared.kernel if self._shared is not None else None
        return len(kernel.placement.ranks_by_host) if isinstance(kernel, HierarchicalKernel) else 1

    def set(self, method: str) -> None:
        """Use a method from now on; on all ranks, while no collective is in progress."""
        if self._shared is None:
            return
        self._shared.reduces_over_gloo = method == GLOO
        kernel = self._shared.kernel
        if isinstance(kernel, HierarchicalKernel) and not kernel.requested_algorithm:
            kernel.algorithm = CHEAPEST if method in (PACELINE, SOCKET_REDUCTION, GLOO) else method
        if self.sockets and isinstance(kernel, CKernel | HierarchicalKernel):
            kernel.use_socket_reduction(method == SOCKET_REDUCTION)

    def measured(self, largest: int, device: torch.device) -> dict[str, dict[int, float]]:
        """Measure an all-reduce with each method; return seconds by bytes, the same on all ranks.

        No vector is larger than ``largest`` bytes.
        """
        times = {}
        for method in self.all:
            self.set(method)
            times[method] = self._by_size(largest, device)
        self.set(self.default)
        return times

    def _by_size(self, largest: int, device: torch.device) -> dict[int, float]:
        times: dict[int, float] = {}
        for nbytes in MEASURED_BYTES:
            if times and (nbytes > largest or max(times.values()) > MAX_MEASURED_S):
                break
            x = torch.zeros(nbytes // 4, device=device)

            def all_reduce_once(x: torch.Tensor = x) -> None:
                dist.all_reduce(x, group=self.group)

            all_reduce_once()
            dist.barrier(group=self.group)
            seconds = median(time_once(all_reduce_once, device) for _ in range(REPETITIONS))
            times[nbytes] = max_over_ranks(seconds, self.group, device)
        return times


def can_reduce_by_sockets(group: Any) -> bool:
    """Return whether ranks of any host of a SharedMemoryGroup may reduce by sockets. Collective.

    False where the user has set the algorithm.
    """
    inner: Any = group.inner if isinstance(group, RecordedGroup) else group
    is_possible = inner.kernel.sockets > 0 and not os.environ.get(ALGORITHM_VARIABLE)
    return max_over_ranks(float(is_possible), group, torch.device("cpu")) > 0


def _algorithms(kernel: Any) -> list[str]:
    """Return the algorithms between hosts; of those with the same steps the first.

    None where the user has set one.
    """
    if not isinstance(kernel, HierarchicalKernel) or kernel.requested_algorithm:
        return []
    hosts, hosts_per_rack = len(kernel.placement.ranks_by_host), kernel.placement.hosts_per_rack
    by_steps: dict[tuple[Step, ...], str] = {}
    for name in algorithm_names(hosts, hosts_per_rack):
        if name != "tree":  # doubling has fewer steps
            by_steps.setdefault(
                tuple(all_reduce(name, COMPARED_BYTES, 0, hosts, hosts_per_rack)), name
            )
    return list(by_steps.values())


def time_once(function: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    function()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Wait until the device has completed its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def max_over_ranks(seconds: float, group: Any, device: torch.device) -> float:
    """Return the largest value of all ranks, the same on all of them."""
    value = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX, group=group)
    return float(value)


def mean_over_ranks(values: list[float], group: Any, device: torch.device) -> list[float]:
    """Return the mean over the ranks of each value."""
    sums = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(sums, group=group)
    return [float(total) / dist.get_world_size(group) for total in sums]
