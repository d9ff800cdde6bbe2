"""The verdict of a diagnosis: its largest cause, the evidence, and the remedy to begin with."""

import math
from collections.abc import Sequence

from ...analyze.diagnosis.causes import OPERATORS, Cause, uncertain_bars
from ...analyze.diagnosis.diagnosis import Diagnosis, Remedy
from ...analyze.diagnosis.evidence import MIN_SHARE
from ...analyze.diagnosis.rungs import Waterfall
from ...analyze.diagnosis.table import CAUSES, INDICATORS
from ...knobs.registry import KNOBS
from ..numbers import percent
from .verdict import Verdict, begin_sentence, diagnose_command, in_doubt, with_comment


def verdict_of_diagnosis(found: Diagnosis) -> Verdict:
    """Return what limits a training, according to its diagnosis."""
    if found.waterfall is None:
        return _without_experiments(found)
    reached = percent(found.waterfall.reached)
    if not found.causes:
        return _without_cause(found, found.waterfall, reached)
    cause = found.causes[0]
    low, high = cause.interval
    if cause.witness == OPERATORS:  # the share is an upper bound
        said = f"Up to {percent(cause.share)} of a step's time is lost to {_lost_to(cause)}."
        return Verdict(said, begin_sentence(cause.sentence), _next(found, cause))
    around = ""
    if low < high and math.isfinite(low):
        seen = cause.measured  # tables show the experiment's own interval
        is_wider = seen is not None and (low < seen.low - 0.005 or high > seen.high + 0.005)
        around = f" ({100 * low:.0f} to {100 * high:.0f}{' with the record' * is_wider})"
    said = f"{percent(cause.share)}{around} of a step's time is lost to {_lost_to(cause)}."
    doubt = "the interval contains less than 2.5 %" if low < MIN_SHARE / 2 else ""
    return Verdict(in_doubt(said, doubt), begin_sentence(cause.sentence), _next(found, cause))


def _lost_to(cause: Cause) -> str:
    return CAUSES[cause.id].lost_to


def _next(found: Diagnosis, cause: Cause) -> str:
    """Return the kept remedy with the largest gain, or else the first one for the cause."""
    trials = [] if found.tried is None else found.tried.trials
    kept = [(one.gain.mean, one.remedy) for one in trials if one.kept and one.gain is not None]
    if kept:
        gain, best = max(kept, key=lambda both: both[0])
        return f"{_edit(best)} (measured gain {100 * gain:+.0f} %)"
    dropped = set() if found.tried is None else found.tried.decided
    left = [one for one in found.remedies if one.knob not in dropped]
    first = [one for one in left if one.cause == cause.id]
    others = [one for one in left if one.knob in KNOBS and cause.id in KNOBS[one.knob].answers]
    for remedy in (*first, *others):
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
    said = f"No cause takes {limit} of a step's time or more: {reached} of the ideal is reached."
    largest = max(w.bars, key=lambda bar: bar.of_step.mean, default=None)
    why = f"the experiments differ by less than {limit} of a step"
    if largest is not None:
        share = percent(max(largest.of_step.mean, 0.0))
        why = (
            f"the largest difference between experiments is {share} of a step ({_bar(largest.id)})"
        )
    if found.usual:
        usual = found.usual[0]
        said = f"No cause takes {limit} of a step's time or more, except for usual costs: "
        said += f"{reached} of the ideal is reached."
        why = f"{percent(usual.share)} of a step, of usual costs: {usual.sentence}"
    if doubtful:
        said = f"No cause is certain: {reached} of the ideal is reached."
        why = (
            f"the rounds are too few or differ too much to judge: {', '.join(map(_bar, doubtful))}"
        )
        wanted = _command(found, ["--minutes", "10"])
        return Verdict(in_doubt(said, "noisy rounds"), begin_sentence(why), wanted)
    if found.remedies:
        return Verdict(said, begin_sentence(why), _apply(found, found.remedies[0]))
    return Verdict(said, begin_sentence(why), "no change is needed")


def _bar(name: str) -> str:
    return INDICATORS[name].title


def _without_experiments(found: Diagnosis) -> Verdict:
    said = "Paceline cannot determine what limits the training: experiments are missing."
    note = next(iter(found.notes), "the script could not be measured with parts switched off")
    why, _, hint = note.partition(" HINT: ")
    record = "paceline run --record FOLDER SCRIPT  # needs no experiments"
    return Verdict(said, begin_sentence(why.rstrip(". ")), hint or record)


def without_values(options: Sequence[str]) -> list[str]:
    """Return options without the values of environment variables, which may be secret."""
    words = list(options)
    for at, word in enumerate(words[:-1]):
        if word == "--env":
            words[at + 1] = words[at + 1].partition("=")[0]
    return words
