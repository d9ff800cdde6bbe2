"""The result of the guard as JSON: the field ``guard`` of ``paceline run --json``."""

import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it imports numpy
    from .loss_guard import LossGuard


def guard_json(guard: "LossGuard | None") -> dict[str, Any] | None:
    """Return the result; None without a guard, or if it has no reference."""
    if guard is None or guard.standard is None:
        return None
    band, axis = guard.standard.band, guard.standard.axis
    left = None
    if guard.departure is not None:
        left = {name: _finite(value) for name, value in asdict(guard.departure).items()}
    last = guard.tested[-1] if guard.tested else None
    return {
        "result": _result(guard),
        "on_divergence": guard.request.action.value,
        "metric": str(guard.metric),
        "axis": axis,
        "reference_runs": band.runs,
        "reference_end": band.end,
        "values": len(guard.tested),
        "end": last[1 if axis == "samples" else 0] if last is not None else 0.0,
        "left": left,
        "rate_rises": [asdict(rise) for rise in guard.rises],
    }


def _result(guard: "LossGuard") -> str:
    if guard.departure is not None:
        return "ranks-differ" if guard.departure.kind == "replicas" else "left-band"
    if guard.mistake:
        return "other-model"
    return "within-band" if guard.tested else "no-values"


def _finite(value: Any) -> Any:
    """Return None for what JSON has no number for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
