"""Printed training losses that are those of one rank: numbers are compared with its losses."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ....record.training.facts.events import OutputFacts
from ....record.training.facts.ranks import RankFacts
from ....record.training.facts.samples import Phase
from ..mistakes import MISTAKES, Finding, Nature
from ..steps import trained
from ..view import View

NUMBER = re.compile(r"(?<![\w.])[-+]?\d+\.\d+(?:[eE][-+]?\d+)?(?![\w.])|[-+]?\d\.\d*[eE][-+]?\d+")
LOSS = re.compile(r"loss|nll|cross.?entropy|\bce\b", re.IGNORECASE)
WORDS = re.compile(r"[-+]?\d[\d.,eE+-]*")
DIGITS = 3  # significant ones that a printed number has to have
LEAST = 2  # numbers at the same place of a line, where its words do not say that it is a loss
MOSTLY = 0.8  # of these
TRANSFORMS: tuple[Callable[[float], float], ...] = (
    lambda value: value,
    lambda value: math.exp(min(value, 100.0)),  # a perplexity
)


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


def loss_of_one_rank(view: View) -> Iterator[Finding]:
    """Find printed training losses that are those of rank 0, and differ from the mean.

    That of a batch is usual in a log. That of a whole epoch differs from that of one process.
    """
    losses = _losses(view)
    if view.size < 2 or losses is None:
        return
    for outputs in outputs_by_place(view.ranks[0]).values():
        if is_printed_by(view.ranks[1:], outputs[0]):
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
                f"of {view.size} ranks is {one.mean:.6g}."
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


def is_own_loss(view: View, outputs: Sequence[OutputFacts], number: int) -> bool:
    """Return whether a number of some lines is a training loss of rank 0."""
    losses = _losses(view)
    return losses is not None and _match(losses, outputs, number, of_all=False) is not None


def is_mean_loss(view: View, outputs: Sequence[OutputFacts], number: int) -> bool:
    """Return whether a number of all lines is the mean of the training losses of all ranks."""
    losses = _losses(view)
    return losses is not None and _match(losses, outputs, number, of_all=True) is not None


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


def _losses(view: View) -> _Losses | None:
    """Return the losses of all ranks, as far as all have them; None without any."""
    values, samples = [], []
    for facts in view.ranks:
        each = [one for step in facts.steps for one in step.backwards]
        values.append([x.loss if x.loss is not None else x.root / x.scale for x in each])
        samples.append([sum(facts.batches[at].samples for at in trained(facts, x)) for x in each])
    length = min(map(len, values))
    if not length:
        return None
    before, starts, count, last = [0], [], 0, None
    for step in view.ranks[0].steps:
        for one in step.backwards:
            if one.batches:
                batch = view.ranks[0].batches[one.batches[-1]]
                if (batch.loader, batch.pass_number) != last:
                    last = (batch.loader, batch.pass_number)
                    starts.append(count)
            count += 1
        before.append(count)
    plans = [s.first.facts.planned for s in view.training]
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
        known += [output] * (abs(printed) >= 10 ** (DIGITS - 1) * digit)
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
    needed = len(known) if of_all else max(LEAST, MOSTLY * len(known))
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
