"""What the launcher does with the answers of the guard, and the result as JSON."""

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..job_end import JobEnd
from .request import DIVERGED_EXIT_CODE, Action

if TYPE_CHECKING:  # it imports numpy
    from .loss_guard import LossGuard

MISTAKE_EXIT_CODE = 2  # the reference does not fit the job


class GuardedJob:
    """The guard of a job, and what became of the job; without a guard, nothing happens.

    Attributes:
        guard: The guard, or None.
        exit_code: Exit code of the job if the guard ends it, or had it end; else 0.
        has_reached: Whether the guard ends the job, or had it end, because it reached its goal.
    """

    def __init__(self, guard: "LossGuard | None") -> None:
        self.guard, self.exit_code = guard, 0
        self.has_reached = False

    @property
    def take_line(self) -> Callable[[int, str], None] | None:
        """Takes lines of output: an argument of ``RankOutput``."""
        return self.guard.take_line if self.guard is not None else None

    def take_message(self, rank: int, message: dict[str, Any]) -> None:
        """Take a message of a rank to the launcher."""
        if self.guard is not None:
            self.guard.take_message(rank, message)

    def begin_attempt(self, ranks: int) -> None:
        """Note that an attempt with this number of ranks begins."""
        if self.guard is not None:
            self.guard.begin_attempt(ranks)

    def check(
        self, say: Callable[[str], None], can_stop_early: bool, warn_ranks: Callable[[], None]
    ) -> JobEnd | None:
        """Return why the job must end; None if it goes on.

        Args:
            say: Prints a message.
            can_stop_early: Whether a warning makes all ranks write a checkpoint and stop.
            warn_ranks: Warns them, as before a time limit.
        """
        if self.guard is None:
            return None
        result, action = self.guard.check(say), self.guard.request.action
        if result == "mistake":
            return self._end(f"paceline: {self.guard.mistake}\n", MISTAKE_EXIT_CODE)
        if result == "reached":
            return self._reach(say, can_stop_early, warn_ranks)
        if result and action is Action.STOP:
            text = "paceline: guard: Paceline ends the job (--on-divergence stop)\n"
            return self._end(text, DIVERGED_EXIT_CODE)
        if result and action is Action.CHECKPOINT:
            self._request_checkpoint(say, can_stop_early)
            warn_ranks()
        return None

    def _reach(
        self, say: Callable[[str], None], can_stop_early: bool, warn_ranks: Callable[[], None]
    ) -> JobEnd | None:
        if self.has_reached:
            return None
        assert self.guard is not None
        self.has_reached = True
        text = self.guard.describe_reached()
        if not can_stop_early:
            return JobEnd(f"{text}. Paceline ends the job\n", 0, may_restart=False)
        say(f"{text}. The ranks write a checkpoint and stop\n")
        warn_ranks()
        return None

    def _end(self, text: str, code: int) -> JobEnd:
        self.exit_code = code
        return JobEnd(text, code, may_restart=False)

    def _request_checkpoint(self, say: Callable[[str], None], can_stop_early: bool) -> None:
        if can_stop_early:
            self.exit_code = DIVERGED_EXIT_CODE
            text = "the ranks write a checkpoint and stop (--on-divergence checkpoint)"
        else:
            text = (
                "SIGUSR1 asks the ranks for a checkpoint, and the job continues. HINT: with "
                "world.epochs(checkpoint=...) they write one and stop"
            )
        say(f"paceline: guard: {text}\n")

    def finish(self, say: Callable[[str], None]) -> None:
        """Print the result at the end of the job, unless the reference was not the job's."""
        if self.guard is None or self.exit_code == MISTAKE_EXIT_CODE:
            return
        last = self.guard.finish(say)
        if last == "diverged" and self.guard.request.action is Action.STOP:
            self.exit_code = DIVERGED_EXIT_CODE

    def describe_checkpoint(self, step: int) -> str:
        """Return the message for a job that has stopped with a checkpoint of ``step``."""
        return (
            f"paceline: a checkpoint of step {step} was written after the divergence, and the job "
            f"stopped (exit code {self.exit_code}). HINT: to continue from before the divergence, "
            "remove this checkpoint\n"
        )


def guard_json(guard: "LossGuard | None") -> dict[str, Any] | None:
    """Return the field ``guard`` of ``paceline run --json``; None without a reference."""
    if guard is None or guard.standard is None:
        return None
    band, axis = guard.standard.band, guard.standard.axis
    left = None
    if guard.departure is not None:
        left = {name: _finite(value) for name, value in asdict(guard.departure).items()}
    last = guard.tested[-1] if guard.tested else None
    return {
        "result": _result(guard),
        "on_divergence": guard.request.action.value,
        "metric": str(guard.metric),
        "axis": axis,
        "reference_runs": band.runs,
        "reference_end": band.end,
        "values": len(guard.tested),
        "end": last[1 if axis == "samples" else 0] if last is not None else 0.0,
        "left": left,
        "rate_rises": [asdict(rise) for rise in guard.rises],
    }


def _result(guard: "LossGuard") -> str:
    if guard.departure is not None:
        return "ranks-differ" if guard.departure.kind == "replicas" else "left-band"
    if guard.mistake:
        return "other-model"
    return "within-band" if guard.tested else "no-values"


def _finite(value: Any) -> Any:
    """Return None for what JSON has no number for."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
