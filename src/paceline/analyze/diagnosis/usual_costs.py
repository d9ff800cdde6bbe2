"""Losses that any data-parallel training has. Only large ones are causes.

A core alone has a higher clock, and more of the caches and of the memory bandwidth, than when all
cores compute. Gradients are exchanged in each step, and ranks wait for whichever of them is late.
POP calls efficiencies of 80 % and more acceptable (https://pop-coe.eu/node/69).
"""

from collections.abc import Iterable

from .overlap import Cause

USUAL_SHARE = 0.2  # of a step
MAX_CALLS = 3  # per step: with more small collectives, their number is the cause
_USUAL = ("shared-machine", "exchange-bandwidth", "exchange-latency", "jitter")


def split_usual(found: Iterable[Cause]) -> tuple[list[Cause], list[Cause]]:
    """Return the causes without usual costs, and the usual costs."""
    causes: list[Cause] = []
    usual: list[Cause] = []
    for cause in found:
        (usual if _is_usual(cause) else causes).append(cause)
    return causes, usual


def _is_usual(cause: Cause) -> bool:
    if cause.id not in _USUAL or cause.share >= USUAL_SHARE:
        return False
    many = float(cause.evidence.get("calls_a_step", 0.0)) > MAX_CALLS
    return not (many and cause.id == "exchange-latency")
