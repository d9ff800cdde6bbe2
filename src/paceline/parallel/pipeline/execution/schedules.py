"""Schedules of a pipeline: the order in which a rank computes forwards and backwards.

A schedule is a generator of the actions of one rank. All of them compute the micro-batches in the
same order in both directions, so that messages between two stages arrive in the order in which
they are needed. In the tables, a row is a stage, a column a time, ``F0`` the forward and ``B0`` the
backward of micro-batch 0, and ``..`` a rank that waits.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from ....cost.pipeline import INTERLEAVED_CHUNKS

DEFAULT = "1f1b"
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
    yield from (Action("F", *one) for one in order[:ahead])
    for number, one in enumerate(backwards):
        yield Action("B", *one)
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
