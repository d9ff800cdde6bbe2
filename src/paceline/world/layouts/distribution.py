"""The part of ``World`` that distributes models: ``world.distribute`` and ``world.deferred``."""

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from ...optim.norms import convert_norms
from ...parallel.data import check_accumulate
from ...parallel.deferred import deferred
from ...parallel.distribute import distribute_model
from ...parallel.memory.out_of_memory import skeleton_of, watch_model
from ...parallel.memory.setup import ModelSetup, ScriptLimits
from ...parallel.offload import check_offload, offload_states
from ...parallel.recompute.recomputation import recompute_blocks
from ...parallel.sharded.layouts import ShardingRequest, parse_request
from ...plurals import counted
from ...record.ring.memory_sampler import MemorySampler
from ...record.ring.recorder import Recorder, now
from ..collectives import Collectives
from ..optimizer_step import OptimizerSteps
from ..progress import Progress
from .automatic import MemoryOptions, layout_problems, resolve_automatic
from .tensor_bytes import tensor_bytes

if TYPE_CHECKING:  # it imports much that only paceline run --show-memory needs
    from ...parallel.memory.survey import MemorySurvey

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)  # noqa: E741  the type of the optimizer, which is returned


class ModelDistribution:
    """Distribute the models of a world. ``World`` sets the attributes."""

    size: int
    device: torch.device
    _dtype: torch.dtype | None
    _progress: Progress
    _training: OptimizerSteps
    _collectives: Collectives
    _recorder: Recorder
    _survey: "MemorySurvey | None"
    _layouts: list[MemoryOptions]  # of the models

    def deferred(self) -> AbstractContextManager[None]:
        """Return a context in which models are built without memory: on the device "meta".

        ``world.distribute`` then computes the parameters and buffers, with the numbers of an
        ordinary construction. In a sharded layout no rank holds more than its shards and one
        tensor. It takes a second initialization, because the generator has to draw all random
        numbers once in the context and once in ``world.distribute``.

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
        example_inputs: Any = None,
        norm: str = "local",
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
                optimizer states, gradients and parameters over the ranks. "auto" takes the fastest
                layout whose predicted memory fits, with recompute="blocks" if none fits without.
            blocks: Names of modules, or of their classes, that are gathered as a whole.
            shard_over: "job", or "host" to shard within each host, and to replicate between hosts.
            offload: "optimizer" keeps the optimizer's states in the host's memory, and
                "parameters" all shards of a GPU's model.
            recompute: "blocks" keeps only the inputs of repeated blocks, and computes their
                activations again in backward. "selective" also keeps products of matrices,
                convolutions and attention. "auto" chooses for each block in the first forward;
                on a GPU it also moves activations to the host's memory, where that is faster.
            memory_budget: For "auto": GiB of memory that the training may take on each rank.
                Default: the memory of the GPU, or the rank's share of the node's free memory;
                for recompute="auto" 80 % of what the first forward leaves of it.
            recomputed_blocks: Names of modules or classes. Default: repeated modules.
            example_inputs: For layout="auto": arguments of a forward in a training step, as a
                tensor, a tuple or a dict. Only shapes and dtypes are used. Default: activations
                are left out of the prediction.
            norm: Statistics of batch normalization: "local" (of a rank's batch), "sync" (of all
                ranks' batches, on CPUs too: the result is that of one process), "ghost:N" (of each
                N samples of a rank), or "group:N": a group normalization with N groups.
            options: Those of DistributedDataParallel, such as ``find_unused_parameters=True``;
                ``mp_policy`` of ``fully_shard`` for the other layouts.

        Raises:
            ValueError: An unknown layout or option, ``accumulate`` below 1, or a model, optimizer
                or block that can't be sharded, or a block or budget that does not fit the model.
                The first forward raises it if nothing meets the budget.
        """
        check_accumulate(accumulate)
        from ...knobs.loading.batch import requested_accumulation  # not needed to start

        accumulate *= requested_accumulation()
        check_offload(offload, optimizer)
        self._convert_norms(model, norm)
        setup = ModelSetup(
            model, optimizer, self.device, self._dtype, blocks, recomputed_blocks, accumulate
        )

        def parse(one: str) -> ShardingRequest | None:
            return parse_request(one, blocks, shard_over, offload, self.device.type, options)

        if self._survey is not None:  # paceline run --show-memory
            problems = layout_problems(setup, parse)
            limits = ScriptLimits(recompute, memory_budget, shard_over == "host", problems)
            self._survey.add(setup, limits)
            return self._add(setup, model)
        sharding_ranks = self.size
        if shard_over == "host":
            sharding_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        asked = MemoryOptions(layout, recompute, memory_budget)
        how = (example_inputs, sharding_ranks, parse, self._collectives.gather)
        memory = resolve_automatic(asked, setup, *how)
        request, say = parse(memory.layout), self._progress.say_once
        if memory.message:
            say(memory.message)
        recompute_blocks(
            model, memory.recompute, memory.memory_budget, recomputed_blocks, say, memory.held_gib
        )
        is_sharded = request is not None and self.size > 1
        setup = replace(setup, recomputes=memory.recompute is not None)
        skeleton = skeleton_of(setup) if is_sharded else replace(setup, autocast_dtype=None)
        where = (self.device, self._dtype)
        distributed = distribute_model(model, optimizer, *where, request, options)
        if offload == "optimizer" and optimizer is not None:
            offload_states(optimizer, self.device)
        self._layouts.append(memory)
        if skeleton is not None:
            known = memory.layout if is_sharded else "data"
            watch_model(skeleton, distributed, known, sharding_ranks)
        return self._add(setup, distributed)

    def _convert_norms(self, model: nn.Module, norm: str) -> None:
        names = convert_norms(model, norm, lambda: self._training.is_filler)
        if norm.startswith("group") and names:
            self._progress.warn_once(
                f"world.distribute: norm={norm!r} has replaced the batch normalization of "
                f"{counted(len(names), 'layer')} by group normalization: weights that were trained "
                "with batch normalization do not fit. HINT: train from the beginning"
            )

    def _record_memory(self) -> None:
        """Write the bytes of models and optimizers into the record."""
        if not self._layouts or not self._recorder.enabled:
            return
        MemorySampler(self._recorder).sample(now())  # short runs have no other sample
        predicted = [one.predicted_bytes for one in self._layouts]
        # of one model: the peaks of several need not be at the same time
        peak = predicted[0] if len(predicted) == 1 else None
        names = [one.layout for one in self._layouts]
        training = self._training
        self._recorder.update_header(
            tensors=tensor_bytes(training.models, training.optimizers, names, peak, self.device)
        )

    def _add(self, setup: ModelSetup, distributed: nn.Module) -> Any:
        """Add a distributed model and its optimizer; return what ``distribute`` returns."""
        self._training.add_model(distributed, setup.accumulate)
        if setup.optimizer is None:
            return distributed
        self._training.add_optimizer(setup.optimizer)
        return distributed, setup.optimizer
