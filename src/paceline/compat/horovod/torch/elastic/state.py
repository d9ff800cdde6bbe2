"""States of a training with PyTorch that continue after a rank was lost."""

import copy
import pickle
from typing import Any

import torch

from .....comm.members.membership import is_store_private
from .....record.ring.launcher_messages import notify
from ...common.elastic import ObjectState
from ..functions import (
    allgather_object,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from ..mpi_ops import rank
from .commits import CommitStore
from .sampler import ElasticSampler

_PICKLED = "pickled attribute"


class StateHandler:
    """How a value of a state is saved, restored and synchronized."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        raise NotImplementedError

    def restore(self) -> None:
        raise NotImplementedError

    def sync(self) -> None:
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Handle another value from now on."""
        self.value = value
        self.save()

    def committed(self) -> Any:
        """Return the state for a commit."""
        return self.value.state_dict()

    def load(self, saved: Any) -> None:
        """Restore a state of ``committed``."""
        self.value.load_state_dict(saved)
        self.save()


class StateDictHandler(StateHandler):
    """Handler of a value with ``state_dict`` and ``load_state_dict``."""

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self._saved = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), name="elastic.state"))
        self.save()

    def committed(self) -> Any:
        """Return the saved state."""
        return self._saved


class ModelStateHandler(StateDictHandler):
    """Handler of a model."""

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateDictHandler):
    """Handler of an optimizer."""

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateDictHandler):
    """Handler of a sampler; its saved state contains the samples that all ranks have named."""

    def save(self) -> None:
        named = allgather_object(sorted(self.value.processed_indices), name="elastic.sampler")
        self._saved = {
            **self.value.state_dict(), "processed_indices": sorted(set().union(*named)),
        }  # fmt: skip

    def sync(self) -> None:
        self.save()
        self._saved = broadcast_object(self._saved, name="elastic.sampler")
        self.value.load_state_dict(self._saved)


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, StateDictHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return the types that have a handler, with their handlers; the first one fits."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    global _registry
    _registry = registry


class TorchState(ObjectState):
    """State of a training: models, optimizers, schedulers, samplers and Python objects.

    All of them are attributes. Under ``paceline run --max-restarts`` a commit is also written to
    the node's memory, from where the next attempt continues.

    Args:
        model: A model, or None.
        optimizer: An optimizer, or None.
        kwargs: Further values by name. Values without a handler are Python objects.
    """

    _handlers: dict[str, StateHandler]

    def __init__(self, model: Any = None, optimizer: Any = None, **kwargs: Any) -> None:
        values = {**kwargs, "model": model, "optimizer": optimizer}
        handlers: dict[str, StateHandler] = {}
        for name, value in values.items():
            kind = next((kind for of, kind in _registry if isinstance(value, of)), None)
            if kind is not None:
                handlers[name] = kind(value)
        self.__dict__["_handlers"] = handlers
        for name, handler in handlers.items():
            self.__dict__[name] = handler.value
        self._commits: CommitStore | None = None
        self._warned = False
        rest = {name: value for name, value in values.items() if name not in handlers}
        super().__init__(bcast_object=broadcast_object, get_rank=rank, **rest)

    def __setattr__(self, name: str, value: Any) -> None:
        handlers = self.__dict__["_handlers"]
        if name in handlers and self.__dict__.get(name) is not value:
            handlers[name].set_value(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        for _, handler in sorted(self._handlers.items()):
            handler.save()
        super().save()

    def restore(self) -> None:
        for _, handler in sorted(self._handlers.items()):
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for _, handler in sorted(self._handlers.items()):
            handler.sync()
        super().sync()

    def reset(self) -> None:
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def resume(self, commits: CommitStore) -> bool:
        """Write commits to ``commits`` from now on. Load its newest one, if there is one.

        Collective. Returns whether there was one.

        Raises:
            ValueError: The commit has other values than this state.
        """
        self._commits = commits
        found = commits.newest()
        if found is None:
            return False
        if found["handlers"].keys() != self._handlers.keys():
            names = sorted(found["handlers"].keys() ^ self._handlers.keys())
            raise ValueError(
                f"the last commit and this TorchState differ in {', '.join(names)}. HINT: create "
                "the state with the same arguments in every attempt"
            )
        for name, handler in self._handlers.items():
            handler.load(found["handlers"][name])
        self._saved_state |= {
            name: _unpacked(value)
            for name, value in found["objects"].items()
            if name in self._saved_state
        }
        self._set_attrs()
        return True

    def keep(self) -> None:
        if self._commits is None:
            return
        objects = {name: _packed(value) for name, value in self._saved_state.items()}
        lost = [name for name, value in objects.items() if value is None]
        if lost and not self._warned and rank() == 0:
            notify(
                f"paceline: commits do not contain {', '.join(lost)} of the state, which can't be "
                "pickled: an attempt after a restart begins with the value of the script\n"
            )
        self._warned = self._warned or bool(lost)
        self._commits.write(
            {
                "handlers": {name: one.committed() for name, one in self._handlers.items()},
                "objects": {name: value for name, value in objects.items() if value is not None},
            }
        )


def _packed(value: Any) -> dict[str, bytes] | None:
    """Return a Python object as a pickle, or None if it has none. The node's memory in which
    commits are is this user's alone.
    """
    try:
        return {_PICKLED: pickle.dumps(value)}
    except Exception:  # of functions of the object, too
        return None


def _unpacked(packed: dict[str, bytes]) -> Any:
    if not is_store_private():
        raise ValueError("a commit can be read under paceline run only")
    return pickle.loads(packed[_PICKLED])
