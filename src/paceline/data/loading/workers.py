"""Workers of a loader: threads, or processes for transforms that hold the interpreter's lock.

Processes write into shared memory, so no batch is copied between processes.
"""

import os
import pickle
import signal
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from queue import SimpleQueue
from socket import SHUT_RDWR, socket
from typing import Any

import numpy as np
import torch

from ..format.shard_format import DataError
from ..shards import RaggedError
from .batch import BatchPiece, Key, SamplePipeline, make_piece
from .buffer_pool import map_file

Array = np.ndarray[Any, Any]
PARENT_CHECK_INTERVAL_S = 2.0
THREAD_NAME = "paceline-loader"
# The parent's end of the pipe to each worker process, of all loaders.
_parent_connections: weakref.WeakSet[Connection] = weakref.WeakSet()


class ThreadWorkers:
    """A pool of ``count`` worker threads."""

    def __init__(self, count: int) -> None:
        self.process = os.getpid()  # threads don't exist in a forked child
        self._pool = ThreadPoolExecutor(count, THREAD_NAME)

    def submit(self, *task: Any) -> "Future[BatchPiece]":
        return self._pool.submit(make_piece, *task)

    def call(self, function: Callable[..., Any], *args: Any) -> "Future[Any]":
        return self._pool.submit(function, *args)

    def close(self) -> None:
        if os.getpid() == self.process:
            self._pool.shutdown(wait=False, cancel_futures=True)


class InlineWorker:
    """Run each task immediately in the calling thread (``num_workers=0``)."""

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
    """A pool of ``count`` forked worker processes, with the interface of ``ThreadWorkers``.

    When a worker process dies, the batch raises RuntimeError with its signal or exit code.
    """

    def __init__(self, pipeline: SamplePipeline, count: int) -> None:
        self.process = os.getpid()
        self._free: SimpleQueue[_Worker] = SimpleQueue()
        self._workers: list[_Worker] = []
        for _ in range(count):  # fork before any thread is started
            self._workers.append(_Worker(pipeline))
            self._free.put(self._workers[-1])
        self._threads = ThreadPoolExecutor(count, THREAD_NAME)

    def submit(
        self, pipeline: SamplePipeline, keys: list[Key], arrays: list[Array], first: int
    ) -> "Future[BatchPiece]":
        return self._threads.submit(self._run_in_process, pipeline, keys, arrays, first)

    def call(self, function: Any, *args: Any) -> "Future[Any]":
        """Run a function in a thread of this process."""
        return self._threads.submit(function, *args)

    def close(self) -> None:
        """End the worker processes, then the threads that wait for them, then close the pipes.

        A pipe must not be closed while a thread reads from it: the thread would read from the file
        that gets the same number next. A forked child leaves the workers to its parent.
        """
        if os.getpid() != self.process:
            return
        for worker in self._workers:
            worker.hang_up()
        threads = self._threads
        # The garbage collector may run this in one of the threads. That thread keeps its pipe.
        own = threading.current_thread().name.startswith(THREAD_NAME)
        threads.shutdown(wait=not own, cancel_futures=True)
        if not own:
            for worker in self._workers:
                worker.connection.close()

    def _run_in_process(self, *task: Any) -> BatchPiece:
        worker = self._free.get()
        try:
            return worker.ask(*task)
        finally:
            self._free.put(worker)


class _Worker:
    """One worker process, and the parent's end of the pipe to it."""

    def __init__(self, pipeline: SamplePipeline) -> None:
        context = get_context("fork")
        self.connection, child_connection = context.Pipe()
        _parent_connections.add(self.connection)
        args = (pipeline, child_connection, os.getpid())
        self._process = context.Process(target=_serve, args=args, daemon=True)
        self._process.start()
        child_connection.close()
        self._known: set[int] = set()  # numbers of the buffers that the process has mapped
        self._hung_up = False

    def hang_up(self) -> None:
        """End both directions of the pipe: the process exits, and ``ask`` raises RuntimeError."""
        self._hung_up = True
        with (
            suppress(OSError),  # the process is dead
            socket(fileno=os.dup(self.connection.fileno())) as end,
        ):
            end.shutdown(SHUT_RDWR)

    def ask(
        self, pipeline: SamplePipeline, keys: list[Key], arrays: list[Array], first: int
    ) -> BatchPiece:
        handles = [pipeline.buffer_pool.handle(array) for array in arrays]
        fields = [
            (number, number not in self._known, array.shape, array.dtype.str)
            for (number, _), array in zip(handles, arrays, strict=True)
        ]
        gone = self._known - pipeline.buffer_pool.numbers
        self._known -= gone
        try:
            self.connection.send((keys, first, pipeline.array, fields, gone))
            for (number, file), (_, fresh, *_) in zip(handles, fields, strict=True):
                if fresh:
                    send_handle(self.connection, file, self._process.pid)
                    self._known.add(number)
            answer: BatchPiece | Exception = self.connection.recv()
        except (EOFError, OSError):
            if self._hung_up:
                raise RuntimeError("Loader: its worker processes have been ended") from None
            self._process.join(5)
            raise RuntimeError(
                f"Loader: a worker process {_death(self._process.exitcode)}. HINT: use fewer "
                "workers (num_workers), a smaller batch, or threads (processes=False)"
            ) from None
        if isinstance(answer, Exception):
            raise answer
        return answer


def _death(code: int | None) -> str:
    if code is None:
        return "closed its pipe"
    if code < 0:
        memory = " (the kernel sends it when memory is short)" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{memory}"
    return f"ended with exit code {code}"


def _serve(pipeline: SamplePipeline, line: Connection, parent: int) -> None:
    """Serve requests in a worker process until the parent closes its end of the pipe.

    Worker processes of other loaders may hold that end open as well, so the process also checks
    regularly that its parent is still alive.
    """
    for other in list(_parent_connections):
        other.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the process
    torch.set_num_threads(1)
    pipeline.seeds_all = True
    memories: dict[int, Array] = {}
    while True:
        try:
            while not line.poll(PARENT_CHECK_INTERVAL_S):
                if os.getppid() != parent:
                    os._exit(0)
            keys, first, pipeline.array, fields, gone = line.recv()
            for number in gone:  # the parent has returned the memory to the system
                memories.pop(number, None)
            arrays = [_array(line, memories, *field) for field in fields]
        except (EOFError, OSError):
            os._exit(0)
        try:
            answer: Any = make_piece(pipeline, keys, arrays, first)
        except (DataError, RaggedError) as error:
            answer = error
        except Exception as error:
            error.add_note(f"in a worker process of the Loader:\n{traceback.format_exc()}")
            answer = _picklable(error)
        del arrays
        try:
            line.send(answer)
        except (EOFError, OSError):
            os._exit(0)
        except Exception as error:  # samples for collate_fn that can't be pickled
            line.send(RuntimeError(f"Loader: a worker process can't send its sample: {error}"))


def _picklable(error: Exception) -> Exception:
    """Return the error, or a RuntimeError with its type, message and notes if pickle changes it."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    except Exception:  # of any type: pickle calls the code of the exception's class
        pass
    other = RuntimeError(f"Loader: {type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", ()):
        other.add_note(str(note))
    return other


def _array(
    line: Connection,
    memories: dict[int, Array],
    number: int,
    fresh: bool,
    shape: tuple[int, ...],
    kind: str,
) -> Array:
    """Return the array of a batch in shared memory; each buffer is mapped once."""
    if fresh:
        file = recv_handle(line)
        memories[number] = map_file(file, os.fstat(file).st_size)
        os.close(file)
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(kind).itemsize
    array: Array = memories[number][:size].view(kind).reshape(shape)
    return array
