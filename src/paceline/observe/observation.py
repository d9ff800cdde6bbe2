"""The facts of one rank while they are collected."""

import functools
import os
import threading
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
import torch
from numpy.typing import NDArray

from ..record.hooks.hook_failures import failed_hooks, report_failure
from ..record.hooks.taps import Function
from .facts.models import StateFacts
from .facts.ranks import CHECKSUM, NONFINITE, ROW_SIZE, SKETCH_SIZE, SQUARES, RankFacts, write_facts
from .facts.samples import BatchFacts, Phase
from .facts.steps import BackwardFacts
from .settings import VerifySettings

# Sketches of tensors: few numbers that show whether a tensor is a sum or a multiple of others.
#
# A sketch is a linear map of the flattened tensor onto ``SKETCH_SIZE`` numbers (Charikar, Chen
# and Farach-Colton, "Finding frequent items in data streams", 2002): each element is added, with
# a random sign, to one of them. Sign and position depend on the index of the element only. So the
# sketch of a mean is the mean of the sketches, on every rank, and the sketch of a sharded tensor
# is the sum of those of its shards. The sum of the squares of a difference of two sketches
# estimates that of the tensors.

_CHUNK = 1 << 20  # elements at a time; a multiple of SKETCH_SIZE
_MULTIPLIER = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed integer
_MIXER = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MAX_KEPT_SIGNS = 1 << 26  # bytes


def sketch(tensor: torch.Tensor, offset: int = 0) -> NDArray[np.float64]:
    """Return the row of a tensor, or of a shard of it.

    Args:
        tensor: Any shape, dtype and device; complex values count as pairs.
        offset: Position of the first element in the flattened whole tensor.

    Returns:
        ``ROW_SIZE`` numbers. Elements that are not finite count as 0 in the first two parts.
    """
    row = torch.zeros(ROW_SIZE, dtype=torch.float64, device="cpu")
    checksums = (0, 1)
    with torch.no_grad():
        values = tensor.detach()
        values = torch.view_as_real(values) if values.is_complex() else values
        flat = values.reshape(-1)
        # Chunks begin at the same positions of the whole tensor, whatever the offset is.
        start = 0
        while start < flat.numel():
            end = min(start + _CHUNK - (offset + start) % _CHUNK, flat.numel())
            part = flat[start:end].cpu().contiguous()
            data: Any = part.view(torch.uint8).numpy()
            checksums = zlib.crc32(data, checksums[0]), zlib.adler32(data, checksums[1])
            _add(row, part.to(torch.float64), offset + start)
            start = end
    row[CHECKSUM] = checksums[0] + ((checksums[1] & 0x1FFFFF) << 32)
    return row.numpy()


def _add(row: torch.Tensor, part: torch.Tensor, first: int) -> None:
    squares = torch.dot(part, part)
    if not squares.isfinite():
        finite = part.isfinite()
        row[NONFINITE] += part.numel() - int(finite.sum())
        part = torch.where(finite, part, torch.zeros_like(part))
        squares = torch.dot(part, part)
    row[SQUARES] += squares
    before = first % SKETCH_SIZE
    after = -(before + part.numel()) % SKETCH_SIZE
    signed = torch.nn.functional.pad(part * _signs(first, part.numel()), (before, after))
    row[:SKETCH_SIZE] += signed.reshape(-1, SKETCH_SIZE).sum(0)


_signs_of_chunks: dict[int, torch.Tensor] = {}


def _signs(first: int, count: int) -> torch.Tensor:
    """Return a random sign for each of the elements from position ``first`` on, as int8."""
    chunk, start = first // _CHUNK, first % _CHUNK
    found = _signs_of_chunks.get(chunk)
    if found is None or len(found) < start + count:
        # Small tensors need the first few signs only.
        size = min(max(2 * (start + count), 1 << 12), _CHUNK)
        hashed = torch.arange(size, dtype=torch.int64, device="cpu") + chunk * _CHUNK
        hashed = hashed * _MULTIPLIER
        hashed = (hashed ^ (hashed >> 29)) * _MIXER
        found = (((hashed >> 50) & 1) * 2 - 1).to(torch.int8)
        if len(_signs_of_chunks) * _CHUNK < _MAX_KEPT_SIGNS:
            _signs_of_chunks[chunk] = found
    return found[start : start + count]


class SketchTable:
    """The rows of one rank."""

    def __init__(self) -> None:
        self._rows: list[NDArray[np.float64]] = []

    def add(self, tensor: torch.Tensor, offset: int = 0) -> int:
        """Add the row of a tensor, and return its number."""
        self._rows.append(sketch(tensor, offset))
        return len(self._rows) - 1

    def add_sum(self, *rows: int) -> int:
        """Add the row of a sum of tensors whose rows are known, and return its number.

        The sum of its squares is the estimate of the sketch.
        """
        total = np.sum([self._rows[row] for row in rows], axis=0)
        total[SQUARES] = np.square(total[:SKETCH_SIZE]).sum()
        total[CHECKSUM] %= float(1 << 53)
        self._rows.append(total)
        return len(self._rows) - 1

    def are_equal(self, one: int, other: int) -> bool:
        """Return whether two rows are those of equal tensors."""
        return bool(self._rows[one][CHECKSUM] == self._rows[other][CHECKSUM])

    def array(self) -> NDArray[np.float64]:
        """Return all rows, of shape (rows, ROW_SIZE)."""
        return np.array(self._rows) if self._rows else np.zeros((0, ROW_SIZE))


_P = ParamSpec("_P")


class Observation:
    """What has been observed so far, and what the training does now.

    Attributes:
        facts: The facts so far.
        rows: Rows of the observed tensors.
        phase: What the training did at last.
        backward: The backward that runs; None between backwards.
        backwards: The backwards since the last optimizer step.
        scale: Loss scale of the last loss that a gradient scaler has scaled; 1 without one.
        loss: Value of the last loss function since the last backward.
        is_over: Whether nothing is observed any more.
    """

    def __init__(self, settings: VerifySettings) -> None:
        self.settings = settings
        self.facts = RankFacts(*_rank_and_size())
        self.rows = SketchTable()
        self.phase = Phase.SETUP
        self.backward: BackwardFacts | None = None
        self.backwards: list[BackwardFacts] = []
        self.unassigned: list[int] = []  # batches that no backward has used yet
        self.last_batches: list[int] = []  # of the last backward
        self.batch_types: set[type] = set()  # of what loaders return
        self.scale = 1.0
        self.loss: float | None = None
        self.reduction, self.elements = "", 0  # of the function that has computed it
        self.class_weight = 0.0
        # Lines that changed gradients since the last step, and parameters, until the next one.
        self.change_lines: dict[str, list[str]] = {"gradient": [], "parameter": []}
        self.is_over = False
        self.pid = os.getpid()
        self.before_end: list[Callable[[], None]] = []
        self._thread = threading.main_thread().ident
        self._running: set[str] = set()  # observations inside of whose calls the training is

    @property
    def step(self) -> int:
        """Number of optimizer steps so far, of all optimizers."""
        return len(self.facts.steps)

    @property
    def is_observed(self) -> bool:
        """Whether the calling thread is the one that trains, and its facts are collected."""
        return (
            not self.is_over
            and threading.get_ident() == self._thread
            and os.getpid() == self.pid  # not in a loader's worker
        )

    def note_rank(self) -> None:
        """Note the rank in the process group; it stays after the group is destroyed."""
        dist: Any = torch.distributed
        if dist.is_available() and dist.is_initialized():
            self.facts.rank, self.facts.size = dist.get_rank(), dist.get_world_size()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was observed, as in a process that only starts the ranks."""
        facts = self.facts
        return not (facts.models or facts.optimizers or facts.batches or facts.steps)

    def add_batch(self, batch: BatchFacts) -> int:
        """Add a batch that a loader returned; return its number."""
        self.facts.batches.append(batch)
        return len(self.facts.batches) - 1

    def add_state(
        self, kind: str, name: str, line: str, changed_by: Iterable[str] = (), **values: Any
    ) -> None:
        """Add a state as it is now. values: The fields ``values`` and ``rows`` of its facts."""
        state = StateFacts(kind, name, line, self.step, changed_by=[*changed_by], **values)
        self.facts.states.append(state)

    def add_unseen(self, text: str) -> None:
        """Add what could not be observed, once."""
        if text not in self.facts.unseen:
            self.facts.unseen.append(text)

    def finish(self, ended: str) -> None:
        """Write the facts; further calls do nothing."""
        if self.is_over or os.getpid() != self.pid:
            return
        self.note_rank()
        for call in self.before_end:
            self.guarded("the end of the observation", call)()
        self.is_over = True
        for hook, error in failed_hooks.items():
            self.add_unseen(f"{hook}: the hook failed ({error})")
        self.facts.ended = ended
        self.facts.sketches = self.rows.array()
        folder = Path(self.settings.folder)
        folder.mkdir(parents=True, exist_ok=True)
        if not (self.is_empty and (folder / f"facts-{self.facts.rank}.json").exists()):
            write_facts(folder, self.facts)

    def observed(self, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``guarded`` of a function, which does nothing while nothing is observed."""
        guarded = self.guarded(hook, function)

        def call(*args: Any, **options: Any) -> Any:
            return guarded(*args, **options) if self.is_observed else None

        return call

    def outermost(
        self,
        hook: str,
        before: Callable[..., Any] | None = None,
        after: Callable[..., Any] | None = None,
    ) -> Callable[[Function], Function]:
        """Return what wraps the functions of taps, to observe their outermost calls.

        Args:
            hook: Names the observation. Calls inside of another one of the same name are left out.
            before: Called before with the arguments.
            after: Called after it with the result and the arguments.
        """
        begin, end = (f and self.guarded(hook, f) for f in (before, after))

        def wrapper_of(function: Function) -> Function:
            def call(*args: Any, **options: Any) -> Any:
                if hook in self._running or not self.is_observed:
                    return function(*args, **options)
                if begin is not None:
                    begin(*args, **options)
                self._running.add(hook)
                try:
                    result = function(*args, **options)
                finally:
                    self._running.discard(hook)
                if end is not None:
                    end(result, *args, **options)
                return result

            return call

        return wrapper_of

    def guarded(self, hook: str, function: Callable[_P, Any]) -> Callable[_P, Any]:
        """Return a function that observes, so that its exceptions are reported and not raised.

        After an exception it does nothing. Modes of torch that see all operators (``torch.device``,
        ``FlopCounterMode``) do not see those of the function, and its result is None then.
        """

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> Any:
            if hook in failed_hooks:
                return None
            try:
                with torch._C.DisableTorchFunction(), _disable_modes():
                    return function(*args, **kwargs)
            except Exception as error:
                report_failure(hook, error)
                return None

        return call


def _disable_modes() -> Any:
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def _rank_and_size() -> tuple[int, int]:
    """Return rank and size of the environment."""
    rank, size = (os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE"))
    return int(rank) if rank.isdigit() else 0, int(size) if size.isdigit() else 1
