"""Diagnosis for terminal, page and JSON: causes of lost time, their evidence, remedies."""

import math
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any

from ...analyze.diagnosis.causes import OPERATORS, Cause, uncertain_bars
from ...analyze.diagnosis.confirmation import EXCHANGE_PARTS, Witness
from ...analyze.diagnosis.diagnosis import Diagnosis, Remedy
from ...analyze.diagnosis.evidence import MIN_SHARE
from ...analyze.diagnosis.ladder_results import WORDS
from ...analyze.diagnosis.rungs import Waterfall
from ...analyze.diagnosis.table import CAUSES, INDICATORS
from ...knobs.registry import KNOBS
from .. import document as doc
from ..losses import loss_items
from ..numbers import amount, counted, duration, elapsed, finite, percent
from ..run_document import run_document, states_of_ranks
from ..sentences import core_wait_sentence, reaches
from ..verdict import Verdict, begin_sentence, diagnose_command, in_doubt, with_comment
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
    for event in seen.events:
        name = NAMES.get(event.kind, event.kind)
        often = (
            f"every {event.period} steps" if event.period else f"in {counted(event.count, 'step')}"
        )
        often = "at the end of each epoch" if event.at_epoch_ends else often
        events.append(f"{name} {percent(event.share)} ({often})")
    over = f"{counted(seen.steps, 'step')} of the unchanged script in {elapsed(seen.seconds)}"
    sentences = [f"{over} had no validation, no checkpoint and no other event that few steps have"]
    if events:
        sentences = [f"{over}, as shares of the time of all ranks: {'; '.join(events)}"]
    if seen.missing_s:
        more = math.ceil(minutes + seen.missing_s / SURVEY_SHARE / 60)
        sentences.append(
            f"The survey did not reach the end of the first epoch ({seen.epoch_batches} batches): "
            f"what happens only there is not in these figures. HINT: --minutes {more} reaches it"
        )
    return sentences


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
        sentences = doc.lines(describe_survey(found.ladder.survey, found.minutes))
        sections.append(doc.Section("survey", "Survey", sentences, heading))
    notes = _notes(found)
    sections += [
        *doc.only(doc.PAGE, witnesses),
        _measurements(found),
        doc.Section("how", "Method", list(_method(found, notes)), "Method", doc.PAGE),
        doc.nodes_section([doc.Nodes(found.report, "report.")]),
        doc.Section("notes", "", notes, where=doc.TERMINAL),
    ]
    about = doc.on_page(command, doc.CODE)
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
    return [*doc.lines([*computing(found), *waits]), *doc.lines(found.notes, doc.DOUBT)]


def computing(found: Diagnosis) -> list[str]:
    """Return sentences that compare the script's computation with the limits of its machine.

    The sentences have no full stops. The list is empty without a roofline.
    """
    line = found.roofline
    useful = line.points.get("its useful time") if line is not None else None
    if line is None or useful is None:
        return []
    sentences = [
        f"While the model computes, it reaches {reaches(useful)} on {line.host} ({line.device})"
    ]
    if line.assumed:
        sentences.append(
            f"paceline check has not measured {found.report.hosts[0]}: the roofline is that of "
            f"{line.host}"
        )
    return sentences


def waits_for_cores(found: Diagnosis) -> list[str]:
    """Return which threads wait for a core, and what one thread per rank saves, if measured.

    The sentence has no full stop. The list is empty if no thread waits to speak of.
    """
    sentence = core_wait_sentence(found.report)
    if not sentence:
        return []
    saved = next((witness.ladder for witness in found.witnesses if witness.name == "threads"), None)
    if saved is not None:
        gain = f"{format_share(saved)} of a step" if saved.mean > 0 else "nothing"
        sentence += f". One thread per rank saves {gain}, as measured"
    return [sentence]


def _witnesses(found: Diagnosis) -> list[doc.Section]:
    """Return the shares of a step by experiment and by record.

    Those of the waterfall come first, in the terminal with their sum; then parts of them.
    """
    w, every = found.waterfall, list(enumerate(found.witnesses))
    if not every:
        return []
    bars = {bar.id for bar in w.bars} if w is not None else set()
    whole = [
        (at, witness)
        for at, witness in every
        if witness.name in bars or (witness.ladder and witness.name in EXCHANGE_PARTS)
    ]
    rows = [_witness(witness, at) for at, witness in whole]
    if w is not None:
        rest = 1 - w.reached - sum(witness.ladder.mean for _, witness in whole if witness.ladder)
        sums = [("other losses", rest)] if abs(rest) >= MIN_SHOWN else []
        sums += [("the rest, as one rank alone", w.reached), ("sum", 1.0)]
        rows += [doc.Row([f"  {name}", percent(x), "", ""], "", doc.TERMINAL) for name, x in sums]
    parts = [(at, witness) for at, witness in every if (at, witness) not in whole]
    if any(_is_shown(witness) for _, witness in parts):
        rows.append(doc.Row(["parts of these shares"], "", doc.TERMINAL))
    for at, witness in parts:
        where = doc.BOTH if _is_shown(witness) else doc.PAGE
        rows.append(replace(_witness(witness, at), where=where))
    headings = ("of a step's time|step share", "experiment|experiment", "record|record", "")
    explained = doc.text(
        "The experiment is the time that switching a part off saved. The record is the time that "
        "the ranks recorded with all parts on. [Where they differ|differ], neither is reliable "
        "alone.",
        doc.PAGE,
    )
    heading = doc.on_page("Experiment and record")
    table = doc.Table(doc.columns(*headings), rows)
    blocks: list[doc.Block] = [doc.Line(explained, where=doc.PAGE), table]
    return [doc.Section("witnesses", "Experiment and record", blocks, heading)]


def _is_shown(witness: Witness) -> bool:
    return max(witness.ladder.mean if witness.ladder else 0.0, witness.record or 0.0) >= MIN_SHOWN


def _witness(witness: Witness, number: int) -> doc.Row:
    at = f"witnesses.{number}"
    experiment = [doc.on_page(doc.NOT_KNOWN, figure=f"{at}.ladder")]
    if witness.ladder is not None:
        experiment = share_around(witness.ladder, f"{at}.ladder")
    record = doc.on_page(doc.NOT_KNOWN, figure=f"{at}.record")
    if witness.record is not None:
        record = doc.Part(percent(witness.record), figure=f"{at}.record")
    agrees = doc.Part(agreement(witness), doc.DOUBT if witness.differ else doc.MUTED)
    return doc.Row([["  ", indicator_name(witness.name)], experiment, record, agrees])


def agreement(witness: Witness) -> str:
    """Return in words whether experiment and record agree; empty if only one of them exists."""
    if witness.ladder is None or witness.record is None:
        return ""
    if witness.differ:
        return "they differ"
    wide = witness.ladder.low <= 0 and max(witness.ladder.mean, witness.record) >= MIN_SHARE
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
    names = ["round 1|round"] * min(rounds, 1) + [str(n) for n in range(2, rounds + 1)]
    columns = doc.columns("rung|rung", *names)
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
        "rungs": {name: [asdict(run) for run in runs] for name, runs in ladder.rungs.items()},
        "savings": ladder.savings,
        "loader": ladder.loader,
        "facts": ladder.facts,
        "waterfall": finite(asdict(found.waterfall)) if found.waterfall else None,
        "witnesses": [
            finite(asdict(witness)) | {"differ": witness.differ} for witness in found.witnesses
        ],
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


def verdict_of_diagnosis(found: Diagnosis) -> Verdict:
    """Return what limits a training, according to its diagnosis."""
    if found.waterfall is None:
        return _without_experiments(found)
    reached = percent(found.waterfall.reached)
    if not found.causes:
        return _without_cause(found, found.waterfall, reached)
    cause = found.causes[0]
    (low, high), lost_to = cause.interval, CAUSES[cause.id].lost_to
    if cause.witness == OPERATORS:  # the share is an upper bound
        verdict = f"Up to {percent(cause.share)} of a step's time is lost to {lost_to}."
        return Verdict(verdict, begin_sentence(cause.sentence), _next(found, cause))
    around = ""
    if low < high and math.isfinite(low):
        seen = cause.measured  # tables show the experiment's own interval
        is_wider = seen is not None and (low < seen.low - 0.005 or high > seen.high + 0.005)
        around = f" ({100 * low:.0f} to {100 * high:.0f}{' with the record' * is_wider})"
    verdict = f"{percent(cause.share)}{around} of a step's time is lost to {lost_to}."
    doubt = "the interval contains less than 2.5 %" if low < MIN_SHARE / 2 else ""
    return Verdict(in_doubt(verdict, doubt), begin_sentence(cause.sentence), _next(found, cause))


def _next(found: Diagnosis, cause: Cause) -> str:
    """Return the kept remedy with the largest gain, or else the first one for the cause."""
    trials = [] if found.tried is None else found.tried.trials
    kept = [(trial.gain.mean, trial.remedy) for trial in trials if trial.kept and trial.gain]
    if kept:
        gain, best = max(kept, key=lambda both: both[0])
        return f"{_edit(best)} (measured gain {100 * gain:+.0f} %)"
    dropped = set() if found.tried is None else found.tried.decided
    left = [remedy for remedy in found.remedies if remedy.knob not in dropped]
    first = [remedy for remedy in left if remedy.cause == cause.id]
    knobs = {name for name, knob in KNOBS.items() if cause.id in knob.answers}
    for remedy in (*first, *(remedy for remedy in left if remedy.knob in knobs)):
        return _apply(found, remedy)
    return with_comment(
        _command(found, ["--json", "diagnosis.json"]),
        "no remedy is known: the file has the evidence",
    )


def _apply(found: Diagnosis, remedy: Remedy) -> str:
    """Return the command that measures a remedy, or the edit that it needs."""
    gain = remedy.gain
    predicted = f"predicted gain {100 * gain.mean:+.0f} %" if gain is not None else ""
    if remedy.settable:
        return with_comment(_command(found, ["--try", remedy.knob]), predicted)
    return f"{_edit(remedy)}{f' ({predicted})' if predicted else ''}"


def _edit(remedy: Remedy) -> str:
    return f"line {remedy.line}: {remedy.edit}" if remedy.line is not None else remedy.edit


def _command(found: Diagnosis, wanted: Sequence[str]) -> str:
    return diagnose_command(without_values(found.options), found.command, wanted)


def _without_cause(found: Diagnosis, w: Waterfall, reached: str) -> Verdict:
    doubtful = uncertain_bars(w, found.usual)
    limit = f"{100 * MIN_SHARE:.0f} %"
    verdict = f"No cause takes {limit} of a step's time or more: {reached} of the ideal is reached."
    largest = max(w.bars, key=lambda bar: bar.of_step.mean, default=None)
    why = f"the experiments differ by less than {limit} of a step"
    if largest is not None:
        share = percent(max(largest.of_step.mean, 0.0))
        why = (
            f"the largest difference between experiments is {share} of a step ({_bar(largest.id)})"
        )
    if found.usual:
        usual = found.usual[0]
        verdict = f"No cause takes {limit} of a step's time or more, except for usual costs: "
        verdict += f"{reached} of the ideal is reached."
        why = f"{percent(usual.share)} of a step, of usual costs: {usual.sentence}"
    if doubtful:
        verdict = f"No cause is certain: {reached} of the ideal is reached."
        why = (
            f"the rounds are too few or differ too much to judge: {', '.join(map(_bar, doubtful))}"
        )
        wanted = _command(found, ["--minutes", "10"])
        return Verdict(in_doubt(verdict, "noisy rounds"), begin_sentence(why), wanted)
    if found.remedies:
        return Verdict(verdict, begin_sentence(why), _apply(found, found.remedies[0]))
    return Verdict(verdict, begin_sentence(why), "no change is needed")


def _bar(name: str) -> str:
    return INDICATORS[name].title


def _without_experiments(found: Diagnosis) -> Verdict:
    verdict = "Paceline cannot determine what limits the training: experiments are missing."
    note = next(iter(found.notes), "the script could not be measured with parts switched off")
    why, _, hint = note.partition(" HINT: ")
    record = "paceline run --record FOLDER SCRIPT  # needs no experiments"
    return Verdict(verdict, begin_sentence(why.rstrip(". ")), hint or record)


def without_values(options: Sequence[str]) -> list[str]:
    """Return options without the values of environment variables, which may be secret."""
    words = list(options)
    for at, word in enumerate(words[:-1]):
        if word == "--env":
            words[at + 1] = words[at + 1].partition("=")[0]
    return words
