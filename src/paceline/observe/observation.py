"""The facts of one rank while they are collected."""

import functools
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec

import torch

from ..record.hooks.hook_failures import failed_hooks, report_failure
from ..record.hooks.taps import Function
from .facts.models import StateFacts
from .facts.ranks import RankFacts
from .facts.samples import BatchFacts, Phase
from .facts.steps import BackwardFacts
from .facts_file import write_facts
from .settings import VerifySettings
from .sketch import SketchTable

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
