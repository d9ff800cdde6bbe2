"""What a thread does: seen from outside, while it is in the middle of it."""

import os
import pathlib
import queue
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import ranks
import torch

from paceline.record.experiments.lines.activity import StackDescriber
from paceline.record.experiments.lines.sidecar import Activity


def seen_in(function, is_wanted):
    """Return what is seen of a thread that runs ``function``, once ``is_wanted`` holds for it."""
    thread = threading.Thread(target=function, daemon=True)
    describer, found = StackDescriber(), []

    def look():
        frame = sys._current_frames().get(thread.ident)
        if frame is not None:
            found.append(describer.describe(frame))
        return bool(found) and is_wanted(found[-1])

    thread.start()
    ranks.wait_until(look)
    return found[-1]


class Waits:
    """Functions that wait until ``end`` is called."""

    def __init__(self, folder):
        self.lock = threading.Lock()
        self.lock.acquire()
        self.queue = queue.Queue()
        self.process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.fifo = folder / "fifo"
        os.mkfifo(self.fifo)
        self.is_over = False

    def acquire(self):
        self.lock.acquire()

    def get(self):
        self.queue.get()

    def wait_for_process(self):
        self.process.wait()

    def sleep(self):
        while not self.is_over:
            time.sleep(0.05)

    def open_file(self):
        with open(self.fifo) as file:
            file.read()

    def read_path(self):
        pathlib.Path(self.fifo).read_text()

    def multiply(self):
        while not self.is_over:
            torch.mm(torch.ones(700, 700), torch.ones(700, 700))

    def method(self):
        matrix = torch.ones(700, 700)
        while not self.is_over:
            matrix.matmul(matrix)

    def layer(self):
        layer = torch.nn.Linear(700, 700)
        while not self.is_over:
            layer(torch.ones(700, 700))

    def sort(self):
        array = np.random.default_rng(0).normal(size=3_000_000)
        while not self.is_over:
            np.sort(array)

    def count(self):
        total = 0
        while not self.is_over:
            total += 1

    def end(self):
        self.is_over = True
        self.lock.release()
        self.queue.put(None)
        self.process.communicate(b"\n")
        with open(os.open(self.fifo, os.O_RDWR | os.O_NONBLOCK), "w") as file:
            file.write("")


@pytest.fixture
def waits(tmp_path):
    found = Waits(tmp_path)
    yield found
    found.end()


@pytest.mark.parametrize(
    ("name", "activity", "what"),
    [
        ("acquire", Activity.WAIT, "self.lock.acquire"),
        ("get", Activity.WAIT, "queue.Queue.get"),
        ("wait_for_process", Activity.WAIT, "subprocess.Popen.wait"),
        ("sleep", Activity.WAIT, "time.sleep"),
        ("open_file", Activity.FILE, "open"),
        ("read_path", Activity.FILE, "pathlib.Path.read_text"),
        ("multiply", Activity.TORCH, "torch.mm"),
        ("method", Activity.TORCH, "Tensor.matmul"),
        ("layer", Activity.TORCH, "torch.nn.modules.linear.Linear.forward"),
        ("sort", Activity.LIBRARY, "numpy._core.fromnumeric.sort"),
        ("count", Activity.PYTHON, ""),
    ],
)
def test_activity_of_a_thread(waits, name, activity, what):
    places, found, of = seen_in(getattr(waits, name), lambda one: one[1:] == (activity, what))
    assert (found, of) == (activity, what)
    assert places[0][2] == f"Waits.{name}"


def test_chain_of_lines_goes_from_the_innermost_one_to_the_callers(waits):
    def outer():
        return middle()

    def middle():
        return [waits.acquire() for _ in range(1)]

    places, _, _ = seen_in(outer, lambda one: one[1] == Activity.WAIT)
    names = [function.rpartition(".")[2] for _, _, function in places]
    assert list(dict.fromkeys(names)) == ["acquire", "middle", "outer"]


def test_loop_that_ends_with_an_if_is_seen_in_its_body(waits):
    def peaks(row=range(1000)):
        found = 0
        while not waits.is_over:
            for i in range(1, 999):
                if row[i] > row[i - 1] and row[i] > row[i + 1]:
                    found += 1  # never

    seen = []
    seen_in(peaks, lambda one: seen.append(one[0][0][1]) or len(seen) == 200)
    first = peaks.__code__.co_firstlineno
    assert seen.count(first) < 10  # the thread may not have begun
    assert max(set(seen), key=seen.count) in (first + 3, first + 4)
