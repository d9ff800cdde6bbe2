"""What the summary of a trial's run tells: what it waited for, and its gradient noise scale."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ...report.verdict.verdict import UNCERTAIN
from ...security.files import InvalidFileError
from ...security.schema import read_json
from .trial_folder import Attempt

MAX_SUMMARY_BYTES = 16 << 20
MIN_SHARE = 0.1  # of the ranks' time; a smaller loss is not named
# What waits, by the kind of a loss in a summary.
INPUT, EXCHANGE, CORES = "input", "exchange", "cores"
_WAITS = {
    "input": INPUT,
    "wait": EXCHANGE,
    "transfer": EXCHANGE,
    "bubble": EXCHANGE,
    "starved": CORES,
}


class _Loss(msgspec.Struct, frozen=True):
    kind: Annotated[str, Meta(max_length=100)]
    share: Annotated[float, Meta(ge=0, le=1)]


class _Verdict(msgspec.Struct, frozen=True):
    verdict: Annotated[str, Meta(max_length=10_000)] = ""


class _Noise(msgspec.Struct, frozen=True):
    samples: float | None = None
    low: float = 0.0
    high: float | None = None


class _Summary(msgspec.Struct, frozen=True):
    """The part of a summary that is read. A run without figures has none of it."""

    losses: Annotated[list[_Loss], Meta(max_length=10_000)] = []
    verdict: _Verdict = _Verdict()
    noise_scale: _Noise | None = None


def summary_facts(attempt: Attempt) -> dict[str, Any]:
    """Return what a run waited for longest, and its gradient noise scale, as far as they are known.

    ``waits``: kind and share of the ranks' time, if it is at least ``MIN_SHARE`` and the summary is
    not uncertain. ``noise``: samples, and its interval.
    """
    try:
        summary = read_json(attempt.summary, _Summary, MAX_SUMMARY_BYTES)
    except (OSError, InvalidFileError):
        return {}
    found: dict[str, Any] = {}
    noise = summary.noise_scale
    if noise is not None and noise.samples is not None and noise.high is not None:
        found["noise"] = [noise.samples, noise.low, noise.high]
    shares: dict[str, float] = {}
    for loss in summary.losses:
        if loss.kind in _WAITS:
            kind = _WAITS[loss.kind]
            shares[kind] = shares.get(kind, 0.0) + loss.share
    kind = max(shares, key=lambda one: shares[one], default="")
    is_sure = not summary.verdict.verdict.startswith(UNCERTAIN)
    if is_sure and shares.get(kind, 0.0) >= MIN_SHARE:
        found["waits"] = {"kind": kind, "share": round(shares[kind], 4)}
    return found
