"""Ranks of benchmarks/exchange/sockets.py: bound to a hardware thread each, the first ranks on
the first socket of PACELINE_SOCKETS; all-reduces of one group that sums up by sockets and
of one that does not, in turns. Rank 0 writes what was found to FILE.

    sockets.py FILE --rounds N --sizes BYTES ...
"""

import argparse
import json
import os
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import paceline  # noqa: F401  the backend
from paceline.comm.shared_memory_group import SharedMemoryGroup
from paceline.plurals import parse_ranges

LEAST, SECONDS = 5, 0.1  # calls a measurement, and about so long

parser = argparse.ArgumentParser()
parser.add_argument("file", type=Path)
parser.add_argument("--rounds", type=int, default=7)
parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 20])
args = parser.parse_args()

rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
lists = [parse_ranges(one) for one in os.environ["PACELINE_SOCKETS"].split()]
mine = lists[rank * len(lists) // size]
os.sched_setaffinity(0, [mine[rank % len(mine)]])
dist.init_process_group("paceline")
groups: dict[str, Any] = {"at once": dist.group.WORLD, "by sockets": dist.new_group()}
for one in groups.values():
    assert isinstance(one, SharedMemoryGroup)
    assert one.kernel.sockets == len(lists)
groups["by sockets"].kernel.use_socket_reduction(True)


def slowest(seconds: float) -> float:
    told = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return float(told)


def timed(group: Any, x: torch.Tensor, times: int) -> float:
    """The median of so many, on the slowest rank; the first one is not counted."""
    each = []
    for _ in range(times + 1):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(x, group=group)
        each.append(time.perf_counter() - start)
    return slowest(median(each[1:]))


found: dict[str, list[float]] = {}
for nbytes in args.sizes:
    x = torch.zeros(nbytes // 4)
    times = max(LEAST, min(50, int(SECONDS / timed(groups["at once"], x, LEAST))))
    for turn in range(args.rounds):
        for name in sorted(groups, reverse=turn % 2 == 1):
            found.setdefault(f"{name} {nbytes}", []).append(timed(groups[name], x, times))
if rank == 0:
    args.file.write_text(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
