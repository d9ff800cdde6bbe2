"""Ranks as threads of the test's own process: a small training takes 0.1 s instead of seconds.

``run(train, 4)`` calls ``train(world)`` on four ranks, and returns what each of them returns. One
rank runs at a time, until it waits for others in a collective or for a message. Then the next one
goes on, with its own states of the global generators: all that a rank draws is as in a process.

The groups are PyTorch's (``multi_threaded_pg``), and messages between two ranks are added here. So
DDP, FSDP2, DTensor, pipelines and all of ``world`` that uses ``torch.distributed`` can be tested,
but not what needs a process: records and hooks of the recorder (checks of gradients before their
exchange, comparison of replicas), checkpoints, launchers, Paceline's own groups. Sums are in the
order of ranks, where gloo's rings have another one: compare to rounding. Each layout also has a
test on processes (``ranks.run``).
"""

import contextlib
import os
import random
import sys
import threading
import time
from collections import defaultdict, deque
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _set_thread_isolation_mode
from torch.distributed import distributed_c10d as c10d
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from paceline.world import World

TIMEOUT_S = 60.0
GRACE_S = 5.0  # in which no rank runs, after one has failed; a loaded machine may wake one late


class Turn:
    """Lets one rank run at a time, each with its own states of the global generators."""

    def __init__(self):
        self.lock = threading.Lock()
        self.of_thread = threading.local()
        self.turns = 0  # taken until now

    @contextlib.contextmanager
    def taken(self):
        """Context of a rank that runs."""
        self.lock.acquire()
        self.turns += 1
        self.of_thread.is_running = True
        try:
            yield
        finally:
            self.of_thread.is_running = False
            self.lock.release()

    @contextlib.contextmanager
    def passed_on(self):
        """Context in which this rank waits, and others run."""
        if not getattr(self.of_thread, "is_running", False):
            yield
            return
        states = torch.get_rng_state(), random.getstate(), np.random.get_state()
        self.lock.release()
        try:
            yield
        finally:
            self.lock.acquire()
            self.turns += 1
            torch.set_rng_state(states[0])
            random.setstate(states[1])
            np.random.set_state(states[2])

    def passing(self, function):
        """Return a function that waits, and lets other ranks run meanwhile."""

        def waiting(*args, **options):
            with self.passed_on():
                return function(*args, **options)

        return waiting


class Mail:
    """Messages between two ranks of a group."""

    def __init__(self, turn):
        self.turn = turn
        self.arrived = threading.Condition()
        self.letters = defaultdict(deque)

    def send(self, group, tensors, to, tag):
        with self.arrived:
            self.letters[group.pg_name, group.rank(), to, tag].append([t.clone() for t in tensors])
            self.arrived.notify_all()
        return threaded.ret_work(tensors)

    def receive(self, group, tensors, source, tag):
        return Received(self, self.letters[group.pg_name, source, group.rank(), tag], tensors)


class Received:
    """A message that is to come."""

    def __init__(self, mail, letters, tensors):
        self.mail, self.letters, self.tensors = mail, letters, tensors
        self.is_done = False

    def wait(self, *_: Any):
        if self.is_done:
            return True
        with self.mail.turn.passed_on(), self.mail.arrived:
            ended = threaded.ProcessLocalGroup._terminate
            came = self.mail.arrived.wait_for(lambda: self.letters or ended.is_set(), TIMEOUT_S)
            if ended.is_set():
                sys.exit("another rank has failed")
            assert came, "no message has come"
            letter = self.letters.popleft()
        for tensor, value in zip(self.tensors, letter, strict=True):
            tensor.detach().copy_(value)
        self.is_done = True
        return True

    def is_completed(self):
        return self.is_done


def run(function, ranks=2, *, seed=0, device="cpu", outcomes=False, **options):
    """Call ``function(world)`` on ranks, and return the results by rank.

    Args:
        seed, options: Those of ``paceline.init``.
        device: Of all ranks: they share a GPU.
        outcomes: Return the exception of a rank in place of its result; else the first is raised.
            Ranks that waited for one that has failed have a SystemExit.
    """
    turn = Turn()
    mail = Mail(turn)
    store = dist.HashStore()
    found: list[Any] = [None] * ranks

    def main(rank):
        try:
            with turn.taken():
                dist.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
                # else the backwards of all ranks wait for each other in the GPU's one thread
                torch.autograd.set_multithreading_enabled(device == "cpu")
                options_of = {"seed": seed, "device": device, **options}
                found[rank] = function(_world(rank, ranks, options_of))
        except BaseException as error:  # also of pytest.fail, and SystemExit
            found[rank] = error
        finally:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()
            # PyTorch destroys a thread's cache of DTensor without the GIL, which ends the process
            getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", lambda: None)()

    group = threaded.ProcessLocalGroup
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    with (
        _threaded_groups(),
        mock.patch.object(threaded.Collective, "join", turn.passing(threaded.Collective.join)),
        mock.patch.object(
            threaded, "_store_based_barrier", turn.passing(threaded._store_based_barrier)
        ),
        mock.patch.object(c10d, "_store_based_barrier", turn.passing(c10d._store_based_barrier)),
        mock.patch.object(threading.Thread, "join", turn.passing(threading.Thread.join)),
        mock.patch.object(group, "send", lambda *args: mail.send(*args), create=True),
        mock.patch.object(group, "recv", lambda *args: mail.receive(*args), create=True),
    ):
        threads = [threading.Thread(target=main, args=(r,), daemon=True) for r in range(ranks)]
        for thread in threads:
            thread.start()
        stuck = _join(threads, turn, found)
        if stuck:
            group.exception_handle(None)
            with mail.arrived:
                mail.arrived.notify_all()
            for thread in threads:
                thread.join(TIMEOUT_S)
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])
    errors = [one for one in found if isinstance(one, BaseException)]
    if errors and not outcomes:
        raise next((e for e in errors if not isinstance(e, SystemExit)), errors[0])
    assert errors or not stuck, f"ranks {stuck} wait in collectives that others do not call"
    return found


def _join(threads, turn, found):
    """Wait until all ranks have ended, or none can go on; return those that wait."""
    since, turns = time.monotonic(), -1
    while stuck := [rank for rank, thread in enumerate(threads) if thread.is_alive()]:
        threads[stuck[0]].join(0.02)
        if turn.turns != turns or turn.lock.locked():  # a rank runs
            since, turns = time.monotonic(), turn.turns
        has_failed = any(isinstance(one, BaseException) for one in found)
        if time.monotonic() - since > (GRACE_S if has_failed else TIMEOUT_S):
            return stuck
    return []


def alone(function, *, seed=0, **options):
    """Call ``function(world)`` on one rank, and return the result."""
    return run(function, 1, seed=seed, **options)[0]


def _world(rank, ranks, options):
    own = options["device"] == "cpu"  # ranks that share a GPU all have its number
    places = {"LOCAL_RANK": rank if own else 0, "LOCAL_WORLD_SIZE": ranks if own else 1}
    variables = {"RANK": rank, "WORLD_SIZE": ranks, **places}
    with mock.patch.dict(os.environ, {name: str(n) for name, n in variables.items()}):
        given = {"precision": "fp32", "nonfinite": "raise", "replicas": "raise", **options}
        return World(record=False, progress=False, timeout=TIMEOUT_S, **given)


@contextlib.contextmanager
def _threaded_groups():
    _set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    threaded.ProcessLocalGroup.reset()
    try:
        yield
    finally:
        threaded._uninstall_threaded_pg()
        threaded.ProcessLocalGroup.reset()
        _set_thread_isolation_mode(False)
