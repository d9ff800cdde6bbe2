"""Ranks that are repeatedly killed or stopped in a collective: the other ranks name them.

The ranks are processes without torch, because these start fast.
"""

import json
import os
import random
import select
import signal
import statistics
import time
from pathlib import Path

import pytest

from paceline.comm.shared.c_kernel import CKernel
from paceline.comm.shared.collective_calls import ExchangeError

SEED = int(os.environ["PACELINE_SEED"])
SIZE, SLOT = 3, 64 << 10
SILENT_SECONDS = 0.5


def exchange(fd, rank, seed, ready, told):
    """Run random collectives on a rank until an error reports that another rank is gone."""
    import ctypes

    kernel = CKernel(fd, rank, SIZE, SLOT)
    os.write(ready, b".")
    draw = random.Random(seed)
    room = (ctypes.c_char * (1 << 20))()
    here = ctypes.addressof(room)
    while len(os.read(told[0], 1)) < 1:
        pass
    try:
        while True:
            nbytes = draw.choice([8, 4096, 40_000, 200_000, 300_000]) // 24 * 24
            what = draw.randrange(4)
            if what == 0:
                kernel.all_reduce(here, nbytes, 0, 0, SILENT_SECONDS)
            elif what == 1:
                kernel.broadcast(here, nbytes, draw.randrange(SIZE), SILENT_SECONDS)
            elif what == 2:
                places = [here + at * (nbytes // SIZE) for at in range(SIZE)]
                kernel.all_gather(places[rank], places, nbytes // SIZE, SILENT_SECONDS)
            else:
                kernel.barrier(SILENT_SECONDS)
    except ExchangeError as error:
        line = json.dumps({"rank": rank, "at": time.monotonic(), "said": str(error)})
        os.write(told[1], line.encode() + b"\n")


def once(seed):
    """Start a group of ranks and kill or stop one of them.

    Return the victim, the signal, and for each other rank the error and the seconds after which it
    was raised.
    """
    draw = random.Random(seed)
    fd = os.memfd_create("soak")
    os.posix_fallocate(fd, 0, CKernel.required_bytes(SIZE, SLOT))
    ready, go, said = os.pipe(), os.pipe(), os.pipe()
    children = []
    for rank in range(SIZE):
        child = os.fork()
        if child == 0:
            try:
                exchange(fd, rank, seed, ready[1], (go[0], said[1]))
            finally:
                os._exit(0)
        children.append(child)
    try:
        held = b""
        while len(held) < SIZE:  # until every rank holds the lock on its byte
            held += os.read(ready[0], SIZE)
        os.write(go[1], b"." * SIZE)
        time.sleep(draw.uniform(0.005, 0.05))  # in a random collective
        victim, how = draw.randrange(SIZE), draw.choice([signal.SIGKILL, signal.SIGSTOP])
        os.kill(children[victim], how)
        begun, text = time.monotonic(), b""
        while text.count(b"\n") < SIZE - 1:
            (readable, _, _) = select.select([said[0]], [], [], 20)
            assert readable, f"seed {seed}: only {text!r} after 20 s"
            text += os.read(said[0], 4096)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for one in (fd, *ready, *go, *said):
            os.close(one)
    lines = [json.loads(line) for line in text.splitlines()]
    return victim, how, [(line["said"], line["at"] - begun) for line in lines]


@pytest.mark.soak
@pytest.mark.alone
def test_ranks_killed_or_stopped_in_collective_are_reported():
    before, times = set(Path("/dev/shm").iterdir()), []
    for seed in range(SEED, SEED + 100):
        victim, how, said = once(seed)
        gone = f"can't continue: rank {victim} has died"
        silent = f": rank {victim} did not join within {SILENT_SECONDS:g} s"
        for text, after in said:
            assert (gone if how == signal.SIGKILL else silent) in text, (seed, text)
            if how == signal.SIGKILL:
                times.append(after)
    assert statistics.median(times) < 0.2
    assert set(Path("/dev/shm").iterdir()) <= before
