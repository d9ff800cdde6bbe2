"""The part of ``World`` that distributes models: ``world.distribute`` and ``world.deferred``."""

import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch import nn
from torch.optim import Optimizer

from ...comm.rehearsal.rehearsed_rank import is_rehearsed
from ...comm.shared.memory import sharing_domain
from ...cost.layout import HOST, Layout
from ...cost.layout_memory import LAYOUTS, LayoutChoice
from ...knobs.knob import requested
from ...knobs.layouts import LAYOUT, with_pipeline_settings
from ...optim.norms import convert_norms
from ...optim.whole_norms import local_part
from ...parallel.clipping import refuse_local_norms
from ...parallel.deferred import deferred
from ...parallel.distribute import distribute_model, strategies_for
from ...parallel.memory.out_of_memory import skeleton_of, watch_model
from ...parallel.memory.setup import ForwardInputs, ModelSetup, ScriptLimits
from ...parallel.memory_budget import GIB, budget_bytes
from ...parallel.mesh import Mesh
from ...parallel.offload import check_offload, offload_states
from ...parallel.pipeline.strategy import PIPELINE_OPTIONS
from ...parallel.placement import check_accumulate
from ...parallel.recompute.recomputation import blocks_to_recompute, recompute_blocks
from ...parallel.sharded.layouts import FULLY_SHARD_OPTIONS
from ...parallel.strategy.distributed_model import DistributedModel
from ...parallel.strategy.layout_arguments import parse_layout, with_arguments
from ...parallel.strategy.model_state import WholeModel
from ...parallel.strategy.parallel_strategy import DistributionRequest
from ...plurals import counted
from ...record.rank_places import set_places
from ...record.ring.header_schema import MAX_LAYOUT_CHARS, MAX_LAYOUTS_CHARS
from ...record.ring.memory_sampler import MemorySampler
from ...record.ring.recorder import Recorder, now
from ..collectives import Collectives
from ..loops.training_loops import TrainingLoops
from ..optimizer_step import OptimizerSteps
from ..progress import Progress
from ..training_state import TrainingState, share_random_states
from .inference import SampleParts

if TYPE_CHECKING:  # it imports much that only paceline run --show-memory needs
    from ...parallel.memory.survey import MemorySurvey

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)  # noqa: E741  the type of the optimizer, which is returned


# Bytes of a rank's models and optimizers, for the record at the end of a run.

_CPU = torch.device("cpu")


def tensor_bytes(
    models: Sequence[DistributedModel],
    optimizers: Sequence[Optimizer],
    layouts: Iterable[str],
    predicted_peak: int | None,
    device: torch.device = _CPU,
) -> dict[str, Any]:
    """Return the header field ``tensors``.

    Args:
        layouts: The layouts of the models.
        predicted_peak: Bytes; None if no layout was predicted.
        device: Where the rank computes. What lies in the host's memory instead is counted apart.
    """
    parameters = {p for model in models for p in model.parameters().values()}
    of_optimizers = [state for o in optimizers for state in o.state.values()]
    state_values = [s for state in of_optimizers if isinstance(state, dict) for s in state.values()]
    tensors: dict[str, Collection[torch.Tensor]] = {
        "parameters": parameters,
        "buffers": {b for model in models for b in model.module.buffers()},
        "gradients": {p for p in parameters if p.requires_grad},
        "optimizer_states": [s for s in state_values if isinstance(s, torch.Tensor)],
    }
    found: dict[str, Any] = {"layout": ", ".join(sorted(set(layouts)))[:MAX_LAYOUTS_CHARS]}
    found |= {name: _nbytes(group, device.type) for name, group in tensors.items()}
    if device.type != "cpu":
        # a state without dimensions, such as the number of steps, is on the host in any case
        offloaded = sum(_nbytes([t for t in group if t.dim()], "cpu") for group in tensors.values())
        found |= {"offloaded": offloaded} if offloaded else {}
    if predicted_peak is not None:
        found["predicted_peak"] = predicted_peak
    if torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        found["device_peak"] = max(map(torch.cuda.max_memory_allocated, devices))
    return found


def _nbytes(tensors: Iterable[torch.Tensor], device_type: str) -> int:
    """Return the bytes of this rank's parts that lie on a type of device."""
    parts = map(local_part, tensors)
    return sum(part.nbytes for part in parts if part.device.type == device_type)


# The arguments of ``world.distribute`` that say how a model is divided.


@dataclass(frozen=True)
class LayoutArguments:
    """The arguments as the script gives them.

    Attributes:
        device: The device on which the rank computes.
        compare: Whether operations on parts are compared with whole ones.
    """

    layout: str | Layout
    mesh: Mesh
    device: torch.device
    blocks: Sequence[str] | None
    shard_over: str
    offload: str | None
    recompute: str | None
    memory_budget: float | None
    options: dict[str, Any]
    compare: bool = True

    def of_settings(self) -> "LayoutArguments":
        """Return the arguments with the layout of the settings (``paceline run --settings``).

        What it does not have of the script's arguments is left out. Settings of pipelines change
        its options.
        """
        layout_of_settings = requested(LAYOUT)
        found = self if layout_of_settings is None else self._in_place_of_script(layout_of_settings)
        layout = parse_layout(found.layout)
        if layout is None:
            return found
        layout, options = with_pipeline_settings(layout, found.options)
        return replace(found, layout=layout, options=options)

    def _in_place_of_script(self, requested: Layout) -> "LayoutArguments":
        shards = bool(requested.zero)
        kind = "shards" if shards else "pipeline" if requested.pp != 1 else "replicas"
        has = [name for name in self.options if _kind_of_option(name) == kind]
        return replace(
            self,
            layout=requested,
            blocks=self.blocks if shards else None,
            shard_over="job",
            offload=None,
            recompute=None,
            memory_budget=self.memory_budget if requested.recompute == "auto" else None,
            options={name: self.options[name] for name in has},
        )

    @property
    def known(self) -> Layout | None:
        """The layout with all arguments; None for "auto"."""
        layout = parse_layout(self.layout)
        return None if layout is None else self.merged(layout)

    def merged(self, layout: Layout) -> Layout:
        """Return a layout with the script's other arguments."""
        return with_arguments(layout, self.shard_over, self.offload, self.recompute)

    def request(self, layout: Layout) -> DistributionRequest:
        """Return how the model would be distributed in a layout."""
        merged = self.merged(layout)
        common = (self.mesh, self.device, self.blocks, self.options)
        return DistributionRequest(merged, *common, compare=self.compare)

    def check(self, layout: Layout, setup: ModelSetup) -> None:
        """Raise ValueError where the model or an argument does not fit a layout."""
        for strategy in strategies_for(self.request(layout)):
            strategy.check(setup.model, setup.optimizer)

    @property
    def is_per_node(self) -> bool:
        """Whether each node holds a replica."""
        known = self.known
        return self.shard_over == HOST or (known is not None and known.shards == HOST)


def _kind_of_option(name: str) -> str:
    """Return which layouts have an option."""
    if name in PIPELINE_OPTIONS:
        return "pipeline"
    return "shards" if name in FULLY_SHARD_OPTIONS else "replicas"


# ``layout="auto"`` and the budget of ``recompute="auto"``, from the predicted memory of a rank.

Check = Callable[[Layout, ModelSetup], None]  # raises ValueError where a layout does not fit
Gather = Callable[[Any, Any], list[Any]]  # a value of each rank, of this type


@dataclass(frozen=True)
class MemoryOptions:
    """Options of ``world.distribute`` that decide the memory of a rank.

    Attributes:
        layout: The layout; None for "auto".
        recompute: How blocks recompute.
        memory_budget: GiB that a rank may take, for ``recompute="auto"``.
        held_gib: The part of the budget that parameters, gradients and optimizer states take.
        message: Why "auto" has chosen the layout; else "".
        predicted_bytes: Peak of a rank with activations, if it was predicted.
    """

    layout: Layout | None
    recompute: str | None
    memory_budget: float | None
    held_gib: float = 0.0
    message: str = ""
    predicted_bytes: int | None = None


def resolve_automatic(
    options: MemoryOptions,
    setup: ModelSetup,
    example_inputs: Any,
    ranks: int,
    check: Check,
    gather: Gather,
) -> MemoryOptions:
    """Return the options with a layout, which has the recomputation. Collective for "auto".

    Args:
        options: The options of the script.
        ranks: Number of ranks over which the model would be sharded.

    Raises:
        ValueError: No layout fits, or the memory of the model can't be predicted.
    """
    layout, recompute, budget = options.layout, options.recompute, options.memory_budget
    message = ""
    predicted: int | None = None
    if layout is None:
        choice = _choose_layout(options, setup, example_inputs, ranks, check, gather)
        layout = choice.predicted.layout
        recompute = recompute or layout.recompute
        message = f"layout='auto': {choice.reason}"
        if example_inputs is not None:
            predicted = choice.predicted.memory.total
            message += ". The loss function is left out; paceline run --show-memory includes it"
        else:
            message += (
                ". Activations are left out. HINT: world.distribute(model, optimizer, "
                "layout='auto', example_inputs=(x,))"
            )
        budget = budget if recompute == "auto" else None
        layout = replace(layout, recompute=recompute)
    if recompute != "auto" or budget is None:  # without a budget, what the first forward leaves
        return MemoryOptions(layout, recompute, budget, message=message, predicted_bytes=predicted)
    from ...parallel.memory.choose import held_bytes

    check(layout, setup)  # a layout that does not fit is an error of its own
    gib = budget_bytes(budget, setup.device) / GIB
    held = held_bytes(setup, layout.without_options, ranks) / GIB
    return MemoryOptions(layout, recompute, gib, held, message, predicted)


def layout_problems(setup: ModelSetup, check: Check) -> dict[Layout, str]:
    """Return the layouts that the model or the other options of ``world.distribute`` rule out.

    Raises:
        ValueError: No layout is possible.
    """
    problems: dict[Layout, str] = {}
    for layout in LAYOUTS:
        try:
            check(layout, setup)
        except ValueError as error:
            problems[layout] = str(error)
    if len(problems) == len(LAYOUTS):
        raise ValueError(next(iter(problems.values())))
    return problems


def _choose_layout(
    options: MemoryOptions,
    setup: ModelSetup,
    example_inputs: Any,
    ranks: int,
    check: Check,
    gather: Gather,
) -> LayoutChoice:
    """Return the fastest layout that fits, the same on all ranks. Collective.

    Raises:
        ValueError: No layout fits, or the model's step can't be traced.
    """
    from ...parallel.memory.choose import choose_for_all_ranks, predict_setup

    problems = layout_problems(setup, check)
    usable = [layout for layout in LAYOUTS if layout not in problems]
    limit = budget_bytes(options.memory_budget, setup.device)
    inputs = ForwardInputs.parse(example_inputs)
    recompute = options.recompute if options.recompute in ("blocks", "selective") else None
    try:
        return choose_for_all_ranks(
            lambda: predict_setup(setup, inputs, ranks, recompute, usable), limit, gather
        )
    except ValueError as error:
        raise ValueError(f"world.distribute: layout='auto': {error}") from None


@contextmanager
def _named() -> Iterator[None]:
    """Name ``world.distribute`` in a ValueError about the layout."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"world.distribute: {error}") from None


class ModelDistribution(SampleParts):
    """Distribute the models of a world. ``World`` sets the attributes."""

    mesh: Mesh
    device: torch.device
    _dtype: torch.dtype | None
    _progress: Progress
    _training: OptimizerSteps
    _collectives: Collectives
    _recorder: Recorder
    _survey: "MemorySurvey | None"
    _layouts: list[MemoryOptions]  # of the models
    _loops: TrainingLoops
    _state: TrainingState

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
        layout: str | Layout = "data",
        blocks: Sequence[str] | None = None,
        shard_over: str = "job",
        offload: str | None = None,
        recompute: str | None = None,
        memory_budget: float | None = None,
        recomputed_blocks: Sequence[str] | None = None,
        example_inputs: Any = None,
        norm: str = "local",
        compare: bool = True,
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
                optimizer states, gradients and parameters over the ranks; "h2", "w2" or "d2", parts
                of each sample; a ``paceline.Layout`` or its text, such as "zero3/host + recompute".
                "auto" takes the fastest layout whose predicted memory fits, with recompute="blocks"
                if none fits without.
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
                are left out of the prediction. For a pipeline: stages follow the order of the
                forward. Default: the order in which modules were registered.
            norm: Statistics of batch normalization: "local" (of a rank's batch), "sync" (of all
                ranks' batches, on CPUs too: the result is that of one process), "ghost:N" (of each
                N samples of a rank), or "group:N": a group normalization with N groups.
            compare: Compare each operation on parts of tensors with the whole one, and the model
                with the undivided one, in the first forward of a layout with ``tp``.
            options: Those of DistributedDataParallel, such as ``find_unused_parameters=True``;
                ``mp_policy`` of ``fully_shard`` for the sharded layouts; ``balance`` for
                pipelines: names of the modules with which the stages after the first one begin, or
                "operations". Default: measured times, if there are ``example_inputs``.

        Raises:
            ValueError: An unknown layout or option, ``accumulate`` below 1, or a model, optimizer
                or block that can't be sharded, or a block or budget that does not fit the model.
                The first forward raises it if nothing meets the budget.
        """
        self._training.phases.begin()  # steps that the layout tries are not the script's
        check_accumulate(accumulate)
        from ...knobs.loading import requested_accumulation  # not needed to start

        accumulate *= requested_accumulation()
        arguments = LayoutArguments(
            layout=layout,
            mesh=self.mesh,
            device=self.device,
            blocks=blocks,
            shard_over=shard_over,
            offload=offload,
            recompute=recompute,
            memory_budget=memory_budget,
            options=options,
            compare=compare and not is_rehearsed(),  # whose values differ
        ).of_settings()
        known = arguments.known
        if known is not None:
            with _named():
                known.over(self.mesh.size if self._survey is None else self._survey.ranks)
            if norm == "sync" and known.divided_axes:
                raise ValueError(
                    f"world.distribute: norm='sync' is not implemented together with "
                    f"{known.divided_axes[0]} yet. HINT: norm='local'"
                )
            strategies_for(arguments.request(known))  # raises before anything is changed
        check_offload(known.offload if known is not None else offload, optimizer)
        self._convert_norms(model, norm)
        setup = ModelSetup(
            *(model, optimizer, self.device, self._dtype, arguments.blocks, recomputed_blocks),
            accumulate,
        )
        if self._survey is not None:  # paceline run --show-memory
            return self._trace(setup, arguments)
        return self._distribute(setup, arguments, example_inputs)

    def _trace(self, setup: ModelSetup, arguments: LayoutArguments) -> Any:
        assert self._survey is not None
        known = arguments.known
        recompute = known.recompute if known is not None else arguments.recompute
        problems = layout_problems(setup, arguments.check)
        limits = (arguments.memory_budget, arguments.is_per_node, problems)
        self._survey.add(setup, ScriptLimits(recompute, *limits))
        return self._add(setup, DistributedModel(setup.model))

    def _distribute(
        self, setup: ModelSetup, arguments: LayoutArguments, example_inputs: Any
    ) -> Any:
        known, say = arguments.known, self._progress.say_once
        recompute = known.recompute if known is not None else arguments.recompute
        memory_options = MemoryOptions(known, recompute, arguments.memory_budget)
        ranks = self._sharding_ranks(arguments)
        memory = resolve_automatic(
            memory_options, setup, example_inputs, ranks, arguments.check, self._collectives.gather
        )
        assert memory.layout is not None
        request = arguments.request(memory.layout)
        note = self._recorder.update_header
        request = replace(request, example_inputs=example_inputs, say=say, note=note)
        layout = request.layout
        self._arrange(layout)
        memory = replace(memory, layout=layout)
        if memory.message:
            say(memory.message)
        model, optimizer = setup.model, setup.optimizer
        recomputing = functools.partial(
            recompute_blocks,
            recompute=layout.recompute,
            memory_budget=memory.memory_budget,
            names=setup.recomputed_blocks,
            say_once=say,
            held_gib=memory.held_gib,
            is_part=bool(layout.divided_axes),
        )
        if not layout.divided_axes:
            recomputing(model)
        elif layout.recompute is not None:
            # a rank that has a part of the model can't see what others have
            blocks_to_recompute(model, layout.recompute, setup.recomputed_blocks, say)
        is_sharded = bool(layout.zero and not layout.divided_axes) and self.mesh.data_size > 1
        setup = replace(setup, recomputes=layout.recompute is not None)
        skeleton = skeleton_of(setup) if is_sharded else replace(setup, autocast_dtype=None)
        owned, whole = self._state.owned, None
        if layout.divided_axes:
            whole = WholeModel.of(model)
            if optimizer is not None:
                owned.note_optimizer(optimizer, model)
        distributed = distribute_model(
            *(model, optimizer, self._dtype, request),
            recomputing if layout.divided_axes else None,
        )
        if whole is not None:
            owned.note_model(distributed, whole)
        if layout.offload == "optimizer" and optimizer is not None:
            offload_states(optimizer, self.device)
        if distributed.rules:
            memory = replace(memory, layout=replace(layout, rules=distributed.rules))
        self._layouts.append(memory)
        if skeleton is not None and not layout.divided_axes:
            watch_model(skeleton, distributed.called, layout if is_sharded else Layout(), ranks)
        self._note_mesh()
        return self._add(setup, distributed)

    @property
    def layouts(self) -> list[Layout]:
        """The layouts of the models that were distributed, with the rules that divide them."""
        return [options.layout for options in self._layouts if options.layout is not None]

    def _arrange(self, layout: Layout) -> None:
        """Give the mesh the axes of a layout. Collective where it divides models or samples."""
        mesh = self.mesh
        if not layout.divided_axes:
            self._arranged(layout, [""] * mesh.size)
            return
        if self._loops.loaders and not mesh.is_arranged:
            raise ValueError(
                f"world.distribute: layout={str(layout)!r} lets ranks share samples, and "
                "world.shard has divided them over all ranks already. HINT: call "
                "world.distribute before world.shard"
            )
        is_new = not mesh.is_arranged
        nodes = self._collectives.gather(sharing_domain(), str)
        for line in self._arranged(layout, nodes):
            self._progress.warn_once(line)
        mesh.create_groups()
        if is_new:
            with _named():
                mesh.try_groups()
            set_places(mesh.places, mesh.rank)
            refuse_local_norms(self._training.models)
            if self._training.loss_scaling is not None:
                self._training.loss_scaling.largest = self._collectives.largest
            share_random_states(mesh)

    def _arranged(self, layout: Layout, nodes: list[str]) -> list[str]:
        with _named():
            return self.mesh.arrange(layout, nodes)

    def _note_mesh(self) -> None:
        """Write layouts and mesh into the record."""
        layouts = dict.fromkeys(str(replace(layout, rules=())) for layout in self.layouts)
        text = ", ".join(layouts)[:MAX_LAYOUT_CHARS]
        self._recorder.update_header(layout=text, mesh=self.mesh.header())
        self._recorder.shares_samples = self.mesh.is_divided

    def _sharding_ranks(self, arguments: LayoutArguments) -> int:
        """Return the number of ranks that hold one copy of the states."""
        known = arguments.known
        if known is not None and isinstance(known.shards, int):
            return known.shards
        if arguments.is_per_node:
            return int(os.environ.get("LOCAL_WORLD_SIZE", self.mesh.size))
        return self.mesh.data_size

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
        predicted = [options.predicted_bytes for options in self._layouts]
        # of one model: the peaks of several need not be at the same time
        peak = predicted[0] if len(predicted) == 1 else None
        names = [str(options.layout.without_options) for options in self._layouts if options.layout]
        training = self._training
        self._recorder.update_header(
            tensors=tensor_bytes(training.models, training.optimizers, names, peak, self.device)
        )

    def _add(self, setup: ModelSetup, distributed: DistributedModel) -> Any:
        """Add a distributed model and its optimizer; return what ``distribute`` returns."""
        self._training.add_model(distributed, setup.accumulate, setup.optimizer)
        if setup.optimizer is None:
            return distributed.called
        self._training.add_optimizer(setup.optimizer)
        return distributed.called, setup.optimizer
