"""Predicted memory of the stages of a pipeline."""

from collections.abc import Mapping, Sequence

import torch
from torch.optim import SGD, Optimizer

from .partition import Partition, Unit

# of each micro-batch, put together, and an intermediate tensor of the loss
COMPARED_OUTPUTS = 3


class StageMemory:
    """The bytes that a stage needs: parameters, gradients, optimizer states and activations.

    Args:
        tensors: Parameters and buffers of the whole model, by name.
        held: Micro-batches whose activations each stage holds at the same time.
        optimizer: None if the script has none.
        shards: Replicas of a stage that hold parts of the optimizer's states.
        has_shards: Whether they hold shards of the parameters as well, beside the whole ones.
        outputs: Bytes of the outputs of a whole batch, which the last stage has.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        held: Sequence[int],
        optimizer: Optimizer | None,
        shards: int = 1,
        has_shards: bool = False,
        outputs: float = 0.0,
    ) -> None:
        self._held, self._outputs = held, outputs
        # of a trained parameter: it, its gradient, its states
        copies = 2 + (_states(optimizer) + has_shards) / shards
        self._nbytes = {
            name: tensor.nbytes * (copies if tensor.requires_grad else 1)
            for name, tensor in tensors.items()
        }

    def of(self, stage: int, units: Sequence[Unit]) -> int:
        """Return the predicted bytes of a stage with these units."""
        names = {name for unit in units for name in unit.tensors}
        needed = self._held[stage] * sum(unit.activations for unit in units)
        if stage == len(self._held) - 1:
            # all outputs are kept where the loss of a batch is compared with its micro-batches'
            needed = max(needed + self._outputs, COMPARED_OUTPUTS * self._outputs)
        return int(sum(self._nbytes[n] for n in names) + needed)

    def of_stages(self, partition: Partition) -> list[int]:
        """Return the predicted bytes of each stage."""
        return [self.of(stage, units) for stage, units in enumerate(partition.units)]


def _states(optimizer: Optimizer | None) -> int:
    """Return how many tensors as large as a parameter an optimizer keeps for it, at most."""
    if optimizer is None:
        return 0
    if isinstance(optimizer, SGD):
        return int(any(group["momentum"] for group in optimizer.param_groups))
    return 2  # of Adam


def held_micro_batches(schedule: str, stages: int, count: int) -> list[int]:
    """Return how many micro-batches each stage holds between their forward and their backward."""
    if schedule == "gpipe":
        return [count] * stages
    return [min(stages - stage, count) for stage in range(stages)]
