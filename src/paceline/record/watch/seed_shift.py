"""Other seeds for a script that sets its own, for the runs of a reference.

``paceline.init`` adds ``seed_shift()`` to its seed. Other scripts may use their seed to make or to
split their data as well, which must not differ. In them, the global generators are therefore seeded
anew at the first iterator of a loader or the first backward, after the model was constructed.
"""

import os
import random
import sys
from typing import Any

from ..hooks.taps import BACKWARD, EPOCH

VARIABLE = "PACELINE_SEED_SHIFT"
STRIDE = 7919  # between seeds, so that they do not coincide with those of other ranks
_is_done = False


def seed_shift() -> int:
    """Return the number to add to the seed; 0 outside of the runs of a reference."""
    text = os.environ.get(VARIABLE, "")
    return STRIDE * int(text) if text.isdigit() else 0


def install() -> None:
    """Shift the seeds of this process, if a reference is made."""
    if seed_shift():
        EPOCH.before(shift_once)
        BACKWARD.before(shift_once)


def shift_once(*_: Any, **__: Any) -> None:
    """Seed the global random number generators anew, the first time."""
    global _is_done
    if _is_done:
        return
    _is_done = True
    import torch

    seed = (torch.initial_seed() + seed_shift()) % (1 << 32)
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def note_seeded() -> None:
    """Shift nothing: ``paceline.init`` has added the shift."""
    global _is_done
    _is_done = True
