"""Proposed and measured remedies of a diagnosis, for terminal, page and JSON."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...analyze.diagnosis.diagnosis import Diagnosis, PredictionError, Remedy, TrialResults
from ...analyze.diagnosis.rungs import Interval
from ...analyze.diagnosis.table import INDICATORS
from .. import document as doc
from ..numbers import amount, percent
from .causes import cause_blocks
from .intervals import format_gain, gain_around
from .waterfall import lead, rate_unit, waterfall_chart


def set_to(remedy: Remedy) -> str:
    """Return the knob's name, with its value if that is not just "on"."""
    plain = remedy.value is True or not remedy.settable
    return remedy.knob if plain else f"{remedy.knob} = {remedy.value}"


def how_to_apply(remedy: Remedy) -> str:
    """Say how to apply a remedy, and which side effects it may have."""
    where = f"line {remedy.line}: " if remedy.line is not None else ""
    besides = ["changes the numbers"] if remedy.numbers else []
    besides += [f"may cost {remedy.costs}"] if remedy.costs else []
    return f"{where}{remedy.edit}" + "".join(f"; {text}" for text in besides)


def proposed_table(remedies: Sequence[tuple[int, Remedy]], path: str) -> doc.Table:
    """Return the proposed remedies with their predicted gains.

    Args:
        remedies: Each with its position in the JSON.
        path: Where they are in the JSON.
    """
    rows = []
    for number, remedy in remedies:
        sets = f"--try {remedy.knob}, or " if remedy.settable else ""
        at = f"{path}.{number}"
        code = [doc.on_page(" "), doc.on_page(remedy.code, doc.CODE)]
        how: doc.Text = [f"{sets}{how_to_apply(remedy)}", *code * bool(remedy.code)]
        source = doc.Part(remedy.source, figure=f"{at}.source")
        gain = gain_around(remedy.gain, f"{at}.gain")
        rows.append(doc.Row([f"  {set_to(remedy)}", gain, source, how]))
    headings = ("remedy|remedy", "predicted gain|predicted gain", "from|prediction", "how")
    return doc.Table(doc.columns(*headings, left=4), rows)


def prediction_errors(remedies: Sequence[Remedy], off: Mapping[str, PredictionError]) -> list[str]:
    """Return how far earlier predictions from the sources of these remedies were off."""
    return [
        f"Predictions from {source} were off by {off[source].points:.1f} points "
        f"(median of {off[source].count})."
        for source in dict.fromkeys(remedy.source for remedy in remedies)
        if source in off
    ]


def tried_table(tried: TrialResults) -> doc.Table | None:
    """Return the tried remedies, with predicted and measured gains; None if none was tried."""
    if not tried.trials:
        return None
    rows = []
    for number, trial in enumerate(tried.trials):
        at = f"tried.{number}"
        kept = doc.Part("kept", doc.GOOD) if trial.kept else trial.why
        predicted = gain_around(trial.predicted, f"{at}.predicted")
        measured = gain_around(trial.gain, f"{at}.gain")
        rows.append(doc.Row([f"  {set_to(trial.remedy)}", predicted, measured, kept]))
    gains = ("predicted gain|predicted gain", "measured gain|measured gain")
    return doc.Table(doc.columns("tried remedy|remedy", *gains, "", left=3), rows)


NOTHING_TRIED = "Paceline tried no remedy: no cause has one that it can set without a script edit."


def describe_confirmed(gain: Interval) -> str:
    """Say how much faster all kept remedies together are, as measured after the trials."""
    return (
        f"All kept remedies together, measured again in alternation with none of them: "
        f"{format_gain(gain)}."
    )


def describe_trial(trial: Any) -> str:
    """Return the result of one trial in one line."""
    result = "kept" if trial.kept else trial.why
    predicted = f" (predicted {format_gain(trial.predicted)})" if trial.predicted else ""
    measured = f"{format_gain(trial.gain)}{predicted}, " if trial.gain else ""
    return f"tried {set_to(trial.remedy)}: {measured}{result}"


def loss_changes(tried: TrialResults) -> list[str]:
    """Return how the knobs that change numerical results changed the training loss, in words."""
    lines = []
    for trial in tried.trials:
        if trial.loss is not None:
            change = trial.loss.with_it - trial.loss.without
            lines.append(
                f"  {trial.remedy.knob} changes the numbers: over the same steps the loss was "
                f"{trial.loss.with_it:.4g} with it and {trial.loss.without:.4g} without "
                f"({change:+.2g}; runs without it differ by {trial.loss.spread:.2g})."
            )
    return lines


def remedies_section(found: Diagnosis) -> list[doc.Section]:
    """Return the proposed remedies, or the measured ones and those that remain after them."""
    tried = found.tried
    if tried is None:
        blocks = _proposed(list(enumerate(found.remedies)), "remedies", found.off)
        note = doc.text(
            "Each gain is for this remedy alone. `--try all` measures those that Paceline can set, "
            "and keeps those that are faster."
        )
        if blocks:
            blocks.append(doc.Line(note, doc.MUTED, doc.PAGE))
        heading = doc.on_page("Proposed remedies")
        return [doc.Section("remedies", "Remedies", blocks, heading)]
    table = tried_table(tried)
    blocks = [table if table is not None else doc.Line(NOTHING_TRIED)]
    blocks += map(doc.Line, loss_changes(tried))
    left = [item for item in enumerate(found.remedies) if item[1].knob not in tried.decided]
    path = "remedies"
    if found.after is not None and found.after.waterfall is not None and found.waterfall:
        blocks += _kept(found)
        left, path = list(enumerate(found.after.remedies)), "after.remedies"
    if left:
        blocks += [doc.BLANK, doc.Heading("Remaining remedies", doc.PAGE)]
        blocks += _proposed(left, path, found.off)
    heading = doc.on_page("Tried remedies")
    return [doc.Section("remedies", "Remedies", blocks, heading)]


def _proposed(
    remedies: Sequence[tuple[int, Remedy]], path: str, off: Mapping[str, PredictionError]
) -> list[doc.Block]:
    """Return remedies with their predicted gains, and errors of earlier predictions."""
    if not remedies:
        return []
    errors = prediction_errors([remedy for _, remedy in remedies], off)
    return [proposed_table(remedies, path), *(doc.Line(line, doc.MUTED) for line in errors)]


def _kept(found: Any) -> Iterable[doc.Block]:
    """Return the training with the remedies that were kept: gain, chart, causes that remain."""
    before, after, gain = found.waterfall, found.after.waterfall, found.tried.confirmed
    rates = (before.measured.mean, after.measured.mean)
    ratio, unit = rates[1] / rates[0], rate_unit(found.report)
    sentence, faster = (
        f"From {amount(rates[0])} to {amount(rates[1])} {unit}: {ratio:.3g} times.",
        ratio > 1,
    )
    speedup = (amount(ratio), "after.waterfall.measured.mean/waterfall.measured.mean")
    if gain is not None:
        sentence, faster = describe_confirmed(gain), gain.low > 0
        speedup = (amount(found.tried.faster), "faster")
    ideal = "after.waterfall.measured.mean/after.waterfall.ideal.mean"
    yield from (doc.BLANK, doc.Heading("With the kept remedies", doc.PAGE))
    yield doc.Line(sentence, doc.BETTER if faster else doc.STRONG)
    yield doc.Facts(
        [
            doc.Fact(f"before, {unit}", amount(rates[0]), "waterfall.measured.mean"),
            doc.Fact(f"after, {unit}", amount(rates[1]), "after.waterfall.measured.mean"),
            doc.Fact("speed-up", *speedup, term="speed-up"),
            doc.Fact("of the ideal", percent(after.reached), ideal, term="of the ideal"),
        ]
    )
    rows = []
    for name in dict.fromkeys(bar.id for w in (before, after) for bar in w.bars):
        shares = [w.of_step(name) for w in (before, after)]
        cells = [percent(share.mean) if share else "" for share in shares]
        rows.append(doc.Row([f"  {INDICATORS[name].title}", *cells]))
    rows.append(doc.Row(["  of the ideal", percent(before.reached), percent(after.reached)]))
    yield doc.Table(doc.columns("of a step's time", "before", "after"), rows, doc.TERMINAL)
    yield waterfall_chart("after", after, unit)
    yield doc.BLANK
    if not found.after.causes:
        yield doc.Line(lead(found.after), doc.STRONG)
    yield from cause_blocks(found.after, "after.")


def remedies_as_json(found: Diagnosis) -> dict[str, Any]:
    """Return the remedies as JSON, in the format of docs/reference/formats/json.md."""
    tried = found.tried
    return {
        "remedies": [asdict(remedy) for remedy in found.remedies],
        "predictions_off": {source: asdict(error) for source, error in found.off.items()},
        "tried": tried and [asdict(trial) | {"off": trial.off} for trial in tried.trials],
        "kept": tried and tried.kept,
        "faster": tried and tried.faster,
        "confirmed": asdict(tried.confirmed) if tried and tried.confirmed else None,
    }
