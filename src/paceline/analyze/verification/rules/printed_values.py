"""Printed values beside those that one process prints with the same parameters and samples."""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ....record.training.facts.events import OutputFacts
from ....record.training.facts.ranks import RankFacts
from ....record.training.facts.samples import Phase
from ..mistakes import MISTAKES, Finding, Nature
from ..relations import Vectors, distance, vectors
from ..replay import NOISE_FACTOR
from ..steps import JointStep
from ..view import View, is_reduction
from .logged_metrics import own_metrics
from .printed_losses import (
    NUMBER,
    is_mean_loss,
    is_own_loss,
    is_printed_by,
    last_digit,
    outputs_by_place,
)

SAME_MODEL = 1e-4  # relative difference of parameters whose metrics can be compared
FLOOR = 2e-4  # relative difference of printed values that rounding may make
AMPLIFIED = 10.0  # largest relative change of a metric, relative to that of the parameters
VARIABLE = 0.01  # relative difference of two replays, from which on a value is a time or a rate
FLIPPED = 1.6  # samples whose class may be another one by rounding
METRIC_BYTES = 1024  # of a collective that combines metrics
SHARE = 0.02  # distance of a share from whole samples, in samples
TRAINED = re.compile(r"train|running|\bstep\b|\bbatch\b|\biter", re.IGNORECASE)
EVALUATED = re.compile(
    r"\b(valid|ppl|perplexity|error|err|score|metric|correct|top-?[15]|precision|recall|bleu|m?iou|"
    r"mse|mae|rmse|r2|dice|map|f1|auc|acc|dev)(?=\b|[_\d@])|accuracy|(\b|_)(val|test|eval)",
    re.IGNORECASE,
)
RANK = re.compile(r"\brank\b", re.IGNORECASE)
# Words before a number, and units after it, of what depends on the machine or the number of ranks.
MACHINE = re.compile(
    r"time|took|elapsed|second|eta\b|per.?sec|throughput|speed|mem|rank|world|proc|gpu|batch.?size"
    r"|flo[ps]|lr\b|learning.?rate",
    re.IGNORECASE,
)
UNIT = re.compile(r"\s*((ms|s|sec\w*|min\w*|h|its?|[KMGT]i?B)\b|[\w ]{0,10}/\s*s)", re.IGNORECASE)


@dataclass(frozen=True)
class _Pair:
    """A line that rank 0 and one process print at the same step.

    Attributes:
        output: That of rank 0.
        since: Number of collectives before the line of this place that was printed before.
        samples: Number of evaluated samples; 0 if it is a line of the training.
        apart: Largest relative difference of a parameter or buffer.
        ours, theirs: Its numbers on N ranks, and on one.
        again: Those of the second replay.
    """

    output: OutputFacts
    since: int
    samples: int
    apart: float
    ours: list[str]
    theirs: list[str]
    again: list[str]


def differ(view: View) -> Iterator[Finding]:
    """Find printed values that differ from those of one process by more than rounding."""
    replay = view.runs.replay
    if view.size < 2 or replay is None or view.runs.replay_peers:
        return
    found: list[Finding] = []
    for pairs in _pairs(view, replay):
        for number in range(len(pairs[0].ours)):
            label = _label(pairs[0].output.text, number)
            wrong = _different(pairs, number) if label else None
            if wrong is None:
                continue
            outputs = [x.output for x in pairs]
            if is_mean_loss(view, outputs, number):
                continue  # as it should be; one process may train other parts of the batches
            one = _finding(view, wrong, label, (wrong.ours[number], wrong.theirs[number]))
            # Another rule asks about the losses of one rank.
            if not (one.is_question and is_own_loss(view, outputs, number)):
                found.append(one)
    found.sort(key=lambda one: (one.is_question, one.step or 0))
    yield from found[:1]


def of_one_rank(view: View) -> Iterator[Finding]:
    """Find values of a divided evaluation that are printed before any exchange."""
    facts = view.ranks[0]
    if view.size < 2 or own_metrics(view):  # Lightning's are known by name
        return
    evaluations = [one for one in facts.outputs if one.phase is Phase.EVALUATION]
    for one in evaluations:
        is_own = not RANK.search(one.text) and not is_printed_by(view.ranks[1:], one)
        if not (is_own and NUMBER.search(one.text) and EVALUATED.search(one.text)):
            continue
        parts = [_evaluated(facts, one.step, one.batches)]
        parts += [_evaluated(each, one.step) for each in view.ranks[1:]]
        is_combined = any(
            is_reduction(each) and each.phase is Phase.EVALUATION and each.step == one.step
            for each in facts.collectives[: one.collectives]
        )
        if is_combined or not all(parts) or all(part == parts[0] for part in parts):
            continue
        text = one.text.strip()[:80]
        yield Finding(
            MISTAKES["metric-of-one-rank"],
            [one.line, *_loops(view, one)],
            f"Rank 0 prints {text!r} after it has evaluated {len(parts[0])} of "
            f"{len(set().union(*parts))} samples, its own part, and no collective combines the "
            f"values of {view.size} ranks before.",
            ranks=[0],
            values={"samples": len(parts[0]), "text": text},
        )


def _loops(view: View, output: OutputFacts) -> list[str]:
    """Return the lines of the evaluations that come before an output."""
    return [
        line
        for stream in view.evaluation
        if any(
            made.facts.first_step == output.step for x in stream.passes for made in x.ranks.values()
        )
        for line in reversed(stream.lines)
    ]


def _pairs(view: View, replay: RankFacts) -> Iterator[list[_Pair]]:
    """Yield, for each line of code and its words, what both print with equal parameters.

    A line that the second replay does not print is left out: nothing tells what varies.
    """
    other_run = view.runs.permuted or view.runs.again
    theirs = outputs_by_place(replay)
    again = outputs_by_place(other_run) if other_run is not None else {}
    for place, outputs in outputs_by_place(view.ranks[0]).items():
        pairs = []
        begin = 0
        for at, one in enumerate(outputs):
            if not one.step:
                continue
            begin, since = one.collectives, begin
            other = next(iter(theirs.get(place, [])[at : at + 1]), None)
            if other is None or other.step != one.step or is_printed_by(view.ranks[1:], one):
                break
            if replay.parts > 1 and one.phase is not Phase.EVALUATION:
                continue  # printed for parts of the batches
            samples, apart = _same_samples(view, replay, one.step), _apart(view, replay, one.step)
            if samples is None or apart > SAME_MODEL:
                continue
            twin = next(iter(again.get(place, [])[at : at + 1]), None)
            if twin is not None and twin.step == one.step:
                numbers = [NUMBER.findall(each.text) for each in (one, other, twin)]
                pairs.append(_Pair(one, since, samples, apart, *numbers))
        if pairs:
            yield pairs


def _apart(view: View, replay: RankFacts, count: int) -> float:
    """Return the largest relative difference of parameters and buffers after some steps."""
    before = [one.steps[:count] for one in (*view.ranks, replay)]
    if not all(len(one) == count for one in before):
        return math.inf
    last = [one[-1] for one in before]
    if len({(one.optimizer, one.index) for one in last}) > 1:
        return math.inf
    found = 0.0
    for key in {one.optimizer for one in before[0]}:
        steps = [next(x for x in reversed(one) if x.optimizer == key) for one in before]
        ours = JointStep(key, steps[0].index, view.ranks, steps[:-1]).values(0)
        other = JointStep(key, steps[0].index, [replay], steps[-1:]).values(0)
        found = max(found, _largest(ours, other))
    buffers = vectors(view.ranks[0], last[0].buffers), vectors(replay, last[-1].buffers)
    return max(found, _largest(*buffers))


def _largest(one: Vectors, two: Vectors) -> float:
    if one.keys() != two.keys():
        return math.inf
    return max((distance(one[name], two[name]) for name in one), default=0.0)


def _same_samples(view: View, replay: RankFacts, step: int) -> int | None:
    """Return how many samples both evaluate after a step; None if they are others."""
    ours = set().union(*(_evaluated(one, step) for one in view.ranks))
    theirs = _evaluated(replay, step)
    return len(ours) if ours == theirs else None


def _evaluated(facts: RankFacts, step: int, end: int | None = None) -> set[tuple[int, ...]]:
    """Return the contents of the samples that a rank evaluates after a step.

    end: Number of batches that are looked at, if not all.
    """
    passes = {
        (loader.key, one.number)
        for loader in facts.loaders
        for one in loader.passes
        if one.phase is Phase.EVALUATION and one.first_step == step
    }
    return {
        content
        for batch in facts.batches[:end]
        if (batch.loader, batch.pass_number) in passes
        for content in zip(*batch.contents, strict=True)
    }


def _different(pairs: Sequence[_Pair], number: int) -> _Pair | None:
    """Return the first pair whose numbers differ, if most do; None if rounding explains it."""
    known = [one for one in pairs if len(one.ours) == len(one.theirs) > number]
    off = [one for one in known if _is_off(one, number, known)]
    return off[0] if off and 2 * len(off) >= len(known) else None


def _is_off(one: _Pair, number: int, every: Sequence[_Pair]) -> bool:
    ours, theirs = float(one.ours[number]), float(one.theirs[number])
    digit = max(last_digit(one.ours[number]), last_digit(one.theirs[number]))
    noise = 0.0
    for each in every:
        texts = each.theirs[number], each.again[number]
        value, again = map(float, texts)
        step = max(map(last_digit, texts))
        if abs(value - again) > VARIABLE * max(abs(value), abs(again)) + 2 * step:
            return False
        noise = max(noise, abs(value - again) - step)
    limit = 2 * digit + NOISE_FACTOR * noise + _flip(every, number)
    limit += max(FLOOR, AMPLIFIED * one.apart) * abs(theirs)
    return abs(ours - theirs) > limit


def _flip(pairs: Sequence[_Pair], number: int) -> float:
    """Return by how much a few samples change a value; 0 if it is no share of the samples."""
    for scale in (1.0, 100.0):
        shares = [float(one.theirs[number]) / scale * one.samples for one in pairs]
        digit = max(last_digit(one.theirs[number]) for one in pairs) / scale
        samples = max(one.samples for one in pairs)
        near = SHARE + digit * samples
        is_share = all(0 <= x <= samples and abs(x - round(x)) <= near for x in shares)
        if samples and digit * samples < 0.2 and is_share:
            return FLIPPED * scale / samples
    return 0.0


def _label(text: str, number: int) -> str:
    """Return the words before a number; "" if it depends on the machine or the number of ranks."""
    every = list(NUMBER.finditer(text))
    start = every[number - 1].end() if number else 0
    words = text[start : every[number].start()]
    if MACHINE.search(words) or UNIT.match(text[every[number].end() :]):
        return ""
    return words or " "


def _counts_batches(size: int, ours: str, theirs: str) -> bool:
    """Return whether values differ by the number of ranks.

    A script may divide by a number of batches that it computes from the number of samples and
    ranks. One process has N times as many. The replay trains batches that are N times as large
    instead.
    """
    large, small = sorted((abs(float(ours)), abs(float(theirs))), reverse=True)
    digit = last_digit(ours) + size * last_digit(theirs)
    return abs(large - size * small) <= FLOOR * large + digit * size


def _finding(view: View, one: _Pair, label: str, values: tuple[str, str]) -> Finding:
    """Return the finding of two values.

    A value of the training may be meant to be that of one rank, unless the script combines values
    of the ranks before it prints.
    """
    ours, theirs = values
    is_evaluated = one.output.phase is Phase.EVALUATION and bool(one.samples)
    is_evaluated = is_evaluated and not TRAINED.search(label)
    # Values of the training are of parts of the batches, or differ from one process as is meant.
    is_other_training = view.replay.in_parts or bool(view.comparison.meant)
    if is_other_training:
        is_evaluated = is_evaluated and bool(EVALUATED.search(label))
    steps = view.ranks[0].steps
    others = {"", *view.gradient_lines(), *(x.line for step in steps for x in step.clips)}
    others |= {step.line for step in steps} | {x.line for one in steps for x in one.backwards}
    reductions = [
        each.line
        for each in view.ranks[0].collectives[one.since : one.output.collectives]
        if each.phase is one.output.phase
        and is_reduction(each)
        and each.line not in others
        and (is_evaluated or each.nbytes <= METRIC_BYTES)
    ]
    of = f" of {one.samples} samples" if is_evaluated else ""
    return Finding(
        MISTAKES["metric-differs"],
        [*reductions[::-1], one.output.line, *_loops(view, one.output)],
        f"After {one.output.step} steps, {view.size} ranks print {ours} in "
        f"{one.output.text.strip()[:80]!r}. One process with the same parameters prints {theirs}"
        f"{of}.",
        step=one.output.step,
        values={"printed": float(ours), "of_one_process": float(theirs)},
        nature=None
        if is_evaluated
        or (reductions and not is_other_training and not _counts_batches(view.size, ours, theirs))
        else Nature.QUESTION,
    )
