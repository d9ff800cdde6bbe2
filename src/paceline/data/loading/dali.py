"""NVIDIA DALI as the decoder of a Loader (``Loader(..., dali=function)``).

The Loader reads the samples in order and verifies their checksums. A graph of DALI operators
processes whole batches into tensors, on the GPU if there is one.
"""

import os
import re
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from ..format.decode import import_optional
from ..format.shard_format import RAW, ZSTD, DataError
from ..sampling.sample_order import derive_seed
from ..shards import ScratchBuffer, Shards
from .batch import Key, SamplePipeline, accepts_rng
from .file_dataset import Files
from .open_dataset import ConcatDataset

DRAWS, STATES = 0x64616C69, 0x73746174  # separate these random numbers from a transform's
STATE_WORDS = 7  # uint32, of DALI's Philox generator
HINT = "pip install nvidia-dali-cuda130, or nvidia-dali-cuda120 for older drivers"
Pull = Callable[[], tuple[int, Any] | None]  # returns the next batch, None at the end


class Raw(NamedTuple):
    """An undecoded sample for DALI.

    Attributes:
        key: (epoch, sample).
        array: Encoded bytes as uint8, or an array.
        draws: Random numbers of the sample, float32, or None.
    """

    key: Key
    array: Any
    draws: Any


class Draws:
    """Per-sample random numbers, the second argument of a function for DALI.

    The numbers depend only on (seed, epoch, sample).
    """

    def __init__(self, made: Callable[[], Any]) -> None:
        self.count = 0
        self._made = made
        self._node: Any = None

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Any:
        """Return a DataNode of float32 numbers, low <= x < high.

        Each call returns different numbers.
        """
        if self._node is None:
            self._node = self._made()
        self.count += 1
        return self._node[self.count - 1] * (high - low) + low

    def coin(self, share: float = 0.5) -> Any:
        """Return a DataNode of int32: 1 with probability ``share``, else 0."""
        fn, types = _package("fn"), _package("types")
        return fn.cast(self.uniform() < share, dtype=types.INT32)


class Undecoded(SamplePipeline):
    """Pipeline of undecoded samples. A batch is a list of Raw, or of (Raw, label).

    Attributes:
        draws: Number of random numbers per sample.
    """

    draws = 0

    def __init__(self, source: Any, seed: int, skips: bool) -> None:
        super().__init__(source, None, list, seed, skips, shared=False)

    def sample(self, key: Key) -> tuple[Any, Any]:
        array, label = stored(self.source, key[1])
        drawn = None
        if self.draws:
            rng = np.random.Generator(np.random.Philox(key=derive_seed(self.seed, *key, DRAWS)))
            drawn = rng.random(self.draws, np.float32)
        return Raw(key, np.asarray(array), drawn), label


def stored(source: Any, i: int) -> tuple[Any, Any]:
    """Return (array, label) of a sample; encoded files are returned as bytes in a uint8 array.

    Raises:
        DataError: The sample can't be read or is corrupted.
    """
    if isinstance(source, ConcatDataset):
        return stored(*source.location(i))
    if isinstance(source, Shards):
        row, data, label = source.read_raw(i, ScratchBuffer())
        if row.encoding in (RAW, ZSTD):
            return source.decode_sample(i, row, data), label
        return np.frombuffer(data, np.uint8), label
    if isinstance(source, Files):
        return source.stored(i)
    found: tuple[Any, Any] = source.read(i, None)
    return found


class Graph:
    """A graph of DALI operators, and the batches that it is processing.

    Args:
        function: Function that defines the graph.
        pipeline: Source of the undecoded samples.
        size: Maximum number of samples in a batch.
        threads: Number of CPU threads of DALI.
        ahead: Number of batches that DALI prefetches.

    Raises:
        ValueError: DALI is not installed or too old, or the function does not return a graph.
    """

    def __init__(
        self, function: Callable[..., Any], pipeline: Undecoded, size: int, threads: int, ahead: int
    ) -> None:
        self.process = os.getpid()  # the threads of DALI don't exist in a forked child
        self._pipeline, self._coming = pipeline, deque[tuple[int, list[Key], list[Any]]]()
        self._inputs: list[_Input] = []
        # Source of the pass; weak, as the graph outlives an abandoned pass.
        self._pull: Callable[[], Pull | None] = lambda: None
        self._begun = self._ended = False  # whether the first and the last batch were fed
        self._error: Exception | None = None  # error that ended the pass
        self._failed: Exception | None = None  # error after which the graph is unusable
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._on_gpu = device is not None
        how = {"batch_size": size, "num_threads": threads, "device_id": device}
        self._pipe = _package("pipeline").Pipeline(**how, prefetch_queue_depth=ahead)
        with self._pipe:
            samples = self._input(lambda raws: [raw.array for raw in raws])
            drawn = Draws(lambda: self._input(lambda raws: np.stack([raw.draws for raw in raws])))
            made = function(samples, drawn) if accepts_rng(function) else function(samples)
            outputs = list(made) if isinstance(made, (tuple, list)) else [made]
            _check(function, outputs, samples)
            operators = list(_operators(outputs))
            self._seed(operators)
            self._pipe.set_outputs(*outputs)
        # DALI does not call the sources of unused inputs.
        self._inputs = [source for source in self._inputs if source.node.source in operators]
        pipeline.draws = drawn.count
        try:
            self._pipe.build()
        except RuntimeError as error:
            raise ValueError(f"Loader: DALI can't build the graph: {_said(error)}") from error

    # Batches

    def begin_pass(self, pull: Pull) -> bool:
        """Begin a pass and discard the remaining batches of the previous one.

        Return False if the graph has failed and can't be used again. ``pull`` is a bound method,
        whose object is the pass; the graph does not keep it alive.
        """
        if self._begun and self._failed is None:
            self._ended = True
            try:
                while True:
                    self._pipe.run()
            except StopIteration:
                self._fresh()
            except RuntimeError as error:
                self._failed = error
        self._pull = weakref.WeakMethod(pull)
        return self._failed is None

    def next(self, pull: Pull) -> tuple[int, Any] | None:
        """Return the next batch, or None at the end of the pass.

        Args:
            pull: Source of the pass, from ``begin_pass``.

        Returns:
            The number of samples of the epoch in the batch, and the batch: x or [x, label], or
            [x, z, label] if the function returns several outputs.

        Raises:
            DataError: A sample can't be read.
            ValueError: DALI can't process the batch.
            RuntimeError: Another pass has begun, or this process was forked during the pass.
        """
        if pull != self._pull() or self.process != os.getpid():
            raise RuntimeError(
                "Loader: another pass has begun, or this process was forked during the pass. DALI "
                "runs one pass at a time. HINT: create a Loader for each pass or process"
            )
        if self._failed is not None:
            raise self._failed
        stream = (torch.cuda.current_stream(),) if self._on_gpu else ()
        try:
            outputs = self._pipe.run(*stream)
        except StopIteration:
            error = self._fresh()
            if error is not None:
                raise error from None
            return None
        except (RuntimeError, TypeError, ValueError) as error:
            self._failed = self._blamed(error)
            raise self._failed from error
        done, keys, labels = self._coming.popleft()
        tensors = [self._tensor(output, len(keys)) for output in outputs]
        if (label := self._pipeline.label) is not None:
            tensors.append(torch.from_numpy(np.asarray(labels, label.dtype)))
        return done, tensors if len(tensors) > 1 else tensors[0]

    def _tensor(self, made: Any, count: int) -> torch.Tensor:
        if len(made) != count:
            raise ValueError(
                f"Loader: the dali function returned {len(made)} samples for {count}. HINT: return "
                "one sample for each input sample"
            )
        try:
            whole = made.as_tensor()
        except (RuntimeError, ValueError):
            some = ", ".join(str(tuple(shape)) for shape in dict.fromkeys(map(tuple, made.shape())))
            raise ValueError(
                f"Loader: the dali function returned samples of different shapes: {some:.200}. "
                "HINT: use crop=... or fn.resize in the function"
            ) from None
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(whole)
        return tensor

    def _fresh(self) -> Exception | None:
        """Reset the empty graph for the next pass.

        Return the error that ended the pass, None if the pass was complete.
        """
        self._pipe.reset()
        self._coming.clear()
        for source in self._inputs:
            source.waiting.clear()
        error, self._error, self._begun, self._ended = self._error, None, False, False
        return error

    # Graph

    def _input(self, make: Callable[[list[Raw]], Any]) -> Any:
        """Return a DataNode of what ``make`` returns for the samples of each batch."""
        self._inputs.append(_Input(make, self._take))
        return self._inputs[-1].node

    def _take(self) -> None:
        """Pass the next batch to all inputs.

        An error ends the pass; it is raised after the preceding batches were returned.
        """
        self._begun = True
        if self._ended:
            raise StopIteration
        pull = self._pull()
        try:
            pulled = pull() if pull is not None else None
        except Exception as error:
            pulled, self._error = None, error
        if pulled is None:
            self._ended = True
            raise StopIteration
        done, samples = pulled
        labelled = self._pipeline.label is not None
        raws = [sample[0] for sample in samples] if labelled else samples
        labels = [sample[1] for sample in samples] if labelled else []
        self._coming.append((done, [raw.key for raw in raws], labels))
        for source in self._inputs:
            source.waiting.append(source.make(raws))

    def _seed(self, operators: list[Any]) -> None:
        """Seed operators with random state by (seed, epoch, first sample of the batch)."""
        random = [operator for operator in operators if _schema(operator).HasRandomStateArg()]
        if not random:
            return
        states = self._input(lambda raws: self._states(len(random), raws))
        for number, operator in enumerate(random):
            state = states[number]
            described = (state.name, state.ndim, state.dtype, state.layout)
            operator.spec.AddArgumentInput("_random_state", *described)
            operator.inputs.append(state)
        operators += _operators([states])

    def _states(self, count: int, raws: list[Raw]) -> Any:
        """Return the random states of ``count`` operators, for a batch.

        The uint32 array has the shape (samples, count, STATE_WORDS); DALI uses the first sample's.
        """
        states = np.zeros((len(raws), count, STATE_WORDS), np.uint32)
        for number in range(count):
            seed = derive_seed(self._pipeline.seed, *raws[0].key, STATES, number)
            states[:, number, 0], states[:, number, 1] = seed & 0xFFFFFFFF, seed >> 32
        return states

    def _blamed(self, error: Exception) -> Exception:
        """Return the error to raise for a failure of DALI.

        The error names the sample if one of the batches can't be decoded without DALI either.
        """
        for _, keys, _ in self._coming:
            for _, i in keys:
                try:
                    self._pipeline.source.read(i, ScratchBuffer())
                except DataError as found:
                    return found
        return ValueError(f"Loader: DALI failed on {self._pipeline.source!r}: {_said(error)}")


class _Input:
    """One external source of the graph.

    Args:
        make: Function that converts the samples of a batch to the input.
        take: Function that passes the next batch to all inputs.
    """

    def __init__(self, make: Callable[[list[Raw]], Any], take: Callable[[], None]) -> None:
        self.make, self._take = make, take
        self.waiting = deque[Any]()  # batches that DALI has not requested yet
        self.node = _package("fn").external_source(source=self._next, batch=True)

    def _next(self) -> Any:
        if not self.waiting:
            self._take()
        return self.waiting.popleft()


def _check(function: Any, outputs: list[Any], samples: Any) -> None:
    """Raise ValueError if the outputs are not DataNodes that depend on the samples."""
    name, node = getattr(function, "__name__", function), _package("data_node").DataNode
    for output in outputs or [None]:
        if not isinstance(output, node):
            raise ValueError(
                f"Loader: dali={name} must return a DataNode; this is {type(output).__name__}. "
                "HINT: return fn.decoders.image(samples), for example, or a tuple of DataNodes"
            )
    if samples.source not in _operators(outputs):
        raise ValueError(
            f"Loader: the output of dali={name} does not depend on the samples. HINT: compute the "
            "output from the first argument"
        )


def _operators(outputs: list[Any]) -> Iterator[Any]:
    """Yield all operators that the outputs depend on, in an order determined by the graph alone."""
    seen, waiting = set(), [output.source for output in reversed(outputs)]
    while waiting:
        operator = waiting.pop()
        if operator is None or id(operator) in seen:
            continue
        seen.add(id(operator))
        yield operator
        for edge in operator.inputs:
            waiting += [e.source for e in (edge if isinstance(edge, list) else [edge])]


def _schema(operator: Any) -> Any:
    schema = operator._op.schema
    if not hasattr(schema, "HasRandomStateArg"):
        version = _package("").__version__
        raise ValueError(f"Loader: DALI {version} is too old. HINT: {HINT} (2.4 or later)")
    return schema


def _package(module: str) -> Any:
    try:
        return import_optional(f"nvidia.dali.{module}".rstrip("."))
    except ValueError:
        raise ValueError(f"Loader: NVIDIA DALI is not installed. HINT: {HINT}") from None


def _said(error: Exception) -> str:
    """Return the message of a DALI error as one line, without the stack trace."""
    text = re.split(r"\n\s*(?:Stacktrace|C\+\+ context|Current pipeline)", str(error))[0]
    return " ".join(text.rpartition("encountered:")[2].split())
