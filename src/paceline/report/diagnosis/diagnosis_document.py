"""Diagnosis for terminal, page and JSON: causes of lost time, their evidence, remedies."""

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from ...analyze.diagnosis.confirmation import EXCHANGE_PARTS, Witness
from ...analyze.diagnosis.diagnosis import Diagnosis
from ...analyze.diagnosis.evidence import MIN_SHARE
from ...analyze.diagnosis.ladder_results import WORDS
from .. import document as doc
from ..losses import loss_items
from ..numbers import amount, counted, duration, elapsed, finite, percent
from ..run_document import run_document, states_of_ranks
from ..sentences import core_wait_sentence, reaches
from ..verdict.of_diagnosis import verdict_of_diagnosis, without_values
from .causes import cause_blocks
from .intervals import format_share, rate_around, share_around
from .profile_tables import lines_as_json, lines_section, operators_as_json, operators_section
from .remedies import remedies_as_json, remedies_section
from .waterfall import indicator_name, lead, rate_unit, waterfall_data, waterfall_section

# Sentences about the survey of ``paceline diagnose``: what happens seldom in the training.

NAMES = {
    "validation": "validation",
    "checkpoint": "checkpoints",
    "input": "waiting for input",
    "other": "the script's own work",
}
SURVEY_SHARE = 0.25  # of the time budget, at most


def describe_survey(seen: Any, minutes: float) -> list[str]:
    """Return sentences without full stops.

    Args:
        seen: A ``Survey`` of analyze/diagnosis/rare_events.py.
        minutes: The time budget of the diagnosis.
    """
    events = []
    for one in seen.events:
        name = NAMES.get(one.kind, one.kind)
        often = f"every {one.period} steps" if one.period else f"in {counted(one.count, 'step')}"
        often = "at the end of each epoch" if one.at_epoch_ends else often
        events.append(f"{name} {percent(one.share)} ({often})")
    over = f"{counted(seen.steps, 'step')} of the unchanged script in {elapsed(seen.seconds)}"
    said = [f"{over} had no validation, no checkpoint and no other event that few steps have"]
    if events:
        said = [f"{over}, as shares of the time of all ranks: {'; '.join(events)}"]
    if seen.missing_s:
        more = math.ceil(minutes + seen.missing_s / SURVEY_SHARE / 60)
        said.append(
            f"The survey did not reach the end of the first epoch ({seen.epoch_batches} batches): "
            f"what happens only there is not in these figures. HINT: --minutes {more} reaches it"
        )
    return said


MIN_SHOWN = 0.005  # of a step's time; smaller parts of it are not listed


def diagnosis_document(found: Diagnosis, width: int = 100) -> doc.Document:
    """Return the diagnosis. width: columns of the terminal."""
    w, command = found.waterfall, shlex.join(found.command)
    size = counted(found.report.size, "rank")
    sections = [doc.Section("summary", "Summary", list(_summary(found, command)))]
    witnesses = _witnesses(found)
    if w is not None:
        causes: list[doc.Block] = []
        if not found.causes:
            causes.append(doc.Line(lead(found), doc.STRONG))
        causes += cause_blocks(found)
        sections += [
            waterfall_section(w, found.report, width),
            *doc.only(doc.TERMINAL, witnesses),
            doc.Section("causes", "", causes, where=doc.TERMINAL),
            *remedies_section(found),
        ]
    else:  # the time was not enough for the experiments
        run = run_document(found.report, width=width).sections
        sections += [
            replace(section, blocks=_without_verdict(section))
            for section in doc.only(doc.TERMINAL, run)
        ]
    sections += [*lines_section(found.lines), *operators_section(found.operators)]
    if found.ladder.survey is not None:
        heading = doc.text("[Survey|survey] of the training", doc.PAGE)
        said = doc.lines(describe_survey(found.ladder.survey, found.minutes))
        sections.append(doc.Section("survey", "Survey", said, heading))
    notes = _notes(found)
    sections += [
        *doc.only(doc.PAGE, witnesses),
        _measurements(found),
        doc.Section("how", "Method", list(_method(found, notes)), "Method", doc.PAGE),
        doc.Section(
            "places",
            "Nodes",
            [doc.Nodes(found.report, "report.")],
            "Nodes, bindings and versions",
            doc.PAGE,
        ),
        doc.Section("notes", "", notes, where=doc.TERMINAL),
    ]
    about = doc.Part(command, doc.CODE, where=doc.PAGE)
    title = f"Paceline: diagnosis of {found.command[0]}"
    return doc.Document(title, f"Causes of lost time on {size}", sections, [about])


def _without_verdict(section: doc.Section) -> list[doc.Block]:
    return [block for block in section.blocks if not isinstance(block, doc.Conclusion)]


def trials_document(found: Diagnosis) -> doc.Document:
    """Return what follows a diagnosis that was printed before its trials."""
    verdict = doc.Conclusion(verdict_of_diagnosis(found))
    end = doc.Section("notes", "", doc.lines(found.notes, doc.DOUBT))
    sections = [*remedies_section(found), end, doc.Section("verdict", "", [verdict])]
    return doc.Document("", "", sections)


def diagnosis_charts(found: Diagnosis) -> dict[str, Any]:
    """Return the data of the page's charts."""
    unit, charts = rate_unit(found.report), {}
    if found.waterfall is not None:
        charts["waterfall"] = waterfall_data(found.waterfall, unit)
        if found.after is not None and found.after.waterfall is not None:
            charts["after"] = waterfall_data(found.after.waterfall, unit)
    return charts


def _summary(found: Diagnosis, command: str) -> Iterable[doc.Block]:
    ladder, w, unit = found.ladder, found.waterfall, rate_unit(found.report)
    yield doc.Conclusion(verdict_of_diagnosis(found))
    yield doc.BLANK
    measured = f"{counted(len(ladder.rungs['everything']), 'round')} of "
    measured += f"{counted(ladder.steps, 'step')} each, {elapsed(ladder.seconds)}"
    on = f"{' '.join(found.command)} on {counted(found.report.size, 'rank')}"
    yield doc.Line(f"{on}: {measured}", doc.STRONG, doc.TERMINAL)
    yield doc.Line(lead(found), doc.LEAD, doc.PAGE)
    if w is not None:
        ratio = "waterfall.measured.mean/waterfall.ideal.mean"
        rates = (
            rate_around(w.measured, "waterfall.measured"),
            rate_around(w.ideal, "waterfall.ideal"),
        )
        yield doc.Facts(
            [
                doc.Fact(f"measured, {unit}", rates[0], term="measured rate"),
                doc.Fact(f"ideal, {unit}", rates[1], term="ideal"),
                doc.Fact("of the ideal", percent(w.reached), ratio, term="of the ideal"),
            ]
        )
        yield from doc.only(doc.PAGE, cause_blocks(found))
    else:
        yield from doc.only(doc.PAGE, _notes(found))
        if found.report.states:
            yield doc.Heading(doc.text("[States|state] of every rank in the first run"), doc.PAGE)
            yield from doc.only(doc.PAGE, [states_of_ranks(found.report, "report.")])
            yield doc.Items(loss_items(found.report, "report.")[0], doc.PAGE)
    options = shlex.join(without_values(found.options) or ["-n", str(found.report.size)])
    record = f"paceline run {options} --record record {command}"
    further = doc.text(
        "`--json` has every figure of this page. For the states of every rank and the timeline: "
        "{record}, then `paceline report record --html run.html`.",
        record=doc.Part(record, doc.CODE),
    )
    yield doc.Line(further, doc.MUTED, doc.PAGE)


def _notes(found: Diagnosis) -> list[doc.Line]:
    """Return the computation beside the machine's limits, waits for cores, and notes."""
    waits = waits_for_cores(found) if found.waterfall is not None else []
    return [
        *doc.lines([*computing(found), *waits]),
        *doc.lines(found.notes, doc.DOUBT),
    ]


def computing(found: Diagnosis) -> list[str]:
    """Return sentences that compare the script's computation with the limits of its machine.

    The sentences have no full stops. The list is empty without a roofline.
    """
    line = found.roofline
    useful = line.points.get("its useful time") if line is not None else None
    if line is None or useful is None:
        return []
    said = [
        f"While the model computes, it reaches {reaches(useful)} on {line.host} ({line.device})"
    ]
    if line.assumed:
        said.append(
            f"paceline check has not measured {found.report.hosts[0]}: the roofline is that of "
            f"{line.host}"
        )
    return said


def waits_for_cores(found: Diagnosis) -> list[str]:
    """Return which threads wait for a core, and what one thread per rank saves, if measured.

    The sentence has no full stop. The list is empty if no thread waits to speak of.
    """
    said = core_wait_sentence(found.report)
    if not said:
        return []
    saved = next((one.ladder for one in found.witnesses if one.name == "threads"), None)
    if saved is not None:
        gain = f"{format_share(saved)} of a step" if saved.mean > 0 else "nothing"
        said += f". One thread per rank saves {gain}, as measured"
    return [said]


def _witnesses(found: Diagnosis) -> list[doc.Section]:
    """Return the shares of a step by experiment and by record.

    Those of the waterfall come first, in the terminal with their sum; then parts of them.
    """
    w, every = found.waterfall, list(enumerate(found.witnesses))
    if not every:
        return []
    bars = {bar.id for bar in w.bars} if w is not None else set()
    whole = [
        (at, one)
        for at, one in every
        if one.name in bars or (one.ladder and one.name in EXCHANGE_PARTS)
    ]
    rows = [_witness(one, at) for at, one in whole]
    if w is not None:
        rest = 1 - w.reached - sum(one.ladder.mean for _, one in whole if one.ladder)
        sums = [("other losses", rest)] if abs(rest) >= MIN_SHOWN else []
        sums += [("the rest, as one rank alone", w.reached), ("sum", 1.0)]
        rows += [doc.Row([f"  {name}", percent(x), "", ""], "", doc.TERMINAL) for name, x in sums]
    parts = [(at, one) for at, one in every if (at, one) not in whole]
    if any(_is_shown(one) for _, one in parts):
        rows.append(doc.Row(["parts of these shares"], "", doc.TERMINAL))
    for at, one in parts:
        rows.append(replace(_witness(one, at), where=doc.BOTH if _is_shown(one) else doc.PAGE))
    columns = [
        doc.Column("of a step's time", right=False, term="step share"),
        doc.Column("experiment", term="experiment"),
        doc.Column("record", term="record"),
        doc.Column("", right=False),
    ]
    explained = doc.text(
        "The experiment is the time that switching a part off saved. The record is the time that "
        "the ranks recorded with all parts on. [Where they differ|differ], neither is reliable "
        "alone.",
        doc.PAGE,
    )
    heading = doc.Part("Experiment and record", where=doc.PAGE)
    blocks: list[doc.Block] = [doc.Line(explained, where=doc.PAGE), doc.Table(columns, rows)]
    return [doc.Section("witnesses", "Experiment and record", blocks, heading)]


def _is_shown(one: Witness) -> bool:
    return max(one.ladder.mean if one.ladder else 0.0, one.record or 0.0) >= MIN_SHOWN


def _witness(one: Witness, number: int) -> doc.Row:
    at = f"witnesses.{number}"
    experiment = [doc.Part(doc.NOT_KNOWN, figure=f"{at}.ladder", where=doc.PAGE)]
    if one.ladder is not None:
        experiment = share_around(one.ladder, f"{at}.ladder")
    record = doc.Part(doc.NOT_KNOWN, figure=f"{at}.record", where=doc.PAGE)
    if one.record is not None:
        record = doc.Part(percent(one.record), figure=f"{at}.record")
    agrees = doc.Part(agreement(one), doc.DOUBT if one.differ else doc.MUTED)
    return doc.Row([["  ", indicator_name(one.name)], experiment, record, agrees])


def agreement(one: Witness) -> str:
    """Return in words whether experiment and record agree; empty if only one of them exists."""
    if one.ladder is None or one.record is None:
        return ""
    if one.differ:
        return "they differ"
    wide = one.ladder.low <= 0 and max(one.ladder.mean, one.record) >= MIN_SHARE
    return "interval too wide" if wide else "they agree"


def _measurements(found: Diagnosis) -> doc.Section:
    """Return the page's table of all measurements: a row for each rung, a column for each round."""
    ladder, rows = found.ladder, []
    rounds = max((len(runs) for runs in ladder.rungs.values()), default=0)
    for name, runs in ladder.rungs.items():
        cells: list[doc.Text] = [WORDS.get(name, name)]
        for number, run in enumerate(runs):
            at = f"rungs.{name}.{number}"
            rate = doc.Part(amount(run.together), figure=f"{at}.together")
            step = doc.Part(duration(run.step_s), doc.RANGE, f"{at}.step_s")
            cells.append([rate, doc.NEW_LINE, step])
        rows.append(doc.Row([*cells, *["left out"] * (rounds - len(runs))]))
    if ladder.loader and ladder.loader["batches"]:
        each = duration(ladder.loader["seconds"] / ladder.loader["batches"])
        batch: list[str | doc.Part] = [
            doc.Part(each, figure="loader.seconds/loader.batches"),
            " per batch",
        ]
        rows.append(doc.Row([WORDS.get("loader", "loader"), batch]))
    columns = [doc.Column("rung", right=False, term="rung")]
    columns += [doc.Column("round 1", term="round")] * min(rounds, 1)
    columns += [doc.Column(str(number)) for number in range(2, rounds + 1)]
    explained = doc.text(
        f"{rate_unit(found.report).capitalize()} of all ranks at the rate of the slowest rank, and "
        "below it the [step time|rung step] of that rank."
    )
    blocks: list[doc.Block] = [doc.Line(explained), doc.Table(columns, rows)]
    return doc.Section("rungs", "Measurements", blocks, "All measurements", doc.PAGE)


def _method(found: Diagnosis, notes: Sequence[doc.Line]) -> Iterable[doc.Block]:
    ladder, w = found.ladder, found.waterfall
    rounds = str(w.repetitions) if w is not None else None
    yield doc.Facts(
        [
            doc.Fact("rounds", rounds, "waterfall.repetitions", term="round"),
            doc.Fact("measured steps", str(ladder.steps), "steps", term="measured steps"),
            doc.Fact("warm-up steps", str(ladder.warm), "warm_up", term="warm-up"),
            doc.Fact("duration", duration(ladder.seconds), "seconds", term="diagnosis time"),
        ]
    )
    yield doc.Line(
        doc.text(
            "Paceline ran the unchanged script for a few steps at a time, each time with one part "
            "switched off. The measurements are [interleaved] round by round, so that other load "
            "of the machine affects all of them alike. Details: docs/explanation/diagnose.md."
        )
    )
    yield from notes if w is not None else ()
    yield from doc.lines(found.report.doubts, doc.DOUBT)


def as_json(found: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis as JSON-compatible values: docs/reference/formats/json.md."""
    ladder = found.ladder
    return {
        "format": "paceline-diagnosis",
        "version": 1,
        "command": found.command,
        "verdict": asdict(verdict_of_diagnosis(found)),
        "ranks": found.report.size,
        "warm_up": ladder.warm,
        "steps": ladder.steps,
        "seconds": ladder.seconds,
        "ended": ladder.ended,
        "survey": finite(asdict(ladder.survey)) if ladder.survey else None,
        "rungs": {name: [asdict(one) for one in runs] for name, runs in ladder.rungs.items()},
        "savings": ladder.savings,
        "loader": ladder.loader,
        "facts": ladder.facts,
        "waterfall": finite(asdict(found.waterfall)) if found.waterfall else None,
        "witnesses": [finite(asdict(one)) | {"differ": one.differ} for one in found.witnesses],
        "causes": [finite(asdict(cause)) for cause in found.causes],
        "usual": [finite(asdict(cause)) for cause in found.usual],
        "unconfirmed": [finite(asdict(cause)) for cause in found.unconfirmed],
        "lines": lines_as_json(found.lines),
        "notes": found.notes,
        "roofline": finite(asdict(found.roofline)) if found.roofline else None,
        "operators": finite(operators_as_json(found.operators)),
        **finite(remedies_as_json(found)),
        "after": as_json(found.after) if found.after else None,
        "report": asdict(found.report),
    }
