"""The rates of the ladder's rungs, and the waterfall between them.

See docs/explanation/diagnose.md.

From what the ranks could do if each were alone with its batch in memory, down to what they did.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...plurals import counted
from ...record.experiments.rung import Rung
from ...record.ring.states import State
from ...significance import half_width
from ..records.load_run import Run
from ..records.read_record import Record
from ..records.state_timeline import total

BARS = ("sharing", "uneven", "validation", "checkpoint", "exchange", "input")

PAUSES = (State.VALIDATION, State.CHECKPOINT)  # a step with one of them says nothing of a part
INTERVAL_TAIL = 0.05  # probability of each end of an interval to be wrong


Facts = Sequence[Mapping[str, Any]]  # of each rank (record/experiments/observer.py)


def resources_used(facts: Facts, phase: str) -> list[dict[str, Any]]:
    """Return what each rank used in a phase (record/ring/resource_usage.py)."""
    return [facts_of_rank.get("used", {}).get(phase, {}) for facts_of_rank in facts]


@dataclass(frozen=True)
class RungResult:
    """One run of a rung.

    Attributes:
        together: samples/s of all ranks at the pace of the slowest.
        step_s: Mean step of the slowest rank, in seconds.
        training_s: By rank, mean of the steps in which no rank validates or writes a checkpoint.
        validation_s, checkpoint_s: By rank, seconds per step.
        cached: Batches that came from memory, of the rank with the fewest.
        silent: Process groups whose communication was switched off.
        used: By rank, the resources used (record/ring/resource_usage.py).
    """

    together: float
    step_s: float
    training_s: list[float]
    validation_s: list[float]
    checkpoint_s: list[float]
    ranks: int
    cached: int
    silent: int
    used: list[dict[str, Any]]

    def at(self, rank: int, validation: bool = False, checkpoint: bool = False) -> float:
        """Return samples/s if all ranks had this rank's pace, with the given phases included."""
        step = self.training_s[rank]
        step += self.validation_s[rank] * validation + self.checkpoint_s[rank] * checkpoint
        return self.together * self.step_s / step


class EndedError(ValueError):
    """The script ended before the steps that were to be measured."""

    def __init__(self, done: int, needed: int) -> None:
        super().__init__(
            f"the script ended after {counted(done, 'step')}, and the experiments need {needed}. "
            "HINT: reduce --steps and --warm-up, or let the script train longer"
        )
        self.done = done


@dataclass(frozen=True)
class Interval:
    """A mean over repetitions, and its 90 % confidence interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        mean, half = statistics.fmean(values), half_width(values, INTERVAL_TAIL)
        return cls(mean, mean - half, mean + half)

    @classmethod
    def of_shares(cls, parts: Sequence[float], wholes: Sequence[float]) -> "Interval":
        """Return the share of all parts in all wholes, one of each per repetition.

        It is the quotient of their means, so that it fits to both of them on one page. The
        interval is that of the residuals (linearized).
        """
        whole = statistics.fmean(wholes)
        share = statistics.fmean(parts) / whole
        each = zip(parts, wholes, strict=True)
        half = half_width([(part - share * one) / whole for part, one in each], INTERVAL_TAIL)
        return cls(share, share - half, share + half)

    def scaled(self, factor: float) -> "Interval":
        """Return the interval times a factor that is not negative."""
        return Interval(factor * self.mean, factor * self.low, factor * self.high)

    @property
    def sure(self) -> bool:
        """Whether the interval is above zero."""
        return self.low > 0


@dataclass(frozen=True)
class Bar:
    """One step of the waterfall.

    Attributes:
        loss: In samples/s.
        share: Of the ideal rate: mean loss / mean ideal.
        of_step: Share of the time of a real step. Each repetition counts with its ideal rate.
    """

    id: str
    loss: Interval
    share: Interval
    of_step: Interval


@dataclass(frozen=True)
class Waterfall:
    """From the ideal rate down to the measured one.

    The bars' mean losses add up to ideal - measured exactly, and both ``share`` and ``of_step`` to
    1 - ``reached``.
    """

    ideal: Interval
    measured: Interval
    bars: list[Bar]
    repetitions: int

    @property
    def reached(self) -> float:
        """Measured rate / ideal rate: also the share of a step that one rank alone takes."""
        return self.measured.mean / self.ideal.mean

    def of_step(self, name: str) -> Interval | None:
        """Return a bar's share of a step's time, or None where there is no such bar."""
        return next((bar.of_step for bar in self.bars if bar.id == name), None)


def measure_rung(run: Run, first: int, steps: int, phase: str = "") -> RungResult:
    """Measure the rates of one phase of a run, over ``steps`` steps from ``first`` on.

    With a phase's name also the resources that it used.

    Raises:
        EndedError: The script ended before these steps.
    """
    samples, steps_s, pausing = 0, list[float](), sorted(_pausing_steps(run))
    phases: dict[int, list[float]] = {state: [] for state in PAUSES}
    rung_facts: list[dict[str, Any]] = []
    for record in run.records:
        rows = record.events_in(State.STEP)
        rows = rows[(rows["step"] >= first) & (rows["step"] < first + steps)]
        if len(rows) < steps:
            raise EndedError(len(record.events_in(State.STEP)), first + steps)
        start, end = int(rows["start"].min()), int(rows["end"].max())
        # Samples are what it takes to compare one rank with several; steps stand in for them.
        samples += total(rows["amount"]) or len(rows)
        for state, took in phases.items():
            took.append(_time_in_state(record, state, start, end) / 1e9 / steps)
        alike = rows[~np.isin(rows["step"], pausing)]
        if 0 < len(alike) < len(rows):
            steps_s.append(total(alike["end"] - alike["start"]) / 1e9 / len(alike))
        else:
            phases_s = sum(took[-1] for took in phases.values())
            steps_s.append((end - start) / 1e9 / steps - phases_s)
        rung_facts.append(record.meta.get("rung", {}))
    validation, checkpoint = phases.values()
    slowest = max(map(sum, zip(steps_s, validation, checkpoint, strict=True)))
    return RungResult(
        together=samples / (slowest * steps),
        step_s=slowest,
        training_s=steps_s,
        validation_s=validation,
        checkpoint_s=checkpoint,
        ranks=len(steps_s),
        cached=min(facts.get("cached", 0) for facts in rung_facts),
        silent=min(facts.get("silent", 0) for facts in rung_facts),
        used=resources_used(rung_facts, phase),
    )


def _time_in_state(record: Record, state: int, start: int, end: int) -> int:
    """Return the nanoseconds of a state between two times."""
    rows = record.events_in(state)
    both = np.minimum(rows["end"], end) - np.maximum(rows["start"], start)
    return total(both.clip(min=0))


def _slowest(rungs: list[RungResult], number: int, *names: str) -> int:
    """Return the rank whose steps take longest in all rounds but ``number``, with these phases.

    Some rank is always the slowest of a round. The rounds that choose it are not the one in which
    its loss is measured, so that equal ranks lose nothing on average.
    """
    return int(np.argmax(_times_of_ranks(rungs, number, *names)))


def _times_of_ranks(rungs: list[RungResult], number: int, *names: str) -> list[float]:
    others = [*rungs[:number], *rungs[number + 1 :]] or rungs
    count = len(rungs[0].training_s)
    parts = ("training_s", *names)
    return [
        sum(getattr(result, part)[i] for result in others for part in parts) for i in range(count)
    ]


def waterfall(
    alone: list[RungResult],
    silent: list[RungResult],
    cached: list[RungResult],
    everything: list[RungResult],
) -> Waterfall:
    """Compute the waterfall, repetition by repetition, in the order in which they were run.

    If ranks are slow in turn (a load that moves from core to core), the rank that is slowest in the
    other rounds is the fastest one of a round, and the bar "uneven" is below zero, which no
    constant difference can be. All ranks then count with their mean step: the bar is zero, and
    waits for ranks that are slow in turn remain in the bar "exchange".

    Args:
        alone: One rank, its batch in memory. Empty where that can't be run; the ideal is then all
            ranks at the pace of the fastest.
        silent: All ranks, without communication.
        cached: With communication.
        everything: With the loader, too.
    """
    found = _waterfall(alone, silent, cached, everything)
    uneven = found.of_step("uneven")
    if uneven is None or uneven.high >= 0:
        return found
    means = [
        replace(result, training_s=[statistics.fmean(result.training_s)] * result.ranks)
        for result in silent
    ]
    return _waterfall(alone, means, cached, everything, shown=("uneven",))


def _waterfall(
    alone: list[RungResult],
    silent: list[RungResult],
    cached: list[RungResult],
    everything: list[RungResult],
    shown: tuple[str, ...] = (),
) -> Waterfall:
    """Return the waterfall. ``shown``: Bars that are shown although they are zero."""
    ideals, ends = [], []
    losses: dict[str, list[float]] = {name: [] for name in BARS}
    times: dict[str, list[float]] = {name: [] for name in BARS}
    firsts: Sequence[RungResult | None] = alone or [None] * len(silent)
    for number, (single, unsynchronized, from_memory, full) in enumerate(
        zip(firsts, silent, cached, everything, strict=True)
    ):
        fast = int(np.argmin(_times_of_ranks(silent, number)))  # chosen as _slowest chooses
        slow = _slowest(silent, number)
        validates = _slowest(silent, number, "validation_s")
        saves = _slowest(silent, number, "validation_s", "checkpoint_s")
        levels = (
            single.at(0) * full.ranks if single is not None else unsynchronized.at(fast),
            unsynchronized.at(fast),
            unsynchronized.at(slow),
            unsynchronized.at(validates, validation=True),
            unsynchronized.at(saves, validation=True, checkpoint=True),
            from_memory.together,
            full.together,
        )
        ideals.append(levels[0])
        ends.append(levels[-1])
        for name, above, below in zip(BARS, levels, levels[1:], strict=False):
            losses[name].append(above - below)
            times[name].append(levels[-1] * (1 / below - 1 / above))
    ideal = Interval.of(ideals)
    bars = []
    for name in BARS:
        if not any(losses[name]) and name not in shown:  # no validation, say
            continue
        weighted = [ideal * time for ideal, time in zip(ideals, times[name], strict=True)]
        of_ideal, of_step = (Interval.of_shares(v, ideals) for v in (losses[name], weighted))
        bars.append(Bar(name, Interval.of(losses[name]), of_ideal, of_step))
    return Waterfall(ideal, Interval.of(ends), bars, len(ideals))


# Measure a switched phase: its steps with a part on, and those with the part off.


def reference_name(phase: str) -> str:
    """Return the name of the rung that has the steps of a switched phase with the part on."""
    return f"{phase}: reference"


@dataclass(frozen=True)
class SwitchedResult:
    """Result of one switched phase.

    Attributes:
        reference: The steps with the part on.
        without: The steps with the part off.
        savings: Share of a step that the part takes, by pair of neighbouring blocks.
    """

    reference: RungResult
    without: RungResult
    savings: list[float]


def measure_switched(run: Run, rung: Rung, phase: str) -> SwitchedResult:
    """Measure a switched phase.

    Pairs with a step in which a rank evaluates or writes a checkpoint are left out, unless all are.

    Raises:
        EndedError: The script ended before the last step of the phase.
    """
    pausing = _pausing_steps(run)
    pairs = rung.switched_pairs(phase)
    pairs = [pair for pair in pairs if not pausing & {*pair[0], *pair[1]}] or pairs
    blocks = [tuple(_measured(run, steps, phase) for steps in pair) for pair in pairs]
    reference, without = (
        _measured(run, [step for pair in pairs for step in pair[at]], phase) for at in (0, 1)
    )
    return SwitchedResult(reference, without, [1 - off.step_s / on.step_s for on, off in blocks])


def _pausing_steps(run: Run) -> set[int]:
    """Return the steps in which a rank evaluates or writes a checkpoint."""
    found: set[int] = set()
    for record in run.records:
        rows = record.events_in(State.STEP)
        for event in record.events_in(*PAUSES):
            both = (rows["start"] < event["end"]) & (rows["end"] > event["start"])
            found |= set(rows["step"][both].tolist())
    return found


def _measured(run: Run, steps: Sequence[int], phase: str) -> RungResult:
    """Return the mean step over some steps that need not be consecutive."""
    seconds, samples = [], 0
    for record in run.records:
        rows = record.events_in(State.STEP)
        done = len(rows)
        rows = rows[np.isin(rows["step"], steps)]
        if len(rows) < len(steps):
            raise EndedError(done, max(steps) + 1)
        seconds.append(float((rows["end"] - rows["start"]).sum()) / 1e9 / len(rows))
        samples += total(rows["amount"]) or len(rows)
    none = [0.0] * len(seconds)
    return RungResult(
        together=samples / (max(seconds) * len(steps)),
        step_s=max(seconds),
        training_s=seconds,
        validation_s=none,
        checkpoint_s=none,
        ranks=len(seconds),
        cached=0,
        silent=0,
        used=resources_used([record.meta.get("rung", {}) for record in run.records], phase),
    )
