"""The complete state that a resumed run needs, and restoring it."""

import random
import sys
from collections.abc import Container
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import nn

from ..checkpoint.shard_copies import DifferentCopy, PartPath, ShardDigests, TensorPath
from ..checkpoint.shared_state import OWNED, Difference, SharedState
from ..comm.members.exchange_objects import all_gather_objects
from ..optim.gradients import parameters_of
from ..parallel.mesh import DATA, Mesh
from ..parallel.replicated.replica import unwrap
from ..parallel.strategy.model_state import OwnedState
from ..plurals import counted, named_ranks
from .meter import Meter
from .optimizer_step import OptimizerSteps
from .restoring import load_part, placed_for


@dataclass
class Position:
    """Position of the run.

    Attributes:
        epoch: Current epoch.
        passes: For each sharded loader, by number, the completed passes of this epoch.
        open: Batches done of each pass in progress.
        batch: Samples in each loader's global batch.
        schedules: Sizes of each loader's global batch by epoch, as in ``BatchSchedule``.
    """

    epoch: int = 0
    passes: dict[int, int] = field(default_factory=dict)
    open: dict[int, int] = field(default_factory=dict)
    batch: dict[int, int] = field(default_factory=dict)
    schedules: dict[int, dict[int, int]] = field(default_factory=dict)

    def new_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.passes, self.open = {}, {}

    @property
    def inside(self) -> bool:
        """Whether this position is inside an epoch."""
        return bool(self.open or self.passes)

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)


# Objects of ``world.keep``, and whose state of them a checkpoint holds.


class Scope(Enum):
    """Whose state a checkpoint holds for an object."""

    REPLICATED = "replicated"
    RANK_0 = "from_rank_0"
    PER_RANK = "per_rank"


@dataclass(frozen=True)
class KeptState:
    """An object of ``world.keep``, which has a state, and the scope of that state."""

    stateful: Any
    scope: Scope

    @classmethod
    def of(cls, name: str, thing: Any) -> "KeptState":
        """Return what ``world.keep(name=thing)`` keeps.

        Raises:
            ValueError: The object has no state_dict and load_state_dict.
        """
        kept = thing if isinstance(thing, KeptState) else cls(thing, Scope.REPLICATED)
        thing = kept.stateful
        if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
            shown = "..." if kept.scope is Scope.REPLICATED else f"paceline.{kept.scope.value}(...)"
            raise ValueError(
                f"world.keep({name}={shown}): the object must have state_dict and load_state_dict; "
                f"this is of type {type(thing).__name__}. HINT: keep an object that has both"
            )
        return kept


def per_rank(thing: Any) -> KeptState:
    """Mark an object for ``world.keep`` whose state differs between ranks by design.

    Checkpoints then contain the state of each rank, and each rank restores the state of its number.
    If the number of ranks changes, new ranks keep their initial state, the states of missing ranks
    are not restored, and a warning names the object. Where a layout lets ranks share samples, and
    the number of data ranks stays, each rank restores the state of one with its samples.
    """
    return KeptState(thing, Scope.PER_RANK)


def from_rank_0(thing: Any) -> KeptState:
    """Mark an object for ``world.keep``, so that checkpoints contain the state of rank 0.

    All ranks restore it. The states of other ranks may differ and are lost.
    """
    return KeptState(thing, Scope.RANK_0)


# Random states.


def random_states() -> dict[str, Any]:
    """Return the states of this rank's global random number generators."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "numpy" in states:
        import numpy as np

        np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


# One stream of random numbers for each data rank.
#
# Ranks that share samples draw the same numbers from the global generators, and data ranks
# different ones. Data rank d continues with the generators of rank d, which are those that it
# would have in a run with data ranks only.

_Numpy = tuple[list[int], int, int, float]  # key, position, and the second normal number
_States = tuple[bytes, tuple[int, list[int], float | None], _Numpy | None, bytes | None]


def share_random_states(mesh: Mesh) -> None:
    """Give this rank the random states of its data rank. Collective."""
    states_of_ranks = all_gather_objects(_packed_states(random_states()), _States)
    set_random_states(_unpacked_states(states_of_ranks[mesh.data_rank]))


def _packed_states(states: dict[str, Any]) -> Any:
    version, numbers, gauss = states["python"]
    legacy = states.get("numpy")
    packed = None
    if legacy is not None:
        inner = legacy["state"]
        packed = (inner["key"].tolist(), inner["pos"], legacy["has_gauss"], legacy["gauss"])
    cuda = states["cuda"].numpy().tobytes() if "cuda" in states else None
    return states["torch"].numpy().tobytes(), (version, list(numbers), gauss), packed, cuda


def _unpacked_states(packed: Any) -> dict[str, Any]:
    on_cpu, (version, numbers, gauss), legacy, cuda = packed
    states: dict[str, Any] = {
        "torch": _byte_tensor(on_cpu),
        "python": (version, tuple(numbers), gauss),
    }
    if legacy is not None:
        import numpy as np

        key, position, has_gauss, second = legacy
        states["numpy"] = {
            "bit_generator": "MT19937",
            "state": {"key": np.array(key, dtype=np.uint32), "pos": position},
            "has_gauss": has_gauss,
            "gauss": second,
        }
    if cuda is not None:
        states["cuda"] = _byte_tensor(cuda)
    return states


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class TrainingState:
    """The state of one rank: a part that is equal on all ranks (shared), and the rest (own)."""

    def __init__(self, training: OptimizerSteps, position: Position) -> None:
        self.training = training
        self.position = position
        self.owned = OwnedState(training.mesh, training.models)
        self.kept: dict[str, KeptState] = {}
        self.meters: list[Meter] = []  # of the current epoch, in order of creation
        # sums for meters that the resumed epoch will create
        self.pending_meters: list[dict[str, float]] = []

    def keep(self, name: str, thing: Any) -> None:
        self.kept[name] = KeptState.of(name, thing)

    def _shared_parts(self) -> dict[str, list[Any]]:
        training = self.training
        parts: dict[str, list[Any]] = {
            "models": [model.plain for model in training.models],
            "optimizers": training.optimizers,
            "warmups": training.warmups,
            "scaler": [training.scaler] if training.scaler else [],
        }
        excluded = [unwrap(kept.stateful) for kept in self._kept(Scope.PER_RANK).values()]
        return {
            name: [part for part in each if not any(part is other for other in excluded)]
            for name, each in parts.items()
        }

    def _kept(self, *scopes: Scope) -> dict[str, KeptState]:
        return {name: kept for name, kept in self.kept.items() if kept.scope in scopes}

    def shared_state(self) -> SharedState:
        """Return the state that all ranks restore."""
        state: dict[str, Any] = {
            name: [self.owned.split(part)[0] for part in parts]
            for name, parts in self._shared_parts().items()
        }
        kept = self._kept(Scope.REPLICATED, Scope.RANK_0)
        state["kept"] = {name: each.stateful.state_dict() for name, each in kept.items()}
        state["position"] = self.position.state_dict()
        state["step"] = self.training.phases.recorder.step
        rank_0 = [("kept", name) for name in self._kept(Scope.RANK_0)]
        of_rank_0 = [*rank_0, ("position",), ("step",)]
        copies = self.training.mesh.copies_of
        return SharedState(state, of_rank_0, self._buffer_addresses(), copies)

    def resolve_differences(
        self, shared: SharedState, found: dict[PartPath, Difference], others: Container[PartPath]
    ) -> list[str]:
        """Take the state of rank 0 for parts that differ between ranks; return warnings.

        Whether replicas of a model may differ is decided by the check of replicas.

        Args:
            found: The parts that differ.
            others: Those of them that differ in names, shapes or dtypes.

        Raises:
            ValueError: The same on all ranks: a kept object differs, or ranks have different
                models.
        """
        named = self.training.mesh.named
        for path, (ranks, absent) in found.items():
            if path[0] == "kept":
                raise ValueError(_difference_of_kept(path[1], named(ranks), len(ranks), absent))
            is_different = path in others and not absent
            if path[0] == "models" and is_different:
                raise ValueError(
                    f"{_label(path)} has other parameters on {named(ranks)} than on rank 0 "
                    "(names, shapes or dtypes), and no layout divides it. HINT: give the same "
                    "model to world.distribute on every rank; world.keep(NAME=paceline.per_rank("
                    "...)) saves different models"
                )
            if path[0] == "optimizers" and is_different and self.training.mesh.is_divided:
                raise ValueError(
                    f"{_label(path)} has the state of other parameters on {named(ranks)} "
                    "than on rank 0. HINT: model, optimizer = world.distribute(model, optimizer, "
                    "layout=...), so that each rank saves its part"
                )
            if absent:
                raise ValueError(
                    f"{_label(path)} does not exist on all ranks: {named(ranks)} "
                    f"{'differs' if len(ranks) == 1 else 'differ'} from rank 0. HINT: call "
                    "world.distribute, world.step and world.scale_learning_rate on every rank"
                )
        shared.take_from_rank_0(found)
        return [
            f"the state of {_label(path)} differs on {named(ranks)} from rank 0, and "
            "checkpoints contain that of rank 0. HINT: world.keep(NAME=paceline.per_rank(...)) if "
            "it is meant to differ"
            for path, (ranks, _) in found.items()
        ]

    def check_copies(self, found: list[DifferentCopy]) -> list[str]:
        """Return warnings about copies of one tensor that differ, one for each part of the state.

        Raises:
            ValueError: The same on all ranks: the copies of a kept object differ.
        """
        first = {copy.part: copy for copy in reversed(found)}
        lines, name = [], self.training.mesh.name
        for part, copy in first.items():
            line = (
                f"{name(copy.rank)}'s copy of {self._tensor_label(part, copy.tensor)} differs from "
                f"{name(copy.source)}'s, and both should be equal"
            )
            if part[0] == "kept":
                raise ValueError(f"{line}. HINT: update {part[1]} in the same way on every rank")
            lines.append(
                f"{line}; checkpoints contain that of {name(copy.source)}. HINT: find code that "
                "only one rank runs on the model or the optimizer (a step, load_state_dict)"
            )
        return lines

    def _tensor_label(self, part: PartPath, keys: TensorPath) -> str:
        """Return a tensor's parameter and block with its part, where it has them."""
        shared = self._shared_parts()
        if part[0] == "models" and keys:
            return (
                f"{_label(part)}: {self._parameter_label(shared['models'][part[1]], str(keys[0]))}"
            )
        if part[0] == "optimizers" and len(keys) == 3 and keys[0] == "state":
            if isinstance(keys[1], str):  # of a model that a layout divides
                return f"{_label(part)}: {keys[2]} of parameter {keys[1]}"
            each = parameters_of(shared["optimizers"][part[1]])
            for model in self.training.models:
                for name, parameter in model.parameters().items():
                    if keys[1] < len(each) and parameter is each[keys[1]]:
                        found = self._parameter_label(model.plain, name)
                        return f"{_label(part)}: {keys[2]} of {found}"
        return f"{_label(part)}: {'.'.join(map(str, keys))}"

    def _parameter_label(self, plain: nn.Module, name: str) -> str:
        block = next((m.block_of(name) for m in self.training.models if m.plain is plain), "")
        return f"parameter {name} (block {block})" if block else f"parameter {name}"

    def shard_digests(self, shared: SharedState) -> ShardDigests:
        """Return digests of what this rank and others hold copies of, in parts of the state."""
        found = shared.shard_digests()
        parts = self._shared_parts()
        for name in ("models", "optimizers"):
            for number, part in enumerate(parts[name]):
                self.owned.add_digests(found, (name, number), part)
        return found

    def _buffer_addresses(self) -> frozenset[int]:
        """Return the addresses of the models' buffers.

        Between forwards ranks differ in them (running statistics); rank 0's are broadcast before
        the next forward.
        """
        models = self.training.models
        return frozenset(b.data_ptr() for m in models for b in m.plain.buffers() if b.numel())

    def rank_state(self) -> dict[str, Any]:
        kept = self._kept(Scope.PER_RANK)
        state: dict[str, Any] = {
            "random": random_states(),
            "meters": [m.state_dict() for m in self.meters],
            "kept": {name: each.stateful.state_dict() for name, each in kept.items()},
        }
        mesh = self.training.mesh
        if mesh.is_divided:
            state |= {"data_rank": mesh.data_rank, "place": str(mesh.place), OWNED: self._owned()}
        return state

    def _owned(self) -> dict[str, list[Any]]:
        """Return what this rank saves of models and optimizers of which ranks hold parts."""
        parts = self._shared_parts()
        return {
            name: [self.owned.split(part)[1] for part in parts[name]]
            for name in ("models", "optimizers")
        }

    def load(self, shared: dict[str, Any], states: list[Any], rank: int, size: int) -> Position:
        """Restore every object's state; return the position at which it was saved.

        Args:
            shared: The state that all ranks restore.
            states: The state of each rank that saved the checkpoint.
            rank, size: Of this run.

        Raises:
            ValueError: The checkpoint belongs to another script or model.
        """
        for name, parts in self._shared_parts().items():
            _check_count(name, len(shared[name]), len(parts))
            for part, state in zip(parts, shared[name], strict=True):
                load_part(part, state, name, self.owned)
        self._check_kept(shared["kept"], _kept_per_rank(states))
        source = self._source_of(states, rank, size)
        rank_state = source if source is not None else next(iter(states[rank : rank + 1]), None)
        for name, kept in self.kept.items():
            if name in shared["kept"]:
                kept.stateful.load_state_dict(placed_for(kept.stateful, shared["kept"][name]))
            elif rank_state is not None:
                kept.stateful.load_state_dict(rank_state["kept"][name])
        self.training.phases.recorder.step = shared["step"]
        if source is not None:
            set_random_states(source["random"])
            sums = source["meters"]
        else:  # another number of data ranks: the first one takes all sums
            data_ranks = _first_of_data_ranks(states)
            is_first = self.training.mesh.data_rank == 0
            sums = _sum_meters([part["meters"] for part in data_ranks]) if is_first else []
        for meter, state in zip(self.meters, sums, strict=False):
            meter.load_state_dict(state)
        self.pending_meters = list(sums[len(self.meters) :])
        return Position(**shared["position"])

    def _source_of(self, states: list[Any], rank: int, size: int) -> Any:
        """Return the saved state of a rank whose samples this one continues with; None for none."""
        mesh = self.training.mesh
        saved = [state.get("data_rank", number) for number, state in enumerate(states)]
        if len(set(saved)) != mesh.data_size:
            return None
        place = str({DATA: rank})  # of checkpoints without places
        if len(states) == size and states[rank].get("place", place) == str(mesh.place):
            return states[rank]
        return states[saved.index(mesh.data_rank)]

    def _check_kept(self, shared: dict[str, Any], per_rank: set[str]) -> None:
        saved = shared.keys() | per_rank
        if self.kept.keys() != saved:
            only = {
                "in the checkpoint": saved - self.kept.keys(),
                "in world.keep": self.kept.keys() - saved,
            }
            found = "; ".join(
                f"only {where}: {', '.join(sorted(names))}"
                for where, names in only.items()
                if names
            )
            raise ValueError(
                f"the checkpoint does not contain the objects of world.keep ({found}). HINT: call "
                "world.keep with the names of the run that saved it, or set another checkpoint "
                "folder"
            )
        for name in self._kept(Scope.REPLICATED, Scope.RANK_0).keys() & per_rank:
            raise ValueError(
                f"the checkpoint contains a state of {name} for each rank, but world.keep expects "
                f"one for all ranks. HINT: world.keep({name}=paceline.per_rank({name}))"
            )

    def restore_warnings(self, shared: dict[str, Any], states: list[Any], size: int) -> list[str]:
        """Return what ``load`` restores otherwise than it was saved, a line for each object."""
        warnings = []
        for name in self._kept(Scope.PER_RANK):
            if name in shared["kept"]:
                warnings.append(
                    f"the checkpoint contains one state of world.keep({name}=...) for all ranks: "
                    "each rank restores it"
                )
            elif len(states) != size:
                others = "each rank restores that of a rank which trained its samples"
                if self._source_of(states, self.training.mesh.rank, size) is None:
                    others = (
                        f"the initial state of {named_ranks(range(len(states), size))} remains"
                        if size > len(states)
                        else f"the states of {named_ranks(range(size, len(states)))} are not "
                        "restored"
                    )
                warnings.append(
                    f"the checkpoint contains the state of world.keep({name}=...) for "
                    f"{counted(len(states), 'rank')}, and this run has {counted(size, 'rank')}: "
                    f"{others}"
                )
        return warnings

    def new_meter(self, meter: Meter) -> None:
        self.meters.append(meter)
        if self.pending_meters:
            meter.load_state_dict(self.pending_meters.pop(0))


def _kept_per_rank(states: list[Any]) -> set[str]:
    """Return the names of objects with a state for each rank; older checkpoints have none."""
    return set[str]().union(*(state.get("kept", ()) for state in states))


def _first_of_data_ranks(states: list[Any]) -> list[Any]:
    """Return the states of one rank of each data rank."""
    numbered = reversed([*enumerate(states)])
    found = {state.get("data_rank", number): state for number, state in numbered}
    return [found[number] for number in sorted(found)]


def _label(path: PartPath) -> str:
    return f"{path[0]}[{path[1]}]" if len(path) > 1 else str(path[0])


def _difference_of_kept(name: str, ranks: str, count: int, absent: bool) -> str:
    if absent:
        return (
            f"world.keep({name}=...) was called on some ranks only, or with another scope: "
            f"{ranks} {'differs' if count == 1 else 'differ'} from rank 0. "
            "HINT: call world.keep with the same names and scopes on every rank"
        )
    return (
        f"the state of world.keep({name}=...) differs on {ranks} from rank 0. "
        f"HINT: {name}=paceline.per_rank({name}) saves each rank's state, "
        f"paceline.from_rank_0({name}) only rank 0's; an average of a model starts equal on all "
        "ranks if it is created after world.distribute"
    )


def _check_count(name: str, saved: int, expected: int) -> None:
    if saved != expected:
        raise ValueError(
            f"the number of {name} is {saved} in the checkpoint and {expected} in this script. "
            "HINT: call world.distribute (and scale_learning_rate) before world.epochs, as in the "
            "run that saved it"
        )


def _sum_meters(ranks: list[list[dict[str, float]]]) -> list[dict[str, float]]:
    """Return the meters of all ranks, summed one by one."""
    sums: list[dict[str, float]] = []
    for meters in ranks:
        for i, meter in enumerate(meters):
            if i == len(sums):
                sums.append({})
            for name, value in meter.items():
                sums[i][name] = sums[i].get(name, 0.0) + value
    return sums
