"""Train many runs of guarded.py in the same processes, and write what a rank sends of each step.

    python guarded_series.py OUT RANKS CASES

CASES: JSON file with a list of arguments of guarded.py. Rank R writes OUT/CASE-R.jsonl: the
messages that ``paceline run --reference`` would get from it.
"""

import json
import os
import sys
from pathlib import Path

import guarded
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from paceline.record.ring.recorder import Recorder
from paceline.record.watch.step_watch import StepWatch


def work(rank, size, out, cases, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    recorder = Recorder(rank, size, enabled=False)
    watch = StepWatch(recorder, False)
    watch.install()
    for number, words in enumerate(cases):
        path = Path(out) / f"{number}-{rank}.jsonl"
        if path.exists():
            continue
        fd = os.open(path.with_suffix(".part"), os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.environ["PACELINE_STATUS"] = f"{os.getpid()}:{fd}"  # where messages to the launcher go
        watch.__init__(recorder, False)
        recorder.step = 0

        def after_step(samples):
            recorder.samples, recorder.step_watch = samples, watch
            recorder.end_of_step()

        guarded.train(guarded.parse(words), after_step)
        watch.flush()
        os.close(fd)
        path.with_suffix(".part").rename(path)
        dist.barrier()
        if rank == 0:
            print(number, *words, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    out, size, file = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    with open(file) as text:
        listed = json.load(text)
    port = int(os.environ.get("GUARDED_PORT", 29511))
    mp.spawn(work, (size, out, listed, port), nprocs=size)
