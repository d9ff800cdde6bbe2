"""NVIDIA DALI as the decoder of a Loader (``Loader(..., dali=function)``).

The Loader reads the samples in order and verifies their checksums. A graph of DALI operators makes
tensors of whole batches, on the GPU if there is one.
"""

import re
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
from .concat_dataset import ConcatDataset
from .file_dataset import Files

DRAWS, STATES = 0x64616C69, 0x73746174  # set these draws apart from a transform's
STATE_WORDS = 7  # uint32, of DALI's Philox generator
HINT = "pip install nvidia-dali-cuda130, or nvidia-dali-cuda120 for older drivers"
Pull = Callable[[], tuple[int, Any] | None]  # a batch, as a pass's


class Raw(NamedTuple):
    """A sample for DALI, as it is stored. draws: its random numbers, float32."""

    key: Key
    array: Any
    draws: Any


class Draws:
    """The second argument of a function for DALI: random numbers, one a sample, that depend on
    (seed, epoch, sample) alone."""

    def __init__(self, made: Callable[[], Any]) -> None:
        self.count = 0
        self._made = made
        self._node: Any = None

    def uniform(self, low: float = 0.0, high: float = 1.0) -> Any:
        """A DataNode of float32 numbers, low <= x < high; others at each call."""
        if self._node is None:
            self._node = self._made()
        self.count += 1
        return self._node[self.count - 1] * (high - low) + low

    def coin(self, share: float = 0.5) -> Any:
        """A DataNode of int32: 1 in a ``share`` of the samples, and 0 in the others."""
        fn, types = _package("fn"), _package("types")
        return fn.cast(self.uniform() < share, dtype=types.INT32)


class Undecoded(SamplePipeline):
    """Samples as they are stored; a batch is a list of Raw, or of (Raw, label). draws: how many
    random numbers each has."""

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
    """(array, label) of a sample: a file's bytes as uint8, or what is stored as an array. Raises
    DataError."""
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
    """function's graph of operators, and the batches that are in it. size: samples of a batch, at
    most. ahead: batches that are in it at a time.

    Raises ValueError where DALI is not there or too old, and for what is no graph.
    """

    def __init__(
        self, function: Callable[..., Any], pipeline: Undecoded, size: int, threads: int, ahead: int
    ) -> None:
        self._pipeline, self._coming = pipeline, deque[tuple[int, list[Key], list[Any]]]()
        self._inputs: list[_Input] = []
        self._pull: Pull = lambda: None
        self._begun = self._ended = False  # whether it was given batches, and all of them
        self._error: Exception | None = None  # that has ended the batches
        self._failed: Exception | None = None  # of the graph itself, which is of no use then
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
        # DALI asks for no others
        self._inputs = [one for one in self._inputs if one.node.source in operators]
        pipeline.draws = drawn.count
        try:
            self._pipe.build()
        except RuntimeError as error:
            raise ValueError(f"Loader: dali: {_said(error)}") from error

    # batches

    def begin_pass(self, pull: Pull) -> bool:
        """Begin a pass and discard what is left of another one.

        Return False if the graph has failed and can't be used again.
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
        self._pull = pull
        return self._failed is None

    def next(self) -> tuple[int, Any] | None:
        """Samples of the epoch, and the batch of them: [x, label], x, or [x, z, label] where the
        function gives several; None at the end. Raises DataError for a sample that can't be
        read, and ValueError for what DALI can't do with it."""
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
        tensors = [self._tensor(one, len(keys)) for one in outputs]
        if (label := self._pipeline.label) is not None:
            tensors.append(torch.from_numpy(np.asarray(labels, label.dtype)))
        return done, tensors if len(tensors) > 1 else tensors[0]

    def _tensor(self, made: Any, count: int) -> torch.Tensor:
        if len(made) != count:
            raise ValueError(
                f"Loader: the dali function gives {len(made)} samples of {count}. HINT: a sample "
                "for each one"
            )
        try:
            whole = made.as_tensor()
        except (RuntimeError, ValueError):
            some = ", ".join(str(tuple(one)) for one in dict.fromkeys(map(tuple, made.shape())))
            raise ValueError(
                f"Loader: the dali function gives samples of several shapes: {some:.200}. HINT: "
                "crop=... or fn.resize in it"
            ) from None
        tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(whole)
        return tensor

    def _fresh(self) -> Exception | None:
        """The graph is empty, and can be filled again; what has ended the batches, if not their
        number."""
        self._pipe.reset()
        self._coming.clear()
        for one in self._inputs:
            one.waiting.clear()
        error, self._error, self._begun, self._ended = self._error, None, False, False
        return error

    # the graph

    def _input(self, make: Callable[[list[Raw]], Any]) -> Any:
        """A DataNode of what is made of each batch's samples."""
        self._inputs.append(_Input(make, self._take))
        return self._inputs[-1].node

    def _take(self) -> None:
        """The next batch to all inputs. An error is told when it is its turn."""
        self._begun = True
        if self._ended:
            raise StopIteration
        try:
            pulled = self._pull()
        except Exception as error:
            pulled, self._error = None, error
        if pulled is None:
            self._ended = True
            raise StopIteration
        done, samples = pulled
        labelled = self._pipeline.label is not None
        raws = [one[0] for one in samples] if labelled else samples
        labels = [one[1] for one in samples] if labelled else []
        self._coming.append((done, [raw.key for raw in raws], labels))
        for one in self._inputs:
            one.waiting.append(one.make(raws))

    def _seed(self, operators: list[Any]) -> None:
        """Operators that draw by themselves do so by (seed, epoch, the batch's first sample)."""
        random = [one for one in operators if _schema(one).HasRandomStateArg()]
        if not random:
            return
        states = self._input(lambda raws: self._states(len(random), raws))
        for number, one in enumerate(random):
            state = states[number]
            described = (state.name, state.ndim, state.dtype, state.layout)
            one.spec.AddArgumentInput("_random_state", *described)
            one.inputs.append(state)
        operators += _operators([states])

    def _states(self, count: int, raws: list[Raw]) -> Any:
        """(samples, count, words); DALI takes those of the first sample."""
        states = np.zeros((len(raws), count, STATE_WORDS), np.uint32)
        for number in range(count):
            seed = derive_seed(self._pipeline.seed, *raws[0].key, STATES, number)
            states[:, number, 0], states[:, number, 1] = seed & 0xFFFFFFFF, seed >> 32
        return states

    def _blamed(self, error: Exception) -> Exception:
        """The sample that DALI has stumbled over, where it can't be decoded here either."""
        for _, keys, _ in self._coming:
            for _, i in keys:
                try:
                    self._pipeline.source.read(i, ScratchBuffer())
                except DataError as found:
                    return found
        return ValueError(f"Loader: dali, of {self._pipeline.source!r}: {_said(error)}")


class _Input:
    """A DataNode of what is made of each batch's samples. take: gives all inputs the next one."""

    def __init__(self, make: Callable[[list[Raw]], Any], take: Callable[[], None]) -> None:
        self.make, self._take = make, take
        self.waiting = deque[Any]()  # what DALI has not asked for yet
        self.node = _package("fn").external_source(source=self._next, batch=True)

    def _next(self) -> Any:
        if not self.waiting:
            self._take()
        return self.waiting.popleft()


def _check(function: Any, outputs: list[Any], samples: Any) -> None:
    """Raises ValueError for what is no graph of the samples."""
    name, node = getattr(function, "__name__", function), _package("data_node").DataNode
    for one in outputs or [None]:
        if not isinstance(one, node):
            raise ValueError(
                f"Loader: dali={name}: returns {type(one).__name__}. HINT: a DataNode, as "
                "fn.decoders.image(samples) is, or a tuple of them"
            )
    if samples.source not in _operators(outputs):
        raise ValueError(
            f"Loader: dali={name}: what it returns does not depend on the samples. HINT: return "
            "what is made of its first argument"
        )


def _operators(outputs: list[Any]) -> Iterator[Any]:
    """All that the outputs depend on, in an order that depends on the graph alone."""
    seen, waiting = set(), [one.source for one in reversed(outputs)]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        for edge in one.inputs:
            waiting += [e.source for e in (edge if isinstance(edge, list) else [edge])]


def _schema(operator: Any) -> Any:
    schema = operator._op.schema
    if not hasattr(schema, "HasRandomStateArg"):
        version = _package("").__version__
        raise ValueError(f"Loader: dali: DALI {version} is too old. HINT: {HINT} (2.4 or later)")
    return schema


def _package(module: str) -> Any:
    try:
        return import_optional(f"nvidia.dali.{module}".rstrip("."))
    except ValueError:
        raise ValueError(f"Loader: dali: NVIDIA DALI is not installed. HINT: {HINT}") from None


def _said(error: Exception) -> str:
    """DALI's own words in a line, without the stack behind them."""
    text = re.split(r"\n\s*(?:Stacktrace|C\+\+ context|Current pipeline)", str(error))[0]
    return " ".join(text.rpartition("encountered:")[2].split())
