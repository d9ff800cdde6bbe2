"""Gradients of a stage over its replicas and tied copies, and ZeRO in a pipeline.

With ZeRO the replicas of a stage hold shards of its states or parameters. A stage uses a parameter
once in each micro-batch. So whole parameters are gathered before the first micro-batch of a step,
and their gradients are reduced and scattered after the last one: once in a step each, where
``fully_shard`` would do both for each micro-batch.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from ....comm.group_device import all_gather_flat, reduce_scatter_flat
from ...mesh import DATA, Mesh
from ...sharded.optimizer_parameters import replace_parameters

BUCKET_BYTES = 25 << 20


class Exchanged(Protocol):
    """What a bucket is made of."""

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def device(self) -> torch.device: ...
    @property
    def nbytes(self) -> int: ...


One = TypeVar("One", bound=Exchanged)


def buckets(tensors: Iterable[One]) -> Iterator[list[One]]:
    """Yield tensors of one dtype and device, of at most BUCKET_BYTES if there are several."""
    kinds: dict[tuple[torch.dtype, torch.device], list[One]] = defaultdict(list)
    for tensor in tensors:
        kinds[tensor.dtype, tensor.device].append(tensor)
    for of_kind in kinds.values():
        bucket: list[One] = []
        for tensor in of_kind:
            if bucket and sum(each.nbytes for each in bucket) + tensor.nbytes > BUCKET_BYTES:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket


def reduce_gradients(parameters: Sequence[nn.Parameter], group: Any, divisor: int) -> None:
    """Replace gradients by their sum over the ranks of a group, divided by a number. Collective.

    After the last micro-batch they are summed over tied copies, and averaged over replicas. One
    all-reduce of a flat tensor carries many gradients, and for each of them whether the rank has
    one: a parameter that no rank has used keeps no gradient.
    """
    for bucket in buckets(p for p in parameters if p.requires_grad):
        first = bucket[0]
        has = torch.tensor([p.grad is not None for p in bucket], device=first.device)
        each = [p.grad if p.grad is not None else torch.zeros_like(p) for p in bucket]
        flat = torch.cat([has.to(first.dtype), *(g.reshape(-1) for g in each)])
        dist.all_reduce(flat, group=group)
        counts, rest = flat[: len(bucket)], flat[len(bucket) :]
        rest /= divisor
        sizes = [p.numel() for p in bucket]
        for parameter, count, part in zip(bucket, counts.tolist(), rest.split(sizes), strict=True):
            if not count:
                continue
            if parameter.grad is None:
                parameter.grad = part.view_as(parameter).clone()
            else:
                parameter.grad.copy_(part.view_as(parameter))


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of a stage.

    Attributes:
        whole: What the stage computes with; without memory between steps.
        shard: What the optimizer holds: rows of it, as a DTensor.
        shape: Shape of the whole one.
        length: Elements of a shard, with the padding of the last ones.
    """

    whole: nn.Parameter
    shard: nn.Parameter
    shape: torch.Size
    length: int

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def device(self) -> torch.device:
        return self.whole.device

    @property
    def nbytes(self) -> int:
        return int(self.shape.numel() * self.dtype.itemsize)

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows."""
        local: torch.Tensor = self.shard.detach().to_local()  # type: ignore[attr-defined]
        return local


class ShardedParameters:
    """The parameters of a stage, whole in a step and an evaluation, and in shards between them.

    (ZeRO-2 and 3.)

    The module has the shards as its parameters while they are not gathered.

    Args:
        module: What this rank has of the model.
        optimizer: Its parameters are replaced by their shards.
    """

    def __init__(
        self, module: nn.Module, optimizer: Optimizer | None, mesh: Mesh, device: torch.device
    ) -> None:
        self._group, self._ranks = mesh.data_group, mesh.data_size
        self._mesh = mesh.device_mesh(device.type)[DATA]
        self._by_name = {
            name: self._sharded(parameter, mesh.data_rank)
            for name, parameter in module.named_parameters()
        }
        by_id = {id(param.whole): param for param in self._by_name.values()}
        self._places = [
            (owner, key, by_id[id(parameter)])
            for owner in module.modules()
            for key, parameter in owner._parameters.items()
            if parameter is not None
        ]
        self.shards = {name: param.shard for name, param in self._by_name.items()}
        self.wholes = {name: param.whole for name, param in self._by_name.items()}
        if optimizer is not None:
            replace_parameters(
                optimizer, {id(param.whole): param.shard for param in self._by_name.values()}
            )
        self._release()

    def _sharded(self, whole: nn.Parameter, rank: int) -> ShardedParameter:
        rows = -(-whole.size(0) // self._ranks)
        own = whole.detach()[rank * rows : (rank + 1) * rows].clone()
        shard = nn.Parameter(
            self._as_shard(own, whole.shape, whole.stride()), requires_grad=whole.requires_grad
        )
        length = rows * whole.shape[1:].numel()
        return ShardedParameter(whole, shard, whole.shape, length)

    def _as_shard(self, own: torch.Tensor, shape: torch.Size, stride: tuple[int, ...]) -> DTensor:
        return DTensor.from_local(
            own, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Context in which the module has whole parameters. Collective over the replicas."""
        self._gather()
        try:
            yield
        finally:
            self._release()

    @torch.no_grad()
    def _gather(self) -> None:
        for bucket in buckets(self._by_name.values()):
            own = bucket[0].local.new_zeros(sum(param.length for param in bucket))
            for param, part in zip(
                bucket, own.split([param.length for param in bucket]), strict=True
            ):
                part[: param.local.numel()] = param.local.reshape(-1)
            every = own.new_empty(self._ranks * own.numel())
            all_gather_flat(every, own, group=self._group)
            columns = every.view(self._ranks, -1).split([param.length for param in bucket], dim=1)
            for param, column in zip(bucket, columns, strict=True):
                flat = column.reshape(-1)[: param.shape.numel()]
                param.whole.data = flat.view(param.shape)
        for owner, key, param in self._places:
            setattr(
                owner, key, param.whole
            )  # recurrent layers note their weights when they are set

    def _release(self) -> None:
        for owner, key, param in self._places:
            setattr(owner, key, param.shard)
        for param in self._by_name.values():
            param.whole.grad = None
            param.whole.data = param.whole.detach().new_empty(0)

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Add the mean of the replicas' gradients to those of the shards. Collective.

        A parameter that no replica has used keeps no gradient.
        """
        trained = [param for param in self._by_name.values() if param.whole.requires_grad]
        if not trained:
            return
        used = torch.tensor(
            [parameter.whole.grad is not None for parameter in trained], dtype=torch.int32
        )
        used = used.to(trained[0].device)
        dist.all_reduce(used, group=self._group)
        found = [param for param, count in zip(trained, used.tolist(), strict=True) if count]
        for bucket in buckets(found):
            lengths = [param.length for param in bucket]
            rows = bucket[0].local.new_zeros(self._ranks, sum(lengths))
            for param, column in zip(bucket, rows.split(lengths, dim=1), strict=True):
                if param.whole.grad is not None:
                    _fill(column, param.whole.grad.reshape(-1))
                    param.whole.grad = None
            mean = rows.new_empty(rows.size(1))
            reduce_scatter_flat(mean, rows.view(-1), group=self._group)
            mean /= self._ranks
            for param, part in zip(bucket, mean.split(lengths), strict=True):
                self._add(param, part[: param.local.numel()].view(param.local.shape))

    def _add(self, param: ShardedParameter, gradient: torch.Tensor) -> None:
        before: Any = param.shard.grad
        if before is not None:
            before.to_local().add_(gradient)
            return
        stride = param.shard.stride()
        param.shard.grad = self._as_shard(gradient.clone(), param.shape, stride)


def _fill(rows: torch.Tensor, flat: torch.Tensor) -> None:
    """Copy a vector into rows that are not contiguous, one after the other."""
    full, rest = divmod(flat.numel(), rows.size(1))
    rows[:full] = flat[: full * rows.size(1)].view(full, -1)
    if rest:
        rows[full, :rest] = flat[-rest:]


def owners_of(
    sizes: Mapping[str, int], stages_of: Mapping[str, Collection[int]], ranks: int
) -> dict[str, int]:
    """Return the data rank that updates each trained parameter of the whole model.

    It is the same on all stages that hold a parameter. Data ranks get about equal bytes of each
    stage.

    Args:
        sizes: Bytes of each trained parameter.
        stages_of: The stages that hold it.
        ranks: Number of data ranks.
    """
    taken: Counter[tuple[int, int]] = Counter()  # bytes by stage and data rank
    owners = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        stages = stages_of[name]
        owner = min(range(ranks), key=lambda rank: sum(taken[s, rank] for s in stages))
        taken.update({(stage, owner): sizes[name] for stage in stages})
        owners[name] = owner
    return owners


class ShardedStates:
    """The states of an optimizer in parts on the replicas of a stage (ZeRO-1).

    All replicas have all parameters and averaged gradients of their stage. In a step of the
    optimizer each of them updates whole parameters of its own, and sends them to the others.

    In its step the optimizer has the parameters that this rank updates; at any other time it has
    all of the stage, so that clipping, scaling and zeroing of gradients see all of them.

    Args:
        parameters: Of this rank's stage, by name.
        owners: Of each trained parameter of the model, the data rank that updates it.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        owners: Mapping[str, int],
        mesh: Mesh,
    ) -> None:
        self._mesh, self._group = mesh, mesh.data_group
        self._owners = {name: owners[name] for name in parameters if name in owners}
        own = mesh.place[DATA]
        self._others = {id(parameters[n]) for n, owner in self._owners.items() if owner != own}
        self._parts = [
            [parameters[name] for name, owner in self._owners.items() if owner == rank]
            for rank in range(mesh.data_size)
        ]
        self._whole: list[list[Any]] = []  # of each group, during a step
        for parameter in [p for p in optimizer.state if id(p) in self._others]:
            del optimizer.state[parameter]
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.register_step_post_hook(self._after_step)

    def holds(self, name: str) -> bool:
        """Return whether this rank has the states of a parameter."""
        return self._owners.get(name, self._mesh.place[DATA]) == self._mesh.place[DATA]

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._restore(optimizer)  # after a step that raised an error
        self._whole = [list(group["params"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in self._others]

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._restore(optimizer)
        ranks = self._mesh.ranks_along((DATA,))
        for rank, part in zip(ranks, self._parts, strict=True):
            for bucket in buckets(part):
                flat = torch.cat([p.reshape(-1) for p in bucket])
                dist.broadcast(flat, rank, self._group)
                if rank != self._mesh.rank:
                    pieces = flat.split([p.numel() for p in bucket])
                    for parameter, piece in zip(bucket, pieces, strict=True):
                        parameter.copy_(piece.view_as(parameter))

    def _restore(self, optimizer: Optimizer) -> None:
        for group, params in zip(optimizer.param_groups, self._whole, strict=False):
            group["params"] = params
        self._whole = []
