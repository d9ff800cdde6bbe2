"""One rank of ``paceline bench comm``: a collective through each backend, interleaved, by size.

``python -m paceline.study.probe.bench_comm`` under ``paceline run`` measures gloo, shared memory
and NCCL; under mpirun, with ``--mpi``, MPI. Rank 0 sends JSON to the launcher, or prints it: a list
of cost.machine's collectives, and the seconds of a copy of each size."""

import argparse
import json
import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...cluster.rank_identity import rank_identity
from ...comm.members.exchange_objects import all_gather_objects
from ...comm.tune.algorithms import can_reduce_by_sockets
from ...cost.machine.dataclass_tree import to_tree
from ...cost.machine.machine_file import SECONDS, AtSize, Collective, Figure
from ...record.hooks.collectives import RecordedGroup
from ...record.ring.launcher_messages import send_to_launcher
from ...record.ring.recorder import Recorder
from ...world.process_group import join_process_group, leave_process_group
from .measure.links import (
    ITEM_BYTES,
    LATENCY,
    LEAST,
    MOST,
    Members,
    backend_of,
    elements,
    mean_time,
    prepared,
)

JOIN_SECONDS = 300.0
EACH_SECONDS = 0.4  # approximate time for one size of one backend
# Maximum number of consecutive calls whose mean is one repetition; nccl-tests also uses 20.
ROW = 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="paceline.study.probe.bench_comm", description=__doc__)
    parser.add_argument("--operation", default="all-reduce")
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes")
    parser.add_argument("--mpi", action="store_true", help="only MPI, through mpi4py")
    given = parser.parse_args()
    if given.mpi:
        print(json.dumps(_with_mpi(given.operation, given.sizes)), flush=True)
        return
    who = rank_identity(dict(os.environ))
    join_process_group(who, Recorder(who.rank, who.size, enabled=False), JOIN_SECONDS)
    found = _measured(_backends(), given.operation, given.sizes)
    leave_process_group()
    if who.rank == 0 and not send_to_launcher(summary=json.dumps(found)):
        print(json.dumps(found))


def _backends() -> dict[str, Members]:
    """Return the backends by name. gloo is first, because others are reported relative to it."""
    cpu = torch.device("cpu")
    size, default = dist.get_world_size(), dist.group.WORLD
    found = {"gloo": Members(dist.new_group(backend="gloo"), size, cpu)}
    if (name := backend_of(default)) not in found:
        found[name] = Members(default, size, cpu)
        if can_reduce_by_sockets(default):
            found[f"{name} by sockets"] = Members(_by_socket(), size, cpu)
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    has_gpu = dist.is_nccl_available() and local_rank < torch.cuda.device_count()
    if min(found["gloo"].share([float(has_gpu)])) == 1.0:  # a GPU for each rank
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        found["nccl"] = Members(dist.new_group(backend="nccl"), size, device)
    return found


def _by_socket() -> Any:
    """Create another group, whose all-reduce first reduces within each CPU socket."""
    group = dist.new_group()
    inner: Any = group.inner if isinstance(group, RecordedGroup) else group
    inner.kernel.use_socket_reduction(True)
    return group


def _measured(backends: dict[str, Members], operation: str, sizes: list[int]) -> dict[str, Any]:
    """Measure every size. Each repetition times all backends and a memory copy of that size."""
    latency: dict[str, Figure] = {}
    table: dict[str, list[AtSize]] = {name: [] for name in backends}
    copies = []
    for size in (LATENCY, *sizes):
        calls, exact = {}, size
        for name, members in backends.items():
            exact, calls[name] = prepared(members, operation, size)
        one, other = torch.zeros(exact, dtype=torch.uint8), torch.zeros(exact, dtype=torch.uint8)
        calls["copy"] = partial(one.copy_, other)
        first = next(iter(backends.values()))
        times = _in_turns(calls, first)
        for name in backends:
            figure = Figure.of(times[name], SECONDS)
            if size == LATENCY:
                latency[name] = figure
            else:
                table[name].append(AtSize(exact, figure))
        if size != LATENCY:
            copies.append(AtSize(exact, Figure.of(times["copy"], SECONDS)))
    hosts = _hosts()
    group = "in host" if len(hosts) == 1 else "all"
    found = [
        to_tree(
            Collective(
                *(group, operation, members.size, hosts, name, members.device.type),
                *(latency[name], tuple(table[name])),
            )
        )
        for name, members in backends.items()
    ]
    return {"collectives": found, "copies": to_tree(copies)}


def _in_turns(calls: dict[str, Callable[[], Any]], members: Members) -> dict[str, list[float]]:
    """Interleave the calls; return seconds of each repetition, as means over the ranks."""
    for call in calls.values():
        call()
    once = members.share([mean_time(call) for call in calls.values()])
    row, count = _repetitions(sum(once), len(calls))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(count):
        for name, call in calls.items():
            call()  # untimed, so that the caches' contents left by other calls have no effect
            dist.barrier()
            times[name].append(mean_time(call, row))
    return {name: members.share(each) for name, each in times.items()}


def _repetitions(once_s: float, calls: int) -> tuple[int, int]:
    """Return the number of calls whose mean is one repetition, and of repetitions."""
    once_s = max(once_s, 1e-7)
    row = max(1, min(ROW, int(EACH_SECONDS / LEAST / once_s)))
    return row, min(MOST, max(LEAST, int(EACH_SECONDS * calls / row / once_s)))


def _hosts() -> tuple[str, ...]:
    return tuple(dict.fromkeys(all_gather_objects(socket.gethostname(), str)))


def _with_mpi(operation: str, sizes: list[int]) -> dict[str, Any]:
    """Measure through mpi4py with NumPy arrays. Only rank 0 returns results."""
    import numpy as np
    from mpi4py import MPI  # type: ignore[import-not-found,unused-ignore]

    world = MPI.COMM_WORLD
    count = world.Get_size()

    def prepared_with_mpi(size: int) -> tuple[int, Callable[[], Any]]:
        items, each = elements(operation, size, count)
        whole, other = np.zeros(items, np.float32), np.zeros(items, np.float32)
        part = np.zeros(each, np.float32)
        calls: dict[str, Callable[[], Any]] = {
            "all-reduce": lambda: world.Allreduce(MPI.IN_PLACE, whole),
            "all-gather": lambda: world.Allgather(part, whole),
            "reduce-scatter": lambda: world.Reduce_scatter_block(whole, part),
            "all-to-all": lambda: world.Alltoall(whole, other),
        }
        return items * ITEM_BYTES, calls[operation]

    latency, table = None, []
    for size in (LATENCY, *sizes):
        exact, call = prepared_with_mpi(size)
        for _ in range(2):
            call()
        row, repetitions = _repetitions(world.allreduce(mean_time(call)) / count, 1)
        times = []
        for _ in range(repetitions):
            world.Barrier()
            times.append(world.allreduce(mean_time(call, row)) / count)
        figure = Figure.of(times, SECONDS)
        if size == LATENCY:
            latency = figure
        else:
            table.append(AtSize(exact, figure))
    hosts = tuple(dict.fromkeys(world.allgather(MPI.Get_processor_name())))
    if world.Get_rank():
        return {}
    group = "in host" if len(hosts) == 1 else "all"
    found = Collective(group, operation, count, hosts, "mpi", "cpu", latency, tuple(table))
    return {"collectives": [to_tree(found)], "copies": []}


if __name__ == "__main__":
    main()
