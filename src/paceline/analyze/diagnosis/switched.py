"""Measure a switched phase: its steps with a part on, and those with the part off."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...record.experiments.rung import Rung
from ...record.ring.states import State
from ..records.load_run import Run
from ..records.read_record import Record
from ..records.state_timeline import total
from .ladder import EndedError, RungResult

PAUSES = (State.VALIDATION, State.CHECKPOINT)  # a step with one of them says nothing of a part


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
    pausing = set().union(*(_pausing_steps(record) for record in run.records))
    pairs = rung.switched_pairs(phase)
    pairs = [pair for pair in pairs if not pausing & {*pair[0], *pair[1]}] or pairs
    blocks = [tuple(_measured(run, steps, phase) for steps in pair) for pair in pairs]
    reference, without = (
        _measured(run, [step for pair in pairs for step in pair[at]], phase) for at in (0, 1)
    )
    return SwitchedResult(reference, without, [1 - off.step_s / on.step_s for on, off in blocks])


def _pausing_steps(record: Record) -> set[int]:
    """Return the steps in which a rank evaluates or writes a checkpoint."""
    rows = record.events_in(State.STEP)
    found: set[int] = set()
    for state in PAUSES:
        for event in record.events_in(state):
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
    facts = [record.meta.get("rung", {}) for record in run.records]
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
        used=[one.get("used", {}).get(phase, {}) for one in facts],
    )
