"""Make a batch: worker threads or processes fill pieces of it, directly in the batch's memory."""

import copy
import inspect
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from ...plurals import counted
from ..format.meta_schema import ArraySpec
from ..format.shard_format import DataError
from ..sampling.sample_order import derive_seed, preserve_random_states, seed_everything
from ..shards import RaggedError, ScratchBuffer
from .buffer_pool import BufferPool
from .mixup import MixUp

Array = np.ndarray[Any, Any]
Key = tuple[int, int]  # epoch, sample
# Called with (pipeline, keys, arrays, first).
Submit = Callable[..., "Future[BatchPiece]"]
_local = threading.local()


class SamplePipeline:
    """Read, transform and mix the samples of a loader, and hold the buffer pool of its batches.

    All samples have the shape and dtype of the first one, which is found by making it.

    Args:
        skips: Whether samples that can't be read are left out; ``skipped`` lists their errors.
        shared: Whether worker processes make the samples, so that buffers are shared memory.
    """

    def __init__(
        self,
        source: Any,
        transform: Callable[..., Any] | None,
        collate: Callable[[list[Any]], Any] | None,
        seed: int,
        skips: bool,
        shared: bool,
        mixing: MixUp | None = None,
    ) -> None:
        self.source, self.transform, self.collate, self.seed = source, transform, collate, seed
        self.skips, self.mixing = skips, mixing
        self.skipped: list[DataError] = []
        self.buffer_pool = BufferPool(shared)
        self.array: ArraySpec | None = None
        self.channels_last = False  # in the buffers; batches are permuted to channels first
        self.seeds_all = False  # the global generators as well: only in a worker process
        self._transform_takes_rng = transform is not None and accepts_rng(transform)
        self._tensors = False  # whether the transform returns tensors

    def seeded(self, seed: int) -> "SamplePipeline":
        """Return a copy with another seed and its own buffer pool."""
        other = copy.copy(self)
        other.seed, other.buffer_pool = seed, BufferPool(self.buffer_pool.shared)
        return other

    def trim_buffers(self, ahead: int) -> None:
        """Keep as many unused buffers as a pass needs that loads ``ahead`` batches in advance.

        A pass uses one more batch in the script, one that the script releases only when it gets
        the next one, and one that a worker releases.
        """
        self.buffer_pool.max_free = ahead + 3

    def leave_to_parent(self) -> None:
        """Stop using memory that the parent of this forked process shares with its workers."""
        if self.buffer_pool.shared:
            self.buffer_pool = BufferPool(shared=True)

    @property
    def plain(self) -> bool:
        """Whether samples are neither transformed nor mixed."""
        return self.transform is None and self.mixing is None

    @property
    def label(self) -> ArraySpec | None:
        """Shape and dtype of the labels; None without labels."""
        label: ArraySpec | None = (self.mixing or self.source).label
        return label

    def resolve_spec(self, keys: list[Key], bad: dict[int, DataError]) -> ArraySpec | None:
        """Return the shape and dtype of samples, from the first of the keys that can be read.

        Return None if no sample can be read and ``skips`` is set; their errors are added to
        ``bad``, by position.
        """
        if self.array is not None:
            return self.array
        errors: dict[int, DataError] = {}
        for k, key in enumerate(keys):
            try:
                self.array = self._first(key)
                return self.array
            except DataError as error:
                if not self.skips:
                    raise
                errors[k] = error.with_traceback(None)
        bad |= errors
        return None

    def _first(self, key: Key) -> ArraySpec:
        source = self.source
        if self.plain:
            array: ArraySpec = source.spec_of(key[1])[0]
        else:
            with preserve_random_states():  # of the training, if the transform draws from them
                sample, _ = self.sample(key)
            array = ArraySpec.of(sample)
        self.channels_last = source.images and len(array.shape) == 3 and not self._tensors
        return array

    def sample(self, key: Key) -> tuple[Any, Any]:
        """Return one transformed sample, mixed with its partner under mix-up: (array, label)."""
        if self.mixing is None:
            return self._unmixed_sample(key)
        partner, share = self.mixing.partner(self.seed, *key)
        sample, other = self._unmixed_sample(key), self._unmixed_sample((key[0], partner))
        if (sample[0].shape, sample[0].dtype) != (other[0].shape, other[0].dtype):
            raise _ragged(self, partner, ArraySpec.of(other[0]), ArraySpec.of(sample[0]))
        return self.mixing.mixed(sample, other, share)

    def _unmixed_sample(self, key: Key) -> tuple[Any, Any]:
        epoch, i = key
        array, label = self.source.read(i, _scratch())
        if self.transform is not None:
            seed = derive_seed(self.seed, epoch, i)
            if self.seeds_all:
                seed_everything(seed)
            # Philox is counter-based: seeding it for each sample costs almost nothing.
            rng: tuple[np.random.Generator, ...] = ()
            if self._transform_takes_rng:
                rng = (np.random.Generator(np.random.Philox(key=seed)),)
            try:
                array = self.transform(array, *rng)
            except StopIteration as error:  # would end the pass silently
                raise RuntimeError(
                    f"Loader: the transform raised StopIteration at sample {i} of {self.source!r}"
                ) from error
            except Exception as error:
                error.add_note(f"in the transform of sample {i} of {self.source!r}")
                raise
            self._tensors = isinstance(array, torch.Tensor)
            array = array.detach().numpy() if self._tensors else np.asarray(array)
            if not array.dtype.isnative:
                array = array.astype(array.dtype.newbyteorder("="))
        return array, label

    def record_skipped(self, error: DataError, owner: Any) -> None:
        """Warn of the first skipped sample now, and print their number when the loader is freed."""
        self.skipped.append(error.with_traceback(None))
        if len(self.skipped) == 1:
            warnings.warn(f"the Loader left out a sample (on_error='skip'): {error}", stacklevel=2)
            weakref.finalize(owner, _print_skipped_count, self.skipped, repr(self.source))


class PendingBatch:
    """A batch that workers are filling. pinned: whether its memory is page-locked.

    Attributes:
        keys: The samples, as (epoch, sample).
        busy_s: CPU time of the workers, complete after ``wait``.
    """

    def __init__(
        self, pipeline: SamplePipeline, keys: list[Key], submit: Submit, pieces: int, pinned: bool
    ) -> None:
        self.pipeline, self.keys, self._pinned, self.busy_s = pipeline, keys, pinned, 0.0
        self._tensors: list[torch.Tensor] = []
        self._arrays: list[np.ndarray[Any, Any]] = []
        self._bad: dict[int, DataError] = {}  # by position in the batch
        self._pieces: list[Future[BatchPiece]] = []
        if pipeline.collate is None:
            array, label = pipeline.resolve_spec(keys, self._bad), pipeline.label
            if array is None:
                return
            specs = [array] if label is None else [array, label]
            self._arrays = [self._memory(spec, field) for field, spec in enumerate(specs)]
        count = max(min(pieces, len(keys)), 1)
        ends = [len(keys) * (k + 1) // count for k in range(count)]
        self._pieces = [
            submit(pipeline, keys[first:end], self._arrays, first)
            for first, end in zip([0, *ends[:-1]], ends, strict=True)
        ]

    def _memory(self, what: ArraySpec, field: int) -> np.ndarray[Any, Any]:
        shape = (len(self.keys), *what.shape)
        if self._pinned:
            # torch's caching allocator of pinned memory knows which blocks are still being copied.
            kind = torch.from_numpy(np.empty(0, what.dtype)).dtype
            tensor = torch.empty(shape, dtype=kind, pin_memory=True)
            self._tensors.append(tensor)
            return tensor.numpy()
        try:
            return self.pipeline.buffer_pool.take(shape, what.dtype, field)
        except (MemoryError, OSError, OverflowError) as error:
            size = len(self.keys) * what.nbytes / 2**30
            raise ValueError(
                f"Loader: a batch of {counted(len(self.keys), 'sample')}, {what.dtype} of "
                f"{what.shape}, needs {size:,.1f} GiB, which can't be allocated ({error}). "
                "HINT: use a smaller batch_size"
            ) from None

    def wait(self, owner: Any) -> Any:
        """Wait for all pieces and return the batch; None if all its samples are left out.

        owner: the loader, for the warning.
        """
        pipeline, samples, bad = self.pipeline, list[Any](), self._bad
        for piece in self._pieces:
            done = piece.result()
            samples += done.samples
            bad |= done.bad
            self.busy_s += done.busy_s
        for k in sorted(bad):
            pipeline.record_skipped(bad[k], owner)
        if len(bad) == len(self.keys):
            return None
        if pipeline.collate is not None:
            labelled = pipeline.label is not None
            return pipeline.collate(
                [_collate_input(array, label, labelled) for array, label in samples]
            )
        tensors = self._tensors or [torch.from_numpy(array) for array in self._arrays]
        self._arrays = []
        if bad:
            kept = [k for k in range(len(self.keys)) if k not in bad]
            tensors = [tensor[kept] for tensor in tensors]
        if pipeline.channels_last:
            tensors[0] = tensors[0].permute(0, 3, 1, 2)
        return tensors if len(tensors) > 1 else tensors[0]


class BatchPiece:
    """The part of a batch that one worker has made.

    Attributes:
        busy_s: CPU time it took.
        samples: The samples, if ``collate_fn`` makes the batch.
        bad: Errors of samples that can't be read, by position in the batch.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.samples: list[Any] = []
        self.bad: dict[int, DataError] = {}


def make_piece(
    pipeline: SamplePipeline, keys: list[Key], arrays: list[np.ndarray[Any, Any]], first: int
) -> BatchPiece:
    """Make the samples of ``keys``, into ``arrays`` (of samples and labels) from ``first`` on.

    Raises ValueError where one has another shape than those before it.
    """
    piece, began = BatchPiece(), time.thread_time()
    if arrays and pipeline.plain and hasattr(pipeline.source, "take"):
        labels = arrays[1] if len(arrays) > 1 else None
        pipeline.source.take([i for _, i in keys], arrays[0], labels, first)
    else:
        _each(pipeline, keys, arrays, first, piece)
    piece.busy_s = time.thread_time() - began
    return piece


def _each(
    pipeline: SamplePipeline,
    keys: list[Key],
    arrays: list[np.ndarray[Any, Any]],
    first: int,
    piece: BatchPiece,
) -> None:
    labels = arrays[1] if len(arrays) > 1 else None
    for k, key in enumerate(keys, first):
        try:
            if arrays and pipeline.plain:
                pipeline.source.read_into(key[1], arrays[0], labels, k, _scratch())
                continue
            array, label = pipeline.sample(key)
            if not arrays:  # collate_fn makes the batch
                if isinstance(array, np.ndarray) and not (
                    array.flags.writeable and min(array.strides, default=0) >= 0
                ):
                    array = array.copy()  # its memory can't be that of a tensor
                piece.samples.append((array, label))
                continue
            if array.shape != arrays[0].shape[1:] or array.dtype != arrays[0].dtype:
                raise RaggedError(key[1], ArraySpec.of(array))
            arrays[0][k] = array
            if labels is not None:
                labels[k] = label
        except RaggedError as error:
            raise _ragged(pipeline, key[1], error.what) from None
        except DataError as error:
            if not pipeline.skips:
                raise
            piece.bad[k] = error.with_traceback(None)


def _collate_input(array: Any, label: Any, labelled: bool) -> Any:
    """Return a sample in the form that collate_fn takes."""
    data = torch.from_numpy(array) if isinstance(array, np.ndarray) else array
    return (data, label) if labelled else data


def _ragged(
    pipeline: SamplePipeline, i: int, what: ArraySpec, usual: ArraySpec | None = None
) -> ValueError:
    usual = usual or pipeline.array
    assert usual is not None
    return ValueError(
        f"Loader: {pipeline.source!r}: sample {i} is {what.dtype} of {what.shape}, but the "
        f"samples before it are {usual.dtype} of {usual.shape}. HINT: use a transform that crops "
        "or resizes, or collate_fn=... for samples of different shapes"
    )


def accepts_rng(transform: Callable[..., Any]) -> bool:
    """Return whether the second argument of a transform is a random generator.

    It is if it has no default, or if it is named or annotated as one: the second argument of
    ``crop(x, size=2)`` or ``np.flip`` is none.
    """
    try:
        signature = inspect.signature(transform)
        signature.bind(None, None)
    except (TypeError, ValueError):  # ValueError: implemented in C, without a signature
        return False
    second = [*signature.parameters.values()][min(1, len(signature.parameters) - 1)]
    if second.kind is second.VAR_POSITIONAL:
        return False
    annotated = str(getattr(second.annotation, "__name__", second.annotation))
    named = second.name in ("rng", "generator") or "Generator" in annotated
    return named or second.default is second.empty


def _scratch() -> ScratchBuffer:
    """Return the scratch buffer of this thread."""
    if not hasattr(_local, "scratch"):
        _local.scratch = ScratchBuffer()
    scratch: ScratchBuffer = _local.scratch
    return scratch


def _print_skipped_count(skipped: list[DataError], name: str) -> None:
    were = f"{counted(len(skipped), 'sample')} {'was' if len(skipped) == 1 else 'were'}"
    message = f"paceline: {name}: {were} left out; the first: {skipped[0]}\n"
    sys.stderr.write(message)
