"""The verdict of a verification: the most consequential finding."""

from collections.abc import Sequence

from ...analyze.verification.compared import Compared
from ...analyze.verification.mistakes import Finding
from ...analyze.verification.runs_facts import VerifyRuns
from ...plurals import counted
from .verdict import Verdict, begin_sentence

Verification = tuple[VerifyRuns, Sequence[Finding], Compared]


def verdict_of_verification(found: Verification) -> Verdict:
    """Return the answer, the first finding as its reason, and what to do."""
    _, findings, seen = found
    first = next(iter(findings), None)
    if first is not None and not first.is_question:
        return Verdict(answer(found), f"{first.mistake.title}. {first.text}", action(first))
    why = (
        f"{counted(seen.steps, 'step')} of {counted(seen.parameters, 'parameter')} and "
        f"{seen.samples} samples were compared, {counted(seen.replayed, 'step')} of them with one "
        "process."
    )
    if first is not None:
        return Verdict(answer(found), why, f"Answer the question at {_place(first)}: {first.text}")
    return Verdict(answer(found), why, "Nothing has to be changed.")


def answer(found: Verification) -> str:
    """Return the answer in one sentence, with the number of questions."""
    runs, findings, seen = found
    questions = sum(one.is_question for one in findings)
    mistakes = len(findings) - questions
    size = len(runs.ranks)
    more = f" {begin_sentence(counted(questions, 'question'))}" if questions else ""
    if size < 2:
        return "One rank was observed: there is no other to compare it with."
    if mistakes:
        wrong = counted(mistakes, "mistake")
        return f"{size} ranks do not train what one process does: {wrong}.{more}"
    if not seen.steps:
        return f"Nothing could be compared: no optimizer step of all ranks was seen.{more}"
    if seen.replayed and seen.related:
        return f"{size} ranks train what one process does, as far as it was compared.{more}"
    return f"No mistake was found.{more}"


def action(one: Finding) -> str:
    """Return the line to look at and what to change there, as a sentence."""
    remedy = begin_sentence(one.remedy or one.mistake.remedy)
    return f"{_place(one)}: {remedy}" if one.lines else remedy


def _place(one: Finding) -> str:
    return one.lines[0] if one.lines else "the script"
