"""Workers of a Loader: end of a pass, forked children, errors of worker processes, memory."""

import functools
import gc
import os
import signal
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch

from paceline.data import Loader
from paceline.data.transforms import Flip, Turn

SAMPLES = np.arange(100, dtype=np.float32)


def numbers(batches):
    return [int(v) for x in batches for v in x.flatten()]


def pool_threads():
    return {t for t in threading.enumerate() if t.name.startswith("paceline-loader")}


def test_dropping_a_loader_in_mid_pass_does_not_read_from_other_files(tmp_path):
    go, started = tmp_path / "go", tmp_path / "started"

    def slow(x):
        if x >= 10:
            started.touch()
            while not go.exists():
                time.sleep(0.005)
        return x

    others = pool_threads()
    loader = Loader(SAMPLES, 10, num_workers=2, processes=True, transform=slow)
    passing = iter(loader)
    next(passing)
    ranks.wait_until(started.exists)  # both threads wait for their process
    del passing, loader
    gc.collect()
    (tmp_path / "mine").write_bytes(bytes(4096))
    files = [os.open(tmp_path / "mine", os.O_RDONLY) for _ in range(20)]
    try:
        go.touch()
        ranks.wait_until(lambda: pool_threads() <= others)
        assert [os.lseek(file, 0, os.SEEK_CUR) for file in files] == [0] * 20
    finally:
        for file in files:
            os.close(file)


def exit_code_of_child(function):
    """Return the exit code of a forked child that runs a function; None if it hangs."""
    child = os.fork()
    if child == 0:
        code = 2
        try:
            code = 0 if function() else 1
        finally:
            os._exit(code)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


@pytest.mark.parametrize("processes", [False, True])
def test_forked_child_loads_after_passes_of_the_parent(processes):
    loader = Loader(SAMPLES, 10, num_workers=2, processes=processes)
    assert numbers(loader) == list(range(100))
    passing = iter(loader)
    first = next(passing).clone()

    def child():
        rest = numbers(passing)
        return rest == list(range(10, 100)) and numbers(loader) == list(range(100))

    assert exit_code_of_child(child) == 0
    assert numbers([first, *passing]) == list(range(100))  # the parent's workers still run
    assert numbers(loader) == list(range(100))


def test_forked_child_may_drop_the_loader_of_the_parent():
    held = [Loader(SAMPLES, 10, num_workers=2, processes=True)]
    list(held[0])

    def child():
        held.clear()
        gc.collect()
        return True

    assert exit_code_of_child(child) == 0
    assert numbers(held[0]) == list(range(100))


@pytest.mark.parametrize("kind", ["shards", "stored"])
def test_locks_held_by_worker_threads_do_not_block_a_forked_child(tmp_path, kind):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=SAMPLES[:, None], chunks=(10, 1))
    if kind == "stored":
        source, name = Loader(f"{tmp_path}/x.h5:x", 10).dataset, "_open_lock"
    else:
        from paceline.data import Shards, pack

        pack(SAMPLES[:, None], tmp_path / "packed")
        source, name = Shards(tmp_path / "packed"), "_open_lock"
    loader = Loader(source, 10, num_workers=2)
    with getattr(source, name):  # as a worker thread may hold it at the moment of the fork
        code = exit_code_of_child(lambda: sorted(set(numbers(loader))) == list(range(100)))
    assert code == 0


# Errors


class TwoArgumentsError(Exception):
    """Cannot be unpickled: pickle calls the class with one argument."""

    def __init__(self, name, value):
        super().__init__(f"bad {name}: {value}")


class WrapsError(Exception):
    """Is unpickled with another message."""

    def __init__(self, name):
        super().__init__(f"bad {name}")


def test_exceptions_that_cannot_be_pickled_keep_type_and_message():
    class LocalError(Exception):
        pass

    for made in (TwoArgumentsError("level", 3), WrapsError("level"), LocalError("bad level")):

        def odd(made, x):
            if x == 30:
                raise made
            return x

        transform = functools.partial(odd, made)
        loader = Loader(SAMPLES, 10, num_workers=2, processes=True, transform=transform)
        with pytest.raises(RuntimeError, match=f"{type(made).__name__}: {made}") as error:
            list(loader)
        notes = "".join(error.value.__notes__)
        assert "raise made" in notes
        assert "in the transform of sample 30" in notes


@pytest.mark.parametrize("processes", [False, True])
def test_stop_iteration_in_a_transform_does_not_end_the_pass(processes):
    def odd(x):
        return next(iter([])) if x == 30 else x

    loader = Loader(SAMPLES, 10, num_workers=2, transform=odd, processes=processes)
    with pytest.raises(RuntimeError, match=r"StopIteration.*sample 30"):
        list(loader)


@pytest.mark.parametrize("processes", [False, True])
def test_collate_fn_gets_tensors_of_any_array_a_transform_returns(processes, recwarn):
    images = np.arange(20 * 4 * 5 * 3, dtype=np.float32).reshape(20, 4, 5, 3)

    def frozen(x):
        x = x.astype(">f4")
        x.flags.writeable = False
        return x

    for transform in (Flip(share=1.0), Flip((0, 1), share=1.0), Turn(), frozen):
        options = {"transform": transform, "num_workers": 2, "processes": processes, "seed": 1}
        found = [x for batch in Loader(images, 5, collate_fn=list, **options) for x in batch]
        stacked = torch.cat(list(Loader(images[:, :4, :4], 5, **options)))
        assert len(found) == len(stacked) == 20
        if isinstance(transform, Flip):
            axes = [axis + 1 for axis in transform.axes]
            assert np.array_equal(torch.stack(found).numpy(), np.flip(images, axes))
    assert not [one for one in recwarn if "not writable" in str(one.message)]


# Memory


def test_loader_of_an_abandoned_pass_is_freed_at_once():
    loader = Loader(SAMPLES, 10, num_workers=2)
    freed = weakref.ref(loader)
    gc.disable()
    try:
        for _ in loader:
            break
        del loader
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("processes", [False, True])
def test_memory_of_batches_that_were_kept_is_returned(processes):
    batch_bytes = 1 << 20
    samples = np.ones((40, batch_bytes), np.uint8)

    def used():
        gc.collect()
        if processes:  # the batches are in unnamed files, which the process maps
            with open("/proc/self/maps") as maps:
                return batch_bytes * sum("paceline-batch" in line for line in maps)
        return os.sysconf("SC_PAGESIZE") * int(Path("/proc/self/statm").read_text().split()[1])

    before = used()
    loader = Loader(samples, 1, num_workers=2, processes=processes)
    kept = list(loader)
    assert used() - before >= 40 * batch_bytes
    del kept
    assert used() - before <= 10 * batch_bytes
    if processes:
        for _ in loader:  # workers return memory with their next batch
            pass
        for worker in loader._workers[1]._workers:
            maps = Path(f"/proc/{worker._process.pid}/maps").read_text()
            assert maps.count("paceline-batch") <= 10
    del loader
    ranks.wait_until(lambda: used() - before < 5 * batch_bytes)
