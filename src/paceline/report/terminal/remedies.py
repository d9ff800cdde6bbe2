"""What would help a training, what was tried, and what it gained: for a terminal, and as JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ...analyze.diagnosis.ladder import Interval, Waterfall
from ..numbers import percent


class Remedy(Protocol):
    """As predict.remedies proposes it."""

    @property
    def knob(self) -> str: ...
    @property
    def value(self) -> Any: ...
    @property
    def gain(self) -> Interval | None: ...
    @property
    def source(self) -> str: ...
    @property
    def settable(self) -> bool: ...
    @property
    def edit(self) -> str: ...
    @property
    def line(self) -> int | None: ...
    @property
    def code(self) -> str: ...
    @property
    def numbers(self) -> bool: ...
    @property
    def costs(self) -> str: ...


class Off(Protocol):
    """By how much predictions of a kind were off so far."""

    @property
    def points(self) -> float: ...
    @property
    def count(self) -> int: ...


def gained(gain: Interval | None) -> str:
    """A gain of the throughput, as +31 % (28 to 34)."""
    if gain is None:
        return "?"
    said = f"{100 * gain.mean:+.0f} %"
    if math.isfinite(gain.low) and math.isfinite(gain.high):
        said += f" ({100 * gain.low:.0f} to {100 * gain.high:.0f})"
    return said


def set_to(remedy: Remedy) -> str:
    """The knob, with its value where that is a number."""
    plain = remedy.value is True or not remedy.settable
    return remedy.knob if plain else f"{remedy.knob} = {remedy.value}"


def how(remedy: Remedy) -> str:
    """What is to be done for it, and what that may do besides."""
    where = f"line {remedy.line}: " if remedy.line is not None else ""
    besides = ["changes the numbers"] if remedy.numbers else []
    besides += [f"may cost {remedy.costs}"] if remedy.costs else []
    return f"{where}{remedy.edit}" + "".join(f"; {one}" for one in besides)


def proposed(remedies: Sequence[Remedy], off: Mapping[str, Off]) -> list[RenderableType]:
    """What can be set from outside, and then what the script has to be edited for."""
    if not remedies:
        return []
    table = Table(box=None, pad_edge=False)
    for heading in ("would gain, of the throughput", "predicted", "from", ""):
        table.add_column(heading, no_wrap=bool(heading))
    for one in remedies:
        sets = f"--try {one.knob}, or " if one.settable else ""
        table.add_row(f"  {set_to(one)}", gained(one.gain), one.source, Text(f"{sets}{how(one)}"))
    said = [
        f"Predictions from {source} were off by {off[source].points:.1f} points "
        f"(median of {off[source].count})."
        for source in dict.fromkeys(one.source for one in remedies)
        if source in off
    ]
    return [table, *(Text(line, style="bright_black") for line in said)]


def proven(tried: Any) -> list[RenderableType]:
    """Predicted against measured."""
    if not tried.trials:
        return [Text("Nothing was tried: no cause has a remedy that can be set from outside.")]
    table = Table(box=None, pad_edge=False)
    for heading in ("tried", "predicted", "measured", ""):
        table.add_column(heading, no_wrap=bool(heading))
    for one in tried.trials:
        kept = Text("kept", style="green") if one.kept else Text(one.why)
        table.add_row(f"  {set_to(one.remedy)}", gained(one.predicted), gained(one.gain), kept)
    return [table, *(Text(line) for line in losses(tried))]


def losses(tried: Any) -> list[str]:
    """Of knobs that change the numbers: what they did to the loss."""
    said = []
    for one in tried.trials:
        if one.loss is not None:
            change = one.loss.with_it - one.loss.without
            said.append(
                f"  {one.remedy.knob} changes the numbers: over the same steps the loss was "
                f"{one.loss.with_it:.4g} with it and {one.loss.without:.4g} without "
                f"({change:+.2g}; runs without it differ by {one.loss.spread:.2g})."
            )
    return said


def beside(before: Waterfall, after: Waterfall, names: Mapping[str, str]) -> RenderableType:
    """Both waterfalls, as shares of a step's time."""
    table = Table(box=None, pad_edge=False)
    table.add_column("of a step's time")
    for heading in ("before", "after"):
        table.add_column(heading, justify="right")
    for one in dict.fromkeys(bar.id for w in (before, after) for bar in w.bars):
        found = [w.of_step(one) for w in (before, after)]
        table.add_row(f"  {names[one]}", *(percent(x.mean) if x else "" for x in found))
    shares = (percent(w.measured.mean / w.ideal.mean) for w in (before, after))
    table.add_row("  of the ideal", *shares)
    return table


def as_json(found: Any) -> dict[str, Any]:
    """See docs/remedies.md."""
    return {
        "remedies": [asdict(one) for one in found.remedies],
        "predictions_off": {source: asdict(one) for source, one in found.off.items()},
        "tried": [asdict(one) | {"off": one.off} for one in found.tried.trials]
        if found.tried
        else None,
        "kept": found.tried.kept if found.tried else None,
        "faster": found.tried.faster if found.tried else None,
    }
