"""One pass of a training loop over a loader, and warnings where it does not train."""

from collections.abc import Callable

import torch

from ...parallel.accumulation import Batch, LoadedBatch
from ...parallel.strategy.distributed_model import DistributedModel
from ...plurals import counted
from ...record.hooks.error_messages import script_line
from ..optimizer_step import OptimizerSteps


class TrainingPass:
    """One pass of ``world.batches`` over a loader that is not one of validation.

    Attributes:
        name: The loader, for messages.
        line: The script's line with the loop.
        batch: The current batch; None where gradients are disabled.
        warn: Prints a warning.
    """

    def __init__(self, training: OptimizerSteps, name: str, warn: Callable[[str], None]) -> None:
        self.training, self.name, self.line = training, name, script_line()
        self.batch: Batch | None = None
        self.warn = warn
        self._batches = 0
        self._counts_at_start = self._counts()
        self._models_at_start = self._models_with_gradients()  # those of a loop around this one
        self._step_at_begin = 0
        self._forward_at_begin = 0
        self._mode = ""  # of the model in the first batch, if it only computed a forward

    def _counts(self) -> tuple[int, int, int]:
        """Return the numbers of backwards, of ``world.step`` and of steps until now."""
        training = self.training
        return training.backwards, training.step_calls, training.phases.known_steps

    def begin(self, loaded: LoadedBatch) -> None:
        """Begin a batch."""
        phases = self.training.phases
        self._step_at_begin, self._forward_at_begin = phases.recorder.step, phases.forward_end
        self.batch = None
        if self._batches == 0 and self.training.unstepped_loop:
            self.warn(
                f"the script left the loop over {self.training.unstepped_loop} between "
                f"world.backward and world.step, so its gradients are added to those of the loop "
                f"over {self.name} ({self.line}). HINT: call optimizer.zero_grad() after the first "
                "loop, or break after world.step"
            )
            self.training.unstepped_loop = ""
        if torch.is_grad_enabled():
            self.batch = self.training.begin(loaded)

    def end(self) -> None:
        """End a batch after the script's part of the loop."""
        self._batches += 1
        if self._batches == 1:
            self._mode = self._mode_of_forward()
        if self.batch is None:
            return
        stepped = self.training.phases.recorder.step > self._step_at_begin
        if self.batch.weight != 1.0 and not self.batch.backwards and stepped:
            self.warn(
                f"a batch of the loop over {self.name} ({self.line}) is uneven or accumulated, but "
                "loss.backward() did not weight its gradient. HINT: call world.backward(loss) "
                "instead"
            )
        self.training.end(self.batch)

    def _mode_of_forward(self) -> str:
        """Return the mode of a forward without backward in this batch; "" if there was none, or
        the models are in eval mode.
        """
        training = self.training
        is_forward = training.phases.forward_end not in (0, self._forward_at_begin)
        if not is_forward or not any(model.called.training for model in training.models):
            return ""
        return "in training mode" + (", with gradients on" if torch.is_grad_enabled() else "")

    def leave(self, warn: Callable[[str], None]) -> None:
        """Note that the script leaves the loop before its end; warnings then go to ``warn``."""
        self.warn = warn
        if self.batch is None or not self.batch.backwards:
            return
        if any(model not in self._models_at_start for model in self._models_with_gradients()):
            self.training.unstepped_loop = f"{self.name} ({self.line})"

    def end_batch(self) -> bool:
        """End the current batch and its group; return whether gradients were discarded."""
        if self.batch is not None:
            self.training.end(self.batch)
            self.batch = None
        discarded = self.training.accumulations.end_loop(self)
        if discarded:
            self.training.unstepped_loop = ""
            self.warn(
                f"the script left the loop over {self.name} ({self.line}) after {discarded} "
                "accumulated batches, and Paceline discards their gradients. HINT: leave the loop "
                "after a world.step that returned True"
            )
        return bool(discarded)

    def close(self) -> None:
        """End the pass, also where the script breaks out of the loop."""
        if self.end_batch():
            return
        backwards, *steps = (
            now - before for now, before in zip(self._counts(), self._counts_at_start, strict=True)
        )
        if any(steps) or self._models_with_gradients():
            return
        if backwards:
            self.warn(
                f"the loop over {self.name} ({self.line}) had {counted(backwards, 'backward')} and "
                "no step of an optimizer that Paceline knows. HINT: call world.step(optimizer) "
                "after each world.backward(loss)"
            )
        elif self._mode:
            self.warn(
                f"the loop over {self.name} ({self.line}) had no backward, and ran the model "
                f"{self._mode}. HINT: for a validation pass in eval mode and without gradients, "
                "use world.batches(world.shard(loader, every_sample_once=True))"
            )

    def _models_with_gradients(self) -> list[DistributedModel]:
        """Return the models whose gradients wait for a step."""
        return [model for model in self.training.models if model.has_gradients()]
