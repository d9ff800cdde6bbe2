"""Printed and logged values: those of one rank, and those that differ from one process."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ....observe.facts.events import MetricFacts, OutputFacts
from ....observe.facts.models import AVERAGE
from ....observe.facts.ranks import RankFacts
from ....observe.facts.samples import Phase
from ..joined_runs import JoinedRuns, is_reduction, listed
from ..mistakes import Finding, Mistake, Nature, by_id
from ..relations import EQUAL_WITHIN, Vectors, distance, vectors
from ..replayed_steps import NOISE_FACTOR
from ..steps import JointStep, trained

NUMBER = re.compile(r"(?<![\w.])[-+]?\d+\.\d+(?:[eE][-+]?\d+)?(?![\w.])|[-+]?\d\.\d*[eE][-+]?\d+")
LOSS = re.compile(r"loss|nll|cross.?entropy|\bce\b", re.IGNORECASE)
WORDS = re.compile(r"[-+]?\d[\d.,eE+-]*")
MIN_DIGITS = 3  # significant ones that a printed number has to have
MIN_NUMBERS = 2  # numbers at the same place of a line, where its words do not say that it is a loss
MOST_OF_NUMBERS = 0.8  # of these
TRANSFORMS: tuple[Callable[[float], float], ...] = (
    lambda value: value,
    lambda value: math.exp(min(value, 100.0)),  # a perplexity
)
SAME_MODEL = 1e-4  # relative difference of parameters whose metrics can be compared
PRINTED_ROUNDING = 2e-4  # relative difference of printed values that rounding may make
AMPLIFIED = 10.0  # largest relative change of a metric, relative to that of the parameters
VARIABLE = 0.01  # relative difference of two replays, from which on a value is a time or a rate
FLIPPED = 1.6  # samples whose class may be another one by rounding
METRIC_BYTES = 1024  # of a collective that combines metrics
MAX_SHARE_ERROR = 0.02  # distance of a share from whole samples, in samples
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

MISTAKES = by_id(
    Mistake(
        "metric-of-one-rank",
        "A printed value is that of one rank",
        "printed and logged values beside losses and evaluated samples of all ranks",
        "sum the value and the number of samples over the ranks before it is printed",
        explains=("metric-differs",),
        is_late=True,
    ),
    Mistake(
        "metric-differs",
        "A printed value differs from that of one process",
        "values that ranks and one process print with the same parameters and samples",
        "combine sums and numbers of samples of all ranks before the value is computed",
        is_late=True,
    ),
)


def logged_metric_of_one_rank(joined: JoinedRuns) -> Iterator[Finding]:
    """Find metrics that are logged without ``sync_dist`` and differ between the ranks."""
    different = own_metrics(joined)
    for first, (ours, theirs, *_) in different.items():
        facts, names = joined.ranks[0], list(different)
        logged = [one.line for one in _logged(facts) if one.name in names]
        printed = [one.line for one in facts.outputs if any(name in one.text for name in names)]
        yield Finding(
            MISTAKES["metric-of-one-rank"],
            [*logged, *printed],
            f"The validation logs {listed(names)} without sync_dist, and each rank evaluates its "
            f"own samples: {first} is {ours:.4g} on rank 0 and {theirs:.4g} on rank 1. Rank 0 "
            "prints and logs the value of its own samples. Checkpoints and early stopping may "
            "differ between ranks.",
            values={"metrics": len(names), "rank 0": ours, "rank 1": theirs},
            remedy="log them with self.log(..., sync_dist=True), or use metrics of torchmetrics",
        )


def own_metrics(joined: JoinedRuns) -> dict[str, tuple[float, ...]]:
    """Return the metrics of a validation that differ between the ranks, with their values."""
    logged = [_logged(facts) for facts in joined.ranks]
    reduced = {one.name for one in logged[0] if one.is_reduced}
    found: dict[str, tuple[float, ...]] = {}
    for name in dict.fromkeys(one.name for one in logged[0] if one.name not in reduced):
        of_ranks = ([one.value for one in each if one.name == name] for each in logged)
        for values in zip(*of_ranks, strict=False):
            if not np.allclose(values, values[0], EQUAL_WITHIN, 0, equal_nan=True):
                found.setdefault(name, values)
    return found


def _logged(facts: RankFacts) -> list[MetricFacts]:
    return [one for one in facts.metrics if one.phase is Phase.EVALUATION]


@dataclass(frozen=True)
class _Losses:
    """The losses of all backwards of all ranks, in order.

    Attributes:
        values, samples: Of shape (ranks, backwards).
        before_step: Number of backwards before each step of any optimizer.
        starts: Number of backwards before each pass.
        planned: Batches and samples of a whole pass on rank 0; 0 if they are not known.
    """

    values: NDArray[np.float64]
    samples: NDArray[np.float64]
    before_step: list[int]
    starts: list[int]
    planned: tuple[int, int]

    def before(self, step: int) -> int:
        """Return the number of backwards before a step."""
        return self.before_step[min(step, len(self.before_step) - 1)]


@dataclass(frozen=True)
class _Match:
    """A printed number that is a loss.

    Attributes:
        output: The line.
        text: The number.
        own, mean: Value of rank 0, and of all ranks.
        is_of_pass: Whether it is that of all batches of a pass.
    """

    output: OutputFacts
    text: str
    own: float
    mean: float
    is_of_pass: bool


def loss_of_one_rank(joined: JoinedRuns) -> Iterator[Finding]:
    """Find printed training losses that are those of rank 0, and differ from the mean.

    That of a batch is usual in a log. That of a whole epoch differs from that of one process.
    """
    losses = _losses(joined)
    if joined.size < 2 or losses is None:
        return
    for outputs in outputs_by_place(joined.ranks[0]).values():
        if is_printed_by(joined.ranks[1:], outputs[0]):
            continue
        for number in range(len(NUMBER.findall(outputs[0].text))):
            one = _match(losses, outputs, number, of_all=False)
            if one is None:
                continue
            what = "the mean over its own batches of an epoch" if one.is_of_pass else "its own loss"
            yield Finding(
                MISTAKES["metric-of-one-rank"],
                [one.output.line],
                f"Rank 0 prints {one.text} in {one.output.text.strip()[:60]!r}: {what}. The mean "
                f"of {joined.size} ranks is {one.mean:.6g}."
                + " Is that of one rank wanted?"
                * (not one.is_of_pass),
                ranks=[0],
                step=one.output.step or None,
                values={"printed": one.own, "mean": one.mean},
                nature=Nature.MEANT if one.is_of_pass else Nature.QUESTION,
                meant="own-loss" if one.is_of_pass else "",
                remedy="average it over the ranks (all_reduce) before it is printed; if that of "
                "one rank is wanted: --accept own-loss",
            )


def is_printed_by(ranks: Sequence[RankFacts], output: OutputFacts) -> bool:
    """Return whether other ranks write the same line of code."""
    return any(one.line == output.line and one.line for facts in ranks for one in facts.outputs)


def outputs_by_place(facts: RankFacts) -> dict[tuple[str, str, int], list[OutputFacts]]:
    """Return outputs with numbers, by the line of code, their words, and how many numbers."""
    found: dict[tuple[str, str, int], list[OutputFacts]] = {}
    for one in facts.outputs:
        numbers = len(NUMBER.findall(one.text))
        if numbers and one.phase is not Phase.SETUP:
            found.setdefault((one.line, WORDS.sub("#", one.text), numbers), []).append(one)
    return found


def last_digit(text: str) -> float:
    """Return the value of the last digit of a printed number."""
    head, _, exponent = text.lower().partition("e")
    return float(10.0 ** (int(exponent or 0) - len(head.partition(".")[2])))


def _losses(joined: JoinedRuns) -> _Losses | None:
    """Return the losses of all ranks, as far as all have them; None without any."""
    values, samples = [], []
    for facts in joined.ranks:
        each = [one for step in facts.steps for one in step.backwards]
        values.append([x.loss if x.loss is not None else x.root / x.scale for x in each])
        samples.append([sum(facts.batches[at].samples for at in trained(facts, x)) for x in each])
    length = min(map(len, values))
    if not length:
        return None
    before, starts, count, last = [0], [], 0, None
    for step in joined.ranks[0].steps:
        for one in step.backwards:
            if one.batches:
                batch = joined.ranks[0].batches[one.batches[-1]]
                if batch.pass_key != last:
                    last = batch.pass_key
                    starts.append(count)
            count += 1
        before.append(count)
    plans = [s.first.facts.planned for s in joined.training]
    plan = plans[0] if plans and plans[0] else []
    return _Losses(
        np.array([one[:length] for one in values]),
        np.array([one[:length] for one in samples], dtype=float),
        *(before, starts),
        (len(plan), sum(map(len, plan))),
    )


def _match(
    losses: _Losses, outputs: Sequence[OutputFacts], number: int, *, of_all: bool
) -> _Match | None:
    """Return the first line whose number is rank 0's loss and not the mean.

    of_all: Return it if the numbers of all lines are the mean.
    """
    matches: dict[tuple[str, int], list[_Match]] = {}
    before = 0
    known: list[OutputFacts] = []
    for output in outputs:
        text = NUMBER.findall(output.text.replace(",", " "))[number]
        printed, digit = float(text), last_digit(text)
        close = max(0.5000001 * digit, 1e-6 * abs(printed))
        known += [output] * (abs(printed) >= 10 ** (MIN_DIGITS - 1) * digit)
        is_at_end = losses.before(output.step) in {*losses.starts, losses.values.shape[1]}
        for kind, values in _candidates(losses, output.step, before):
            for at, transform in enumerate(TRANSFORMS):
                own, mean = transform(float(values[0])), transform(float(values.mean()))
                is_own = abs(own - printed) <= close and abs(mean - printed) > 2 * close
                if abs(mean - printed) <= close if of_all else is_own:
                    is_of_pass = is_at_end and kind.startswith("pass")
                    one = _Match(output, text, own, mean, is_of_pass)
                    matches.setdefault((kind, at), []).append(one)
        before = losses.before(output.step)
    says_loss = bool(LOSS.search(outputs[0].text)) and not of_all
    needed = len(known) if of_all else max(MIN_NUMBERS, MOST_OF_NUMBERS * len(known))
    for (_, at), found in sorted(matches.items(), key=lambda one: not one[1][0].is_of_pass):
        if not known or found[0].output not in known:
            continue
        if len({one.output.step for one in found}) >= needed or (says_loss and at == 0):
            is_of_pass = all(one.is_of_pass for one in found) and len(found) == len(outputs)
            return replace(found[0], is_of_pass=is_of_pass)
    return None


def _candidates(
    losses: _Losses, step: int, before: int
) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield values of each rank that scripts print after a step, each with its kind.

    before: Number of backwards before the output before.
    """
    done = losses.before(step)
    ends = {"": done, "+": losses.before(step + 1)}  # "+": the step comes afterwards
    for sign, end in ends.items():
        if not 0 < end <= losses.values.shape[1]:
            continue
        yield f"last{sign}", losses.values[:, end - 1]
        start = max((one for one in losses.starts if one < end), default=0)
        of_step = max((one for one in losses.before_step if one < end), default=0)
        begins = {"pass": start, "output": before, "run": 0, "step": of_step}
        for name, begin in begins.items():
            if not 0 <= begin < end - 1:
                continue
            part, weights = losses.values[:, begin:end], losses.samples[:, begin:end]
            total, weighted = part.sum(axis=1), (part * weights).sum(axis=1)
            by = {"mean": end - begin, "sum": 1, "of all batches": losses.planned[0]}
            yield from ((f"{name}{sign} {x}", total / n) for x, n in by.items() if n)
            if weights.all():
                yield f"{name}{sign} weighted", weighted / weights.sum(axis=1)
                if losses.planned[1]:
                    yield f"{name}{sign} of all samples", weighted / losses.planned[1]


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


def differ(joined: JoinedRuns) -> Iterator[Finding]:
    """Find printed values that differ from those of one process by more than rounding."""
    replay = joined.runs.replay
    if joined.size < 2 or replay is None or joined.runs.replay_peers:
        return
    found: list[Finding] = []
    losses = _losses(joined)
    for pairs in _pairs(joined, replay):
        for number in range(len(pairs[0].ours)):
            label = _label(pairs[0].output.text, number)
            wrong = _different(pairs, number) if label else None
            if wrong is None:
                continue
            outputs = [x.output for x in pairs]
            if losses and _match(losses, outputs, number, of_all=True):
                continue  # as it should be; one process may train other parts of the batches
            one = _finding(joined, wrong, label, (wrong.ours[number], wrong.theirs[number]))
            # Another rule asks about the losses of one rank.
            is_own = losses and _match(losses, outputs, number, of_all=False)
            if not (one.is_question and is_own):
                found.append(one)
    found.sort(key=lambda one: (one.is_question, one.step or 0))
    yield from found[:1]


def of_one_rank(joined: JoinedRuns) -> Iterator[Finding]:
    """Find values of a divided evaluation that are printed before any exchange."""
    facts = joined.ranks[0]
    if joined.size < 2 or own_metrics(joined):  # Lightning's are known by name
        return
    evaluations = [one for one in facts.outputs if one.phase is Phase.EVALUATION]
    for one in evaluations:
        is_own = not RANK.search(one.text) and not is_printed_by(joined.ranks[1:], one)
        if not (is_own and NUMBER.search(one.text) and EVALUATED.search(one.text)):
            continue
        parts = [_evaluated(facts, one.step, one.batches)]
        parts += [_evaluated(each, one.step) for each in joined.ranks[1:]]
        is_combined = any(
            is_reduction(each) and each.phase is Phase.EVALUATION and each.step == one.step
            for each in facts.collectives[: one.collectives]
        )
        if is_combined or not all(parts) or all(part == parts[0] for part in parts):
            continue
        text = one.text.strip()[:80]
        yield Finding(
            MISTAKES["metric-of-one-rank"],
            [one.line, *_loops(joined, one)],
            f"Rank 0 prints {text!r} after it has evaluated {len(parts[0])} of "
            f"{len(set().union(*parts))} samples, its own part, and no collective combines the "
            f"values of {joined.size} ranks before.",
            ranks=[0],
            values={"samples": len(parts[0]), "text": text},
        )


def _loops(joined: JoinedRuns, output: OutputFacts) -> list[str]:
    """Return the lines of the evaluations that come before an output."""
    return [
        line
        for stream in joined.evaluation
        if any(
            made.facts.first_step == output.step for x in stream.passes for made in x.ranks.values()
        )
        for line in reversed(stream.lines)
    ]


def _pairs(joined: JoinedRuns, replay: RankFacts) -> Iterator[list[_Pair]]:
    """Yield, for each line of code and its words, what both print with equal parameters.

    A line that the second replay does not print is left out: nothing tells what varies.
    """
    other_run = joined.runs.permuted or joined.runs.again
    theirs = outputs_by_place(replay)
    again = outputs_by_place(other_run) if other_run is not None else {}
    for place, outputs in outputs_by_place(joined.ranks[0]).items():
        pairs = []
        begin = 0
        for at, one in enumerate(outputs):
            if not one.step:
                continue
            begin, since = one.collectives, begin
            other = next(iter(theirs.get(place, [])[at : at + 1]), None)
            if other is None or other.step != one.step or is_printed_by(joined.ranks[1:], one):
                break
            if replay.parts > 1 and one.phase is not Phase.EVALUATION:
                continue  # printed for parts of the batches
            samples, apart = (
                _same_samples(joined, replay, one.step),
                _apart(joined, replay, one.step),
            )
            if samples is None or apart > SAME_MODEL:
                continue
            twin = next(iter(again.get(place, [])[at : at + 1]), None)
            if twin is not None and twin.step == one.step:
                numbers = [NUMBER.findall(each.text) for each in (one, other, twin)]
                pairs.append(_Pair(one, since, samples, apart, *numbers))
        if pairs:
            yield pairs


def _apart(joined: JoinedRuns, replay: RankFacts, count: int) -> float:
    """Return the largest relative difference of parameters and buffers after some steps."""
    before = [one.steps[:count] for one in (*joined.ranks, replay)]
    if not all(len(one) == count for one in before):
        return math.inf
    last = [one[-1] for one in before]
    if len({one.key for one in last}) > 1:
        return math.inf
    found = 0.0
    for key in {one.optimizer for one in before[0]}:
        steps = [next(x for x in reversed(one) if x.optimizer == key) for one in before]
        ours = JointStep(key, steps[0].index, joined.ranks, steps[:-1]).values(0)
        other = JointStep(key, steps[0].index, [replay], steps[-1:]).values(0)
        found = max(found, _largest(ours, other))
    buffers = vectors(joined.ranks[0], last[0].buffers), vectors(replay, last[-1].buffers)
    return max(found, _largest(*buffers), _averages_apart(joined.ranks[0], replay, count))


def _averages_apart(ours: RankFacts, theirs: RankFacts, count: int) -> float:
    """Return the largest relative difference of averaged copies of the model after some steps.

    One process that trains the parts of a batch updates them once for each part.
    """
    rows = [
        {(x.name, x.line): x.rows for x in one.states if (x.kind, x.step) == (AVERAGE, count)}
        for one in (ours, theirs)
    ]
    both = rows[0].keys() & rows[1].keys()
    pairs = ((vectors(ours, rows[0][n]), vectors(theirs, rows[1][n])) for n in both)
    return max((_largest(*one) for one in pairs), default=0.0)


def _largest(one: Vectors, two: Vectors) -> float:
    if one.keys() != two.keys():
        return math.inf
    return max((distance(one[name], two[name]) for name in one), default=0.0)


def _same_samples(joined: JoinedRuns, replay: RankFacts, step: int) -> int | None:
    """Return how many samples both evaluate after a step; None if they are others."""
    ours = set().union(*(_evaluated(one, step) for one in joined.ranks))
    theirs = _evaluated(replay, step)
    return len(ours) if ours == theirs else None


def _evaluated(facts: RankFacts, step: int, end: int | None = None) -> set[tuple[int, ...]]:
    """Return the contents of the samples that a rank evaluates after a step.

    end: Number of batches that are looked at, if not all.
    """
    evaluations = facts.passes(Phase.EVALUATION)
    return {
        content
        for batch in facts.batches[:end]
        if (made := evaluations.get(batch.pass_key)) is not None and made.first_step == step
        for content in batch.by_sample
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
    limit += max(PRINTED_ROUNDING, AMPLIFIED * one.apart) * abs(theirs)
    return abs(ours - theirs) > limit


def _flip(pairs: Sequence[_Pair], number: int) -> float:
    """Return by how much a few samples change a value; 0 if it is no share of the samples."""
    for scale in (1.0, 100.0):
        shares = [float(one.theirs[number]) / scale * one.samples for one in pairs]
        digit = max(last_digit(one.theirs[number]) for one in pairs) / scale
        samples = max(one.samples for one in pairs)
        near = MAX_SHARE_ERROR + digit * samples
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
    return abs(large - size * small) <= PRINTED_ROUNDING * large + digit * size


def _finding(joined: JoinedRuns, one: _Pair, label: str, values: tuple[str, str]) -> Finding:
    """Return the finding of two values.

    A value of the training may be meant to be that of one rank, unless the script combines values
    of the ranks before it prints.
    """
    ours, theirs = values
    is_evaluated = one.output.phase is Phase.EVALUATION and bool(one.samples)
    is_evaluated = is_evaluated and not TRAINED.search(label)
    # Values of the training are of parts of the batches, or differ from one process as is meant.
    is_other_training = joined.replay.in_parts or bool(joined.comparison.meant)
    if is_other_training:
        is_evaluated = is_evaluated and bool(EVALUATED.search(label))
    steps = joined.ranks[0].steps
    others = {"", *joined.gradient_lines(), *(x.line for step in steps for x in step.clips)}
    others |= {step.line for step in steps} | {x.line for one in steps for x in one.backwards}
    reductions = [
        each.line
        for each in joined.ranks[0].collectives[one.since : one.output.collectives]
        if each.phase is one.output.phase
        and is_reduction(each)
        and each.line not in others
        and (is_evaluated or each.nbytes <= METRIC_BYTES)
    ]
    of = f" of {one.samples} samples" if is_evaluated else ""
    return Finding(
        MISTAKES["metric-differs"],
        [*reductions[::-1], one.output.line, *_loops(joined, one.output)],
        f"After {one.output.step} steps, {joined.size} ranks print {ours} in "
        f"{one.output.text.strip()[:80]!r}. One process with the same parameters prints {theirs}"
        f"{of}.",
        step=one.output.step,
        values={"printed": float(ours), "of_one_process": float(theirs)},
        nature=None
        if is_evaluated
        or (reductions and not is_other_training and not _counts_batches(joined.size, ours, theirs))
        else Nature.QUESTION,
    )
