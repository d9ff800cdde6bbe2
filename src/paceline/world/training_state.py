"""The complete state that a resumed run needs, and restoring it."""

import random
import sys
from dataclasses import dataclass, field
from typing import Any

import torch

from ..parallel.data import unwrap
from .meter import Meter
from .optimizer_step import OptimizerSteps


@dataclass
class Position:
    """Position of the run.

    Attributes:
        epoch: Current epoch.
        passes: For each sharded loader, by number, the completed passes of this epoch.
        open: Batches done of each pass in progress.
        batch: Samples in each loader's global batch.
    """

    epoch: int = 0
    passes: dict[int, int] = field(default_factory=dict)
    open: dict[int, int] = field(default_factory=dict)
    batch: dict[int, int] = field(default_factory=dict)

    def new_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.passes, self.open = {}, {}

    @property
    def inside(self) -> bool:
        """Whether this position is inside an epoch."""
        return bool(self.open or self.passes)

    def state_dict(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "passes": dict(self.passes),
            "open": dict(self.open),
            "batch": dict(self.batch),
        }


def random_states() -> dict[str, Any]:
    """Return the states of this rank's global random number generators."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
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


class TrainingState:
    """The state of one rank: what is the same on all ranks (shared), and what differs (own)."""

    def __init__(self, training: OptimizerSteps, position: Position) -> None:
        self.training = training
        self.position = position
        self.kept: dict[str, Any] = {}
        self.meters: list[Meter] = []  # of the current epoch, in order of creation
        # sums for meters that the resumed epoch will create
        self.pending_meters: list[dict[str, float]] = []

    def keep(self, name: str, thing: Any) -> None:
        if not hasattr(thing, "state_dict") or not hasattr(thing, "load_state_dict"):
            raise ValueError(
                f"world.keep({name}=...): a {type(thing).__name__} has no state_dict and "
                "load_state_dict. HINT: keep objects that have both"
            )
        self.kept[name] = thing

    def _shared_parts(self) -> dict[str, list[Any]]:
        training = self.training
        return {
            "models": [unwrap(model) for model in training.models],
            "optimizers": training.optimizers,
            "warmups": training.warmups,
            "scaler": [training.scaler] if training.scaler else [],
        }

    def shared_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {
            name: [part.state_dict() for part in parts]
            for name, parts in self._shared_parts().items()
        }
        state["kept"] = {name: thing.state_dict() for name, thing in self.kept.items()}
        state["position"] = self.position.state_dict()
        state["step"] = self.training.phases.recorder.step
        return state

    def buffer_addresses(self) -> frozenset[int]:
        """Return the addresses of the models' buffers.

        Between forwards ranks differ in them (running statistics); rank 0's are broadcast before
        the next forward.
        """
        models = self.training.models
        return frozenset(b.data_ptr() for model in models for b in model.buffers() if b.numel())

    def rank_state(self) -> dict[str, Any]:
        return {"random": random_states(), "meters": [m.state_dict() for m in self.meters]}

    def load(self, shared: dict[str, Any], own: list[Any], rank: int, size: int) -> Position:
        """Restore every object's state; return the position at which it was saved.

        Raises ValueError where the checkpoint belongs to another script or model.
        """
        for name, parts in self._shared_parts().items():
            _check_count(name, len(shared[name]), len(parts))
            for part, state in zip(parts, shared[name], strict=True):
                _load_part(part, state, name)
        missing = self.kept.keys() ^ shared["kept"].keys()
        if missing:
            raise ValueError(
                f"the checkpoint and world.keep differ in {', '.join(sorted(missing))}. "
                "HINT: keep the same names, or another checkpoint folder"
            )
        for name, thing in self.kept.items():
            thing.load_state_dict(shared["kept"][name])
        self.training.phases.recorder.step = shared["step"]
        if len(own) == size:
            set_random_states(own[rank]["random"])
            sums = own[rank]["meters"]
        else:  # another number of ranks: rank 0 takes all sums
            sums = _sum_meters([part["meters"] for part in own]) if rank == 0 else []
        for meter, state in zip(self.meters, sums, strict=False):
            meter.load_state_dict(state)
        self.pending_meters = list(sums[len(self.meters) :])
        return Position(**shared["position"])

    def new_meter(self, meter: Meter) -> None:
        self.meters.append(meter)
        if self.pending_meters:
            meter.load_state_dict(self.pending_meters.pop(0))


def _load_part(part: Any, state: Any, name: str) -> None:
    try:
        part.load_state_dict(state)
    except (RuntimeError, ValueError, KeyError) as error:
        first = " ".join(str(error).split())[:300]
        raise ValueError(
            f"the checkpoint does not fit this script's {name}: {first}. HINT: the script that "
            "wrote it, or another checkpoint folder"
        ) from None


def _check_count(name: str, saved: int, expected: int) -> None:
    if saved != expected:
        raise ValueError(
            f"the checkpoint has {saved} {name}, this script {expected}. HINT: call "
            "world.distribute (and scale_learning_rate) before world.epochs, as the run that "
            "wrote it did"
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
