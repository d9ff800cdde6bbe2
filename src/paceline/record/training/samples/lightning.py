"""Shorten epochs of Lightning: its loops compare numbers of batches with the loader's length.

A shortened pass ends before that length. The loop is told so with the last batch, so that it
validates and ends the epoch as after a whole one.
"""

import functools
from typing import Any

from ...hooks.import_hooks import after_import
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
        """Patch Lightning when the script imports it."""
        after_import(
            {
                f"{package}.loops.{name}": patch
                for package in _PACKAGES
                for name, patch in (
                    ("fetchers", self._patch_fetchers),
                    ("training_epoch_loop", self._patch_epochs),
                )
            }
        )

    def _patch_fetchers(self, module: Any) -> None:
        kind = module._DataFetcher
        fetch = kind.__next__

        @functools.wraps(fetch)
        def next_batch(fetcher: Any) -> Any:
            batch = fetch(fetcher)
            if self._observation.is_observed and self._loaders.has_ended_early:
                fetcher.done = True
            return batch

        kind.__next__ = next_batch

    def _patch_epochs(self, module: Any) -> None:
        kind = module._TrainingEpochLoop
        check = kind._should_check_val_fx

        @functools.wraps(check)
        def should_validate(loop: Any, fetcher: Any) -> bool:
            trainer = loop.trainer
            is_end = self._observation.is_observed and self._loaders.has_ended_early
            interval = trainer.val_check_batch
            if not (is_end and fetcher.done) or interval in (None, float("inf")):
                return bool(check(loop, fetcher))
            is_epoch = trainer.check_val_every_n_epoch is not None
            trainer.val_check_batch = (loop.batch_idx if is_epoch else loop.total_batch_idx) + 1
            try:
                return bool(check(loop, fetcher))
            finally:
                trainer.val_check_batch = interval

        kind._should_check_val_fx = should_validate
