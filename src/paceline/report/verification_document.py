"""The answer of ``paceline verify``: verdict, document for terminal and page, charts, JSON."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ..analyze.verification.find import Compared
from ..analyze.verification.mistakes import MEANT, Finding, Nature
from ..analyze.verification.passes import Stream, streams
from ..analyze.verification.runs_facts import VerifyRuns
from ..analyze.verification.steps import trained as in_training
from ..observe.facts.ranks import RankFacts
from ..observe.facts.samples import Phase
from . import document as doc
from .numbers import counted, elapsed
from .verdict import Verdict, begin_sentence

MAX_COLUMNS = 400  # samples, or blocks of them, in a row of the chart
MAX_LAYERS = 60  # bars: those with the largest difference
MAX_RANK_COLOURS = 8
MAX_LINES = 4  # of the script, in a finding
NOBODY, SEVERAL = -1, -2  # instead of a rank
SMALLEST = 1e-17  # length of a bar of equal gradients, on a logarithmic axis
_CHARTS = {
    "samples": (
        "Samples",
        "Which rank trains which sample",
        "One row per epoch, one column per sample of the dataset, coloured by rank. Samples that "
        "no rank trains are empty; those that several ranks train are marked in the colour of "
        "waiting. The order of all samples of an epoch is known, although only a part of it was "
        "run.",
    ),
    "layers": (
        "Gradients",
        "Gradients of N ranks and of one process",
        "Relative difference in the first compared step, by parameter. The mark is the tolerance: "
        "20 times the difference that another order of the same samples makes, or the rounding of "
        "the dtype.",
    ),
    "rates": (
        "Learning rate",
        "Learning rate over samples",
        "Learning rate of the first parameter group, over the samples that all ranks have trained. "
        "Epochs were shortened.",
    ),
}

Verification = tuple[VerifyRuns, Sequence[Finding], Compared]
EQUAL, WRONG, NO_VERDICT = 0, 1, 2  # exit codes


def exit_code(found: Verification) -> int:
    """Return the exit code: 1 if something differs that is not accepted, 2 without a verdict."""
    _, findings, seen = found
    if any(finding.is_wrong for finding in findings):
        return WRONG
    return NO_VERDICT if seen.no_verdict else EQUAL


def verdict_of_verification(found: Verification) -> Verdict:
    """Return the answer, the first finding as its reason, and what to do."""
    _, findings, seen = found
    first = next((finding for finding in findings if finding.is_wrong), None)
    if first is not None:
        return Verdict(answer(found), f"{first.mistake.title}. {first.text}", action(first))
    why = (
        f"{counted(seen.steps, 'step')} of {counted(seen.parameters, 'parameter')} and "
        f"{seen.samples} samples were compared, {counted(seen.replayed, 'step')} of them with one "
        "process."
    )
    question = next((finding for finding in findings if finding.is_question), None)
    if question is not None:
        action_of = f"Answer the question at {_place(question)}: {question.text}"
        return Verdict(answer(found), why, action_of)
    return Verdict(answer(found), why, "Nothing has to be changed.")


def answer(found: Verification) -> str:
    """Return the answer in one sentence, with what was not compared and the number of questions."""
    runs, findings, seen = found
    wrong = sum(finding.is_wrong for finding in findings)
    questions = sum(finding.is_question for finding in findings)
    size = len(runs.ranks)
    more = f" {begin_sentence(counted(questions, 'question'))}" if questions else ""
    if wrong:
        text = f"{size} ranks do not train what one process does: {counted(wrong, 'difference')}."
        none = "" if seen.replayed else _not_compared(seen)
        return f"{text}{none}{more}"
    if seen.no_verdict:
        return f"No verdict: nothing could be compared. {begin_sentence(seen.no_verdict)}{more}"
    if not seen.replayed:
        reason = f": {seen.not_replayed}" if seen.not_replayed else ""
        return (
            f"No difference between {size} ranks was found. They were not compared with one "
            f"process{reason}.{more}"
        )
    names = [
        *seen.meant,
        *(finding.meant for finding in findings if finding.is_accepted and finding.meant),
    ]
    but = "; ".join(MEANT[name].clause for name in dict.fromkeys(names))
    but = f", but for: {but} (confirmed)" if but else ", as far as it was compared"
    does = "does" if seen.replayed_by == "one process" else "do"
    return f"{size} ranks train what {seen.replayed_by} {does}{but}.{_not_compared(seen)}{more}"


def _not_compared(seen: Compared) -> str:
    """Return a sentence about the share of steps that were not compared; "" if all were."""
    rest = seen.steps - seen.replayed
    if not seen.replayed:
        reason = f" ({seen.not_replayed})" if seen.not_replayed else ""
        return f" No step was compared with one process{reason}."
    if not rest:
        return ""
    return f" {rest} of {counted(seen.steps, 'step')} were not compared with {seen.replayed_by}."


def action(finding: Finding) -> str:
    """Return the line to look at and what to change there, as a sentence."""
    remedy = begin_sentence(finding.remedy or finding.mistake.remedy)
    return f"{_place(finding)}: {remedy}" if finding.lines else remedy


def _place(finding: Finding) -> str:
    return finding.lines[0] if finding.lines else "the script"


def verification_document(
    found: Verification, charts: Mapping[str, Any] | None = None
) -> doc.Document:
    """Return the answer: findings, then what was compared and what could not be seen.

    Args:
        charts: Data of the page's charts; None for the terminal.
    """
    runs, findings, seen = found
    command, size = shlex.join(runs.command), counted(len(runs.ranks), "rank")
    wrong = counted(sum(finding.is_wrong for finding in findings), "difference")
    questions = counted(sum(finding.is_question for finding in findings), "question")
    summary: list[doc.Block] = [
        doc.Line(answer(found), doc.STRONG, doc.TERMINAL),
        doc.Conclusion(verdict_of_verification(found), doc.PAGE),
        doc.BLANK,
    ]
    if findings:
        summary.append(doc.Heading(f"{wrong}, {questions}", doc.PAGE))
    summary += [_item(finding, f"findings.{number}") for number, finding in enumerate(findings)]
    compared: list[doc.Block] = [*map(doc.Line, compared_sentences(seen))]
    for number, note in enumerate(seen.notes):
        text: doc.Text = ["Not seen: ", doc.Part(note, figure=f"not_seen.{number}"), "."]
        compared.append(doc.Line(text, doc.DOUBT))
    compared.append(doc.Line(f"{command} on {size}, {elapsed(runs.seconds)}", doc.MUTED))
    drawn = [
        doc.Section(name, short, [doc.Chart(name, caption, _label(name, data))], title, doc.PAGE)
        for name, (short, title, caption) in _CHARTS.items()
        if (data := (charts or {}).get(name))
    ]
    return doc.Document(
        f"Paceline: verification of {(runs.command or ['a training'])[0]}",
        f"Is the training of {size} that of one process?",
        [
            doc.Section("summary", "Summary", summary),
            *drawn,
            doc.Section("how", "Method", compared, doc.on_page("What was compared")),
        ],
        [doc.on_page(command, doc.CODE)],
    )


def _item(finding: Finding, at: str) -> doc.Item:
    is_short = finding.is_question and finding.mistake.nature is Nature.QUESTION
    shown = doc.PAGE if is_short else doc.BOTH
    first = f"{finding.lines[0]}: " if finding.lines and is_short else ""
    text = [
        doc.Part(finding.mistake.title, doc.STRONG, f"{at}.title", where=shown),
        doc.Part(". ", where=shown),
        doc.in_terminal(first, doc.STRONG),
        doc.Part(finding.text, figure=f"{at}.text"),
    ]
    lines: list[doc.Text] = []
    if finding.lines:
        places = [
            doc.Part(line, doc.CODE, f"{at}.lines.{number}", where=shown)
            for number, line in enumerate(finding.lines[:MAX_LINES])
        ]
        others = [part for place in places[1:] for part in (doc.Part(", ", where=shown), place)]
        if others:
            others = [doc.Part(" (and ", where=shown), *others[1:], doc.Part(")", where=shown)]
        look = [doc.Part("Look at ", where=shown), places[0], *others, doc.Part(".", where=shown)]
        lines.append([*look, doc.on_page(_meta(finding))])
    remedy = begin_sentence(finding.remedy or finding.mistake.remedy)
    lines.append(doc.Part(remedy, doc.GOOD, where=shown))
    lines.append(doc.on_page(finding.mistake.id, doc.CODE, f"{at}.mistake"))
    label, style = _label_of(finding)
    return doc.Item(doc.Part(label, style), text, lines, "" if finding.is_wrong else "asked")


def _meta(finding: Finding) -> str:
    """Return step, layer and ranks of a finding in words."""
    parts = [f"step {finding.step}" if finding.step is not None else "", finding.layer]
    if finding.ranks:
        what = "rank" if len(finding.ranks) == 1 else "ranks"
        parts.append(f"{what} {', '.join(map(str, finding.ranks))}")
    meta = "; ".join(part for part in parts if part)
    return f" In {meta}." if meta else ""


def _label_of(finding: Finding) -> tuple[str, str]:
    """Return the label of a finding, and its style."""
    if finding.is_question:
        return "QUESTION", doc.QUESTION
    if finding.kind is Nature.MEANT:
        return ("ACCEPTED" if finding.is_accepted else "MEANT?"), doc.QUESTION
    return "DIFFERS", doc.WORSE


def compared_sentences(seen: Compared) -> list[str]:
    """Return what was compared, how much of it, and with which tolerance."""
    sentences = [
        f"Compared: {counted(seen.steps, 'step')} of {counted(seen.parameters, 'parameter')} in "
        f"{counted(seen.epochs, 'epoch')} (shortened), {seen.samples} trained and "
        f"{seen.evaluated} evaluated samples."
    ]
    if seen.related:
        sentences.append(
            f"In {seen.related} of {counted(seen.steps, 'step')}, the gradient after the exchange "
            "is the mean of the ranks' gradients times a constant. The largest relative difference "
            f"from that is {seen.largest_residual:.1g}."
        )
    if seen.replayed:
        largest = max((value for value, _ in seen.differences.values()), default=0.0)
        that = "that trains" if seen.replayed_by == "one process" else "that train"
        text = (
            f"{counted(seen.replayed, 'step')} compared with {seen.replayed_by} {that} the same "
            f"samples: largest relative difference of a gradient in the first one {largest:.1g}"
        )
        if seen.noise is not None:
            text += f"; rounding alone changes gradients by {seen.noise:.1g} (median)"
        sentences.append(f"{text}.")
    return sentences


def as_json(found: Verification) -> dict[str, Any]:
    """Return the answer as JSON-compatible values: docs/reference/formats/json.md."""
    runs, findings, seen = found
    return {
        "format": "paceline-verification",
        "version": 2,
        "command": runs.command,
        "ranks": len(runs.ranks),
        "seconds": runs.seconds,
        "verdict": asdict(verdict_of_verification(found)),
        "exit_code": exit_code(found),
        "differences": sum(finding.is_wrong for finding in findings),
        "questions": sum(finding.is_question for finding in findings),
        "findings": [finding_as_json(finding) for finding in findings],
        "compared": _compared_as_json(seen),
        "not_seen": seen.notes,
    }


def finding_as_json(finding: Finding) -> dict[str, Any]:
    """Return a finding as JSON-compatible values."""
    return {
        "mistake": finding.mistake.id,
        "title": finding.mistake.title,
        "nature": finding.kind.value,
        "is_wrong": finding.is_wrong,
        "meant": finding.meant,
        "is_accepted": finding.is_accepted,
        "lines": finding.lines,
        "ranks": finding.ranks,
        "step": finding.step,
        "layer": finding.layer,
        "text": finding.text,
        "remedy": finding.remedy or finding.mistake.remedy,
        "values": finding.values,
    }


def _compared_as_json(seen: Compared) -> dict[str, Any]:
    values = asdict(seen)
    del values["notes"]
    differences: Mapping[str, tuple[float, float]] = values["differences"]
    values["differences"] = {
        name: {"difference": value, "tolerance": limit}
        for name, (value, limit) in differences.items()
    }
    return values


def verification_charts(found: Verification) -> dict[str, Any]:
    """Return the data of the charts that the answer has."""
    runs, _, _ = found
    charts = {
        "samples": samples_chart(runs.ranks),
        "layers": layers_chart(found),
        "rates": rates_chart(found),
    }
    return {name: data for name, data in charts.items() if data}


def samples_chart(ranks: list[RankFacts]) -> dict[str, Any]:
    """Return which rank trains which sample, by epoch; empty if the samples are not known.

    ``z`` has a row for each epoch, and a column for each sample or block of samples: a rank,
    NOBODY or SEVERAL.
    """
    for stream in streams(ranks, Phase.TRAINING):
        if not (stream.shares_dataset or stream.has_root):
            continue
        loader = stream.first.loader
        length = loader.root_length if stream.has_root else loader.dataset_length
        rows = _rows(stream, length or 0)
        if rows:
            width = -(-(length or 1) // MAX_COLUMNS)
            starts = range(0, length or 0, width)
            return {
                "z": [[_common(row[at : at + width]) for at in starts] for row in rows],
                "x": [str(at) if width == 1 else f"{at}-{at + width - 1}" for at in starts],
                "y": [f"epoch {at + 1}" for at in range(len(rows))],
                "ranks": len(ranks),
                "colours": min(len(ranks), MAX_RANK_COLOURS),
            }
    return {}


def _rows(stream: Stream, length: int) -> list[list[int]]:
    """Return by epoch the rank that trains each sample."""
    rows = []
    for epoch in stream.passes:
        row = [NOBODY] * length
        for rank, made in epoch.ranks.items():
            for at in stream.plan(made) or []:
                if 0 <= at < length:
                    row[at] = rank if row[at] in (NOBODY, rank) else SEVERAL
        if any(value != NOBODY for value in row):
            rows.append(row)
    return rows


def _common(values: list[int]) -> int:
    """Return what to show of a block of samples: what is odd, else the most frequent rank."""
    for odd in (SEVERAL, NOBODY):
        if odd in values:
            return odd
    return max(set(values), key=values.count)


def layers_chart(found: Verification) -> dict[str, Any]:
    """Return the difference of each gradient from that of one process, and its tolerance."""
    _, _, seen = found
    largest = sorted(seen.differences.items(), key=lambda entry: -entry[1][0])[:MAX_LAYERS]
    kept = {name for name, _ in largest}
    names = [name for name in seen.differences if name in kept]
    if not names:
        return {}
    return {
        "names": [name.partition("/")[2] or name for name in names],
        "values": [max(seen.differences[name][0], SMALLEST) for name in names],
        "limits": [max(seen.differences[name][1], SMALLEST) for name in names],
    }


def rates_chart(found: Verification) -> dict[str, Any]:
    """Return the learning rate over the samples trained, on N ranks and on one."""
    runs, _, _ = found
    lines = []
    single = runs.single
    size = len(runs.ranks)
    for name, facts, times in ((f"{size} ranks", runs.ranks[0], size), ("1 rank", single, 1)):
        if facts is None:
            continue
        line = _rates(facts, times)
        if line["x"]:
            lines.append({"name": name, **line})
    return {"lines": lines} if lines else {}


def _rates(facts: RankFacts, times: int) -> dict[str, Any]:
    trained, x, y = 0, [], []
    for step in facts.steps:
        if step.optimizer != facts.steps[0].optimizer or not step.learning_rates:
            continue
        x.append(trained)
        y.append(step.learning_rates[0])
        trained += times * sum(
            facts.batches[at].samples
            for backward in step.backwards
            for at in in_training(facts, backward)
        )
    return {"x": x, "y": y}


def _label(name: str, data: dict[str, Any]) -> str:
    """Return the description of a chart for screen readers."""
    if name == "samples":
        odd = [sum(row.count(value) for row in data["z"]) for value in (NOBODY, SEVERAL)]
        return (
            f"Which of {data['ranks']} ranks trains which sample, by epoch: {odd[0]} columns of "
            f"samples that no rank trains, {odd[1]} that several ranks train."
        )
    if name == "layers":
        above = sum(v > limit for v, limit in zip(data["values"], data["limits"], strict=True))
        return f"Difference of {len(data['names'])} gradients; {above} are above the tolerance."
    return "Learning rate over the number of trained samples."
