"""Causes of a diagnosis: what they cost, on which evidence, and which are usual or refuted."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...analyze.diagnosis.causes import USUAL_SHARE, Cause, uncertain_bars
from ...analyze.diagnosis.confirmation import CONFIRMED
from ...analyze.diagnosis.diagnosis import Diagnosis
from ...analyze.diagnosis.table import INDICATORS
from .. import document as doc
from ..numbers import amount, percent
from ..verdict import begin_sentence
from .intervals import share_around
from .waterfall import MORE_ROUNDS

MAX_SHOWN = 40  # entries of a list in the evidence
VERDICTS = {
    "confirmed": "Confirmed by experiment",
    "not-confirmed": "Not confirmed by experiment",
    "not-testable": "Not testable from outside",
}
_BASES = {  # of causes that no experiment can switch off
    "experiment": "measured by experiment",
    "record": "measured in the record; no experiment can switch it off",
    "estimate": "estimated; no experiment could test it",
}


def cause_blocks(found: Diagnosis, path: str = "") -> Iterable[doc.Block]:
    """Return the causes with their evidence. ``path``: of the diagnosis in the JSON."""
    if found.causes:
        yield doc.Heading("Largest causes, of a step's time:", doc.TERMINAL)
        yield doc.Heading("Largest causes of lost time", doc.PAGE)
        yield doc.Items(
            [_item(cause, number, f"{path}causes") for number, cause in enumerate(found.causes)]
        )
        shares = "[Shares|step share] are of a step's time, with their [intervals|cause interval]."
        yield doc.Line(doc.text(shares), doc.MUTED, doc.PAGE)
        if found.waterfall is not None:
            known = [*found.causes, *found.usual]
            names = [INDICATORS[name].title for name in uncertain_bars(found.waterfall, known)]
            if names:
                yield doc.Line(f"Uncertain, and not listed: {', '.join(names)}. {MORE_ROUNDS}.")
    if found.usual:
        usual = doc.Part("Usual costs", term="usual cost")
        limit = f", below {100 * USUAL_SHARE:.0f} % of a step"
        yield doc.Heading([usual, limit, doc.in_terminal(":")])
        yield doc.Bullets(
            [
                [*_named(cause, f"{path}usual.{number}"), f". {begin_sentence(cause.sentence)}"]
                for number, cause in enumerate(found.usual)
            ]
        )
    if found.unconfirmed:
        not_confirmed = doc.Part("not confirmed", term="not-confirmed")
        yield doc.Heading(["Expected, but ", not_confirmed, doc.in_terminal(":")])
        at = f"{path}unconfirmed"
        refuted = [_unconfirmed(cause, f"{at}.{n}") for n, cause in enumerate(found.unconfirmed)]
        yield doc.Bullets(refuted)


def _named(cause: Cause, at: str) -> list[str | doc.Part]:
    return [
        doc.in_terminal("- "),
        doc.Part(cause.id, doc.CODE, f"{at}.id"),
        ": ",
        doc.Part(percent(cause.share), figure=f"{at}.share"),
        " of a step's time",
    ]


def _unconfirmed(cause: Cause, at: str) -> doc.Text:
    measured: Sequence[str | doc.Part] = ["nothing"]
    if cause.measured is not None:
        measured = share_around(cause.measured, f"{at}.measured")
    sentence = begin_sentence(cause.sentence)
    return [*_named(cause, at), " expected, ", *measured, f" measured. {sentence}"]


def _item(cause: Cause, number: int, path: str) -> doc.Item:
    """Return a cause with its interval, its basis and its evidence."""
    at = f"{path}.{number}"
    label = [
        doc.in_terminal(f"{number + 1}. "),
        doc.Part(percent(cause.share), doc.STRONG, f"{at}.share"),
    ]
    text: list[str | doc.Part] = [begin_sentence(cause.sentence)]
    basis = ""
    if cause.confirmed != CONFIRMED:
        basis = _BASES.get(cause.basis, "")
        if cause.measured is not None:
            basis = (
                "measured in the record; the experiments agree, with too few rounds to confirm it"
            )
        text.append(doc.in_terminal(f" {begin_sentence(basis)}" if basis else "", doc.DOUBT))
    verdict: list[str | doc.Part] = [doc.on_page(VERDICTS[cause.confirmed], term=cause.confirmed)]
    if cause.confirmed == CONFIRMED and cause.measured is not None:
        verdict.append(doc.on_page(": without it, steps are shorter by "))
        verdict += doc.only(doc.PAGE, share_around(cause.measured, f"{at}.measured"))
    elif basis:
        verdict.append(doc.on_page(f": {basis}"))
    low, high = cause.interval
    ends = (
        doc.Part(percent(end), figure=f"{at}.interval.{n}") for n, end in enumerate((low, high))
    )
    between = dict(zip(("low", "high"), ends, strict=True))
    interval = doc.text("{low} to {high} of a step's time", doc.PAGE, **between)
    rows = [doc.Row([doc.Part("cause", term="cause"), doc.Part(cause.id, doc.CODE, f"{at}.id")])]
    rows += evidence(cause.evidence, f"{at}.evidence", ())
    table = doc.Table(doc.columns("", ""), rows, name="evidence")
    lines: list[doc.Text] = [*([interval] if low < high else []), verdict]
    return doc.Item(label, text, lines, evidence=doc.Folded("Evidence", [table]))


def evidence(values: Mapping[str, Any], path: str, above: tuple[str, ...]) -> Iterable[doc.Row]:
    """Yield the evidence of a cause as rows: name and values.

    Args:
        path: Of the values in the JSON.
        above: Names of the values that contain these.
    """
    for key, value in values.items():
        name, place = ", ".join((*above, _name(key))), f"{path}.{key}"
        if isinstance(value, Mapping):
            yield from evidence(value, place, (*above, _name(key)))
        elif isinstance(value, list | tuple):
            yield from _listed(value, name, place, above)
        else:
            yield doc.Row([name, doc.Part(_text(value), figure=place)])


def _listed(
    value: Sequence[Any], name: str, place: str, above: tuple[str, ...]
) -> Iterable[doc.Row]:
    """Yield a list: lines of the script, entries in a row each, or values in one row."""
    shown = list(enumerate(value))[:MAX_SHOWN]
    if not shown:
        return
    parts: list[str | doc.Part] = []
    if all(isinstance(entry, Mapping) and "code" in entry for entry in value):
        for at, entry in shown:
            parts += [*_line(entry, f"{place}.{at}"), doc.NEW_LINE]
        parts.pop()
    elif any(isinstance(entry, Mapping | list | tuple) for entry in value):
        for at, entry in shown:
            yield from evidence({str(at): entry}, place, (*above, name))
        return
    else:
        for at, entry in shown:
            parts += [doc.Part(_text(entry), figure=f"{place}.{at}"), ", "]
        parts.pop()
    if more := len(value) - len(shown):
        parts.append(f", and {more} more (see --json)")
    yield doc.Row([name, parts])


def _line(line: Mapping[str, Any], place: str) -> list[doc.Part]:
    """Return a line of the script that the sampling profiler found."""
    where = f"{line.get('file', 'line')}:{line.get('line', '?')}"
    where += f" in {line['function']}" if line.get("function") else ""
    parts = [doc.Part(where, doc.SMALL)]
    if (share := line.get("share")) is not None:
        parts += [
            doc.Part(", ", doc.SMALL),
            doc.Part(percent(share), doc.SMALL, f"{place}.share"),
            doc.Part(" of its stack samples", doc.SMALL),
        ]
    return [*parts, doc.NEW_LINE, doc.Part(str(line["code"]), doc.CODE)]


def _name(key: str) -> str:
    """Return the label of a key: "busbw (GB/s)" for "busbw_GB_s"."""
    key = re.sub(r"_GB_s$", " (GB/s)", key)
    return re.sub(r"_s$", " (s)", key).replace("_", " ")


def _text(value: Any) -> str:
    if value is None:
        return doc.NOT_KNOWN
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return amount(value) if isinstance(value, float) else str(value)
