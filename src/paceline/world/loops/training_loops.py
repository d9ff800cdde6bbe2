"""The two loops of a training script: over batches, and over epochs."""

import copy
import functools
import itertools
from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from ...data.sampling.batch_schedule import BatchSchedule
from ...data.sampling.sample_order import BatchShare
from ...data.sampling.shard_loader import ShardedLoader
from ...data.sampling.sharded_stream import ShardedStream
from ...parallel.accumulation import Batch, LoadedBatch
from ...parallel.strategy.distributed_model import DistributedModel
from ...plurals import counted
from ...record.hooks.batch_size import samples_in
from ...record.hooks.error_messages import script_line
from ...record.ring.recorder import Recorder, now
from ...record.ring.states import State
from ..checkpointing import Checkpointer
from ..optimizer_step import OptimizerSteps
from ..progress import Progress
from ..training_state import Position, TrainingState
from .loop_log import LoopLog

Sharded = ShardedLoader | ShardedStream
_PASS_KEY_STRIDE = 1_000_003  # further passes through a loader in one epoch have different orders


# One pass of a training loop over a loader, and warnings where it does not train.


class TrainingPass:
    """One pass of ``world.batches`` over a loader that is not one of validation.

    Attributes:
        name: The loader, for messages.
        line: The script's line with the loop.
        batch: The current batch; None where gradients are disabled.
        warn: Prints a warning.
    """

    def __init__(self, training: OptimizerSteps, name: str, warn: Callable[[str], None]) -> None:
        self.training, self.name, self.line = training, name, script_line()
        self.batch: Batch | None = None
        self.warn = warn
        self._batches = 0
        self._counts_at_start = self._counts()
        self._models_at_start = self._models_with_gradients()  # those of a loop around this one
        self._step_at_begin = 0
        self._forward_at_begin = 0
        self._mode = ""  # of the model in the first batch, if it only computed a forward

    def _counts(self) -> tuple[int, int, int]:
        """Return the numbers of backwards, of ``world.step`` and of steps until now."""
        training = self.training
        return training.backwards, training.step_calls, training.phases.known_steps

    def begin(self, loaded: LoadedBatch) -> None:
        """Begin a batch."""
        phases = self.training.phases
        self._step_at_begin, self._forward_at_begin = phases.recorder.step, phases.forward_end
        self.batch = None
        if self._batches == 0 and self.training.unstepped_loop:
            self.warn(
                f"the script left the loop over {self.training.unstepped_loop} between "
                f"world.backward and world.step, so its gradients are added to those of the loop "
                f"over {self.name} ({self.line}). HINT: call optimizer.zero_grad() after the first "
                "loop, or break after world.step"
            )
            self.training.unstepped_loop = ""
        if torch.is_grad_enabled():
            self.batch = self.training.begin(loaded)

    def end(self) -> None:
        """End a batch after the script's part of the loop."""
        self._batches += 1
        if self._batches == 1:
            self._mode = self._mode_of_forward()
        if self.batch is None:
            return
        stepped = self.training.phases.recorder.step > self._step_at_begin
        if self.batch.weight != 1.0 and not self.batch.backwards and stepped:
            self.warn(
                f"a batch of the loop over {self.name} ({self.line}) is uneven or accumulated, but "
                "loss.backward() did not weight its gradient. HINT: call world.backward(loss) "
                "instead"
            )
        self.training.end(self.batch)

    def _mode_of_forward(self) -> str:
        """Return the mode of a forward without backward in this batch; "" if there was none, or
        the models are in eval mode.
        """
        training = self.training
        is_forward = training.phases.forward_end not in (0, self._forward_at_begin)
        if not is_forward or not any(model.called.training for model in training.models):
            return ""
        return "in training mode" + (", with gradients on" if torch.is_grad_enabled() else "")

    def leave(self, warn: Callable[[str], None]) -> None:
        """Note that the script leaves the loop before its end; warnings then go to ``warn``."""
        self.warn = warn
        if self.batch is None or not self.batch.backwards:
            return
        if any(model not in self._models_at_start for model in self._models_with_gradients()):
            self.training.unstepped_loop = f"{self.name} ({self.line})"

    def end_batch(self) -> bool:
        """End the current batch and its group; return whether gradients were discarded."""
        if self.batch is not None:
            self.training.end(self.batch)
            self.batch = None
        discarded = self.training.accumulations.end_loop(self)
        if discarded:
            self.training.unstepped_loop = ""
            self.warn(
                f"the script left the loop over {self.name} ({self.line}) after {discarded} "
                "accumulated batches, and Paceline discards their gradients. HINT: leave the loop "
                "after a world.step that returned True"
            )
        return bool(discarded)

    def close(self) -> None:
        """End the pass, also where the script breaks out of the loop."""
        if self.end_batch():
            return
        backwards, *steps = (
            now - before for now, before in zip(self._counts(), self._counts_at_start, strict=True)
        )
        if any(steps) or self._models_with_gradients():
            return
        if backwards:
            self.warn(
                f"the loop over {self.name} ({self.line}) had {counted(backwards, 'backward')} and "
                "no step of an optimizer that Paceline knows. HINT: call world.step(optimizer) "
                "after each world.backward(loss)"
            )
        elif self._mode:
            self.warn(
                f"the loop over {self.name} ({self.line}) had no backward, and ran the model "
                f"{self._mode}. HINT: for a validation pass in eval mode and without gradients, "
                "use world.batches(world.shard(loader, every_sample_once=True))"
            )

    def _models_with_gradients(self) -> list[DistributedModel]:
        """Return the models whose gradients wait for a step."""
        return [model for model in self.training.models if model.has_gradients()]


# The context of a validation pass: no gradients, and models in eval mode.


class EvaluationPass(ExitStack):
    """The context of one validation pass, from its first batch until it ends.

    Attributes:
        name: The loader and the script's line, for messages.
        share: This rank's part of the current batch.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.share: BatchShare | None = None


@contextmanager
def evaluation(models: list[DistributedModel]) -> Iterator[None]:
    """Context without gradients, with modules in eval mode.

    Rank 0's buffers are broadcast at the start, so that ranks may run different numbers of
    forwards.
    """
    modules = [module for model in models for module in model.called.modules()]
    modes = [module.training for module in modules]
    gradients = torch.is_grad_enabled()
    for model in models:
        model.set_buffer_sync(False)
        model.called.eval()
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for model in models:
            model.set_buffer_sync(True)


class TrainingLoops:
    """State that the loops of one world share: the position, and where to resume."""

    def __init__(
        self,
        training: OptimizerSteps,
        state: TrainingState,
        recorder: Recorder,
        progress: Progress,
        log: LoopLog,
        warn: Callable[[str], None],
    ) -> None:
        self.training = training
        self.state = state
        self.recorder = recorder
        self.progress = progress
        self.log = log
        self.warn = warn
        self.loaders: list[Sharded] = []
        self.checkpointer: Checkpointer | None = None
        self.count = 0  # number of epochs; 0 outside of world.epochs
        self._resume: tuple[Position, Callable[[], Position]] | None = None
        # Of the checkpoint: schedule by loader until it is compared, and epochs that had begun.
        self._saved_schedules: dict[int, BatchSchedule] = {}
        self._begun_epochs = 0
        # The pass of each loader, by number, that has begun last and has not ended.
        self._open_passes: dict[int, object] = {}
        self._evaluations: list[EvaluationPass] = []  # in force; the last one is the innermost

    @property
    def position(self) -> Position:
        return self.state.position

    # over batches

    def batches(self, loader: Any) -> Iterator[Any]:
        if not isinstance(loader, (ShardedLoader, ShardedStream)):
            return self._iterate_unsharded(loader)
        number = next(i for i, known in enumerate(self.loaders) if known is loader)
        return (
            self._evaluate(loader, number)
            if loader.every_sample_once
            else self._train(loader, number)
        )

    def _train(self, loader: Sharded, number: int) -> Iterator[Any]:
        self._end_previous_pass(number)
        self._begin_epoch(loader, number)
        start = self._first_batch(loader, number)
        if start is None:
            return
        self._end_evaluations()
        position, training, nominal = self.position, self.training, loader.batch
        self._say_batch(loader, position.batch.get(number))
        position.batch[number] = nominal
        position.schedules[number] = dict(loader.schedule.sizes)
        self.log.go_on()
        loop = self._open_passes[number] = TrainingPass(training, loader.name, self.warn)
        try:
            for batch, share in self._with_input_time(
                loader.iterate(self._order_key(number), start)
            ):
                group_total = functools.partial(loader.group_total, share)
                loop.begin(LoadedBatch(loop, share, share.total, nominal, group_total))
                yield batch
                loop.end()
                if self._open_passes.get(number) is loop:
                    position.open[number] = share.position + 1
                self.progress.batch(share.position + 1, _length(loader), training)
                if self.checkpointer is not None:
                    self.checkpointer.after_batch()
        except GeneratorExit:  # the script breaks out of the loop
            if self._open_passes.get(number) is loop:
                self._leave(number, loop, script_line())
            raise
        finally:
            if self._end_pass(number, loop):
                loop.close()
            else:  # another loop has ended the pass, and the script may have gone on with it
                loop.end_batch()

    def _leave(self, number: int, loop: TrainingPass, line: str) -> None:
        """Note that the script leaves a loop before its end, at this line."""
        done = self.position.open.get(number, 0) + 1
        where = f"after batch {done} of epoch {self.position.epoch + 1}"
        self.log.leave(f"the loop over {loop.name}", where, line)
        loop.leave(self.log.warn_later)

    def _end_previous_pass(self, number: int) -> None:
        """End the pass over a loader that the script has left, if its iterator still exists."""
        previous = self._open_passes.get(number)
        if isinstance(previous, TrainingPass):
            self._leave(number, previous, previous.line)
        if self._end_pass(number, previous) and isinstance(previous, TrainingPass):
            previous.close()

    def _end_pass(self, number: int, ended: object) -> bool:
        """Count a pass as completed; return whether it was open.

        The iterator of an abandoned pass may be freed after the next pass or epoch has begun. The
        next pass has ended it then.
        """
        if ended is None or self._open_passes.get(number) is not ended:
            return False
        del self._open_passes[number]
        self.position.open.pop(number, None)
        self.position.passes[number] = self.position.passes.get(number, 0) + 1
        return True

    def _evaluate(self, loader: Sharded, number: int) -> Iterator[Any]:
        self._end_previous_pass(number)
        self._begin_epoch(loader, number)
        start = self._first_batch(loader, number)
        if start is None:
            return
        training = self.training
        if any(model.has_collective_forward for model in training.models):
            loader.give_equal_batches()  # each forward is a collective
        evaluation_pass = EvaluationPass(f"{loader.name} ({script_line()})")
        self._open_passes[number] = evaluation_pass
        training.average_replicas()
        self.log.begin_pass("validation", loader.name)
        self._evaluations.append(evaluation_pass)
        training.validation_loop = evaluation_pass.name
        evaluation_pass.callback(self._record_validation, now())
        try:
            evaluation_pass.enter_context(evaluation(training.models))
            for batch, share in self._with_input_time(loader.iterate(0, start)):
                evaluation_pass.share = training.evaluation_share = share
                yield batch
                if evaluation_pass not in self._evaluations:
                    raise ValueError(
                        f"world.batches: a training loop began inside the validation pass over "
                        f"{loader.name} and ended it. HINT: leave the validation loop before the "
                        "training loop; for an inner loop that does not train, use "
                        "world.shard(loader, every_sample_once=True)"
                    )
        finally:
            self._end_evaluations(evaluation_pass)
            self._end_pass(number, evaluation_pass)

    def _end_evaluations(self, outermost: "EvaluationPass | None" = None) -> None:
        """End a validation pass and those inside it; default all, which the script has left."""
        passes = self._evaluations
        if outermost is None or outermost in passes:
            first = passes.index(outermost) if outermost is not None else 0
            while len(passes) > first:
                passes.pop().close()
            self.training.evaluation_share = passes[-1].share if passes else None
            self.training.validation_loop = passes[-1].name if passes else ""

    def _record_validation(self, start_ns: int) -> None:
        self.recorder.event(State.VALIDATION, start_ns, now())

    def _iterate_unsharded(self, loader: Any) -> Iterator[Any]:
        loop = TrainingPass(self.training, describe_loader(loader), self.warn)
        self.log.begin_pass("unsharded", loop.name)
        if self.training.mesh.data_size > 1 and not is_divided(loader):
            self.warn(
                f"world.batches: the {loop.name} ({loop.line}) is not sharded, so each of "
                f"{self.training.mesh.data_size} ranks processes all of its batches. HINT: "
                "loader = world.shard(loader), and for validation world.shard(loader, "
                "every_sample_once=True)"
            )
        try:
            for batch, share in self._with_input_time(self._own_shares(loader)):
                # Ranks' batches are equal in number, and in weight, whatever their sizes.
                loop.begin(LoadedBatch(loop, share, 1.0, 1.0, lambda _: None))
                yield batch
                loop.end()
        except GeneratorExit:
            loop.leave(self.log.warn_later)
            raise
        finally:
            loop.close()

    def _own_shares(self, loader: Any) -> Iterator[tuple[Any, BatchShare]]:
        """Yield the batches of a loader that is not sharded, each with this rank's share.

        With accumulation one batch is read ahead, to know which one is the last.
        """
        size = self.training.mesh.data_size
        reads_ahead = any(model.every > 1 for model in self.training.accumulations.models)
        source = iter(loader)
        held: list[Any] = []
        for position in itertools.count():
            if not held:
                held = list(itertools.islice(source, 1))
            if not held:
                return
            batch = held.pop()
            if reads_ahead:
                held = list(itertools.islice(source, 1))
            count = samples_in(batch)
            yield batch, BatchShare(position, count, count * size, last=reads_ahead and not held)

    def _with_input_time(self, source: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Yield batches on the rank's device, and record the wait for each."""
        while True:
            start_ns = now()
            self.recorder.begin(State.INPUT, start_ns)
            item = next(source, None)
            if item is not None and self.training.device.type != "cpu":
                item = (move_to_device(item[0], self.training.device), item[1])
            if item is not None:
                item = (self.training.place_batch(item[0]), item[1])
            self.recorder.event(State.INPUT, start_ns, now())
            if item is None:
                return
            yield item

    def _order_key(self, number: int) -> int:
        return self.position.epoch + _PASS_KEY_STRIDE * self.position.passes.get(number, 0)

    def _begin_epoch(self, loader: Sharded, number: int) -> None:
        """Set a loader's batch size to that of this epoch; outside of world.epochs, of this pass.

        Raises ValueError where a checkpoint was trained with another schedule.
        """
        passes = self.position.passes.get(number, 0)
        loader.begin_epoch(self.position.epoch if self.count else passes)
        if number in self._saved_schedules and not loader.is_branch:
            saved = self._saved_schedules.pop(number)
            if change := _describe_change(saved, loader.schedule, self._begun_epochs):
                self.progress.say(change)

    def _say_batch(self, loader: Sharded, before: int | None) -> None:
        if loader.schedule.changes and before != loader.batch:
            text = f"epoch {self.position.epoch + 1}: the global batch is {loader.batch}"
            self.progress.say(text + (f", before {before}" if before else ""))

    def _first_batch(self, loader: Sharded, number: int) -> int | None:
        """Return the first batch of this pass; None if the resumed run has completed it."""
        if self._resume is None:
            return 0
        saved, restore = self._resume
        completed = self.position.passes.get(number, 0)
        if completed < saved.passes.get(number, 0):
            self.position.passes[number] = completed + 1
            return None
        if number not in saved.open:
            return 0
        # The position of the checkpoint: restore the state again, over whatever the script did in
        # this epoch before reaching it.
        self.state.position = restore()
        self._resume = None
        batch = saved.batch.get(number)
        if batch is not None and loader.is_branch and isinstance(loader, ShardedLoader):
            # a run that compares batch sizes: all sizes continue with the same samples
            loader.begin_epoch(self.position.epoch, first=saved.open[number] * batch)
            return 0
        return _convert_position(saved.open[number], batch, loader)

    # over epochs

    def epochs(self, count: int, checkpointer: Checkpointer | None) -> Iterator[int]:
        self.log.go_on()
        self.count = count
        self.checkpointer = checkpointer
        if checkpointer is None:
            yield from self._epochs(0, count, None)
            return
        checkpointer.early_exit.listen()
        try:
            yield from self._epochs(self._resume_epoch(checkpointer), count, checkpointer)
            checkpointer.finish()
            checkpointer.saver.close()
        finally:
            checkpointer.early_exit.stop()

    def _epochs(self, first: int, count: int, checkpointer: Checkpointer | None) -> Iterator[int]:
        outer = len(self.state.meters)
        for epoch in range(first, count):
            self._new_epoch(epoch)
            self.training.replicas.new_epoch()
            del self.state.meters[outer:]
            self.progress.epoch(epoch, count)
            try:
                yield epoch
            except GeneratorExit:  # the script breaks out of the loop
                self.log.leave("world.epochs", f"in epoch {epoch + 1}", script_line())
                raise
            self._end_open_passes()
            self.log.compare()
            self.training.average_replicas()
            if self._resume is not None:
                self._resume = None
                self.warn(
                    f"epoch {epoch + 1} did not reach the loop in which its checkpoint was saved, "
                    "so the script repeated the whole epoch. HINT: resume with the script that "
                    "saved the checkpoint"
                )
            self.training.check_previous_loss()
            self.training.replicas.end_of_epoch()
            self._new_epoch(epoch + 1)
            del self.state.meters[outer:]
            if checkpointer is not None:
                checkpointer.after_epoch(epoch, last=epoch == count - 1)

    def _end_open_passes(self) -> None:
        """End passes that the script has left, and whose iterators are kept."""
        self._end_evaluations()
        for number in list(self._open_passes):
            self._end_previous_pass(number)

    def _new_epoch(self, epoch: int) -> None:
        self._end_open_passes()
        self.position.new_epoch(epoch)

    def _resume_epoch(self, checkpointer: Checkpointer) -> int:
        """Load the newest checkpoint, if there is one; return the epoch to resume in."""
        checkpointer.prepare()
        folder = checkpointer.find_newest()
        if folder is None:
            return 0
        restore = checkpointer.load(folder)
        saved = restore()
        where = f"inside epoch {saved.epoch + 1}" if saved.inside else f"after epoch {saved.epoch}"
        self.progress.say(f"resuming from {folder} ({where}, step {self.recorder.step})")
        self._saved_schedules = {n: BatchSchedule(sizes) for n, sizes in saved.schedules.items()}
        self._begun_epochs = saved.epoch + int(saved.inside)
        self.position.batch |= saved.batch
        self.position.schedules |= saved.schedules
        if saved.inside:
            self._resume = (saved, restore)
        return saved.epoch


def move_to_device(value: Any, device: torch.device) -> Any:
    """Return the value with tensors in (nested) mappings, lists and tuples moved to the device.

    An object with a method ``to``, such as a PackedSequence or a batch of graphs, moves itself.
    """
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if not isinstance(value, type) and callable(getattr(value, "to", None)):
        try:
            moved = value.to(device)
        except (TypeError, ValueError):  # its `to` converts something else
            return value
        return moved if isinstance(moved, type(value)) else value
    if isinstance(value, dict):
        return {key: move_to_device(item, device) for key, item in value.items()}
    if isinstance(value, UserDict):
        moved = copy.copy(value)
        moved.data = move_to_device(value.data, device)
        return moved
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(move_to_device(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(move_to_device(item, device) for item in value)
    return value


def is_divided(loader: Any) -> bool:
    """Return whether a loader that is not of ``world.shard`` is divided between ranks itself."""
    return isinstance(getattr(loader, "sampler", None), DistributedSampler)


def describe_loader(loader: Any) -> str:
    """Return a name such as "DataLoader(TensorDataset)"."""
    name = type(loader).__name__
    dataset = getattr(loader, "dataset", None)
    return name if dataset is None else f"{name}({type(dataset).__name__})"


def _describe_change(saved: BatchSchedule, now: BatchSchedule, begun: int) -> str:
    """Return how a schedule differs from that of the checkpoint; "" if it does not.

    Raises ValueError where epochs that had begun (the first ``begun``) have another batch size. A
    size that does not change may be replaced by another one.
    """
    epoch = saved.first_difference(now) if saved.changes or now.changes else None
    if epoch is None:
        return ""
    if epoch >= begun:
        return (
            f"from epoch {epoch + 1} on the global batch is {now.at(epoch)} and not "
            f"{saved.at(epoch)}, as in the run that saved the checkpoint: the schedule is {now}, "
            f"and was {saved}"
        )
    raise ValueError(
        f"world.shard: the checkpoint was trained with a global batch of {saved.at(epoch)} in "
        f"epoch {epoch + 1}, and this script has {now.at(epoch)} there: its schedule is {now}, and "
        f"was {saved}. HINT: global_batch={saved}; sizes from epoch {begun} of the "
        "schedule on may change"
    )


def _length(loader: Sharded) -> int | None:
    return len(loader) if isinstance(loader, ShardedLoader) else None


def _convert_position(position: int, batch: int | None, loader: Sharded) -> int:
    """Return the position in batches of the current size, for one in batches of the saved size."""
    current = loader.batch
    if batch is None or batch == current:
        return position
    if position * batch % current:
        raise ValueError(
            f"the checkpoint was saved after {counted(position * batch, 'sample')} of the epoch, "
            f"which is not a multiple of the global batch of {current}. "
            f"HINT: world.shard(loader, global_batch={batch}), as in the run that saved it"
        )
    return position * batch // current
