"""The part of ``World`` that distributes models: ``world.distribute`` and ``world.deferred``."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from ...parallel.data import check_accumulate
from ...parallel.deferred import Materialization, deferred, is_deferred
from ...parallel.distribute import distribute_model
from ...parallel.recomputation import recompute_blocks
from ...parallel.sharded.layouts import parse_request
from ..optimizer_step import OptimizerSteps
from ..progress import Progress

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)  # noqa: E741  the type of the optimizer, which is returned


class ModelDistribution:
    """Distribute the models of a world. ``World`` sets the attributes."""

    size: int
    device: torch.device
    _dtype: torch.dtype | None
    _progress: Progress
    _training: OptimizerSteps

    def deferred(self) -> AbstractContextManager[None]:
        """Return a context in which models are built without memory: on the device "meta".

        ``world.distribute`` then computes the parameters and buffers, with the numbers of an
        ordinary construction. It takes a second initialization, because the generator has to draw
        all random numbers once in the context and once in ``world.distribute``.

        Raises:
            ValueError: In the context: code that reads the value of a tensor (``.item()``), or
                draws from a generator of its own.
        """
        return deferred()

    @overload
    def distribute(self, model: M, *, accumulate: int = 1, **options: Any) -> M: ...
    @overload
    def distribute(
        self, model: M, optimizer: O, *, accumulate: int = 1, **options: Any
    ) -> tuple[M, O]: ...
    def distribute(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        *,
        accumulate: int = 1,
        layout: str = "data",
        blocks: Sequence[str] | None = None,
        shard_over: str = "job",
        offload: str | None = None,
        recompute: str | None = None,
        memory_budget: float | None = None,
        recomputed_blocks: Sequence[str] | None = None,
        **options: Any,
    ) -> Any:
        """Distribute ``model``; return it, or ``(model, optimizer)`` if one is given.

        Parameters and buffers of rank 0 are broadcast to all ranks; ``world.backward`` averages
        gradients. The optimizer stays the same object.

        Args:
            accumulate: Number of batches of ``world.batches`` whose gradients are averaged for one
                step of this model; only the last of them synchronizes. The last batches of a pass
                form a smaller group; a loop that is left inside a group (``break``) discards its
                gradients.
            layout: "data" (DistributedDataParallel), or "zero1", "zero2" or "zero3", which shard
                optimizer states, gradients and parameters over the ranks.
            blocks: Names of modules, or of their classes, that are gathered as a whole.
            shard_over: "job", or "host" to shard within each host, and to replicate between hosts.
            offload: "parameters" keeps all shards of a GPU's model in the host's memory.
            recompute: "blocks" keeps only the inputs of repeated blocks, and computes their
                activations again in backward. "selective" also keeps products of matrices,
                convolutions and attention. "auto" chooses for each block in the first forward.
            memory_budget: For "auto": GiB of activations that the blocks may take.
            recomputed_blocks: Names of modules or classes. Default: repeated modules.
            options: Those of DistributedDataParallel, such as ``find_unused_parameters=True``;
                ``mp_policy`` of ``fully_shard`` for the other layouts.

        Raises:
            ValueError: An unknown layout or option, ``accumulate`` below 1, or a model, optimizer
                or block that can't be sharded, or a block or budget that does not fit the model.
                The first forward raises it if nothing meets the budget.
        """
        check_accumulate(accumulate)
        request = parse_request(layout, blocks, shard_over, offload, self.device.type, options)
        say = self._progress.say_once
        recompute_blocks(model, recompute, memory_budget, recomputed_blocks, say)
        if is_deferred(model):
            Materialization(model).run()
        where = (self.device, self._dtype)
        distributed = distribute_model(model, optimizer, *where, request, options)
        self._training.add_model(distributed, accumulate)
        if optimizer is None:
            return distributed
        self._training.add_optimizer(optimizer)
        return distributed, optimizer
