"""The two loops of a training script: over batches, and over epochs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..data.sampling.sample_order import BatchShare
from ..data.sampling.shard_loader import ShardedLoader, ShardedStream
from ..parallel.data import set_buffer_exchange
from ..record.hooks.batch_size import samples_in
from ..record.ring.recorder import Recorder, now
from ..record.ring.states import State
from .checkpointing import Saves
from .optimizer_step import Training
from .progress import Progress
from .training_state import Everything, Position

Sharded = ShardedLoader | ShardedStream
_PASS = 1_000_003  # further passes through a loader in one epoch get an order of their own


class Loops:
    """What the loops of one world share: the position, and where to resume it."""

    def __init__(
        self,
        training: Training,
        everything: Everything,
        recorder: Recorder,
        progress: Progress,
        warn: Callable[[str], None],
    ) -> None:
        self.training = training
        self.everything = everything
        self.recorder = recorder
        self.progress = progress
        self.warn = warn
        self.loaders: list[Sharded] = []
        self.saves: Saves | None = None
        self.count = 0  # of epochs, 0 outside of world.epochs
        self._resume: tuple[Position, Callable[[], Position]] | None = None

    @property
    def position(self) -> Position:
        return self.everything.position

    # over batches

    def batches(self, loader: Any) -> Iterator[Any]:
        if not isinstance(loader, (ShardedLoader, ShardedStream)):
            return self._plain(loader)
        number = next(i for i, known in enumerate(self.loaders) if known is loader)
        return (
            self._evaluate(loader, number)
            if loader.every_sample_once
            else self._train(loader, number)
        )

    def _train(self, loader: Sharded, number: int) -> Iterator[Any]:
        start = self._start(loader, number)
        if start is None:
            return
        position, training = self.position, self.training
        nominal = loader.split.batch if isinstance(loader, ShardedLoader) else loader.batch
        position.batch[number] = nominal
        try:
            for batch, share in self._timed(loader.iterate(self._order_key(number), start)):
                step = self.recorder.step
                total = loader.group_total(share, training.accumulate)
                training.begin(share, total, nominal)
                yield batch
                if training.weight != 1.0 and not training.backwards and self.recorder.step > step:
                    self.warn(
                        "a batch is uneven or accumulated, and its gradient was not weighted. "
                        "HINT: world.backward(loss) instead of loss.backward()"
                    )
                training.end()
                position.open[number] = share.position + 1
                self.progress.batch(share.position + 1, _length(loader), training)
                if self.saves is not None:
                    self.saves.after_batch()
        finally:  # also where the script breaks out of the loop
            training.end()
            position.open.pop(number, None)
            position.passes[number] = position.passes.get(number, 0) + 1

    def _evaluate(self, loader: Sharded, number: int) -> Iterator[Any]:
        start = self._start(loader, number)
        if start is None:
            return
        began = now()
        training = self.training
        try:
            with evaluation(training.models):
                for batch, share in self._timed(loader.iterate(0, start)):
                    training.share = share
                    yield batch
        finally:
            training.share = None
            self.recorder.event(State.VALIDATION, began, now())
            self.position.passes[number] = self.position.passes.get(number, 0) + 1

    def _plain(self, loader: Any) -> Iterator[Any]:
        training = self.training
        if training.size > 1:
            self.warn(
                f"world.batches got a {type(loader).__name__} that is not sharded: each of "
                f"{training.size} ranks goes through all of it. HINT: loader = world.shard(loader)"
            )
        numbered = ((batch, i) for i, batch in enumerate(loader))
        try:
            for batch, i in self._timed(numbered):
                count = samples_in(batch)
                if torch.is_grad_enabled():
                    total = count * training.size
                    training.begin(BatchShare(i, count, total), total * training.accumulate, total)
                yield batch
                training.end()
        finally:
            training.end()

    def _timed(self, source: Iterator[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
        """Record the wait for each batch; the batch on the rank's device."""
        while True:
            began = now()
            self.recorder.begin(State.INPUT, began)
            item = next(source, None)
            if item is not None and self.training.device.type != "cpu":
                item = (on_device(item[0], self.training.device), item[1])
            self.recorder.event(State.INPUT, began, now())
            if item is None:
                return
            yield item

    def _order_key(self, number: int) -> int:
        return self.position.epoch + _PASS * self.position.passes.get(number, 0)

    def _start(self, loader: Sharded, number: int) -> int | None:
        """The first batch of this pass; None where the resumed run has been through it."""
        if self._resume is None:
            return 0
        saved, lay = self._resume
        done = self.position.passes.get(number, 0)
        if done < saved.passes.get(number, 0):
            self.position.passes[number] = done + 1
            return None
        if number not in saved.open:
            return 0
        # The very point: whatever the script did before it in this epoch is laid over.
        self.everything.position = lay()
        self._resume = None
        return _same_place(saved.open[number], saved.batch.get(number), loader)

    # over epochs

    def epochs(self, count: int, saves: Saves | None) -> Iterator[int]:
        self.count = count
        self.saves = saves
        if saves is None:
            yield from self._epochs(0, count, None)
            return
        saves.early.listen()
        try:
            yield from self._epochs(self._go_on(saves), count, saves)
            saves.finish()
        finally:
            saves.early.stop()

    def _epochs(self, first: int, count: int, saves: Saves | None) -> Iterator[int]:
        outer = len(self.everything.meters)
        for epoch in range(first, count):
            self.position.new_epoch(epoch)
            self.training.replicas.new_epoch()
            del self.everything.meters[outer:]
            self.progress.epoch(epoch, count)
            yield epoch
            if self._resume is not None:
                self._resume = None
                self.warn(
                    f"epoch {epoch + 1} ended without reaching the loop that its checkpoint was "
                    "taken in, so it ran whole. HINT: did the script change?"
                )
            self.training.check_previous_loss()
            self.training.replicas.end_of_epoch()
            self.position.new_epoch(epoch + 1)
            del self.everything.meters[outer:]
            if saves is not None:
                saves.after_epoch(epoch, last=epoch == count - 1)

    def _go_on(self, saves: Saves) -> int:
        """Lay the newest checkpoint, if there is one; the epoch to go on in."""
        saves.prepare()
        folder = saves.find()
        if folder is None:
            return 0
        lay = saves.lay(folder)
        saved = lay()
        where = f"inside epoch {saved.epoch + 1}" if saved.inside else f"after epoch {saved.epoch}"
        self.progress.say(f"going on from {folder} ({where}, step {self.recorder.step})")
        if saved.inside:
            self._resume = (saved, lay)
        return saved.epoch


@contextmanager
def evaluation(models: list[nn.Module]) -> Iterator[None]:
    """No gradients, modules in eval mode, and rank 0's buffers on all ranks from the start, so
    that ranks may make different numbers of forwards."""
    modules = [module for model in models for module in model.modules()]
    modes = [module.training for module in modules]
    gradients = torch.is_grad_enabled()
    for model in models:
        set_buffer_exchange(model, False)
        model.eval()
    torch.set_grad_enabled(False)
    try:
        yield
    finally:
        torch.set_grad_enabled(gradients)
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
        for model in models:
            set_buffer_exchange(model, True)


def on_device(value: Any, device: torch.device) -> Any:
    """Tensors in (nested) dicts, lists and tuples, moved to the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {key: on_device(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_device(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(on_device(item, device) for item in value)
    return value


def _length(loader: Sharded) -> int | None:
    return len(loader) if isinstance(loader, ShardedLoader) else None


def _same_place(position: int, batch: int | None, loader: Sharded) -> int:
    """The position in batches of today's size, for one in batches of the saved size."""
    today = loader.split.batch if isinstance(loader, ShardedLoader) else loader.batch
    if batch is None or batch == today:
        return position
    if position * batch % today:
        raise ValueError(
            f"the checkpoint stands after {position} global batches of {batch} samples, which is "
            f"no whole number of batches of {today}. HINT: global_batch={batch} as before"
        )
    return position * batch // today
