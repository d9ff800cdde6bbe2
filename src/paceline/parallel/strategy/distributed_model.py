"""What the training loop may ask of a model, in any layout.

Strategies wrap each other: what one does not define, it passes on to the model inside. The
innermost one is a model of one process.
"""

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ...optim.gradients import has_gradients

if TYPE_CHECKING:
    from ...optim.local_sgd import LocalSGD
    from .training_step import TrainingStep


Index = tuple[int, ...]


class Part(NamedTuple):
    """Which part of a whole tensor a rank holds as a plain tensor.

    Attributes:
        whole: Shape of the whole tensor.
        offset: Where the part begins in it.
        shape: Shape of the part.
        dim: Of a part that is not contiguous, the dim of which it has something in each block.
        blocks: Number of equal blocks of that dim, such as the gates of a recurrent layer.
    """

    whole: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    dim: int = 0
    blocks: int = 1

    def slabs(self, offset: Index, shape: Index) -> Iterator[tuple[Index, tuple[slice, ...]]]:
        """Yield the contiguous parts of a range of this part.

        Each one is its offset in the whole tensor, and its place in the range.

        Args:
            offset: Where the range begins in this part.
            shape: Shape of the range.
        """
        if self.blocks == 1:
            first = tuple(a + b for a, b in zip(self.offset, offset, strict=True))
            yield first, (slice(None),) * len(shape)
            return
        size, stride = self.shape[self.dim] // self.blocks, self.whole[self.dim] // self.blocks
        begin, end = offset[self.dim], offset[self.dim] + shape[self.dim]
        for block in range(begin // size, -(-end // size)):
            low, high = max(begin, block * size), min(end, (block + 1) * size)
            begins = [a + b for a, b in zip(self.offset, offset, strict=True)]
            begins[self.dim] = self.offset[self.dim] + block * stride + low - block * size
            place = [slice(None)] * len(shape)
            place[self.dim] = slice(low - begin, high - begin)
            yield tuple(begins), tuple(place)


class DistributedModel:
    """A model in a layout, on one rank.

    Attributes:
        module: What this rank computes with.
        inner: The model without the last strategy; None for a model of one process.
    """

    def __init__(self, module: nn.Module, inner: "DistributedModel | None" = None) -> None:
        self.module, self.inner = module, inner

    @property
    def called(self) -> nn.Module:
        """What the script calls: ``module``, unless a strategy has put another one before it."""
        if self.inner is None or self.inner.called is self.inner.module:
            return self.module
        return self.inner.called

    # names and parameters

    @property
    def plain(self) -> nn.Module:
        """The script's module; its ``state_dict`` has the names of checkpoints."""
        return self.module if self.inner is None else self.inner.plain

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of this rank as optimizers hold them, at any time of a step.

        Names are those of the whole model, the same in each layout.
        """
        if self.inner is None:
            return dict(self.module.named_parameters())
        return self.inner.parameters()

    @property
    def ignored_parameters(self) -> Collection[str]:
        """Names of parameters whose gradients are not synchronized."""
        return () if self.inner is None else self.inner.ignored_parameters

    def parted_axes(self, name: str) -> frozenset[str]:
        """Return the axes of the mesh along which ranks hold other parameters than this one.

        Along all other axes ranks hold equal copies. Axes over which a DTensor is sharded are not
        in it. The norm of all gradients is summed over these axes.
        """
        return frozenset() if self.inner is None else self.inner.parted_axes(name)

    def is_first_copy(self, name: str) -> bool:
        """Return whether this rank counts for a parameter of ``parted_axes``.

        False where an earlier rank along these axes holds a copy, as of tied parameters.
        """
        return True if self.inner is None else self.inner.is_first_copy(name)

    def axes_of_states(self, name: str) -> frozenset[str]:
        """Return the axes along which ranks hold other optimizer states than for this parameter.

        They are those of ``parted_axes``, unless states alone are sharded.
        """
        inner = frozenset() if self.inner is None else self.inner.axes_of_states(name)
        return self.parted_axes(name) | inner

    def holds_states(self, name: str) -> bool:
        """Return whether this rank has the optimizer states of a parameter."""
        return True if self.inner is None else self.inner.holds_states(name)

    @property
    def is_parted(self) -> bool:
        """Whether ranks hold other parameters than this one. The same on all ranks."""
        return any(self.parted_axes(name) for name in self.parameters())

    def part_of(self, name: str) -> Part | None:
        """Return which part this rank holds of a tensor of the whole model's ``state_dict``.

        None: all of it, or a DTensor, which knows its part.
        """
        return None if self.inner is None else self.inner.part_of(name)

    @property
    def rules(self) -> tuple[tuple[str, str], ...]:
        """The rules by which modules are divided (``Layout.rules``), given or found."""
        return () if self.inner is None else self.inner.rules

    @property
    def holds_copied_shards(self) -> bool:
        """Whether several ranks hold copies of a shard. The same on all ranks."""
        return False if self.inner is None else self.inner.holds_copied_shards

    def block_of(self, name: str) -> str:
        """Return the block that a parameter is gathered with; "" if it is not gathered."""
        return "" if self.inner is None else self.inner.block_of(name)

    # gradients and buffers

    @property
    def is_distributed(self) -> bool:
        """Whether the model's gradients are exchanged between ranks."""
        return False if self.inner is None else self.inner.is_distributed

    @property
    def is_sharded(self) -> bool:
        """Whether optimizers hold shards of the parameters."""
        return False if self.inner is None else self.inner.is_sharded

    @property
    def has_collective_forward(self) -> bool:
        """Whether ranks must run the same number of forwards, also without gradients."""
        return False if self.inner is None else self.inner.has_collective_forward

    def set_gradient_sync(self, enabled: bool) -> None:
        """Set whether the next forward and backward synchronize gradients, as ``no_sync``."""
        if self.inner is not None:
            self.inner.set_gradient_sync(enabled)

    def set_buffer_sync(self, enabled: bool) -> None:
        """Set whether forwards broadcast the first data rank's buffers first.

        It is disabled where ranks run different numbers of forwards. Disabling broadcasts them one
        last time, on all ranks together.
        """
        if self.inner is not None:
            self.inner.set_buffer_sync(enabled)

    def has_gradients(self) -> bool:
        """Return whether the model has gradients that wait for a step, exchanged or not."""
        if self.inner is None:
            return has_gradients(self.module.parameters())
        return self.inner.has_gradients()

    def discard_gradients(self) -> None:
        """Discard the gradients, also those that no exchange has taken yet."""
        if self.inner is None:
            self.module.zero_grad(set_to_none=True)
        else:
            self.inner.discard_gradients()

    def has_run(self) -> bool:
        """Return whether a forward has run after which the module may hold whole parameters."""
        return False if self.inner is None else self.inner.has_run()

    @property
    def local_sgd(self) -> "LocalSGD | None":
        """How the ranks train independently between averages, if they do."""
        return None if self.inner is None else self.inner.local_sgd

    # errors

    def name_nonfinite(self, exchanged: torch.Tensor) -> list[str]:
        """Return the parameters with elements that are not finite in an exchanged tensor."""
        return [] if self.inner is None else self.inner.name_nonfinite(exchanged)

    def explain(self, error: BaseException) -> str | None:
        """Return the cause of an error and what to do; None for an error of another kind."""
        return None if self.inner is None else self.inner.explain(error)

    # a step

    def place_batch(self, batch: Any) -> Any:
        """Return the part of its data rank's batch that this rank computes with."""
        return batch if self.inner is None else self.inner.place_batch(batch)

    def run_step(self, step: "TrainingStep") -> torch.Tensor:
        """Run forward, loss and backward of one batch.

        Returns:
            The mean loss of this data rank's samples, the same on all ranks that share them.
        """
        if self.inner is not None:
            return self.inner.run_step(step)
        mean, weight = step.loss_of(step.call())
        with step.backward(mean):
            step.scaled(mean, weight).backward()
        return mean.detach()
