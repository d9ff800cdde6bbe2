"""Successive halving (Jamieson, Talwalkar 2016, arXiv 1502.07943) over a job's own steps, and the
proof against what the job began with.

Not Bayesian: choices are few, most of them are words and no numbers, and what a model can tell of
them has been asked before (costs.py). Halving bears the noise of single steps as well, and ends
after a number of steps that is known before:

    rung     choices               steps each
    0        6                     3, after 1 that is not counted
    1        the best 3            3, the same
    proof    the best, default     3, the same, 3 times in turns
"""

from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from statistics import median

from .choice import Choice

MOST = 6  # choices beside the default
LEFT = 3  # of them, after the first rung
STEPS = 3  # of a choice at a time, of which the median counts
SETTLES = 1  # step before them, where the choice is another one: memory is touched anew
PAIRS = 3  # of the proof; the best one has to be faster in each


@dataclass(frozen=True)
class Ask:
    """Run so many steps with the choice; the answer is the seconds of one."""

    choice: Choice
    steps: int = STEPS


@dataclass(frozen=True)
class Verdict:
    """best: of the choices, by the rungs. seconds, before: of a step with it and with the default,
    in the proof; kept: whether it was faster in each pair."""

    default: Choice
    best: Choice
    seconds: float
    before: float
    kept: bool

    @property
    def choice(self) -> Choice:
        return self.best if self.kept else self.default


def halving(default: Choice, likely: Sequence[Choice]) -> Generator[Ask, float, Verdict]:
    """likely: without the default, MOST of them at most are taken; of two that are equally fast the
    first."""
    left, found = list(likely[:MOST]), defaultdict[Choice, list[float]](list)
    for keep in (LEFT, 1):
        if len(left) > keep:
            for choice in left:
                found[choice].append((yield Ask(choice)))
            left = sorted(left, key=lambda choice: median(found[choice]))[:keep]
    if not left:
        return Verdict(default, default, 0.0, 0.0, False)
    pairs, both = [], (left[0], default)
    for pair in range(PAIRS):
        told = {}
        for choice in both if pair % 2 else reversed(both):
            told[choice] = yield Ask(choice)
        pairs.append(tuple(told[choice] for choice in both))
    seconds, before = (median(one) for one in zip(*pairs, strict=True))
    return Verdict(default, left[0], seconds, before, all(one < other for one, other in pairs))


def steps_of(count: int) -> int:
    """That a search among so many choices takes at most."""
    count = min(count, MOST)
    rungs = count * (count > LEFT) + min(count, LEFT) * (count > 1)
    asks = rungs + 2 * PAIRS * (count > 0)
    stays = (PAIRS - 1) * (count > 0)  # a pair begins with what the one before has ended with
    return asks * (STEPS + SETTLES) - stays * SETTLES
