"""The verdict of a diagnosis: its largest cause, the evidence, and the remedy to begin with."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

from ...analyze.diagnosis.causes import MIN_SHARE, OPERATORS, Cause, uncertain_bars
from ...analyze.diagnosis.ladder import Waterfall
from ...analyze.figures.report import Report
from ...knobs.registry import KNOBS
from ..numbers import percent
from .verdict import Verdict, begin_sentence, diagnose_command, in_doubt, with_comment

# Noun phrases that continue "is lost to", by the id of a cause.
LOST_TO = {
    "loader-start": "the start of the loader in each epoch",
    "input-small-files": "reading small files",
    "input-bandwidth": "reading files from storage",
    "input-preprocessing": "preprocessing of samples",
    "input-waiting": "waiting for the loader",
    "input": "waiting for the next batch",
    "synchronisation": "waiting for a value, an output or a barrier",
    "accumulation-exchange": "gradient synchronization in every backward of a step",
    "bucket-size": "gradient synchronization with an unsuitable bucket size",
    "exchange-latency": "many small collectives",
    "buffer-broadcast": "broadcasts of the model's buffers",
    "metric-collectives": "collectives of metrics",
    "object-collectives": "exchanges of Python objects",
    "sharded-exchange": "gathers and reductions of sharded blocks",
    "tensor-exchange": "exchange of activations on the tensor axis",
    "pipeline-bubble": "waits of the stages of a pipeline for each other",
    "no-overlap": "gradient synchronization after the backward",
    "exchange-bandwidth": "communication limited by bandwidth",
    "uneven-data": "batches of different sizes",
    "slow-host": "a slow node",
    "slow-rank": "a slow rank",
    "noisy-machine": "other programs on the node",
    "jitter": "ranks that are late in different steps",
    "too-many-threads": "too many compute threads",
    "binding": "a binding to too few cores",
    "fixed-cost": "the cost of a step that does not depend on the batch size",
    "shared-machine": "sharing of the node by its ranks",
    "validation": "validation",
    "validation-on-one-rank": "validation on one rank",
    "checkpoint": "checkpoints",
    "checkpoint-on-one-rank": "checkpoints of one rank",
    "script": "other work of the script",
    "line": "one function of the script",
    "layout": "the memory layout of convolutions",
    "precision": "computing in float64",
    "allocator": "page faults of the memory allocator",
    "memory-limit": "lack of memory",
    "garbage-collection": "Python's garbage collector",
    "interpreter": "another Python thread",
    "unused-parameter-search": "the search for unused parameters",
    "copies": "copies of tensors between memory layouts or dtypes",
    "small-operators": "many small operators",
    "recomputation": "operators computed again on the same values",
    "activation-checkpointing": "activation checkpointing",
    "unused-output": "outputs that nothing uses",
    "unneeded-gradient": "gradients of parameters that no optimizer updates",
    "second-backward": "a second backward through the same operators",
    "padding": "padding in the model's input",
    "slow-operators": "operators far below the limits of the device",
    "large-intermediate": "large intermediate tensors",
}

_BARS = {"sharing": "sharing the machine", "uneven": "slower ranks", "checkpoint": "checkpoints"}


class Remedy(Protocol):
    """A remedy, as far as a verdict reads it."""

    @property
    def knob(self) -> str: ...
    @property
    def cause(self) -> str: ...
    @property
    def gain(self) -> Any: ...
    @property
    def settable(self) -> bool: ...
    @property
    def edit(self) -> str: ...
    @property
    def line(self) -> int | None: ...


class Diagnosed(Protocol):
    """A diagnosis, as far as a verdict reads it."""

    @property
    def command(self) -> list[str]: ...
    @property
    def options(self) -> Sequence[str]: ...
    @property
    def report(self) -> Report: ...
    @property
    def waterfall(self) -> Waterfall | None: ...
    @property
    def causes(self) -> list[Cause]: ...
    @property
    def usual(self) -> list[Cause]: ...
    @property
    def notes(self) -> list[str]: ...
    @property
    def remedies(self) -> Sequence[Remedy]: ...
    @property
    def tried(self) -> Any: ...


def verdict_of_diagnosis(found: Diagnosed) -> Verdict:
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
    return LOST_TO.get(cause.id, cause.id.replace("-", " "))


def _next(found: Diagnosed, cause: Cause) -> str:
    """Return the kept remedy with the largest gain, or else the first one for the cause."""
    trials = [] if found.tried is None else found.tried.trials
    kept = [one for one in trials if one.kept and one.gain is not None]
    if kept:
        best = max(kept, key=lambda one: one.gain.mean)
        return f"{_edit(best.remedy)} (measured gain {100 * best.gain.mean:+.0f} %)"
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


def _apply(found: Diagnosed, remedy: Remedy) -> str:
    """Return the command that measures a remedy, or the edit that it needs."""
    gain = remedy.gain
    predicted = f"predicted gain {100 * gain.mean:+.0f} %" if gain is not None else ""
    if remedy.settable:
        return with_comment(_command(found, ["--try", remedy.knob]), predicted)
    return f"{_edit(remedy)}{f' ({predicted})' if predicted else ''}"


def _edit(remedy: Remedy) -> str:
    return f"line {remedy.line}: {remedy.edit}" if remedy.line is not None else remedy.edit


def _command(found: Diagnosed, wanted: Sequence[str]) -> str:
    return diagnose_command(without_values(found.options), found.command, wanted)


def _without_cause(found: Diagnosed, w: Waterfall, reached: str) -> Verdict:
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
    return _BARS.get(name, name)


def _without_experiments(found: Diagnosed) -> Verdict:
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
