"""Train on one rank what several ranks have trained: the same global batches, step by step."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.data import dataloader as torch_dataloader

from ..facts import PassFacts, Phase, RankFacts, StepFacts
from ..facts_file import read_facts
from ..observation import Observation
from ..optimization.models import Model
from ..optimization.steps import Steps
from ..samples.loaders import Loaders, OpenPass
from .joined_batches import join_batches, permute_batch
from .stored_run import load_batches, restore_initial

_HOOK = "the replay"


class Replay:
    """The replay of a stored run in this process.

    The first training forward begins with the stored parameters. Loaders return the stored
    batches. Each step uses the learning rates of the stored run.

    Args:
        observation: Its settings have the folder of the stored run.
        steps: Know the optimizers.
        loaders: Note the batches.
        end: Ends the run; it does not return.
    """

    def __init__(
        self,
        observation: Observation,
        steps: Steps,
        loaders: Loaders,
        end: Callable[[], None],
    ) -> None:
        self._observation, self._steps, self._end = observation, steps, end
        self.loaders = loaders
        self._folder = Path(observation.settings.replays)
        self._stored: RankFacts = read_facts(self._folder, 0)
        self._rates: dict[tuple[int, int], StepFacts] = {
            (one.optimizer, one.index): one for one in self._stored.steps
        }
        self._own: list[Any] = []

    def install(self) -> None:
        """Set the learning rates of each step, and restore those of the script afterwards."""
        self._steps.before_step.append(self._set_rates)
        self._steps.after_step.append(self._restore_rates)

    def set_initial(self, model: Model) -> None:
        """Set a model's parameters before its first training forward."""
        reason = restore_initial(self._folder, model)
        if reason:
            self._stop(f"the replay: {reason}")

    def _stop(self, reason: str) -> None:
        self._observation.add_unseen(reason)
        self._end()

    def _set_rates(self, optimizer: Optimizer) -> None:
        facts = self._steps.optimizers[optimizer]
        stored = self._rates.get((facts.key, self._steps.count_of(optimizer)))
        if stored is None:
            self._end()
            return
        self._own = [group.get("lr") for group in optimizer.param_groups]
        if len(stored.learning_rates) == len(self._own):
            for group, rate in zip(optimizer.param_groups, stored.learning_rates, strict=True):
                _set_rate(group, rate)

    def _restore_rates(self, optimizer: Optimizer, step: StepFacts) -> None:
        own, self._own = self._own, []
        for group, rate in zip(optimizer.param_groups, own, strict=False):
            _set_rate(group, float(rate))

    # Batches

    def iterator(self, loader: Any, opened: OpenPass) -> Any:
        """Return the iterator that replaces that of a loader in a pass.

        None if the pass evaluates: it has the script's own batches.
        """
        key, pass_number = opened.loader.key, opened.facts.number
        stored = next((one for one in self._stored.loaders if one.key == key), None)
        passes = stored.passes if stored is not None else []
        if pass_number >= len(passes):
            self._end()
        if passes[pass_number].phase != Phase.TRAINING:
            return None
        return _StoredBatches(self, loader, opened, passes[pass_number])

    def batch(self, key: int, one: PassFacts, number: int) -> Any:
        """Return the joined batch of a pass; None after the last one."""
        place = (key, one.number, number)
        batches = load_batches(self._folder, place, self._stored.size)
        if not batches:
            is_last = (self._stored.ended == "script") or self._went_on(key, one)
            if number < one.batches or not is_last:
                self._end()  # not stored, or where the stored run ended
            return None
        try:
            batch = join_batches(batches)
            samples = self._observation.settings.permutes
            return permute_batch(batch, number) if samples else batch
        except ValueError as error:
            self._stop(f"the replay: batches of several ranks can't be joined: {error}")

    def _went_on(self, key: int, one: PassFacts) -> bool:
        """Return whether the stored run went on after this pass."""
        stored = next(x for x in self._stored.loaders if x.key == key)
        return one.is_complete or one.planned is not None or one.number + 1 < len(stored.passes)


class _StoredBatches(torch_dataloader._BaseDataLoaderIter):
    """An iterator over stored batches."""

    def __init__(self, replay: Replay, loader: Any, opened: OpenPass, one: PassFacts) -> None:
        self._replay, self._opened, self._pass = replay, opened, one
        self._dataset, self._num_yielded, self._length = loader.dataset, 0, len_of(loader)

    def __next__(self) -> Any:
        return self._replay.loaders.fetch(self, _StoredBatches._read)

    def _read(self) -> Any:
        batch = self._replay.batch(self._opened.loader.key, self._pass, self._num_yielded)
        if batch is None:
            raise StopIteration
        self._num_yielded += 1
        return batch

    def __len__(self) -> int:
        return self._length

    def __del__(self) -> None:
        """Nothing to end: there are no workers."""


def len_of(loader: Any) -> int:
    """Return the length of a loader; 0 if it has none."""
    try:
        return len(loader)
    except TypeError:
        return 0


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group.get("lr"), torch.Tensor):
        group["lr"].fill_(rate)
    elif "lr" in group:
        group["lr"] = rate
