"""One stream of random numbers for each data rank.

Ranks that share samples draw the same numbers from the global generators, and data ranks different
ones. Data rank d continues with the generators of rank d, which are those that it would have in a
run with data ranks only.
"""

from typing import Any

import torch

from ...comm.members.exchange_objects import all_gather_objects
from ...parallel.mesh import Mesh
from ..training_state import random_states, set_random_states

_Numpy = tuple[list[int], int, int, float]  # key, position, and the second normal number
_States = tuple[bytes, tuple[int, list[int], float | None], _Numpy | None, bytes | None]


def share_random_states(mesh: Mesh) -> None:
    """Give this rank the random states of its data rank. Collective."""
    found = all_gather_objects(_packed(random_states()), _States)
    set_random_states(_unpacked(found[mesh.data_rank]))


def _packed(states: dict[str, Any]) -> Any:
    version, numbers, gauss = states["python"]
    legacy = states.get("numpy")
    packed = None
    if legacy is not None:
        inner = legacy["state"]
        packed = (inner["key"].tolist(), inner["pos"], legacy["has_gauss"], legacy["gauss"])
    cuda = states["cuda"].numpy().tobytes() if "cuda" in states else None
    return states["torch"].numpy().tobytes(), (version, list(numbers), gauss), packed, cuda


def _unpacked(packed: Any) -> dict[str, Any]:
    on_cpu, (version, numbers, gauss), legacy, cuda = packed
    states: dict[str, Any] = {"torch": _bytes(on_cpu), "python": (version, tuple(numbers), gauss)}
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
        states["cuda"] = _bytes(cuda)
    return states


def _bytes(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
