"""Run a script of somebody's with something planted from outside, into what makes its loader's
batches and before its optimizer's step:

python wrapped.py --load-sleep 0.01 ../../examples/digits.py --epochs 30
"""

import argparse
import os
import runpy
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from planted import busy
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.data.loading import workers


def tell_reduce(count: int = 200) -> None:
    """Print the seconds of a small all-reduce with the backend of this script."""
    start = time.perf_counter()
    for _ in range(count):
        dist.all_reduce(torch.zeros(1))
    if dist.get_rank() == 0:
        print(f"reduce_s {(time.perf_counter() - start) / count:.3g}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--load-sleep", type=float, default=0.0, help="s a batch")
    parser.add_argument("--load-work", type=float, default=0.0, help="s a batch")
    parser.add_argument("--slow-rank", type=int, default=-1)
    parser.add_argument("--slow", type=float, default=0.0, help="s a step that it computes longer")
    parser.add_argument("--reduces", type=int, default=0, help="small all-reduces a step")
    parser.add_argument("--tell-reduce", action="store_true", help="print what one takes, in s")
    parser.add_argument("--script", type=float, default=0.0, help="s a step, outside of all else")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    plain = workers.make_piece

    def slowly(*task: object) -> object:
        time.sleep(args.load_sleep)
        busy(args.load_work)
        return plain(*task)

    if args.load_sleep or args.load_work:
        workers.make_piece = slowly  # without loader threads in the examples, a batch is one piece
    mine = int(os.environ["RANK"]) == args.slow_rank

    def before_step(*_: object) -> None:
        if mine:
            busy(args.slow)
        if args.tell_reduce:
            tell_reduce()
            args.tell_reduce = False
        for _ in range(args.reduces):
            dist.all_reduce(torch.zeros(1))
        time.sleep(args.script)

    register_optimizer_step_pre_hook(before_step)
    sys.argv = args.command
    sys.path.insert(0, str(Path(args.command[0]).parent))
    runpy.run_path(args.command[0], run_name="__main__")


if __name__ == "__main__":
    main()
