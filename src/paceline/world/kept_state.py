"""Scope of the state of an object that ``world.keep`` adds to checkpoints."""

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Scope(Enum):
    """Whose state a checkpoint holds for an object."""

    REPLICATED = "replicated"
    RANK_0 = "from_rank_0"
    PER_RANK = "per_rank"


@dataclass(frozen=True)
class KeptState:
    """An object of ``world.keep``, and the scope of its state."""

    thing: Any
    scope: Scope

    @classmethod
    def of(cls, name: str, thing: Any) -> "KeptState":
        """Return what ``world.keep(name=thing)`` keeps.

        Raises:
            ValueError: The object has no state_dict and load_state_dict.
        """
        kept = thing if isinstance(thing, KeptState) else cls(thing, Scope.REPLICATED)
        thing = kept.thing
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
