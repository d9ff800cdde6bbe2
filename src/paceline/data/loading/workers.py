"""Who makes a loader's batches: threads, or processes in their place for transforms that hold the
interpreter's lock. These write into memory that is shared, so no batch moves between processes."""

import os
import signal
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from ..format.shard_format import DataError
from ..shards import RaggedError
from .batch import BatchPiece, Key, SamplePipeline, make_piece
from .buffer_pool import map_file

Array = np.ndarray[Any, Any]
LOOK_S = 2.0
_lines: weakref.WeakSet[Connection] = weakref.WeakSet()  # our ends, of all loaders


class ThreadWorkers:
    """``count`` of them."""

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, "paceline-loader")

    def submit(self, *task: Any) -> "Future[BatchPiece]":
        return self._pool.submit(make_piece, *task)

    def call(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        return self._pool.submit(function, *args)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class InlineWorker:
    """In the place of threads."""

    def submit(self, *task: Any) -> "Future[BatchPiece]":
        return self.call(make_piece, *task)

    def call(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args))
        except Exception as error:
            done.set_exception(error)
        return done


class ProcessWorkers:
    """``count`` of them, forked as a DataLoader's are; ``submit`` as a pool of threads has it.

    A process that dies ends the loop with an error that says of what.
    """

    def __init__(self, pipeline: SamplePipeline, count: int) -> None:
        self._free: SimpleQueue[_Worker] = SimpleQueue()
        self._workers: list[_Worker] = []
        for _ in range(count):  # before there are threads
            self._workers.append(_Worker(pipeline))
            self._free.put(self._workers[-1])
        self._threads = ThreadPoolExecutor(count, "paceline-loader")

    def submit(
        self, pipeline: SamplePipeline, keys: list[Key], arrays: list[Array], first: int
    ) -> "Future[BatchPiece]":
        return self._threads.submit(self._asked, pipeline, keys, arrays, first)

    def call(self, function: Any, *args: Any) -> "Future[Any]":
        """A function of this process, beside what it does."""
        return self._threads.submit(function, *args)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.ours.close()  # which ends it

    def _asked(self, *task: Any) -> BatchPiece:
        worker = self._free.get()
        try:
            return worker.ask(*task)
        finally:
            self._free.put(worker)


class _Worker:
    """One process, and our end of the line to it."""

    def __init__(self, pipeline: SamplePipeline) -> None:
        context = get_context("fork")
        self.ours, theirs = context.Pipe()
        _lines.add(self.ours)
        words = (pipeline, theirs, os.getpid())
        self._process = context.Process(target=_serve, args=words, daemon=True)
        self._process.start()
        theirs.close()
        self._known: set[int] = set()

    def ask(
        self, pipeline: SamplePipeline, keys: list[Key], arrays: list[Array], first: int
    ) -> BatchPiece:
        handles = [pipeline.buffer_pool.handle(array) for array in arrays]
        fields = [
            (number, number not in self._known, array.shape, array.dtype.str)
            for (number, _), array in zip(handles, arrays, strict=True)
        ]
        try:
            self.ours.send((keys, first, pipeline.array, fields))
            for (number, file), (_, fresh, *_) in zip(handles, fields, strict=True):
                if fresh:
                    send_handle(self.ours, file, self._process.pid)
                    self._known.add(number)
            answer: BatchPiece | Exception = self.ours.recv()
        except (EOFError, OSError):
            self._process.join(5)
            raise RuntimeError(
                f"Loader: one of its processes has {_death(self._process.exitcode)}. HINT: fewer "
                "of them (num_workers), a smaller batch, or threads (processes=False)"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _death(code: int | None) -> str:
    if code is None:
        return "closed its end of the line"
    if code < 0:
        memory = " (the kernel's, when memory is short)" if code == -signal.SIGKILL else ""
        return f"died of {signal.Signals(-code).name}{memory}"
    return f"ended with exit code {code}"


def _serve(pipeline: SamplePipeline, line: Connection, parent: int) -> None:
    """What such a process does, until nobody is at the other end. Children of other loaders may
    hold that end open as well: so it looks after its parent now and then."""
    for other in list(_lines):
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started it ends it
    torch.set_num_threads(1)
    pipeline.seeds_all = True
    memories: dict[int, Array] = {}
    while True:
        try:
            while not line.poll(LOOK_S):
                if os.getppid() != parent:
                    os._exit(0)
            keys, first, pipeline.array, fields = line.recv()
            arrays = [_array(line, memories, *field) for field in fields]
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer: Any = make_piece(pipeline, keys, arrays, first)
        except (DataError, RaggedError) as error:
            answer = error
        except Exception as error:
            error.add_note(f"in a process of the loader:\n{traceback.format_exc()}")
            answer = error
        try:
            line.send(answer)
        except (EOFError, OSError):
            os._exit(0)
        except Exception as error:  # what can't be pickled
            line.send(RuntimeError(f"{type(answer).__name__}: {answer} ({error})"))


def _array(
    line: Connection,
    memories: dict[int, Array],
    number: int,
    fresh: bool,
    shape: tuple[int, ...],
    kind: str,
) -> Array:
    """The memory of a batch, mapped once."""
    if fresh:
        file = recv_handle(line)
        memories[number] = map_file(file, os.fstat(file).st_size)
        os.close(file)
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize
    array: Array = memories[number][:size].view(kind).reshape(shape)
    return array
