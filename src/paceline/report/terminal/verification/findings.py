"""Answer of ``paceline verify`` as terminal text and as JSON."""

import shlex
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ....analyze.verification.find import Compared
from ....analyze.verification.mistakes import Finding, Nature
from ...numbers import counted, elapsed
from ...verdict.of_verification import Verification, answer, exit_code, verdict_of_verification
from ...verdict.verdict import begin_sentence


def render(found: Verification) -> RenderableType:
    """Return the answer as text: findings, then what was compared and what could not be seen."""
    runs, findings, seen = found
    parts: list[RenderableType] = [Text(answer(found), style="bold"), Text()]
    for one in findings:
        is_short = one.is_question and one.mistake.nature is Nature.QUESTION
        label, style = label_of(one)
        parts += [_question(one) if is_short else _finding(one, label, f"bold {style}"), Text()]
    parts += [Text(said) for said in compared_sentences(seen)]
    parts += [Text(f"Not seen: {note}.", style="yellow") for note in seen.notes]
    command = shlex.join(runs.command)
    size = counted(len(runs.ranks), "rank")
    parts += [Text(f"{command} on {size}, {elapsed(runs.seconds)}", style="bright_black")]
    return Group(*parts)


def label_of(one: Finding) -> tuple[str, str]:
    """Return the label of a finding, and its colour."""
    if one.is_question:
        return "QUESTION", "yellow"
    if one.kind is Nature.MEANT:
        return ("ACCEPTED" if one.is_accepted else "MEANT?"), "yellow"
    return "DIFFERS", "red"


def compared_sentences(seen: Compared) -> list[str]:
    """Return what was compared, how much of it, and with which tolerance."""
    said = [
        f"Compared: {counted(seen.steps, 'step')} of {counted(seen.parameters, 'parameter')} in "
        f"{counted(seen.epochs, 'epoch')} (shortened), {seen.samples} trained and "
        f"{seen.evaluated} evaluated samples."
    ]
    if seen.related:
        said.append(
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
        said.append(f"{text}.")
    return said


def finding_text(one: Finding) -> str:
    """Return title and observation of a finding."""
    return f"{one.mistake.title}. {one.text}"


def remedy(one: Finding) -> str:
    """Return what to change, as a sentence."""
    return begin_sentence(one.remedy or one.mistake.remedy)


def _finding(one: Finding, label: str, style: str) -> RenderableType:
    text = Text()
    text.append(f"{label}  ", style=style)
    text.append(finding_text(one))
    if one.lines:
        text.append("\n  Look at ")
        text.append(one.lines[0], style="bold")
        if one.lines[1:]:
            text.append(f" (and {', '.join(one.lines[1:4])})")
        text.append(".")
    text.append(f"\n  {remedy(one)}", style="green")
    return text


def _question(one: Finding) -> Text:
    """Return a finding that depends on what is wanted in one line."""
    text = Text()
    text.append("QUESTION  ", style="bold yellow")
    text.append(f"{one.lines[0]}: " if one.lines else "", style="bold")
    text.append(one.text)
    return text


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
        "differences": sum(one.is_wrong for one in findings),
        "questions": sum(one.is_question for one in findings),
        "findings": [finding_as_json(one) for one in findings],
        "compared": _compared_as_json(seen),
        "not_seen": seen.notes,
    }


def finding_as_json(one: Finding) -> dict[str, Any]:
    """Return a finding as JSON-compatible values."""
    return {
        "mistake": one.mistake.id,
        "title": one.mistake.title,
        "nature": one.kind.value,
        "is_wrong": one.is_wrong,
        "meant": one.meant,
        "is_accepted": one.is_accepted,
        "lines": one.lines,
        "ranks": one.ranks,
        "step": one.step,
        "layer": one.layer,
        "text": one.text,
        "remedy": one.remedy or one.mistake.remedy,
        "values": one.values,
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
