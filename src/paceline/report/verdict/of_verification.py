"""The verdict of a verification: what differs first."""

from collections.abc import Sequence

from ...analyze.verification.find import Compared
from ...analyze.verification.mistakes import MEANT, Finding
from ...analyze.verification.runs_facts import VerifyRuns
from ...plurals import counted
from .verdict import Verdict, begin_sentence

Verification = tuple[VerifyRuns, Sequence[Finding], Compared]
EQUAL, WRONG, NO_VERDICT = 0, 1, 2  # exit codes


def exit_code(found: Verification) -> int:
    """Return the exit code: 1 if something differs that is not accepted, 2 without a verdict."""
    _, findings, seen = found
    if any(one.is_wrong for one in findings):
        return WRONG
    return NO_VERDICT if seen.no_verdict else EQUAL


def verdict_of_verification(found: Verification) -> Verdict:
    """Return the answer, the first finding as its reason, and what to do."""
    _, findings, seen = found
    first = next((one for one in findings if one.is_wrong), None)
    if first is not None:
        return Verdict(answer(found), f"{first.mistake.title}. {first.text}", action(first))
    why = (
        f"{counted(seen.steps, 'step')} of {counted(seen.parameters, 'parameter')} and "
        f"{seen.samples} samples were compared, {counted(seen.replayed, 'step')} of them with one "
        "process."
    )
    question = next((one for one in findings if one.is_question), None)
    if question is not None:
        action_of = f"Answer the question at {_place(question)}: {question.text}"
        return Verdict(answer(found), why, action_of)
    return Verdict(answer(found), why, "Nothing has to be changed.")


def answer(found: Verification) -> str:
    """Return the answer in one sentence, with what was not compared and the number of questions."""
    runs, findings, seen = found
    wrong = sum(one.is_wrong for one in findings)
    questions = sum(one.is_question for one in findings)
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
    names = [*seen.meant, *(one.meant for one in findings if one.is_accepted and one.meant)]
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


def action(one: Finding) -> str:
    """Return the line to look at and what to change there, as a sentence."""
    remedy = begin_sentence(one.remedy or one.mistake.remedy)
    return f"{_place(one)}: {remedy}" if one.lines else remedy


def _place(one: Finding) -> str:
    return one.lines[0] if one.lines else "the script"
