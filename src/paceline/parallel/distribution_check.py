"""Detection of models and loaders that are not distributed, and of changed parameters.

Each rank trains a separate copy of a model that was not given to ``world.distribute``. Parameters
are accepted if they were trainable in a model of ``world.distribute``, or if the script
synchronizes them: DistributedDataParallel, FSDP, distributed tensors, or hooks on their gradients.
The first loss is checked by its graph, and each optimizer at its first step.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ..optim.gradients import count_parameters, graph_nodes, parameters_of
from ..optim.whole_norms import local_part
from ..record.hooks.phases import UncopiedHook, has_users_hooks
from .mesh import Mesh
from .replicated.replica import FixedBuckets
from .strategy.distributed_model import DistributedModel

# Base classes of models whose parameters in the graph are not those of the modules.
SHARDING_CLASSES = {"FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"}


class DistributionCheck:
    """Check that trained parameters are synchronized between ranks.

    mode: "raise", "warn" or "ignore". warn: prints a line on rank 0.
    """

    def __init__(self, mesh: Mesh, mode: str, warn: Callable[[str], None]) -> None:
        self.mode = mode if mesh.size > 1 else "ignore"
        self._warn = warn
        self._distributed: set[int] = set()  # ids of parameters
        self._models: list[DistributedModel] = []  # keeps the ids valid
        self._has_checked_loss = False
        self._frozen_objects = gc.get_freeze_count()
        self._checked: dict[int, int] = {}  # by id of an optimizer: its number of parameters
        self._unarmed: list[tuple[FixedBuckets, _Gradients]] = []

    def add_model(self, model: DistributedModel) -> None:
        """Accept the parameters of a model that is being distributed."""
        self._models.append(model)
        self._distributed.update(id(p) for p in model.parameters().values() if p.requires_grad)

    def check_loss(self, loss: torch.Tensor) -> None:
        """Check the parameters that the first loss reaches; raise ValueError if none is accepted.

        Others than those of the distributed models may be reached without being trained.
        """
        if self._has_checked_loss or self.mode == "ignore":
            return
        self._has_checked_loss = True
        reached = [leaf for leaf in reached_leaves(loss) if isinstance(leaf, nn.Parameter)]
        unknown = self._unknown(reached)
        if unknown and len(unknown) == len(reached):
            self._report("world.backward: the loss reaches only parameters", unknown)

    def before_backward(self) -> None:
        """Note the gradients of models that no forward has prepared for this backward."""
        self._unarmed.clear()
        if self.mode != "ignore":
            self._unarmed += [(r, _gradients_of(r)) for r in self._synchronized() if not r.is_armed]

    def after_backward(self) -> None:
        """Report gradients that the backward has changed without an exchange; raises ValueError."""
        for replica, before in self._unarmed:
            after = _gradients_of(replica)
            changed = [name for name, gradient in after.items() if gradient != before.get(name)]
            if changed:
                self._report_unsynchronized("world.backward", changed)
        self._unarmed.clear()

    def _report_unsynchronized(self, where: str, names: list[str]) -> None:
        self._say(
            f"{where}: ranks have not synchronized the gradients of {names[0]}{_more(names)}, "
            "because the backward does not belong to a forward of the distributed model. HINT: "
            "call model(...), or model.METHOD(...) with a tensor, in place of "
            "model.module.METHOD(...) or a part of the model; add the losses of one forward, and "
            "call world.backward once"
        )

    def _synchronized(self) -> list[FixedBuckets]:
        """Return the models whose next backward is to synchronize gradients."""
        replicas = [model.module for model in self._models if model.local_sgd is None]
        return [r for r in replicas if isinstance(r, FixedBuckets) and r.require_backward_grad_sync]

    def note_exchange(self, bucket: torch.Tensor) -> None:
        """Note that a backward reduces a bucket of a DistributedDataParallel model."""
        for model in self._models:
            if isinstance(model.module, FixedBuckets) and model.module.is_armed:
                model.module.note_exchange(bucket)

    def check_optimizer(self, optimizer: Optimizer, others: Iterable[Optimizer] = ()) -> None:
        """Check the parameters that an optimizer is about to step; raises ValueError.

        Args:
            others: All known optimizers.
        """
        if self.mode == "ignore":
            return
        for replica in self._synchronized():
            if not replica.has_run:
                own = set(map(id, parameters_of(optimizer)))
                named = replica.module.named_parameters()
                trained = [n for n, p in named if p.grad is not None]
                trained = trained if any(id(p) in own for p in replica.parameters()) else []
                if trained:
                    self._report_unsynchronized(f"the step of {type(optimizer).__name__}", trained)
        number = count_parameters(optimizer)
        if self._checked.get(id(optimizer)) == number:
            return
        self._checked[id(optimizer)] = number
        unknown = self._unknown(p for p in parameters_of(optimizer) if p.grad is not None)
        if unknown:
            kind = type(optimizer).__name__
            self._report(f"world.step: the {kind} trains parameters", unknown)
        self._check_unused(optimizer, others)

    def _check_unused(self, optimizer: Optimizer, others: Iterable[Optimizer]) -> None:
        """Report an optimizer that was created before the model was complete.

        It holds parameters that no model has, and no optimizer holds some that have a gradient.
        """
        named = [(n, p) for model in self._models for n, p in model.parameters().items()]
        names = {id(p): name for name, p in named}
        own = [p for p in parameters_of(optimizer) if p.requires_grad]
        unused = [p for p in own if p.grad is None and id(p) not in names]
        if not unused:
            return
        held = {id(p) for o in (optimizer, *others) for p in parameters_of(o)}
        left = [p for _, p in named if p.grad is not None and id(p) not in held]
        if left:
            self._say(
                f"world.step: the {type(optimizer).__name__} holds a parameter of shape "
                f"{tuple(unused[0].shape)} that no model of world.distribute has, and no optimizer "
                f"trains {names[id(left[0])]}{_more(left)}. HINT: create the optimizer after the "
                "last change of the model"
            )

    def _unknown(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        found = [p for p in parameters if id(p) not in self._distributed and not _is_handled(p)]
        # Objects that the script froze (gc.freeze) can't be searched for models.
        if not found or gc.get_freeze_count() > self._frozen_objects:
            return []
        accepted: set[int] = set()
        for module in _modules():
            if any(kind.__name__ in SHARDING_CLASSES for kind in type(module).__mro__):
                return []
            if isinstance(module, DistributedDataParallel):
                accepted.update(map(id, module.parameters()))
        accepted -= self._frozen()
        return [p for p in found if id(p) not in accepted]

    def _frozen(self) -> set[int]:
        """Return the ids of parameters that were not trainable when they were distributed."""
        ids = {id(p) for model in self._models for p in model.parameters().values()}
        return ids - self._distributed

    def _report(self, what: str, parameters: list[torch.Tensor]) -> None:
        self._say(
            f"{what} that are not distributed: {_name(parameters[0])}{_more(parameters)}. Each "
            "rank would train a different model. HINT: model, optimizer = world.distribute(model, "
            "optimizer) before the loop, with all trained parameters inside the model; or set "
            "replicas='ignore' in paceline.init if ranks are meant to differ or the script "
            "averages gradients"
        )

    def _say(self, message: str) -> None:
        """Raise ValueError, or warn once, as the mode says."""
        if self.mode == "raise":
            raise ValueError(message)
        self.mode = "ignore"
        self._warn(message)


_Gradients = dict[str, tuple[int, int] | None]


def _gradients_of(replica: FixedBuckets) -> _Gradients:
    """Return identity and version of each gradient, which change when a backward adds to it."""
    return {
        name: None if p.grad is None else (id(p.grad), p.grad._version)
        for name, p in replica.module.named_parameters()
    }


def reached_leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaf tensors that a backward of ``loss`` would give a gradient."""
    nodes = graph_nodes([loss.grad_fn])
    return [node.variable for node in nodes if hasattr(node, "variable")]


def unsharded_loaders_in_use() -> list[str]:
    """Return the DataLoaders that the process iterates over, and that give it all samples.

    Loaders of ``world.shard`` are left out, and those with other samplers than PyTorch's plain
    ones, which may divide the samples between ranks.
    """
    found = []
    for value in gc.get_objects():
        if issubclass(type(value), _BaseDataLoaderIter):
            batches = getattr(value, "_index_sampler", None)  # None: still in its constructor
            sampler = getattr(batches, "sampler", batches)
            if type(sampler) in (RandomSampler, SequentialSampler):
                found.append(f"DataLoader({type(value._dataset).__name__})")
    return found


def _is_handled(parameter: torch.Tensor) -> bool:
    """Return whether the script or a library handles the parameter's gradient."""
    is_distributed = type(parameter).__module__.startswith("torch.distributed")
    return is_distributed or has_users_hooks(parameter)


def _modules() -> Iterator[nn.Module]:
    """Yield all modules of the process."""
    for value in gc.get_objects():
        if issubclass(type(value), nn.Module):  # isinstance would ask proxies for their class
            yield value


def _more(parameters: Sequence[object]) -> str:
    return f" (and {len(parameters) - 1} more)" if len(parameters) > 1 else ""


def _name(parameter: torch.Tensor) -> str:
    """Return the parameter's name in the largest module that has it."""
    found: list[tuple[int, str]] = []
    for module in _modules():
        named = dict(module.named_parameters())
        of = type(module).__name__
        found += [(len(named), f"{n} of a {of}") for n, p in named.items() if p is parameter]
    return max(found)[1] if found else f"a parameter of shape {tuple(parameter.shape)}"


# Parameters that the script changes between ``world.distribute`` and the first step.
#
# DistributedDataParallel and FSDP2 hold the parameters that a model had when it was distributed.
# A parameter that is added or replaced afterwards is not synchronized, or is lost in the next
# forward.

HINT = (
    "HINT: change the model first, then create the optimizer, then model, optimizer = "
    "world.distribute(model, optimizer); load_state_dict without assign=True keeps the parameters"
)


@dataclass(frozen=True)
class _Parameter:
    """A parameter as it was when the model was distributed."""

    tensor: torch.Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Parameter":
        return cls(tensor, tuple(tensor.shape), tensor.dtype, local_part(tensor).device)

    def change_to(self, other: "_Parameter") -> str:
        """Return what has changed since; "" for nothing."""
        for name in ("shape", "dtype", "device"):
            before, now = getattr(self, name), getattr(other, name)
            if before != now:
                return f"had the {name} {before} at world.distribute, and has {now} now"
        return "" if self.tensor is other.tensor else "was replaced after world.distribute"


def watch_parameters(model: DistributedModel) -> None:
    """Check in the first forward of a distributed model that its parameters are the same.

    The forward raises ValueError where they differ, before ranks exchange anything.
    """
    before = _parameters(model.plain)

    def check(*_: Any) -> None:
        handle.remove()
        if model.has_run():
            return  # some parameters are gathered
        found = list(_changes(before, _parameters(model.plain)))
        if found:
            raise ValueError(f"world.distribute: {found[0]}{_more(found)}. {HINT}")

    handle = model.called.register_forward_pre_hook(UncopiedHook(check), prepend=True)


def _parameters(model: nn.Module) -> dict[str, _Parameter]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: _Parameter.of(parameter) for name, parameter in named}


def _changes(before: dict[str, _Parameter], now: dict[str, _Parameter]) -> Iterator[str]:
    """Yield a sentence for each parameter that has changed."""
    for name, parameter in now.items():
        known = before.get(name)
        if known is None:
            yield f"the parameter {name} was added after world.distribute"
        elif change := known.change_to(parameter):
            yield f"the parameter {name} {change}"
    for name in before:
        if name not in now:
            yield f"the parameter {name} was removed after world.distribute"
