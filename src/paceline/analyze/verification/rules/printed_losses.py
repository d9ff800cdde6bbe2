"""Printed training losses that are those of one rank: numbers are compared with its losses."""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ....record.training.facts.events import OutputFacts
from ....record.training.facts.ranks import RankFacts
from ....record.training.facts.samples import Phase
from ..mistakes import MISTAKES, Finding, Nature
from ..steps import trained
from ..view import View, unique

NUMBER = re.compile(r"(?<![\w.])[-+]?\d+\.\d+(?:[eE][-+]?\d+)?(?![\w.])|[-+]?\d\.\d*[eE][-+]?\d+")
LOSS = re.compile(r"loss|nll|cross.?entropy|\bce\b", re.IGNORECASE)
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


def loss_of_one_rank(view: View) -> Iterator[Finding]:
    """Find printed training losses that are those of rank 0, and differ from the mean."""
    losses = _losses(view)
    if view.size < 2 or losses is None:
        return
    for outputs in _by_place(view):
        for number in range(len(NUMBER.findall(outputs[0].text))):
            found = _own_value(losses, outputs, number)
            if found is None:
                continue
            output, text, own, mean = found
            yield Finding(
                MISTAKES["metric-of-one-rank"],
                unique([output.line]),
                f"Rank 0 prints {text} in {output.text.strip()[:60]!r}: its own loss. The mean of "
                f"{view.size} ranks is {mean:.6g}. Is that of one rank wanted?",
                ranks=[0],
                step=output.step or None,
                values={"printed": own, "mean": mean},
                nature=Nature.QUESTION,
                remedy="average it over the ranks (all_reduce) before it is printed",
            )
            return


def is_own_loss(view: View, outputs: Sequence[OutputFacts], number: int) -> bool:
    """Return whether a number of some lines is a training loss of rank 0."""
    losses = _losses(view)
    return losses is not None and _own_value(losses, outputs, number) is not None


def is_mean_loss(view: View, outputs: Sequence[OutputFacts], number: int) -> bool:
    """Return whether a number of all lines is the mean of the training losses of all ranks."""
    losses = _losses(view)
    return losses is not None and _value(losses, outputs, number, of_all=True) is not None


def is_printed_by(ranks: Sequence[RankFacts], output: OutputFacts) -> bool:
    """Return whether other ranks write the same line of code."""
    return any(one.line == output.line and one.line for facts in ranks for one in facts.outputs)


def _by_place(view: View) -> list[list[OutputFacts]]:
    """Return rank 0's outputs with numbers, by the line of code and the words."""
    found: dict[tuple[str, str, int], list[OutputFacts]] = {}
    for one in view.ranks[0].outputs:
        if one.phase is Phase.SETUP or is_printed_by(view.ranks[1:], one):
            continue
        numbers = len(NUMBER.findall(one.text))
        if numbers:
            words = re.sub(r"[-+]?\d[\d.eE+-]*", "#", one.text)
            found.setdefault((one.line, words, numbers), []).append(one)
    return list(found.values())


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


def _own_value(
    losses: _Losses, outputs: Sequence[OutputFacts], number: int
) -> tuple[OutputFacts, str, float, float] | None:
    """Return output, number, rank 0's value and the mean, if the number is rank 0's loss."""
    return _value(losses, outputs, number, of_all=False)


def _value(
    losses: _Losses, outputs: Sequence[OutputFacts], number: int, *, of_all: bool
) -> tuple[OutputFacts, str, float, float] | None:
    """Return the same, if the number is rank 0's loss and not the mean, or with ``of_all`` this."""
    matches: dict[tuple[str, int], list[tuple[OutputFacts, str, float, float]]] = {}
    before = 0
    for output in outputs:
        text = NUMBER.findall(output.text.replace(",", " "))[number]
        printed, precision = float(text), _precision(text)
        for kind, values in _candidates(losses, output.step, before):
            for at, transform in enumerate(TRANSFORMS):
                own, mean = transform(float(values[0])), transform(float(values.mean()))
                close = max(precision, 1e-6 * abs(printed))
                is_own = abs(own - printed) <= close and abs(mean - printed) > 2 * close
                if abs(mean - printed) <= close if of_all else is_own:
                    matches.setdefault((kind, at), []).append((output, text, own, mean))
        before = _backwards_before(losses, output.step)
    known = [
        one
        for one in outputs
        if abs(float(t := NUMBER.findall(one.text.replace(",", " "))[number]))
        >= 10**DIGITS * _precision(t) / 5
    ]
    says_loss = bool(LOSS.search(outputs[0].text))
    for (_, at), found in matches.items():
        different = {one[0].step for one in found}
        needed = max(LEAST, MOSTLY * len(known))
        if not known or found[0][0] not in known:
            continue
        if of_all:
            needed, says_loss = len(known), False
        if len(different) >= needed or (says_loss and at == 0 and len(different) >= 1):
            return found[0]
    return None


def _backwards_before(losses: _Losses, step: int) -> int:
    return losses.before_step[min(step, len(losses.before_step) - 1)]


def _precision(text: str) -> float:
    """Return half of the last printed digit."""
    head, _, exponent = text.lower().partition("e")
    decimals = len(head.partition(".")[2])
    return 0.5000001 * 10.0 ** (int(exponent or 0) - decimals)


def _candidates(
    losses: _Losses, step: int, before: int
) -> Iterator[tuple[str, NDArray[np.float64]]]:
    """Yield values of each rank that scripts print after a step, each with its kind.

    before: Number of backwards before the output before.
    """
    values, samples = losses.values, losses.samples
    count = values.shape[1]
    done = _backwards_before(losses, step)
    ends = {"": done, "+": _backwards_before(losses, step + 1)}  # "+": the step comes afterwards
    for sign, end in ends.items():
        if not 0 < end <= count:
            continue
        yield f"last{sign}", values[:, end - 1]
        start = max((one for one in losses.starts if one < end), default=0)
        begins = {"pass": start, "output": before, "run": 0, "step": _step_start(losses, end)}
        for name, begin in begins.items():
            if not 0 <= begin < end - 1:
                continue
            part, weights = values[:, begin:end], samples[:, begin:end]
            yield f"{name}{sign} mean", part.mean(axis=1)
            yield f"{name}{sign} sum", part.sum(axis=1)
            if weights.all():
                weighted = (part * weights).sum(axis=1)
                yield f"{name}{sign} weighted", weighted / weights.sum(axis=1)
                if losses.planned[1]:
                    yield f"{name}{sign} of all samples", weighted / losses.planned[1]
            if losses.planned[0]:  # the script divides by the batches of the whole epoch
                yield f"{name}{sign} of all batches", part.sum(axis=1) / losses.planned[0]


def _step_start(losses: _Losses, end: int) -> int:
    return max((one for one in losses.before_step if one < end), default=0)
