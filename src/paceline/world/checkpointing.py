"""When a checkpoint is due, at the same step on every rank, and resuming from the last one.

Ranks agree by a broadcast of rank 0's clock and warnings. They do so only every few batches, about
once a second: where the agreement falls follows from the number of batches only, so all ranks make
it at the same step, whenever a signal reaches each of them. (A rank that acted on its own flag
would leave one step before another, which would then wait for it forever.)
"""

import functools
import re
import socket
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

from ..checkpoint import checkpoint_folder, state_tree
from ..checkpoint.saver import (
    OWN_STATE,
    CheckpointSaver,
    Ranks,
    find_newest_valid,
    load_checkpoint,
)
from ..checkpoint.shard_copies import (
    PartPath,
    ShardDigests,
    ShardKey,
    TensorPath,
    name_copies,
    shards_that_differ,
)
from ..checkpoint.shared_state import Difference, SharedState, differences
from ..record.ring.launcher_messages import send_to_launcher
from ..record.ring.recorder import Recorder
from ..record.ring.states import State
from ..security import shared_folder
from ..security.files import error_reason
from .collectives import Collectives
from .early_exit import EarlyExit, EarlyExitMonitor
from .training_state import Position, TrainingState

T = TypeVar("T")

AGREEMENT_INTERVAL_S = 1.0  # between two agreements on whether to save or to exit
MAX_AGREEMENT_INTERVAL_BATCHES = 100  # steps may become slower than when the interval was computed
_SECONDS = {"s": 1, "sec": 1, "min": 60, "h": 3600}


@dataclass(frozen=True)
class CheckpointInterval:
    """Interval between two checkpoints. ``unit`` is "epoch", "step" or "second"."""

    number: float
    unit: str

    @classmethod
    def parse(cls, text: str | int) -> "CheckpointInterval":
        """Parse "epoch", "2 epochs", 500 or "500 steps", "30s", "10min" or "1h".

        Raises ValueError for anything else.
        """
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)?\s*([a-z]*)\s*", str(text))
        number, unit = match.groups() if match else (None, "")
        unit = {"": "step" if number else "", "epochs": "epoch", "steps": "step"}.get(unit, unit)
        value = float(number) if number else 1.0
        if value > 0 and unit in _SECONDS:
            return cls(value * _SECONDS[unit], "second")
        if value >= 1 and value == int(value) and unit in ("epoch", "step"):
            return cls(value, unit)
        raise ValueError(
            f"world.epochs: every must be a number of epochs, steps or a time; this is {text!r}. "
            "HINT: every='epoch', '2 epochs', 500 (steps), '30s', '10min' or '1h'"
        )


# Keys of a checkpoint's tree as JSON, in which ranks exchange them.
#
# Keys are numbers, strings, None, bytes and tuples of them. JSON has no bytes and no tuples.

Digests = list[tuple[list[Any], bytes]]  # paths, as JSON, with their digests


def path_to_json(path: tuple[Any, ...]) -> list[Any]:
    """Return a path as a list of numbers, strings, None and dicts with one item."""
    return [_to_json(key) for key in path]


def path_from_json(keys: list[Any]) -> tuple[Any, ...]:
    """Return the path. Raises ValueError if ``keys`` are not of ``path_to_json``."""
    return tuple(_from_json(key) for key in keys)


def digests_to_json(digests: Mapping[tuple[Any, ...], bytes]) -> Digests:
    """Return digests by path as a list."""
    return [(path_to_json(path), digest) for path, digest in digests.items()]


def digests_from_json(items: Digests) -> dict[tuple[Any, ...], bytes]:
    """Return digests by path. Raises ValueError same as for ``path_from_json``."""
    return {path_from_json(keys): digest for keys, digest in items}


def _to_json(key: Any) -> Any:
    if isinstance(key, tuple):
        return {"tuple": path_to_json(key)}
    return {"bytes": key.hex()} if isinstance(key, bytes) else key


def _from_json(key: Any) -> Any:
    match key:
        case {"tuple": list(parts)}:
            return path_from_json(parts)
        case {"bytes": str(digits)}:
            return bytes.fromhex(digits)
        case dict() | list():
            raise ValueError(f"{key!r} is not a key of a checkpoint's tree")
    return key


class Checkpointer:
    """The checkpoints of one ``world.epochs``.

    Args:
        say: Prints a line on rank 0.
        source: Folder of the checkpoint to resume from; None: that of the saver.
    """

    def __init__(
        self,
        saver: CheckpointSaver,
        interval: CheckpointInterval,
        state: TrainingState,
        recorder: Recorder,
        collectives: Collectives,
        say: Callable[[str], None],
        source: Path | None = None,
    ) -> None:
        self.saver = saver
        self.source = source or saver.directory
        self.interval = interval
        self.state = state
        self.recorder = recorder
        self.collectives = collectives
        self.say = say
        self.early_exit = EarlyExitMonitor()
        self._warnings: set[str] = set()  # printed once
        self._saved_step = -1
        self._saved_at = time.monotonic()
        # duration of the last save, until it was on disk
        self._save_duration_s: float | None = None
        self._is_timed = True
        self._exit_reason = ""  # why rank 0 wants to exit
        self._batches_since_agreement = 0
        self._agreement_interval_batches = 1
        self._agreed_at = time.monotonic()

    def prepare(self) -> None:
        """Check on every rank, before training, what would otherwise fail at the first save.

        Raises ValueError where checkpoints can't be written, another run uses the folder, or ranks
        do not share it.
        """

        def check() -> None:
            checkpoint_folder.check_writable(self.saver.directory)
            self.saver.lock(self.say)
            self.state.shared_state()
            state_tree.flatten(self.state.rank_state(), OWN_STATE)

        self._on_all_ranks(check, "save checkpoints")
        if self.saver.size > 1:
            self._check_shared_folder()

    def _on_all_ranks(self, act: Callable[[], T], what: str) -> T:
        """Return the result of ``act``. Collective.

        Args:
            what: What ``act`` does, for the message.

        Raises:
            ValueError: On all ranks, if ``act`` raises it on one of them.
        """
        problem: ValueError | None = None
        result: Any = None
        try:
            result = act()
        except ValueError as error:
            problem = error
        reasons = self.collectives.gather(str(problem or ""), str)
        if failed := [rank for rank, reason in enumerate(reasons) if reason]:
            named = self.collectives.mesh.named(failed)
            raise problem or ValueError(f"{named} can't {what}: {reasons[failed[0]]}")
        return cast(T, result)

    def _check_shared_folder(self) -> None:
        """Raise ValueError on all ranks where one does not see the folder of rank 0."""
        directory = self.saver.directory
        number, reason = -1, "see the message of rank 0"
        if self.saver.rank == 0:
            try:
                number = shared_folder.write_token(directory)
            except OSError as error:
                reason = error_reason(error)
        (number,) = self.collectives.from_rank_0([number])
        if number < 0:
            raise ValueError(
                f"rank 0 can't write to the checkpoint folder {directory}: {reason}. "
                "HINT: set checkpoint=... of world.epochs to another folder"
            )
        seen = shared_folder.sees_token(directory, number)
        answers = self.collectives.gather((seen, socket.gethostname()), tuple[bool, str])
        if self.saver.rank == 0:
            shared_folder.remove_token(directory, number)
        nodes = [node for _, node in answers]
        if blind := [rank for rank, (seen, _) in enumerate(answers) if not seen]:
            raise ValueError(
                f"the checkpoint folder {directory} is not the same on all nodes: a file that rank "
                f"0 ({nodes[0]}) wrote to it is not visible to "
                f"{shared_folder.describe_ranks(nodes, blind)}. HINT: set checkpoint=... to a "
                "folder that all nodes share, not to node-local storage such as /tmp"
            )

    def find_newest(self) -> Path | None:
        """Return the checkpoint that all ranks resume from, or None.

        Raises ValueError on all ranks where checkpoints exist but none is complete.
        """
        if self.saver.rank == 0:
            for path in checkpoint_folder.remove_unfinished(self.saver.directory):
                self.saver.warn(
                    f"{path} looks like an unfinished checkpoint, but Paceline has not written all "
                    "that it contains. HINT: remove it, or move it to another folder"
                )
        ranks = Ranks(self.saver.rank, self.saver.size, self.collectives.gather)
        chosen = find_newest_valid(self.source, self.saver.warn, ranks)
        if chosen is None:
            self._compared_state()  # before training, which a difference would make worthless
        return chosen

    def load(self, folder: Path) -> Callable[[], Position]:
        """Read a checkpoint; return a function that restores its state whenever it is called.

        It raises ValueError on all ranks where the state does not fit one of them. Collective.
        """
        shared, own, manifest = load_checkpoint(folder)
        self._saved_step = manifest["step"]
        rank, size = self.saver.rank, self.saver.size
        for line in self.state.restore_warnings(shared, own, size):
            self.saver.warn(line)

        load = functools.partial(self.state.load, shared, own, rank, size)
        return lambda: self._on_all_ranks(load, "restore the checkpoint")

    def after_batch(self) -> None:
        """Save if a checkpoint is due, and exit early if that was requested. Called between
        batches.
        """
        training = self.state.training
        if not training.between_steps or self.recorder.step == self._saved_step:
            return
        save, exit_early = self._agree()
        if self.interval.unit == "step":
            save = self.recorder.step - max(self._saved_step, 0) >= self.interval.number
        if exit_early:
            self._exit_early()
        elif save:
            self.save()

    def _agree(self, immediately: bool = False) -> tuple[bool, bool]:
        """Return whether rank 0's clock says to save, and whether rank 0 wants to exit.

        Both are False while no agreement is due, unless ``immediately``.
        """
        self._batches_since_agreement += 1
        if self._batches_since_agreement < self._agreement_interval_batches and not immediately:
            return False, False
        now, interval_s, due = time.monotonic(), AGREEMENT_INTERVAL_S, False
        if self.interval.unit == "second":
            interval_s = min(self.interval.number, AGREEMENT_INTERVAL_S)
            due = now - self._saved_at >= self.interval.number and not self.saver.busy
        batch_s = (now - self._agreed_at) / self._batches_since_agreement
        interval_batches = min(
            MAX_AGREEMENT_INTERVAL_BATCHES, max(1, int(interval_s / max(batch_s, 1e-6)))
        )
        self.early_exit.report_termination()
        if self.saver.rank == 0:
            self._measure_save()
            self._exit_reason = self.early_exit.exit_reason(self._save_duration_s)
        decision = [int(due), int(self._exit_reason != ""), interval_batches]
        save, exit_early, self._agreement_interval_batches = self.collectives.from_rank_0(decision)
        self._agreed_at, self._batches_since_agreement = now, 0
        return bool(save), bool(exit_early)

    def _measure_save(self) -> None:
        """Record how long the last save took, up to the next check."""
        if not self._is_timed and not self.saver.busy:
            self._save_duration_s, self._is_timed = time.monotonic() - self._saved_at, True

    def _exit_early(self) -> None:
        """Save, wait until the checkpoint is complete, and end the script on all ranks."""
        self.say(f"{self._exit_reason}: Paceline saves a checkpoint and ends the run early")
        step = self.recorder.step
        if step != self._saved_step:
            self.save()
        self.finish()
        is_complete = (
            self.saver.directory / f"step-{step:08}" / checkpoint_folder.MANIFEST
        ).exists()
        (is_complete,) = map(bool, self.collectives.from_rank_0([int(is_complete)]))
        if not is_complete:
            raise ValueError(
                f"Paceline could not write the checkpoint of step {step} before the early exit; "
                f"{self.saver.describe_remaining()}. HINT: check the free space: "
                f"df -h {self.saver.directory}"
            )
        send_to_launcher(left=step)
        raise EarlyExit

    def after_epoch(self, epoch: int, last: bool) -> None:
        """Save at an epoch's end if due, and always after the last one.

        Exit early if that was requested, for instance during validation, which can't exit itself.
        """
        if not last:
            _, exit_early = self._agree(immediately=True)
            if exit_early:
                self._exit_early()
        if last or (self.interval.unit == "epoch" and (epoch + 1) % self.interval.number == 0):
            self.save()

    def save(self) -> None:
        self._measure_save()
        start = time.monotonic()
        with self.recorder.span(State.CHECKPOINT):
            self.state.training.prepare_save()
            position = self.state.position
            self.saver.save(
                self.recorder.step,
                self._compared_state(),
                self.state.rank_state(),
                {"epoch": position.epoch, "inside": position.inside, "ranks": self.saver.size},
            )
        self._saved_step = self.recorder.step
        self._saved_at, self._is_timed = start, False

    def _compared_state(self) -> SharedState:
        """Return the state that all ranks restore, after comparing it over the ranks. Collective.

        Raises ValueError, the same on all ranks, where the state of a kept object differs.
        """
        shared = self.state.shared_state()
        if self.saver.size > 1:
            held = self.state.shard_digests(shared)
            digests = digests_to_json(shared.digests()), digests_to_json(held.of_shards)
            gathered = self.collectives.gather(digests, tuple[Digests, Digests])
            parts = [digests_from_json(shared_digests) for shared_digests, _ in gathered]
            found = differences(parts)
            warnings = self.state.resolve_differences(
                shared, found, self._other_structures(shared, found)
            )
            if differing := shards_that_differ(
                [digests_from_json(shard_digests) for _, shard_digests in gathered]
            ):
                warnings += self.state.check_copies(
                    name_copies(self._gather_copies(held, differing))
                )
            for line in warnings:
                if line not in self._warnings:
                    self._warnings.add(line)
                    self.saver.warn(line)
        return shared

    def _other_structures(
        self, shared: SharedState, found: dict[PartPath, Difference]
    ) -> Container[PartPath]:
        """Return the parts that differ in names, shapes or dtypes. Collective if any differ."""
        if not found:
            return ()
        own = digests_to_json(shared.structures())
        return differences([*map(digests_from_json, self.collectives.gather(own, Digests))])

    def _gather_copies(
        self, held: ShardDigests, keys: Container[ShardKey]
    ) -> list[dict[ShardKey, dict[TensorPath, bytes]]]:
        """Return the digests of each rank's tensors in these shards. Collective."""
        own = [
            (path_to_json(key), digests_to_json(each))
            for key, each in held.of_tensors.items()
            if key in keys
        ]
        return [
            {path_from_json(key): digests_from_json(each) for key, each in digests}
            for digests in self.collectives.gather(own, list[tuple[list[Any], Digests]])
        ]

    def finish(self) -> None:
        """Wait until the last checkpoint is complete."""
        with self.recorder.span(State.CHECKPOINT):
            self.saver.wait()
