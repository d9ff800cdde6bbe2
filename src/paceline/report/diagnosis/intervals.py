"""Means with their intervals, as terminal and page show them."""

import math
from collections.abc import Callable

from ...analyze.diagnosis.rungs import Interval
from .. import document as doc
from ..numbers import amount, percent


def format_gain(gain: Interval | None) -> str:
    """Format a gain in throughput, as in "+31 % (28 to 34)"."""
    if gain is None:
        return "?"
    text = f"{100 * gain.mean:+.0f} %"
    if math.isfinite(gain.low) and math.isfinite(gain.high):
        text += f" ({100 * gain.low:.0f} to {100 * gain.high:.0f})"
    return text


def format_share(share: Interval) -> str:
    """Format a share, as in "31.2 % (28.0 to 34.4)"."""
    if not math.isfinite(share.low):
        return percent(share.mean)
    return f"{percent(share.mean)} ({100 * share.low:.1f} to {100 * share.high:.1f})"


def format_rate(rate: Interval) -> str:
    """Format a rate, as in "4,800 ± 67.4", or "36 within the noise"."""
    half = (rate.high - rate.low) / 2
    if not math.isfinite(half):
        return f"{amount(rate.mean)} ± ?"
    noise = half >= abs(rate.mean)
    return f"{amount(rate.mean)} {'within the noise' if noise else f'± {amount(half)}'}"


def share_around(share: Interval, path: str) -> list[doc.Part]:
    """Return a share with its interval. ``path``: of the interval in the JSON."""
    return around(share, path, percent, format_share(share))


def rate_around(rate: Interval, path: str) -> list[doc.Part]:
    """Return a rate with its interval. ``path``: of the interval in the JSON."""
    return around(rate, path, amount, format_rate(rate))


def gain_around(gain: Interval | None, path: str) -> list[doc.Part]:
    """Return a gain with its interval. ``path``: of the interval in the JSON."""
    if gain is None:
        return [doc.Part("?")]
    return around(gain, path, lambda share: f"{100 * share:+.1f} %", format_gain(gain))


def around(
    interval: Interval, path: str, show: Callable[[float], str], brief: str
) -> list[doc.Part]:
    """Return a mean and its interval: ``brief`` in the terminal, single figures on a page."""
    parts = [doc.in_terminal(brief), doc.on_page(show(interval.mean), figure=f"{path}.mean")]
    if math.isfinite(interval.low):
        parts += [
            doc.on_page(" (", doc.RANGE),
            doc.on_page(show(interval.low), doc.RANGE, f"{path}.low"),
            doc.on_page(" to ", doc.RANGE),
            doc.on_page(show(interval.high), doc.RANGE, f"{path}.high"),
            doc.on_page(")", doc.RANGE),
        ]
    return parts
