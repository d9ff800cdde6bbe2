"""Find the lines of the script that change gradients after a backward, and between steps
parameters, learning rates, averaged copies of the model and tensors of the script.
"""

from collections.abc import Iterator
from typing import Any

import torch

from ..line_tracer import LineTracer
from ..observation import Observation
from ..optimization.steps import Steps
from .averages import Averages
from .own_tensors import OwnTensors

_HOOK = "the lines that change gradients"
MAX_EVENTS = 4000  # lines that are looked at, in all steps
MAX_EVENTS_PER_STEP = 400
MAX_TENSORS = 6  # of an optimizer
MAX_ELEMENTS = 1 << 15  # of a tensor, evenly spaced


class ChangeLines:
    """Looks after each line between a backward and the next forward, in the first steps.

    Args:
        observation: Receives the lines.
        steps: Know the optimizers.
        averages, tensors: Know the averaged copies, and tensors of the script.
    """

    def __init__(
        self, observation: Observation, steps: Steps, averages: Averages, tensors: OwnTensors
    ) -> None:
        self._observation, self._steps = observation, steps
        self._averages, self._tensors = averages, tensors
        self._gradients = LineTracer(self._gradient_states, self._add, MAX_EVENTS_PER_STEP)
        self._values = LineTracer(self._value_states, self._add, MAX_EVENTS_PER_STEP)
        self._left = MAX_EVENTS

    def after_backward(self) -> None:
        """Begin to look at the gradients."""
        if self._left > 0 and not self._steps.is_stepping:
            self._gradients.start()

    def after_step(self) -> None:
        """Begin to look at parameters and averaged copies."""
        if self._left > 0:
            self._averages.watch()
            self._tensors.watch()
            self._values.start()

    def after_batch(self) -> None:
        """Go on after a batch was read."""
        if self._left > 0 and self._observation.step:
            self._values.start()

    def stop(self, *_: Any) -> None:
        """End to look: something else begins."""
        for tracer in (self._gradients, self._values):
            if tracer.is_running:
                tracer.stop()
                self._left -= tracer.events

    def _add(self, name: str, line: str, site: str) -> None:
        kind, _, rest = name.partition(" ")
        if kind == "average":
            self._averages.lines.setdefault(rest, list(dict.fromkeys([site, line])))
            return
        if kind == "tensor":
            self._tensors.lines.setdefault(rest, list(dict.fromkeys([site, line])))
            return
        if kind == "rate":
            facts = list(self._steps.optimizers.values())[int(rest)]
            if line not in facts.rate_lines:
                facts.rate_lines.append(line)
            return
        lines = self._observation.change_lines[kind]
        if line not in lines:
            lines.append(line)

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for key, optimizer in enumerate(list(self._steps.optimizers)):
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            every = max(-(-len(parameters) // MAX_TENSORS), 1)
            for at, parameter in enumerate(parameters[::every]):
                yield f"{key}.{at}", parameter

    def _gradient_states(self) -> dict[str, Any]:
        found = {}
        for name, parameter in self._parameters():
            state = fingerprint(parameter.grad)
            if state is not None and state[1]:  # gradients that are set to zero are not changed
                found[f"gradient {name}"] = state
        return found

    def _value_states(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            f"parameter {name}": fingerprint(one) for name, one in self._parameters()
        }
        for key, optimizer in enumerate(list(self._steps.optimizers)):
            found[f"rate {key}"] = [group.get("lr") for group in optimizer.param_groups]
        found |= {f"tensor {name}": fingerprint(one) for name, one in self._tensors.watched()}
        found |= {f"average {n}": list(map(fingerprint, t)) for n, t in self._averages.watched()}
        return found


def fingerprint(tensor: Any) -> tuple[float, float] | None:
    """Return two numbers that change with the values of a tensor, or of this rank's shard."""
    local = getattr(tensor, "_local_tensor", tensor)
    if not isinstance(local, torch.Tensor) or local.is_sparse or local.is_meta:
        return None
    with torch.no_grad():
        values = local.detach()
        while not values.is_contiguous() and values.ndim:
            values = values[0]
        values = values.reshape(-1)[:: max(values.numel() // MAX_ELEMENTS, 1)].float()
        return float(values.sum()), float(values.abs().sum())
