"""Shorten epochs of Lightning: its loops compare numbers of batches with the loader's length.

A shortened pass ends before that length. The loop is told so with the last batch, so that it
validates and ends the epoch as after a whole one.
"""

from typing import Any

from ...hooks.taps import Function, Tap
from ..observation import Observation
from .loaders import Loaders

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class LightningEpochs:
    """The epochs of Lightning's Trainer.

    Args:
        observation: Knows whether the training is observed.
        loaders: Know whether a pass was shortened.
    """

    def __init__(self, observation: Observation, loaders: Loaders) -> None:
        self._observation, self._loaders = observation, loaders

    def install(self) -> None:
        """Subscribe to Lightning's loops."""
        for package in _PACKAGES:
            Tap(f"{package}.loops.fetchers", "_DataFetcher.__next__").after(self._note_batch)
            loop = f"{package}.loops.training_epoch_loop"
            Tap(loop, "_TrainingEpochLoop._should_check_val_fx").around(self._validates)

    @property
    def _is_end(self) -> bool:
        return self._observation.is_observed and self._loaders.has_ended_early

    def _note_batch(self, _: Any, fetcher: Any) -> None:
        if self._is_end:
            fetcher.done = True

    def _validates(self, check: Function, loop: Any, fetcher: Any) -> bool:
        """Return whether the loop validates after this batch."""
        trainer, is_end = loop.trainer, self._is_end
        interval = trainer.val_check_batch
        if not (is_end and fetcher.done) or interval in (None, float("inf")):
            return bool(check(loop, fetcher))
        is_epoch = trainer.check_val_every_n_epoch is not None
        trainer.val_check_batch = (loop.batch_idx if is_epoch else loop.total_batch_idx) + 1
        try:
            return bool(check(loop, fetcher))
        finally:
            trainer.val_check_batch = interval
