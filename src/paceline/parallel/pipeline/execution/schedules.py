"""Schedules of a pipeline: the order in which a rank computes forwards and backwards.

A schedule is a generator of the actions of one rank. All of them compute the micro-batches in the
same order in both directions, so that messages between two stages arrive in the order in which
they are needed. In the tables, a row is a stage, a column a time, ``F0`` the forward and ``B0`` the
backward of micro-batch 0, and ``..`` a rank that waits.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ....cost.layout import INTERLEAVED_CHUNKS, idle_share

DEFAULT = "1f1b"
AUTO = "auto"  # measured in the first steps (``ScheduleChoice``)
SKIPPED_ROUNDS = 1  # in which plans are made and memory is allocated
MEASURED_ROUNDS = 3
MICRO_BATCHES_OF_STAGE = 4  # default: 4 for each stage, so that at most 1/5 of the time is idle


class Action(NamedTuple):
    """One computation of a rank.

    Attributes:
        kind: "F" (forward), "B" (backward), "I" (backward of the inputs alone) or "W" (of the
            parameters).
        chunk: Which of the rank's virtual stages.
        micro_batch: Its number.
    """

    kind: str
    chunk: int
    micro_batch: int


Schedule = Callable[[int, int, int], Iterator[Action]]


def gpipe(stage: int, stages: int, count: int) -> Iterator[Action]:
    """Yield all forwards, then all backwards. A rank holds the activations of all micro-batches.

    | 0 | F0 F1 F2 F3 .. .. .. .. B0 .. B1 .. B2 .. B3 |
    | 1 | .. F0 F1 F2 F3 .. B0 .. B1 .. B2 .. B3 .. .. |
    """
    yield from (Action("F", 0, m) for m in range(count))
    yield from (Action("B", 0, m) for m in range(count))


def one_f_one_b(stage: int, stages: int, count: int) -> Iterator[Action]:
    """Yield a backward as soon as one is possible: at most ``stages`` micro-batches are held.

    | 0 | F0 F1 .. .. B0 F2 .. B1 F3 .. B2 .. .. B3 |
    | 1 | .. F0 B0 .. F1 B1 .. F2 B2 .. F3 B3 .. .. |
    """
    ahead = min(stages - stage, count)
    yield from (Action("F", 0, m) for m in range(ahead))
    for m in range(count):
        yield Action("B", 0, m)
        if m + ahead < count:
            yield Action("F", 0, m + ahead)


def zero_bubble(stage: int, stages: int, count: int) -> Iterator[Action]:
    """Yield the order of ZB-H1 (Qi et al., arXiv 2401.10241), with the memory of ``one_f_one_b``.

    The backward of the inputs comes first, because the stage before waits for it. That of the
    parameters (``W``) fills the time in which the rank would wait.

    | 0 | F0 F1 .. I0 W0 F2 I1 W1 F3 I2 W2 .. I3 W3 |
    | 1 | .. F0 I0 F1 I1 W0 F2 I2 W1 F3 I3 W2 W3 .. |
    """
    ahead, done = min(stages - stage, count), 0
    yield from (Action("F", 0, m) for m in range(ahead))
    for m in range(count):
        yield Action("I", 0, m)
        if m >= stage:  # later stages delay more backwards of parameters
            yield Action("W", 0, done)
            done += 1
        if m + ahead < count:
            yield Action("F", 0, m + ahead)
    yield from (Action("W", 0, m) for m in range(done, count))


def interleaved(stage: int, stages: int, count: int) -> Iterator[Action]:
    """Yield the order of interleaved 1F1B (Narayanan et al., arXiv 2104.04473).

    A rank holds several virtual stages, one in each round of the micro-batches over all ranks, so
    that the pipeline fills in a fraction of the time. ``F0'`` is a forward of the second one.

    | 0 | F0 F1 F0' F1' ... |
    | 1 | .. F0 F1 F0' F1' ... |
    """
    chunks = INTERLEAVED_CHUNKS
    order = _rounds(stages, chunks, count)
    backwards = [(chunks - 1 - chunk, m) for chunk, m in order]
    ahead = min((stages - stage - 1) * 2 + (chunks - 1) * stages + 1, len(order))
    yield from (Action("F", *at) for at in order[:ahead])
    for number, at in enumerate(backwards):
        yield Action("B", *at)
        if number + ahead < len(order):
            yield Action("F", *order[number + ahead])


def _rounds(stages: int, chunks: int, count: int) -> list[tuple[int, int]]:
    """Return (chunk, micro-batch) in groups of ``stages`` micro-batches, chunk after chunk."""
    firsts = range(0, count, stages)
    return [
        (chunk, m)
        for first in firsts
        for chunk in range(chunks)
        for m in range(first, min(first + stages, count))
    ]


SCHEDULES: dict[str, Schedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zero-bubble": zero_bubble,
    "interleaved": interleaved,
}


class Candidate(NamedTuple):
    """A schedule and a number of micro-batches."""

    schedule: str
    micro_batches: int

    def __str__(self) -> str:
        return f"schedule={self.schedule} + micro-batches={self.micro_batches}"


def candidates_for(
    stages: int, asked: int | None, samples: int, *, can_split: bool, may_differ: bool
) -> list[Candidate]:
    """Return the candidates, those that are shortest by the formula first.

    Args:
        asked: Number of micro-batches that the layout has; None: any.
        samples: Of a batch; no micro-batch is empty.
        can_split: Whether backwards can be divided in two parts ("zero-bubble").
        may_differ: Whether the number of micro-batches may change: it changes the results of batch
            normalization.
    """
    default = asked or MICRO_BATCHES_OF_STAGE * stages
    counts = [default] if asked or not may_differ else [default, 2 * default]
    counts = [count for count in counts if count <= samples] or [default]
    schedules = [DEFAULT, "zero-bubble"] if can_split else [DEFAULT]
    found = [Candidate(schedule, count) for schedule in schedules for count in counts]
    return sorted(found, key=lambda c: idle_share(c.schedule, stages, c.micro_batches))


class ScheduleChoice:
    """Measures schedules and numbers of micro-batches in the first steps, and chooses the fastest.

    Candidates take turns, so that a drift of the machine's speed affects all of them. They compute
    the same gradients, up to rounding. All stages get the same times, and choose alike.
    """

    def __init__(self, candidates: Sequence[Candidate], samples: int) -> None:
        self._samples = samples
        self._order = [*candidates] * (SKIPPED_ROUNDS + MEASURED_ROUNDS)
        self._skipped = SKIPPED_ROUNDS * len(candidates)
        self._times: dict[Candidate, list[int]] = {candidate: [] for candidate in candidates}
        self._begun = 0  # steps
        self.chosen: Candidate | None = candidates[0] if len(candidates) == 1 else None

    def next(self) -> Candidate:
        """Return the candidate of the next step."""
        if self.chosen is not None:
            return self.chosen
        return self._order[min(self._begun, len(self._order) - 1)]

    def begin(self, before_ns: int, samples: int) -> str:
        """Note the begin of a step, and the time of the step before; return a line, if it chooses.

        Args:
            samples: Of the step before; a batch of another size is not compared.
        """
        if self.chosen is not None:
            return ""
        last = self._begun - 1
        if last >= self._skipped and samples == self._samples:
            self._times[self._order[last]].append(before_ns)
        self._begun += 1
        if self._begun <= len(self._order):
            return ""
        medians = {c: statistics.median(of) for c, of in self._times.items() if of}
        self.chosen = min(medians, key=medians.__getitem__) if medians else self._order[0]
        each = ", ".join(f"{c} {ns / 1e6:.3g} ms" for c, ns in medians.items())
        return f"pipeline: {self.chosen}, the fastest of the measured ones: {each}"
