"""Two exchanges of a norm's statistics, apart and as one, for
benchmarks/large_batch/norm_neighbours.py. Arguments: file, rounds, exchanges of a round.
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import paceline
from paceline.optim.norms import GroupExchange

ROWS = 3 * 256  # mean, squared deviations and number of values of 256 channels


def main(path: str, repeats: int, number: int) -> None:
    world = paceline.init()
    exchange = GroupExchange()
    one, both = torch.randn(ROWS), torch.randn(2 * ROWS)

    def apart() -> None:
        exchange.gather(one)
        exchange.gather(one)

    def fused() -> None:
        exchange.gather(both)

    ways = {"apart": apart, "fused": fused}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(-1, repeats):  # the first one warms up
        for name, way in list(ways.items())[:: -1 if repeat % 2 else 1]:
            dist.barrier()
            begin = time.perf_counter()
            for _ in range(number):
                way()
            if repeat >= 0:
                times[name].append((time.perf_counter() - begin) / number)
    if world.rank == 0:
        Path(path).write_text(json.dumps(times))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
