"""Other seeds for a script that sets its own, for the runs of a reference.

``paceline.init`` adds ``seed_shift()`` to its seed. Other scripts may use their seed to make or to
split their data as well, which must not differ. In them, the global generators are therefore seeded
anew at the first iterator of a loader or the first backward, after the model was constructed.
"""

import functools
import os
import random
import sys
from typing import Any

from ..hooks.import_hooks import after_import

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
        after_import({"torch.utils.data.dataloader": _patch, "torch.autograd": _patch_backward})


def shift_once() -> None:
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


def _patch(module: Any) -> None:
    original = module.DataLoader.__iter__

    @functools.wraps(original)
    def iterate(self: Any) -> Any:
        shift_once()
        return original(self)

    module.DataLoader.__iter__ = iterate


def _patch_backward(module: Any) -> None:
    original = module._engine_run_backward

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        shift_once()
        return original(*args, **kwargs)

    module._engine_run_backward = run_backward
