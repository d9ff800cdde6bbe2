"""ZeRO-1 to 3 by PyTorch's FSDP2 (``fully_shard``), which keeps the user's module.

Between steps a rank holds its shard of every parameter, of its gradient and of the optimizer's
states, as distributed tensors. FSDP gathers the whole parameters of a block before its forward, and
reduces and scatters its gradients in its backward.
"""

import functools
import traceback
import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...comm.group_device import exchangeable
from ...comm.members.exchange_objects import all_gather_objects
from ...comm.shared.memory import sharing_domain
from ...cost.layout import Layout
from ...record.hooks.block_labels import whole_gradient
from ...record.hooks.collective_check import SAME_BLOCKS, block_in
from ...record.rank_places import placed_ranks
from ..blocks import WITHOUT_FORWARD, gathered_blocks, names_in
from ..materialization import Materialization
from ..mesh import DATA, Mesh
from ..replicated.replica import has_tensor, own_methods
from ..strategy.distributed_model import DistributedModel
from .deferred_shards import compute_shards
from .layouts import ShardingRequest
from .optimizer_parameters import replace_parameters
from .replication import BufferSync, broadcast_model

# Blocks and parameters that ranks use differently in one step: branches, mixtures of experts.
#
# FSDP gathers a block when the rank's forward reaches it, and reduces only those gradients that
# the rank's backward has computed. Nothing compares the ranks: two blocks of the same size that
# meet in one collective are exchanged in silence.
#
# - **Parameters** of a block: each rank reduces the whole block, with zeros for parameters that
# got no gradient on this rank. A parameter that no rank has used has no gradient, as in one
# process. - **Blocks**: a rank counts its gathers and reductions. At the end of each backward
# that reduces gradients all ranks compare them, in one all-reduce of a few bytes, and raise an
# error.

MAX_KEPT_CALLS = 4096  # gathers and reductions that an error can name
GATHERED, REDUCED = "gathers", "reduces"
_KINDS = (GATHERED, REDUCED)


def groups_of(state: Any) -> list[FSDPParamGroup]:
    """Return the groups of parameters of an FSDP state; before PyTorch 2.12 it has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []


class BlockUsage:
    """The gathers and reductions of one model on this rank since the ranks were compared.

    Args:
        model: The model.
        states: FSDP's states of its modules.
        names: By the id of a shard, the parameter's name in the plain model.
        ranks: The process group that shares the model; None: all.
    """

    def __init__(
        self, model: nn.Module, states: Sequence[Any], names: dict[int, str], ranks: Any = None
    ) -> None:
        self._model, self._names, self._ranks = model, names, ranks
        self._groups = [group for state in states for group in groups_of(state)]
        parameters = [parameter for group in self._groups for parameter in group.fsdp_params]
        self._index = {id(parameter): i for i, parameter in enumerate(parameters)}
        self._parameters = parameters
        self._calls, self._digest = array("l"), 0
        self.discard_gradients()
        for number, group in enumerate(self._groups):
            group.unshard = self._counted(group.unshard, number, group)  # type: ignore[method-assign]
            group.post_backward = self._filled(group.post_backward, number, group)  # type: ignore[method-assign]
        for state in states:
            end = state._root_post_backward_final_callback
            state._root_post_backward_final_callback = self._compared(end)

    def discard_gradients(self) -> None:
        """Forget which parameters have a gradient."""
        self._used = [False] * len(self._parameters)
        self._zero_filled: list[
            Any
        ] = []  # parameters without a gradient but the zeros of this rank

    def _counted(self, unshard: Callable[..., None], number: int, group: Any) -> Any:
        """Return ``unshard`` of a block, whose gathers are counted."""

        @functools.wraps(unshard)
        def gather(*args: Any, **options: Any) -> None:
            before = group._all_gather_result
            unshard(*args, **options)
            if group._all_gather_result is not before:
                self._count(number, GATHERED)

        return gather

    def _filled(self, post_backward: Callable[..., None], number: int, group: Any) -> Any:
        """Return ``post_backward`` of a block, which reduces all its gradients or none."""

        @functools.wraps(post_backward)
        def reduce(*args: Any) -> None:
            if group.reduce_grads and self._fill(group):
                self._count(number, REDUCED)
            post_backward(*args)

        return reduce

    def _fill(self, group: Any) -> bool:
        """Complete a block's gradients with zeros; return whether the block is reduced."""
        trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
        gradients = [whole_gradient(parameter) for parameter in trained]
        like = next((gradient for gradient in gradients if gradient is not None), None)
        if like is None and not group.is_unsharded:
            return False  # the block did not run
        is_accumulated = any(p.unsharded_accumulated_grad is not None for p in trained)
        for parameter, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                self._used[self._index[id(parameter)]] = True
                continue
            if parameter.sharded_param.grad is None:
                self._zero_filled.append(parameter)
            whole = parameter.unsharded_param
            zeros = torch.zeros_like(whole, dtype=whole.dtype if like is None else like.dtype)
            if is_accumulated:
                parameter.unsharded_accumulated_grad = zeros
            else:
                whole.grad = zeros
        return bool(trained)

    def _compared(self, end: Callable[[], None]) -> Callable[[], None]:
        """Return FSDP's callback at the end of a backward, after which the ranks are compared."""

        @functools.wraps(end)
        def callback() -> None:
            end()
            # the same on all ranks: gradients of an accumulation may wait for its last backward
            if all(group.reduce_grads and group.all_reduce_grads for group in self._groups):
                self._compare()

        return callback

    def _count(self, number: int, kind: str) -> None:
        if len(self._calls) == MAX_KEPT_CALLS:
            self._digest = zlib.crc32(self._calls.tobytes(), self._digest)
            del self._calls[:]
        self._calls.append(number * len(_KINDS) + _KINDS.index(kind))

    def _compare(self) -> None:
        """Compare the blocks, and discard gradients of which no rank has any part. Collective.

        Raises:
            ValueError: The ranks have gathered or reduced different blocks.
        """
        digest = zlib.crc32(self._calls.tobytes(), self._digest)
        used = torch.tensor([digest, -digest, *self._used])
        used = exchangeable(used, self._ranks)  # on the CPU if possible
        with torch.no_grad():
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._ranks)
        highest, lowest, *is_used = used.tolist()
        if highest != -lowest:
            raise ValueError(self._describe_difference())
        for parameter in self._zero_filled:
            if not is_used[self._index[id(parameter)]]:
                parameter.sharded_param.grad = None
        del self._calls[:]
        self._digest = 0
        self.discard_gradients()

    def _describe_difference(self) -> str:
        """Return which ranks have used which block, and the way out. Collective."""
        rows = all_gather_objects(self._calls.tolist(), list[int], self._ranks)
        place = next(self._differing_places(rows), 0)
        sides: dict[str, list[int]] = {}
        blocks = []
        ranks = dist.get_process_group_ranks(self._ranks or dist.group.WORLD)
        for rank, row in zip(ranks, rows, strict=True):
            block, kind = divmod(row[place], len(_KINDS)) if place < len(row) else (-1, 0)
            what = f"{_KINDS[kind]} {self._describe(block)}" if block >= 0 else "runs no block"
            sides.setdefault(what, []).append(rank)
            blocks += [block] if block >= 0 else []
        shown = ", ".join(f"{placed_ranks(ranks)} {what}" for what, ranks in sides.items())
        # inner blocks are those that a rank may leave out
        names = [str(self._groups[block]._module_fqn or "") for block in blocks]
        inner = max(names, key=lambda name: name.count(".") + bool(name), default="")
        return (
            f"ranks use different blocks of the {_class_name(self._model)} in one step, so their "
            f"gathers and reductions do not belong together: {shown}. "
            f"HINT: name blocks that all ranks run in each step: world.distribute(..., "
            f"blocks=[{self._around(inner)!r}]) in place of {inner!r}; or layout='data' with "
            "find_unused_parameters=True"
        )

    def _differing_places(self, rows: list[list[int]]) -> Iterator[int]:
        for place in range(max(map(len, rows))):
            if len({row[place] if place < len(row) else -1 for row in rows}) > 1:
                yield place

    def _describe(self, block: int) -> str:
        """Return name and parameters of a block."""
        group = self._groups[block]
        names = [self._names.get(id(p.sharded_param), "") for p in group.fsdp_params]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"{group._module_fqn or 'the model'} ({', '.join(names[:3])}{more})"

    def _around(self, name: str) -> str:
        """Return the class of the next module around a block that is called as a whole."""
        while name:
            name = name.rpartition(".")[0]
            module = self._model.get_submodule(name)
            if not isinstance(module, WITHOUT_FORWARD):
                return _class_name(module)
        return _class_name(self._model)


def _class_name(module: nn.Module) -> str:
    """Return the name of the user's class, which FSDP has extended."""
    return type(module).__name__.removeprefix("FSDP")


# FSDP's hooks on tensors of which each rank holds a part.
#
# FSDP gathers a block's parameters when the gradient of its output arrives, and reduces their
# gradients after that of its input. A tensor that shows the shape of the whole carries its
# gradient in ``local``, so FSDP's hooks belong there.


class PartOfTensor(Protocol):
    """A tensor of which ``local`` is this rank's part."""

    local: torch.Tensor

    def like(self, local: torch.Tensor) -> Any: ...


def hook_parts(model: nn.Module, kind: type[PartOfTensor]) -> None:
    """Let the hooks of all blocks of a sharded model see the parts of tensors of a kind."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state: Any = module._get_fsdp_state()
            state._register_pre_backward_hook = _on_parts(state._register_pre_backward_hook, kind)
            for group in groups_of(state):
                own: Any = group
                own._register_post_backward_hook = _on_parts(own._register_post_backward_hook, kind)


def _on_parts(register: Callable[..., Any], kind: type[PartOfTensor]) -> Callable[..., Any]:
    """Return a function that registers hooks on parts, and returns what it was given."""

    @functools.wraps(register)
    def on_parts(*given: Any) -> Any:
        leaves, structure = tree_flatten(given)
        if not any(isinstance(leaf, kind) for leaf in leaves):
            return register(*given)
        opened = [leaf.local if isinstance(leaf, kind) else leaf for leaf in leaves]
        found, structure = tree_flatten(register(*tree_unflatten(opened, structure)))
        closed = [_closed(*both, kind) for both in zip(leaves, found, strict=True)]
        return tree_unflatten(closed, structure)

    return on_parts


def _closed(before: Any, after: Any, kind: type[PartOfTensor]) -> Any:
    """Return a leaf as it was before, with what FSDP has made of its part."""
    if not isinstance(before, kind):
        return after
    return before if after is before.local else before.like(after)


# The mesh of ranks over which a model is sharded.

# By the ranks of a world: one for all its models, with its groups
_meshes: WeakKeyDictionary[Mesh, dict[tuple[str, int | str | None], DeviceMesh]]
_meshes = WeakKeyDictionary()


def data_mesh(device: torch.device, layout: Layout, mesh: Mesh) -> DeviceMesh:
    """Return a mesh of the data ranks, or of replicas and the ranks that share one. Collective.

    Ranks that share samples have whole models, and are in it.

    Raises:
        ValueError: Each node is to hold a replica, and nodes have different numbers of ranks.
    """
    if mesh.divides_model:
        return mesh.device_mesh(device.type)[DATA]
    known, key = _meshes.setdefault(mesh, {}), (device.type, layout.shards)
    if key not in known:
        known[key] = _new_mesh(device, layout.shards)
    return known[key]


def _new_mesh(device: torch.device, shards: int | str | None) -> DeviceMesh:
    size = dist.get_world_size()
    if shards is None:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    if isinstance(shards, int):
        whole = torch.arange(size).view(-1, shards)
        return DeviceMesh(device.type, whole, mesh_dim_names=("replicate", "shard"))
    hosts = all_gather_objects(sharing_domain(), str)
    counts = Counter(hosts)
    if len(set(counts.values())) > 1:
        shown = ", ".join(map(str, counts.values()))
        raise ValueError(
            f"world.distribute: shard_over='host' needs the same number of ranks on each host; "
            f"these have {shown}. HINT: shard_over='job'"
        )
    if len(counts) == 1:
        return init_device_mesh(device.type, (size,), mesh_dim_names=("shard",))
    ranks = [[rank for rank in range(size) if hosts[rank] == host] for host in counts]
    return DeviceMesh(device.type, ranks, mesh_dim_names=("replicate", "shard"))


# Methods of a model that compute like its forward: gather the parameters around them too.
#
# FSDP gathers a block's parameters around ``forward`` only. A method of the model's own class
# that is called with a tensor (``model.encode(x)``) runs between the same hooks, unless it is
# called from the forward itself.


def wrap_methods(module: FSDPModule) -> None:
    """Let methods of the module's own class gather the parameters when called with a tensor."""
    for name in own_methods(module):
        plain = getattr(module, name)
        register_fsdp_forward_method(module, name)  # type: ignore[arg-type]
        gathering = getattr(module, name)
        setattr(module, name, _choosing(module, plain, gathering))


def _choosing(
    module: FSDPModule, plain: Callable[..., Any], gathering: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(plain)
    def method(*args: Any, **options: Any) -> Any:
        # within a forward of this module its parameters are whole
        is_inside = module._get_fsdp_state()._training_state == TrainingState.FORWARD
        gathers = has_tensor(args, options) and not is_inside
        return (gathering if gathers else plain)(*args, **options)

    return method


# Causes of errors of sharded models.

_AVERAGE = "average = [p.detach().clone() for p in model.parameters()] after world.distribute"
# of the exchange in shared memory
_MISMATCH_PHRASE = "ranks call different collectives"


def explain(error: BaseException) -> str | None:
    """Return the cause of an error of a sharded model, and what to do; None for other errors."""
    text = str(error)
    if "mixed torch.Tensor and DTensor" in text:
        return (
            "an operation outside of a forward used a sharded parameter together with a whole "
            "tensor. HINT: compute it inside model(...), or in a method of the model that has a "
            f"tensor among its arguments; to average weights, {_AVERAGE}"
        )
    if "FSDP does not support deepcopy" in text or ("pickle" in text and ".FSDP" in text):
        return (
            "a sharded model can't be copied or pickled as a whole, because each rank has only "
            f"its shards. HINT: to average weights, {_AVERAGE}; to save them in one file, "
            "world.epochs(checkpoint=FOLDER), then `paceline convert FOLDER model.safetensors`"
        )
    if "setStorage" in text and "of size 0" in text:
        return (
            "a backward needs parameters of a sharded block that another backward of the same "
            "forward has released, such as torch.autograd.grad(..., create_graph=True) for a "
            "gradient penalty. HINT: layout='data'"
        )
    if _MISMATCH_PHRASE in text:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        block = next((found for frame in reversed(frames) if (found := block_in(frame))), None)
        if block is not None:
            what = text.partition(". HINT: ")[0].strip().splitlines()[0]
            return f"{what}; this rank gathers or reduces {block[1]}. HINT: {SAME_BLOCKS}"
    return None


class FullyShardedModel(DistributedModel):
    """A model that ``fully_shard`` has sharded.

    Attributes:
        request: How it was to be sharded.
        mesh: The ranks: one dimension, or hosts and the ranks of each.
        shards: By the name of the parameter in the plain model, what the optimizer holds.
        blocks: Names of the modules that are gathered as a whole; "" for the model.
    """

    def __init__(
        self,
        inner: DistributedModel,
        request: ShardingRequest,
        mesh: DeviceMesh,
        group: dist.ProcessGroup,
    ) -> None:
        model = inner.module
        super().__init__(model, inner)
        assert isinstance(model, FSDPModule)
        self.request, self.mesh = request, mesh
        self._model = model
        self.shards = dict(model.named_parameters())
        self.blocks = [name for name, m in model.named_modules() if isinstance(m, FSDPModule)]
        self._buffers = BufferSync(model, group)
        self._usage = BlockUsage(
            model,
            _states_of(model),
            {id(shard): name for name, shard in self.shards.items()},
            group,
        )
        self._is_syncing = True

    @property
    def is_distributed(self) -> bool:
        return True

    @property
    def is_sharded(self) -> bool:
        return True

    @property
    def has_collective_forward(self) -> bool:
        return True

    @property
    def holds_copied_shards(self) -> bool:
        return self.mesh.ndim > 1 or super().holds_copied_shards

    def parameters(self) -> dict[str, nn.Parameter]:
        return self.shards

    def block_of(self, name: str) -> str:
        return max(
            (block for block in self.blocks if name.startswith(f"{block}.")), key=len, default=""
        )

    def explain(self, error: BaseException) -> str | None:
        return explain(error) or super().explain(error)

    def set_gradient_sync(self, enabled: bool) -> None:
        if enabled == self._is_syncing:
            return
        self._is_syncing = enabled
        if not self.request.shards_accumulated_gradients:
            # whole parameters and gradients stay until the last backward of the group
            self._model.set_requires_gradient_sync(enabled)
            self._model.set_reshard_after_backward(enabled)
        elif self.mesh.ndim > 1:
            self._model.set_requires_all_reduce(enabled)

    def set_buffer_sync(self, enabled: bool) -> None:
        self._buffers.set(enabled)

    def discard_gradients(self) -> None:
        self._usage.discard_gradients()
        for shard in self.shards.values():
            shard.grad = None
        for group in self._groups():
            group._partial_reduce_output = None
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None

    def has_gradients(self) -> bool:
        if any(shard.grad is not None for shard in self.shards.values()):
            return True
        return any(
            group._partial_reduce_output is not None
            or any(whole_gradient(parameter) is not None for parameter in group.fsdp_params)
            for group in self._groups()
        )

    def has_run(self) -> bool:
        assert isinstance(self._model, FSDPModule)
        return self._model._get_fsdp_state()._is_root is not None

    def name_nonfinite(self, exchanged: torch.Tensor) -> list[str]:
        names = {id(shard): name for name, shard in self.shards.items()}
        for group in self._groups():
            if group._training_state != TrainingState.POST_BACKWARD:
                continue
            parameters = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
            sizes = [p.padded_sharded_param_size.numel() for p in parameters]
            rows = exchanged.view(self.mesh.size(self.mesh.ndim - 1), -1)
            # each row holds, one after the other, the shards of a rank
            well = [bool(part.isfinite().all()) for part in rows.split(sizes, dim=1)]
            found = [p for p, ok in zip(parameters, well, strict=True) if not ok]
            if found:
                return [names[id(p.sharded_param)] for p in reversed(found)]
        return super().name_nonfinite(exchanged)

    def _groups(self) -> list[FSDPParamGroup]:
        return _groups_of(self._model)


def _groups_of(model: nn.Module) -> list[FSDPParamGroup]:
    """Return FSDP's groups of parameters, one for each block."""
    return [group for state in _states_of(model) for group in groups_of(state)]


def _states_of(model: nn.Module) -> list[Any]:
    """Return FSDP's states of the model's blocks."""
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [module._get_fsdp_state() for module in modules]


def shard_model(
    inner: DistributedModel,
    optimizer: Optimizer | None,
    device: torch.device,
    request: ShardingRequest,
    ranks: Mesh,
    plan: Materialization | None = None,
) -> FullyShardedModel:
    """Shard a model over the data ranks, and replace the parameters of its optimizer. Collective.

    Args:
        plan: Of a deferred model; its shards are computed after it was sharded.

    Raises:
        ValueError: Hosts have different numbers of ranks, and shards are to stay in a host.
    """
    model = inner.module
    whole = dict(model.named_parameters(remove_duplicate=False))
    blocks = [*gathered_blocks(model, names_in(model, request.blocks)), ""]
    mesh, group = data_mesh(device, request.layout, ranks), ranks.copies_group
    broadcast_model(model, group)
    _shard_blocks(model, blocks, mesh, request)
    if plan is not None:
        each = [parameter for block in _groups_of(model) for parameter in block.fsdp_params]
        of = {id(parameter.sharded_param): parameter for parameter in each}
        divided = {name: of[id(parameter)] for name, parameter in model.named_parameters()}
        compute_shards(plan, divided, mesh.get_local_rank(mesh.ndim - 1), device, group)
    sharded = FullyShardedModel(inner, request, mesh, group)
    if optimizer is not None:
        after = dict(model.named_parameters(remove_duplicate=False))
        replace_parameters(optimizer, {id(p): after[name] for name, p in whole.items()})
    return sharded


def _shard_blocks(
    model: nn.Module, blocks: list[str], mesh: DeviceMesh, request: ShardingRequest
) -> None:
    """Apply ``fully_shard`` to each block, inner ones first, and to the model at last."""
    options: dict[str, Any] = dict(request.options)
    if request.layout.offload == "parameters":
        options["offload_policy"] = CPUOffloadPolicy()
    for name in blocks:
        module = model.get_submodule(name)
        # the model's own parameters are needed again when its backward begins
        reshards = request.reshards_after_forward and bool(name)
        fully_shard(module, mesh=mesh, reshard_after_forward=reshards, **options)
        assert isinstance(module, FSDPModule)
        wrap_methods(module)
    assert isinstance(model, FSDPModule)
    if mesh.device_type == "cpu":
        # gloo has no AVG, which FSDP would use
        model.set_force_sum_reduction_for_comms(True)
