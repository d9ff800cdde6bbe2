"""Add up the gradients of a global batch over its parts, where one rank can't hold all of it.

The script trains each part as a batch: a backward and a step of the optimizer. Steps before the
last part find no gradients, so they change nothing. The last one finds the weighted sum.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ...hooks.taps import on_step
from ..facts.ranks import RankFacts
from ..facts.steps import BackwardFacts
from ..observation import Observation
from ..optimization.steps import Steps

_HOOK = "the accumulation of a global batch"
Place = tuple[int, int, int]  # loader, pass, and number of a batch in its pass


@dataclass(frozen=True)
class Part:
    """A part of a global batch.

    Attributes:
        path: File of the stored batch.
        whole: Place of the global batch in the stored run.
        weight: Number of its samples, relative to those of the global batch.
        is_first, is_last: Whether it is the first part, and the last one.
        samples: Number of its samples.
    """

    path: Path
    whole: Place
    weight: float
    is_first: bool
    is_last: bool
    samples: int


class Accumulation:
    """The gradients of the parts of a step.

    Args:
        observation: Knows the batches.
        steps: Know the optimizers.
        stored: The facts of the stored run.
        stop: Ends the run with a reason; it does not return.
    """

    def __init__(
        self,
        observation: Observation,
        steps: Steps,
        stored: RankFacts,
        stop: Callable[[str], None],
    ) -> None:
        self._observation, self._steps, self._stored = observation, steps, stored
        self._stop = stop
        self._sums: WeakIdKeyDictionary = WeakIdKeyDictionary()  # gradients by parameter
        self._parts: dict[Place, Part] = {}  # by place in this run
        self._is_held = False

    def install(self) -> None:
        """Register the hooks. Must precede those of the steps."""
        self._steps.weight = self._weight
        self._steps.is_held = lambda: self._is_held
        self._steps.clipping.skips = self._skips_clipping
        on_step(before=self._before_step)

    def add_part(self, place: Place, part: Part) -> None:
        """Note which part of which batch a loader returns next, at a place of this run."""
        self._parts[place] = part

    def _part_of(self, batches: list[int]) -> Part | None:
        """Return the part that the last of some batches of this run is."""
        if not batches:
            return None
        one = self._observation.facts.batches[batches[-1]]
        return self._parts.get((one.loader, one.pass_number, one.number))

    def _weight(self, backward: BackwardFacts) -> float:
        """Return the weight of a backward in the gradient of the global batch."""
        parts = [self._part_of([at]) for at in backward.batches]
        weights = {part.weight for part in parts if part is not None}
        if len(weights) > 1:
            self._stop("a backward of several batches of different sizes can't be accumulated")
        if not weights or _is_sum(backward):
            return 1.0
        return weights.pop()

    def _is_complete(self, optimizer: int) -> bool:
        """Return whether the last backward was that of the last part of the optimizer's step."""
        part = self._part_of(self._observation.last_batches)
        count = self._steps.count_of_key(optimizer)
        stored = next(
            (x for x in self._stored.steps if (x.optimizer, x.index) == (optimizer, count)), None
        )
        if stored is None:
            return True  # the replay ends with this step
        batches = [at for one in stored.backwards for at in one.batches]
        if part is None or not batches:
            self._stop("the batches of a step are not known, so they can't be accumulated")
            return True
        last = self._stored.batches[batches[-1]]
        return part.is_last and part.whole == (last.loader, last.pass_number, last.number)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Hold a step back, or give it the sum of all parts."""
        if not self._observation.is_observed:
            return None
        changed = self._run_closure(optimizer, args, kwargs)
        self._observation.guarded(_HOOK, self._hold_or_merge)(optimizer)
        return changed

    def _run_closure(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Call the step's closure; return the arguments with its result in its place."""
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            return None
        if type(optimizer).__name__ == "LBFGS":
            self._stop("LBFGS computes gradients several times in a step")
        with torch.enable_grad():
            loss = closure()
        rest = {name: value for name, value in kwargs.items() if name != "closure"}
        return (args[0], lambda: loss, *args[2:]), rest

    def _hold_or_merge(self, optimizer: Optimizer) -> None:
        if len({one.optimizer for one in self._stored.steps}) > 1:
            self._stop("the script has several optimizers, whose steps depend on each other")
        self._is_held = not self._is_complete(self._steps.key_of(optimizer))
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if self._is_held:
                    self._collect(parameter)
                else:
                    self._merge(parameter)

    def _collect(self, parameter: torch.Tensor) -> None:
        if parameter.grad is None:
            return
        if parameter in self._sums:
            self._sums[parameter].add_(parameter.grad)
        else:
            self._sums[parameter] = parameter.grad.detach().clone()
        parameter.grad = None

    def _merge(self, parameter: torch.Tensor) -> None:
        held = self._sums.pop(parameter, None)
        if held is None:
            return
        if parameter.grad is None:
            parameter.grad = held
        else:
            with torch.no_grad():
                parameter.grad.add_(held)

    def _skips_clipping(self, parameters: list[torch.Tensor]) -> bool:
        """Return whether gradients are not complete yet; complete those that are to be clipped."""
        if not self._is_complete(0 if not self._stored.steps else self._stored.steps[0].optimizer):
            return True
        for parameter in parameters:
            self._merge(parameter)
        return False


def _is_sum(backward: BackwardFacts) -> bool:
    """Return whether the loss is a sum over samples that the script does not divide."""
    if backward.reduction != "sum" or backward.loss is None:
        return False
    return math.isclose(backward.root / backward.scale, backward.loss, rel_tol=1e-5)


def weights_of(samples: list[int]) -> list[float]:
    """Return the weight of each part from its number of samples; equal ones if none has any."""
    total = math.fsum(samples)
    return [one / total if total else 1 / len(samples) for one in samples]
