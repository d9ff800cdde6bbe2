"""Proposed and measured remedies of a diagnosis, as tables and as JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ...analyze.diagnosis.remedy import Remedy
from ...analyze.diagnosis.rungs import Interval, Waterfall
from ..numbers import percent


class PredictionError(Protocol):
    """Median error of the predictions of one kind, in percentage points."""

    @property
    def points(self) -> float: ...
    @property
    def count(self) -> int: ...


def format_gain(gain: Interval | None) -> str:
    """Format a gain in throughput, as in "+31 % (28 to 34)"."""
    if gain is None:
        return "?"
    text = f"{100 * gain.mean:+.0f} %"
    if math.isfinite(gain.low) and math.isfinite(gain.high):
        text += f" ({100 * gain.low:.0f} to {100 * gain.high:.0f})"
    return text


def set_to(remedy: Remedy) -> str:
    """Return the knob's name, with its value if that is not just "on"."""
    plain = remedy.value is True or not remedy.settable
    return remedy.knob if plain else f"{remedy.knob} = {remedy.value}"


def how_to_apply(remedy: Remedy) -> str:
    """Say how to apply a remedy, and which side effects it may have."""
    where = f"line {remedy.line}: " if remedy.line is not None else ""
    besides = ["changes the numbers"] if remedy.numbers else []
    besides += [f"may cost {remedy.costs}"] if remedy.costs else []
    return f"{where}{remedy.edit}" + "".join(f"; {one}" for one in besides)


def render_proposed(
    remedies: Sequence[Remedy], off: Mapping[str, PredictionError]
) -> list[RenderableType]:
    """Return the table of proposed remedies with their predicted gains.

    off: Errors of earlier predictions, by their source.
    """
    if not remedies:
        return []
    table = Table(box=None, pad_edge=False)
    for heading in ("remedy", "predicted gain", "from", "how"):
        table.add_column(heading, no_wrap=heading != "how")
    for one in remedies:
        sets = f"--try {one.knob}, or " if one.settable else ""
        table.add_row(
            f"  {set_to(one)}",
            format_gain(one.gain),
            one.source,
            Text(f"{sets}{how_to_apply(one)}"),
        )
    accuracy = [
        f"Predictions from {source} were off by {off[source].points:.1f} points "
        f"(median of {off[source].count})."
        for source in dict.fromkeys(one.source for one in remedies)
        if source in off
    ]
    return [table, *(Text(line, style="bright_black") for line in accuracy)]


def render_tried(tried: Any) -> list[RenderableType]:
    """Return the table of tried remedies, with predicted and measured gains."""
    if not tried.trials:
        return [
            Text(
                "Paceline tried no remedy: no cause has one that it can set without a script edit."
            )
        ]
    table = Table(box=None, pad_edge=False)
    for heading in ("tried remedy", "predicted gain", "measured gain", ""):
        table.add_column(heading, no_wrap=bool(heading))
    for one in tried.trials:
        kept = Text("kept", style="green") if one.kept else Text(one.why)
        table.add_row(
            f"  {set_to(one.remedy)}", format_gain(one.predicted), format_gain(one.gain), kept
        )
    return [table, *(Text(line) for line in loss_changes(tried))]


def describe_confirmed(gain: Interval) -> str:
    """Say how much faster all kept remedies together are, as measured after the trials."""
    return (
        f"All kept remedies together, measured again in alternation with none of them: "
        f"{format_gain(gain)}."
    )


def describe_trial(trial: Any) -> str:
    """Return the result of one trial in one line."""
    said = "kept" if trial.kept else trial.why
    predicted = f" (predicted {format_gain(trial.predicted)})" if trial.predicted else ""
    measured = f"{format_gain(trial.gain)}{predicted}, " if trial.gain else ""
    return f"tried {set_to(trial.remedy)}: {measured}{said}"


def loss_changes(tried: Any) -> list[str]:
    """Return how the knobs that change numerical results changed the training loss, in words."""
    lines = []
    for one in tried.trials:
        if one.loss is not None:
            change = one.loss.with_it - one.loss.without
            lines.append(
                f"  {one.remedy.knob} changes the numbers: over the same steps the loss was "
                f"{one.loss.with_it:.4g} with it and {one.loss.without:.4g} without "
                f"({change:+.2g}; runs without it differ by {one.loss.spread:.2g})."
            )
    return lines


def render_before_after(
    before: Waterfall, after: Waterfall, names: Mapping[str, str]
) -> RenderableType:
    """Return a table of two waterfalls, as shares of a step's time."""
    table = Table(box=None, pad_edge=False)
    table.add_column("of a step's time")
    for heading in ("before", "after"):
        table.add_column(heading, justify="right")
    for one in dict.fromkeys(bar.id for w in (before, after) for bar in w.bars):
        found = [w.of_step(one) for w in (before, after)]
        table.add_row(f"  {names[one]}", *(percent(x.mean) if x else "" for x in found))
    shares = (percent(w.reached) for w in (before, after))
    table.add_row("  of the ideal", *shares)
    return table


def as_json(found: Any) -> dict[str, Any]:
    """Return the remedies as JSON, in the format of docs/reference/formats/json.md."""
    return {
        "remedies": [asdict(one) for one in found.remedies],
        "predictions_off": {source: asdict(one) for source, one in found.off.items()},
        "tried": [asdict(one) | {"off": one.off} for one in found.tried.trials]
        if found.tried
        else None,
        "kept": found.tried.kept if found.tried else None,
        "faster": found.tried.faster if found.tried else None,
        "confirmed": asdict(found.tried.confirmed)
        if found.tried and found.tried.confirmed
        else None,
    }
