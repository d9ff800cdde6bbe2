"""Layouts of the tests: a hand-made pipeline of two stages, columns of linear layers, and parts of
each sample along its first dim.

They are written with ``paceline.parallel`` only, as a layout of Paceline is: neither ``world``,
``checkpoint`` nor ``record`` knows them. ``install()`` adds them to the strategies.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional as F  # noqa: N812

from paceline.parallel.distribute import STRATEGIES
from paceline.parallel.replicated.data_parallel import DataParallel
from paceline.parallel.sharded.optimizer_parameters import replace_parameters
from paceline.parallel.sharded.strategy import FullySharded
from paceline.parallel.strategy.distributed_model import DistributedModel
from paceline.parallel.strategy.parallel_strategy import ParallelStrategy

OTHERS = [*STRATEGIES]


def install():
    """Put the layouts in the place of those that divide models, before those of the data ranks."""
    STRATEGIES[:] = [*TOYS, DataParallel, FullySharded]


def uninstall():
    """Put the strategies of Paceline back."""
    STRATEGIES[:] = OTHERS


class Stage(nn.ModuleDict):
    """One of the two parts of a Sequential, under its name there."""

    def __init__(self, model, number):
        super().__init__({str(number): model[number]})
        self.number = number

    def forward(self, x):
        return self[str(self.number)](x)


class Pipeline(nn.Module):
    """What the script calls: outputs on all ranks in evaluation, an error in training."""

    def __init__(self, stage, mesh):
        super().__init__()
        self.stage, self.mesh = stage, mesh

    def forward(self, x):
        if self.training:
            raise ValueError(
                "the model is a pipeline, which can't be called in training. HINT: "
                "world.forward_backward(model, inputs, targets, loss=...)"
            )
        group, number = self.mesh.group("stage"), self.stage.number
        out = self.stage(_received(group) if number else x)
        if not number:
            _send(out, group, 1)
            out = torch.empty(_shape(group, 1))
        else:
            _shape(group, 1, out)
        dist.broadcast(out, group=group, group_src=1)
        return out


class TwoStages(ParallelStrategy):
    axes = frozenset({"pp"})

    def check(self, model, optimizer):
        if not isinstance(model, nn.Sequential) or len(model) != 2:
            raise ValueError("world.distribute: layout='pp2': the model has not two parts")

    def apply(self, model, optimizer):
        stage = Stage(model.module, self.request.mesh.place["stage"])
        own = set(stage.parameters())
        for group in optimizer.param_groups if optimizer is not None else ():
            group["params"] = [p for p in group["params"] if p in own]
        return TwoStagesModel(stage, model, self.request.mesh)


class TwoStagesModel(DistributedModel):
    def __init__(self, stage, inner, mesh):
        super().__init__(stage, inner)
        self.stage, self.mesh = stage, mesh
        self._called = Pipeline(stage, mesh)

    @property
    def called(self):
        return self._called

    @property
    def plain(self):
        return self.stage

    def parameters(self):
        return dict(self.stage.named_parameters())

    def parted_axes(self, name):
        return frozenset({"stage"})

    def has_gradients(self):
        return any(p.grad is not None for p in self.stage.parameters())

    def discard_gradients(self):
        self.stage.zero_grad()

    @property
    def has_collective_forward(self):
        return True

    def place_batch(self, batch):
        """The second stage gets its inputs from the first one."""
        x, *others = batch
        return [torch.full_like(x, torch.nan) if self.stage.number else x, *others]

    def run_step(self, step):
        group, mean = self.mesh.group("stage"), torch.zeros(())
        if self.stage.number == 0:
            out = step.call()
            _send(out.detach(), group, 1)
            with step.backward(None):
                gradient = torch.empty_like(out)
                dist.recv(gradient, group=group, group_src=1)
                if out.requires_grad:
                    out.backward(gradient)
        else:
            x = _received(group).requires_grad_()
            mean, weight = step.loss_of(step.call(inputs=x))
            with step.backward(mean):
                step.scaled(mean, weight).backward()
                dist.send(x.grad, group=group, group_dst=0)
        mean = mean.detach()
        dist.broadcast(mean, group=group, group_src=1)
        return mean


def _shape(group, source, tensor=None):
    shape = torch.tensor(tensor.shape if tensor is not None else [0, 0])
    dist.broadcast(shape, group=group, group_src=source)
    return shape.tolist()


def _send(tensor, group, to):
    dist.send(torch.tensor(tensor.shape), group=group, group_dst=to)
    dist.send(tensor.contiguous(), group=group, group_dst=to)


def _received(group):
    shape = torch.zeros(2, dtype=torch.int64)
    dist.recv(shape, group=group, group_src=0)
    x = torch.empty(shape.tolist())
    dist.recv(x, group=group, group_src=0)
    return x


class _Gather(torch.autograd.Function):
    """Columns of all ranks in forward, this rank's columns of the gradient in backward."""

    @staticmethod
    def forward(ctx, local, group):
        ctx.rank, ctx.size = dist.get_rank(group), dist.get_world_size(group)
        parts = [torch.empty_like(local) for _ in range(ctx.size)]
        dist.all_gather(parts, local.contiguous(), group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(ctx.size, -1)[ctx.rank].contiguous(), None


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Columns(ParallelStrategy):
    """Columns of each linear layer on the ranks of the tensor axis, replicas on the data axis."""

    axes = frozenset({"dp", "tp"})

    @classmethod
    def divides(cls, layout):
        return layout.tp != 1

    def apply(self, model, optimizer):
        mesh, module = self.request.mesh, model.module
        whole = dict(module.named_parameters())
        shards = {}
        for layer in module.modules():
            if isinstance(layer, nn.Linear):
                for name in ("weight", "bias"):
                    shard = self._shard(getattr(layer, name).data, mesh)
                    shards[id(getattr(layer, name))] = shard
                    setattr(layer, name, shard)
                layer.forward = _Column(layer, mesh.group("tensor"))
        if optimizer is not None:
            replace_parameters(optimizer, shards)
        assert whole.keys() == dict(module.named_parameters()).keys()
        return ColumnsModel(module, model, mesh)

    @staticmethod
    def _shard(tensor, mesh):
        placements = [Replicate(), Shard(0)]
        made = distribute_tensor(tensor, mesh.device_mesh("cpu"), placements, src_data_rank=None)
        return nn.Parameter(made)


class _Column:
    def __init__(self, layer, group):
        self.layer, self.group = layer, group

    def __call__(self, x):
        weight, bias = self.layer.weight.to_local(), self.layer.bias.to_local()
        return _Gather.apply(F.linear(_SumGradient.apply(x, self.group), weight, bias), self.group)


class ColumnsModel(DistributedModel):
    def __init__(self, module, inner, mesh):
        super().__init__(module, inner)
        self.mesh, self._sync = mesh, True
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(self._average)

    is_distributed = is_sharded = holds_copied_shards = property(lambda _: True)

    def set_gradient_sync(self, enabled):
        self._sync = enabled

    def _average(self, parameter):
        if self._sync:
            gradient = parameter.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            dist.all_reduce(local, group=self.mesh.data_group)
            local /= self.mesh.data_size


class Heights(ParallelStrategy):
    """A part of each sample on each rank, for models that treat all positions alike."""

    axes = frozenset({"h"})

    def apply(self, model, optimizer):
        return HeightsModel(model, self.request.mesh)


class HeightsModel(DistributedModel):
    def __init__(self, inner, mesh):
        super().__init__(inner.module, inner)
        self.group, self.at = mesh.group("height"), mesh.place["height"]
        self.size = mesh.shape["height"]
        for parameter in inner.module.parameters():
            parameter.register_hook(self._mean)  # before replicas are averaged
        inner.module.register_forward_hook(self._whole)

    @property
    def has_collective_forward(self):
        return True

    def place_batch(self, batch):
        x, *others = batch
        return [x.chunk(self.size, 1)[self.at], *others]

    def run_step(self, step):
        return self._mean(super().run_step(step))

    def _mean(self, tensor):
        mean = tensor.clone()
        dist.all_reduce(mean, group=self.group)
        return mean / self.size

    def _whole(self, module, _, output):
        if not module.training:
            parts = [torch.empty_like(output) for _ in range(self.size)]
            dist.all_gather(parts, output.contiguous(), self.group)
            return torch.cat(parts, 1)
        return None


TOYS = [Columns, TwoStages, Heights]
