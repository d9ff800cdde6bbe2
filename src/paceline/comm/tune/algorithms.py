"""Which ways a group's all-reduces can go, and how long each of them takes here."""

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
from ..shared_group import SharedGroup
from .choice import AS_IT_IS, GLOO, PACELINE

SIZES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)  # bytes
TIMES = 3  # each, of which the median counts
LONG = 0.15  # s: after one that takes so long no larger ones are measured
PROBE = 1 << 20  # bytes, of which algorithms with the same steps are one


class Ways:
    """Of the group that a replica exchanges by; made on all of its ranks."""

    def __init__(self, group: Any) -> None:
        self.group = group
        inner = group.inner if isinstance(group, RecordedGroup) else group
        self._shared = inner if isinstance(inner, SharedGroup) else None
        self.default, self.all, self.sockets = AS_IT_IS, [AS_IT_IS], False
        if self._shared is not None:
            self.default = GLOO if self._shared.instead_of_gloo else PACELINE
            self.sockets = has_sockets(group)
            use_socket_reduction = [SOCKET_REDUCTION] * self.sockets
            self.all = [PACELINE, *use_socket_reduction, *_algorithms(self._shared.kernel), GLOO]

    @property
    def hosts(self) -> int:
        kernel = self._shared.kernel if self._shared is not None else None
        return len(kernel.placement.ranks_by_host) if isinstance(kernel, HierarchicalKernel) else 1

    def set(self, way: str) -> None:
        """On all ranks, while nothing is under way."""
        if self._shared is None:
            return
        self._shared.reduces_over_gloo = way == GLOO
        kernel = self._shared.kernel
        if isinstance(kernel, HierarchicalKernel) and not kernel.requested_algorithm:
            kernel.algorithm = CHEAPEST if way in (PACELINE, SOCKET_REDUCTION, GLOO) else way
        if self.sockets and isinstance(kernel, CKernel | HierarchicalKernel):
            kernel.use_socket_reduction(way == SOCKET_REDUCTION)

    def measured(self, largest: int, device: torch.device) -> dict[str, dict[int, float]]:
        """Seconds of an all-reduce by its bytes, of each way; up to ``largest`` bytes. The same on
        all ranks."""
        found = {}
        for way in self.all:
            self.set(way)
            found[way] = self._by_size(largest, device)
        self.set(self.default)
        return found

    def _by_size(self, largest: int, device: torch.device) -> dict[int, float]:
        found: dict[int, float] = {}
        for nbytes in SIZES:
            if found and (nbytes > largest or max(found.values()) > LONG):
                break
            x = torch.zeros(nbytes // 4, device=device)

            def once(x: torch.Tensor = x) -> None:
                dist.all_reduce(x, group=self.group)

            once()
            dist.barrier(group=self.group)
            seconds = median(timed(once, device) for _ in range(TIMES))
            found[nbytes] = slowest(seconds, self.group, device)
        return found


def has_sockets(group: Any) -> bool:
    """Whether ranks of any host of a SharedGroup may sum up by sockets; not where the user has said
    how. All of its ranks ask."""
    inner: Any = group.inner if isinstance(group, RecordedGroup) else group
    may = inner.kernel.sockets > 0 and not os.environ.get(ALGORITHM_VARIABLE)
    return slowest(float(may), group, torch.device("cpu")) > 0


def _algorithms(kernel: Any) -> list[str]:
    """Between hosts; of those that do the same steps the first, none where the user has set one."""
    if not isinstance(kernel, HierarchicalKernel) or kernel.requested_algorithm:
        return []
    hosts, each = len(kernel.placement.ranks_by_host), kernel.placement.hosts_per_rack
    found: dict[tuple[Step, ...], str] = {}
    for name in algorithm_names(hosts, each):
        if name != "tree":  # doubling has fewer steps
            found.setdefault(tuple(all_reduce(name, PROBE, 0, hosts, each)), name)
    return list(found.values())


def timed(what: Callable[[], None], device: torch.device) -> float:
    settled(device)
    start = time.perf_counter()
    what()
    settled(device)
    return time.perf_counter() - start


def settled(device: torch.device) -> None:
    """Until the device has done what it was told."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def slowest(seconds: float, group: Any, device: torch.device) -> float:
    """Over the ranks: the same on all of them."""
    told = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    return float(told)


def mean(values: list[float], group: Any, device: torch.device) -> list[float]:
    """Over the ranks."""
    told = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(told, group=group)
    return [float(one) / dist.get_world_size(group) for one in told]
