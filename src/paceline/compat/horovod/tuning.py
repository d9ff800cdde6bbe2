"""Tune Horovod's fusion threshold and cycle time while a script trains.

``paceline run --tune-exchange FILE`` and HOROVOD_AUTOTUNE request it. As in Horovod, only rank 0
measures its steps: those of the other ranks end at the same time. The other ranks receive new
settings from rank 0 when they next negotiate operations. All ranks thus change the settings at the
same point and fuse the same operations, also if some ranks have called hvd.join().
"""

import os
import weakref
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...comm.tune import saved_settings, tuner
from ...comm.tune.choice import FusionSettings
from ...comm.tune.successive_halving import Trial, TrialSteps, TuningResult, halving
from ...knobs import tuning
from ...record.ring.launcher_messages import notify
from ...security.outputs import output_target, write_output
from .environment import HorovodSettings

# Candidates besides the default: each threshold, each cycle time, and one pair of both.
THRESHOLDS_MIB, CYCLES_MS = (32.0, 2.0), (0.25, 5.0, 20.0)
LOG_COLUMNS = ("cycle_time_ms", "tensor_fusion_threshold_mib", "step_ms")
Change = Callable[[FusionSettings], None]


def settings_to_tune(settings: HorovodSettings) -> FusionSettings:
    """Return the tuned part of Horovod's settings, in the units of the tuner (MiB and ms)."""
    return FusionSettings(settings.fusion_bytes / 2**20, 1e3 * settings.cycle_s)


def is_requested(settings: HorovodSettings) -> bool:
    """Return whether HOROVOD_AUTOTUNE or --tune-exchange requests tuning."""
    return settings.autotune or tuning.VARIABLE in os.environ


class FusionTuner:
    """Tunes the fusion of the global process set. Exists on rank 0 only.

    Args:
        settings: Horovod's settings of this job.
        conditions: Conditions under which the result is valid, such as the number of ranks.
        change: Function that makes all ranks use other settings.

    Attributes:
        ranks: Number of ranks at the start of the tuning.
    """

    def __init__(
        self, settings: HorovodSettings, conditions: dict[str, Any], change: Change
    ) -> None:
        text = os.environ.get(tuning.VARIABLE)
        self._options = tuning.Tuning.loads(text) if text else None
        self._default, self._conditions = settings_to_tune(settings), conditions
        self.ranks = conditions["ranks"]
        if self._options is not None:
            self._conditions = conditions | {"script": self._options.script}
        self._change: Change | None = change
        self._log = TuningLog(settings.autotune_log)
        self._trials = TrialSteps(self._search())
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._current, self._is_done = self._default, False
        if self._load():
            return
        if self._options is not None and self._options.bf16:
            _print(
                "--tune-compression has no effect on Horovod's operations. HINT: "
                "DistributedOptimizer(compression=hvd.Compression.fp16)"
            )
        register_optimizer_step_post_hook(self._after_step)
        name = "--tune-exchange" if self._options is not None else "HOROVOD_AUTOTUNE"
        _print(f"tuning the exchange of Horovod's operations ({name}), by steps of the optimizer")

    def use_world(self, change: Change | None) -> None:
        """Change the settings of another world from now on, after hvd.shutdown() and hvd.init().

        Args:
            change: As for ``FusionTuner``, of the new world; None after hvd.shutdown().
        """
        self._change = change
        if change is not None and self._current != self._default:
            change(self._current)

    def stop(self) -> None:
        """End the search and restore the default, because the number of ranks has changed."""
        if not self._is_done:
            self._is_done = True
            self._use(self._default)
            _print(
                "the number of ranks has changed: the exchange is not tuned, and nothing is stored"
            )

    def reason_not_tuned(self) -> str:
        """Return why the script, which has ended, was not tuned; "" if it was."""
        if self._is_done:
            return ""
        if not self._trials.has_begun:
            return "no optimizer of torch.optim made a step"
        return tuner.ended_early(self._trials.steps)

    def _load(self) -> bool:
        """Use the settings of the file of --tune-exchange if it was made under the same conditions.

        Returns:
            Whether the settings are used, so that no search is needed.
        """
        if self._options is None:
            return False
        try:
            found, why = saved_settings.load_settings(
                Path(self._options.file), self._conditions, self._default
            )
        except (ValueError, KeyError) as error:
            found, why = None, str(error)
        if found is not None:
            self._is_done = True
            self._use(found)
            _print(f"the exchange uses the settings of {self._options.file}: {found}")
            return True
        if why:
            _print(f"{why}; the exchange is tuned again")
        return False

    def _use(self, settings: FusionSettings) -> None:
        if self._change is not None:
            self._change(settings)
        self._current = settings

    def _search(
        self,
    ) -> Generator[Trial[FusionSettings], float, TuningResult[FusionSettings]]:
        yield Trial(self._default, tuner.WARM_UP)  # the first steps of a script are slower
        return (yield from halving(self._default, candidates(self._default, os.environ)))

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Count a step of the first optimizer that makes one; ignore those of others."""
        if self._is_done or self._change is None:
            return
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        measured = self._current
        next_settings = self._trials.after_step()
        if next_settings is None:  # the trial has not ended
            return
        self._log.write(measured, self._trials.last_s)
        if next_settings != measured:
            self._use(next_settings)
        result = self._trials.result
        if result is not None:
            self._is_done = True  # the hook stays: PyTorch iterates over all hooks while it runs
            message = result.describe(self._trials.steps)
            if self._options is not None:
                message += saved_settings.store(self._options, result, self._conditions)
            self._log.write(result.choice, result.step_s if result.is_faster else 0.0)
            _print(message)


def candidates(default: FusionSettings, environment: Mapping[str, str]) -> list[FusionSettings]:
    """Return the settings to try, without the default.

    The value of a setting whose environment variable the user has set is not changed.
    """
    thresholds = () if "HOROVOD_FUSION_THRESHOLD" in environment else THRESHOLDS_MIB
    cycles = () if "HOROVOD_CYCLE_TIME" in environment else CYCLES_MS
    found = [FusionSettings(default.mib, cycle_ms) for cycle_ms in cycles]
    found += [FusionSettings(mib, default.cycle_ms) for mib in thresholds]
    found += [FusionSettings(thresholds[-1], cycles[0])] if thresholds and cycles else []
    return [settings for settings in dict.fromkeys(found) if settings != default]


class TuningLog:
    """Writes the file of HOROVOD_AUTOTUNE_LOG: a line for each trial, then the result."""

    def __init__(self, name: str) -> None:
        self._lines: list[tuple[Any, ...]] = [LOG_COLUMNS]
        self._path = Path(name) if name else None

    def write(self, settings: FusionSettings, step_s: float) -> None:
        """Add a line. If the file can't be written, print the reason and write no more lines."""
        if self._path is None:
            return
        self._lines.append((settings.cycle_ms, settings.mib, f"{1e3 * step_s:.3f}"))
        text = "".join(",".join(map(str, line)) + "\n" for line in self._lines)
        try:
            write_output(output_target(self._path), text.encode())
        except OSError as error:
            _print(f"HOROVOD_AUTOTUNE_LOG={self._path} can't be written: {error.strerror or error}")
            self._path = None


def _print(text: str) -> None:
    notify(f"paceline: {text}\n")


_tuner: FusionTuner | None = None  # of this process, from the first hvd.init() that starts tuning


def begin(settings: HorovodSettings, conditions: dict[str, Any], change: Change) -> None:
    """Start or continue the tuning in the world that hvd.init() has made. Called on rank 0."""
    global _tuner
    if _tuner is not None:
        _tuner.use_world(change)
        if conditions["ranks"] != _tuner.ranks:
            _tuner.stop()
        return
    reason = ""
    if conditions["ranks"] == 1:
        reason = "the script has one rank"
    elif not candidates(settings_to_tune(settings), os.environ):
        reason = (
            "HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME are both set. HINT: unset one of them"
        )
    if reason:
        _print(f"the exchange is not tuned: {reason}")
        tuner.add_other(lambda: "")  # the reason is not printed again when the script ends
        return
    _tuner = FusionTuner(settings, conditions, change)
    tuner.add_other(_tuner.reason_not_tuned)


def end() -> None:
    """Suspend the tuning until the next hvd.init(). Called by hvd.shutdown()."""
    if _tuner is not None:
        _tuner.use_world(None)
