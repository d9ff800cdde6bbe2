"""When a checkpoint is due, the same moment on every rank, and going on from the last one."""

import time
from collections.abc import Callable
from pathlib import Path

from ..checkpoint import files
from ..checkpoint.saver import Saver, load, newest
from ..record.recorder import Recorder
from ..record.states import State
from .every import Every
from .state import Everything, Position

AGREE_SECONDS = 1.0  # how often ranks agree on whether a checkpoint by time is due


class Saves:
    """The checkpoints of one ``world.epochs``.

    ``from_rank_0(numbers)`` gives rank 0's numbers to all; ``any_rank(flag)`` is true on all
    ranks if it is on one.
    """

    def __init__(
        self,
        saver: Saver,
        every: Every,
        everything: Everything,
        recorder: Recorder,
        from_rank_0: Callable[[list[int]], list[int]],
        any_rank: Callable[[bool], bool],
    ) -> None:
        self.saver = saver
        self.every = every
        self.everything = everything
        self.recorder = recorder
        self.from_rank_0 = from_rank_0
        self.any_rank = any_rank
        self._saved_step = -1
        self._saved_at = time.monotonic()
        self._until_agreement = 0
        self._agreed_at = time.monotonic()
        self._interval = 1

    def prepare(self) -> None:
        """Find out now, and on every rank, what would otherwise fail at the first save."""
        problem = None
        try:
            files.check_writable(self.saver.directory)
            self.saver.check(self.everything.shared(), self.everything.own())
        except ValueError as error:
            problem = error
        if self.any_rank(problem is not None):
            raise problem or ValueError(
                f"checkpoints can't be written to {self.saver.directory}: another rank says why"
            )

    def find(self) -> Path | None:
        """The checkpoint that all ranks go on from; rank 0 looks, reads and decides."""
        chosen: Path | None = None
        problem: ValueError | None = None
        if self.saver.rank == 0:
            files.remove_unfinished(self.saver.directory)
            try:
                chosen = newest(self.saver.directory, self.saver.warn)
            except ValueError as error:
                problem = error
        if self.any_rank(problem is not None):
            raise problem or ValueError(
                f"no whole checkpoint is left in {self.saver.directory}: rank 0 says why"
            )
        step = int(chosen.name.removeprefix("step-")) if chosen else -1
        (step,) = self.from_rank_0([step])
        return self.saver.directory / f"step-{step:08}" if step >= 0 else None

    def lay(self, folder: Path) -> Callable[[], Position]:
        """Read a checkpoint; a function that lays its state, as often as it is called."""
        shared, own, manifest = load(folder)
        self._saved_step = manifest["step"]
        rank, size = self.saver.rank, self.saver.size
        return lambda: self.everything.lay(shared, own, rank, size)

    def after_batch(self) -> None:
        """Between two batches: save if due."""
        training = self.everything.training
        if not training.between_steps or self.recorder.step == self._saved_step:
            return
        if self.every.unit == "step":
            if self.recorder.step - max(self._saved_step, 0) >= self.every.number:
                self.save()
        elif self.every.unit == "second" and self._time_is_up():
            self.save()

    def _time_is_up(self) -> bool:
        """Whether rank 0's clock says so. Asked only every so many batches, about once a
        second, because asking is a broadcast."""
        self._until_agreement -= 1
        if self._until_agreement > 0:
            return False
        now = time.monotonic()
        due = now - self._saved_at >= self.every.number and not self.saver.busy
        each = (now - self._agreed_at) / self._interval
        interval = min(self.every.number, AGREE_SECONDS) / max(each, 1e-6)
        agreed, batches = self.from_rank_0([int(due), max(1, int(interval))])
        self._until_agreement = self._interval = batches
        self._agreed_at = now
        return bool(agreed)

    def after_epoch(self, epoch: int, last: bool) -> None:
        """At an epoch's end: save if due, and always at the end of the last one."""
        if last or (self.every.unit == "epoch" and (epoch + 1) % self.every.number == 0):
            self.save()

    def save(self) -> None:
        with self.recorder.span(State.CHECKPOINT):
            self.everything.training.check_previous_loss()
            position = self.everything.position
            self.saver.save(
                self.recorder.step,
                self.everything.shared(),
                self.everything.own(),
                {"epoch": position.epoch, "inside": position.inside, "ranks": self.saver.size},
                self.everything.buffers(),
            )
        self._saved_step = self.recorder.step
        self._saved_at = time.monotonic()

    def finish(self) -> None:
        """Wait until the last checkpoint is whole."""
        with self.recorder.span(State.CHECKPOINT):
            self.saver.wait()
