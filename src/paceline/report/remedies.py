"""Proposed and measured remedies of a diagnosis, as tables for terminal and page and as JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..analyze.diagnosis.remedy import PredictionError, Remedy, TrialResults
from ..analyze.diagnosis.rungs import Interval, Waterfall
from . import document as doc
from .numbers import percent


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


def proposed_table(remedies: Sequence[tuple[int, Remedy]], path: str) -> doc.Table:
    """Return the proposed remedies with their predicted gains.

    Args:
        remedies: Each with its position in the JSON.
        path: Where they are in the JSON.
    """
    rows = []
    for number, one in remedies:
        sets = f"--try {one.knob}, or " if one.settable else ""
        at = f"{path}.{number}"
        code = [doc.Part(" ", where=doc.PAGE), doc.Part(one.code, doc.CODE, where=doc.PAGE)]
        how: doc.Text = [f"{sets}{how_to_apply(one)}", *code * bool(one.code)]
        source = doc.Part(one.source, figure=f"{at}.source")
        rows.append(doc.Row([f"  {set_to(one)}", _gain(one.gain, f"{at}.gain"), source, how]))
    columns = [
        doc.Column("remedy", right=False, term="remedy"),
        doc.Column("predicted gain", right=False, term="predicted gain"),
        doc.Column("from", right=False, term="prediction"),
        doc.Column("how", right=False),
    ]
    return doc.Table(columns, rows)


def prediction_errors(remedies: Sequence[Remedy], off: Mapping[str, PredictionError]) -> list[str]:
    """Return how far earlier predictions from the sources of these remedies were off."""
    return [
        f"Predictions from {source} were off by {off[source].points:.1f} points "
        f"(median of {off[source].count})."
        for source in dict.fromkeys(one.source for one in remedies)
        if source in off
    ]


def tried_table(tried: TrialResults) -> doc.Table | None:
    """Return the tried remedies, with predicted and measured gains; None if none was tried."""
    if not tried.trials:
        return None
    rows = []
    for number, one in enumerate(tried.trials):
        at = f"tried.{number}"
        kept = doc.Part("kept", doc.GOOD) if one.kept else one.why
        gains = (_gain(one.predicted, f"{at}.predicted"), _gain(one.gain, f"{at}.gain"))
        rows.append(doc.Row([f"  {set_to(one.remedy)}", *gains, kept]))
    columns = [
        doc.Column("tried remedy", right=False, term="remedy"),
        doc.Column("predicted gain", right=False, term="predicted gain"),
        doc.Column("measured gain", right=False, term="measured gain"),
        doc.Column("", right=False),
    ]
    return doc.Table(columns, rows)


def _gain(gain: Interval | None, path: str) -> doc.Text:
    """Return a gain, on a page with the parts that are in the JSON."""
    if gain is None:
        return "?"
    shown: list[doc.Part] = [doc.Part(format_gain(gain), where=doc.TERMINAL)]
    shown.append(doc.Part(_rise(gain.mean), figure=f"{path}.mean", where=doc.PAGE))
    if math.isfinite(gain.low):
        shown += [
            doc.Part(" (", where=doc.PAGE),
            doc.Part(_rise(gain.low), figure=f"{path}.low", where=doc.PAGE),
            doc.Part(" to ", where=doc.PAGE),
            doc.Part(_rise(gain.high), figure=f"{path}.high", where=doc.PAGE),
            doc.Part(")", where=doc.PAGE),
        ]
    return shown


def _rise(share: float) -> str:
    return f"{100 * share:+.1f} %"


NOTHING_TRIED = "Paceline tried no remedy: no cause has one that it can set without a script edit."


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


def loss_changes(tried: TrialResults) -> list[str]:
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


def before_after_table(before: Waterfall, after: Waterfall, names: Mapping[str, str]) -> doc.Table:
    """Return two waterfalls, as shares of a step's time."""
    rows = []
    for one in dict.fromkeys(bar.id for w in (before, after) for bar in w.bars):
        found = [w.of_step(one) for w in (before, after)]
        rows.append(doc.Row([f"  {names[one]}", *(percent(x.mean) if x else "" for x in found)]))
    rows.append(doc.Row(["  of the ideal", percent(before.reached), percent(after.reached)]))
    columns = [doc.Column("of a step's time", right=False), *map(doc.Column, ("before", "after"))]
    return doc.Table(columns, rows)


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
