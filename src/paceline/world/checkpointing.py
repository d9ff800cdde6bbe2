"""When a checkpoint is due, the same moment on every rank, and going on from the last one.

Ranks agree by a broadcast of rank 0's clock and warnings. It is asked for only every so many
batches, about once a second: where the agreement falls follows from the number of batches alone,
so all ranks make it at the same step, whenever a signal reaches each of them. (A rank that acted
on its own flag would leave one step before another, which then waits for it for ever.)
"""

import time
from collections.abc import Callable
from pathlib import Path

from ..checkpoint import checkpoint_folder
from ..checkpoint.saver import CheckpointSaver, find_newest_valid, load_checkpoint
from ..record.ring.launcher_messages import send_to_launcher
from ..record.ring.recorder import Recorder
from ..record.ring.states import State
from .checkpoint_interval import Every
from .early_exit import Early, LeftEarly
from .training_state import Everything, Position

AGREE_SECONDS = 1.0  # how often ranks agree on whether to save or to leave
AGREE_BATCHES = 100  # and at least so often: steps may become slower than they were


class Saves:
    """The checkpoints of one ``world.epochs``.

    ``from_rank_0(numbers)`` gives rank 0's numbers to all; ``any_rank(flag)`` is true on all
    ranks if it is on one. ``say`` shows a line, on rank 0.
    """

    def __init__(
        self,
        saver: CheckpointSaver,
        every: Every,
        everything: Everything,
        recorder: Recorder,
        from_rank_0: Callable[[list[int]], list[int]],
        any_rank: Callable[[bool], bool],
        say: Callable[[str], None],
    ) -> None:
        self.saver = saver
        self.every = every
        self.everything = everything
        self.recorder = recorder
        self.from_rank_0 = from_rank_0
        self.any_rank = any_rank
        self.say = say
        self.early = Early()
        self._saved_step = -1
        self._saved_at = time.monotonic()
        self._took: float | None = None  # the last save, until it was on the disk
        self._timed = True
        self._reason = ""  # why rank 0 wants to leave
        self._batches = 0  # since ranks agreed last
        self._interval = 1  # batches until they agree again
        self._agreed_at = time.monotonic()

    def prepare(self) -> None:
        """Find out now, and on every rank, what would otherwise fail at the first save."""
        problem = None
        try:
            checkpoint_folder.check_writable(self.saver.directory)
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
            checkpoint_folder.remove_unfinished(self.saver.directory)
            try:
                chosen = find_newest_valid(self.saver.directory, self.saver.warn)
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
        shared, own, manifest = load_checkpoint(folder)
        self._saved_step = manifest["step"]
        rank, size = self.saver.rank, self.saver.size
        return lambda: self.everything.lay(shared, own, rank, size)

    def after_batch(self) -> None:
        """Between two batches: save if due, and leave if asked to."""
        training = self.everything.training
        if not training.between_steps or self.recorder.step == self._saved_step:
            return
        save, leave = self._agreed()
        if self.every.unit == "step":
            save = self.recorder.step - max(self._saved_step, 0) >= self.every.number
        if leave:
            self._leave()
        elif save:
            self.save()

    def _agreed(self, now: bool = False) -> tuple[bool, bool]:
        """Whether rank 0's clock says to save, and whether it wants to leave; False for both
        where it is not yet time to ask, unless ``now``."""
        self._batches += 1
        if self._batches < self._interval and not now:
            return False, False
        at, seconds, due = time.monotonic(), AGREE_SECONDS, False
        if self.every.unit == "second":
            seconds = min(self.every.number, AGREE_SECONDS)
            due = at - self._saved_at >= self.every.number and not self.saver.busy
        each = (at - self._agreed_at) / self._batches
        interval = min(AGREE_BATCHES, max(1, int(seconds / max(each, 1e-6))))
        self.early.tell()
        if self.saver.rank == 0:
            self._time_save()
            self._reason = self.early.why(self._took)
        told = [int(due), int(self._reason != ""), interval]
        save, leave, self._interval = self.from_rank_0(told)
        self._agreed_at, self._batches = at, 0
        return bool(save), bool(leave)

    def _time_save(self) -> None:
        """How long the last save took, to the next time that anybody looks."""
        if not self._timed and not self.saver.busy:
            self._took, self._timed = time.monotonic() - self._saved_at, True

    def _leave(self) -> None:
        """Save, wait until that is on the disk, and end the script on all ranks."""
        self.say(f"{self._reason}: a checkpoint, and the run leaves early")
        step = self.recorder.step
        if step != self._saved_step:
            self.save()
        self.finish()
        whole = (self.saver.directory / f"step-{step:08}" / checkpoint_folder.MANIFEST).exists()
        (whole,) = map(bool, self.from_rank_0([int(whole)]))
        if not whole:
            raise ValueError(
                f"the checkpoint of step {step} could not be written before leaving; the one "
                f"before it is kept. HINT: is there room in {self.saver.directory}?"
            )
        send_to_launcher(left=step)
        raise LeftEarly

    def after_epoch(self, epoch: int, last: bool) -> None:
        """At an epoch's end: save if due, and always at the end of the last one; leave if asked
        to, which validation may have kept us from."""
        if not last:
            _, leave = self._agreed(now=True)
            if leave:
                self._leave()
        if last or (self.every.unit == "epoch" and (epoch + 1) % self.every.number == 0):
            self.save()

    def save(self) -> None:
        self._time_save()
        began = time.monotonic()
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
        self._saved_at, self._timed = began, False

    def finish(self) -> None:
        """Wait until the last checkpoint is whole."""
        with self.recorder.span(State.CHECKPOINT):
            self.saver.wait()
