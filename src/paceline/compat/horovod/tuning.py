"""Tuning of the fusion threshold and the cycle time while a script trains.

``paceline run --tune-exchange FILE`` and HOROVOD_AUTOTUNE request it. As in Horovod, rank 0
measures its own steps, which end together with those of the other ranks, and the ranks take new
settings from it in one of their meetings. So all of them fuse the same operations, also if some
have joined.
"""

import os
import weakref
from collections.abc import Callable, Generator
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

# Candidates besides the default: other thresholds, other cycle times, and one of both.
MIBS, CYCLES_MS = (32.0, 2.0), (0.25, 5.0, 20.0)
LOG_COLUMNS = ("cycle_time_ms", "tensor_fusion_threshold_mib", "step_ms")
Change = Callable[[FusionSettings], None]


def settings_to_tune(settings: HorovodSettings) -> FusionSettings:
    return FusionSettings(settings.fusion_bytes / 2**20, 1e3 * settings.cycle_s)


def is_requested(settings: HorovodSettings) -> bool:
    return settings.autotune or tuning.VARIABLE in os.environ


class FusionTuner:
    """Tunes the exchange of the global process set. On rank 0 only.

    Args:
        settings: Horovod's settings of this job.
        conditions: Under which the result is valid.
        change: Lets all ranks use other settings.
    """

    def __init__(
        self, settings: HorovodSettings, conditions: dict[str, Any], change: Change
    ) -> None:
        text = os.environ.get(tuning.VARIABLE)
        self._wanted = tuning.Tuning.loads(text) if text else None
        self._default, self._conditions = settings_to_tune(settings), conditions
        self.ranks = conditions["ranks"]
        if self._wanted is not None:
            self._conditions = conditions | {"script": self._wanted.script}
        self._change: Change | None = change
        self._log = TuningLog(settings.autotune_log)
        self._trials = TrialSteps(self._search())
        self._optimizer: weakref.ref[Optimizer] | None = None
        self._present, self._is_done = self._default, False
        if self._load():
            return
        if self._wanted is not None and self._wanted.bf16:
            _say(
                "--tune-compression has no effect on Horovod's operations. HINT: "
                "DistributedOptimizer(compression=hvd.Compression.fp16)"
            )
        register_optimizer_step_post_hook(self._after_step)
        name = "--tune-exchange" if self._wanted is not None else "HOROVOD_AUTOTUNE"
        _say(f"tuning the exchange of Horovod's operations ({name}), by steps of the optimizer")

    def move(self, change: Change | None) -> None:
        """Use another world, after hvd.shutdown() and hvd.init(); None between the two."""
        self._change = change
        if change is not None and self._present != self._default:
            change(self._present)

    def stop(self) -> None:
        """End the search: the world has other ranks than its first trials."""
        if not self._is_done:
            self._is_done = True
            self._use(self._default)
            _say(
                "the number of ranks has changed: the exchange is not tuned, and nothing is stored"
            )

    def left(self) -> str:
        """Return why a script that has ended was not tuned, or ""."""
        if self._is_done:
            return ""
        if not self._trials.has_begun:
            return "no optimizer of torch.optim made a step"
        return tuner.ended_early(self._trials.steps)

    # Implementation.

    def _load(self) -> bool:
        """Use the settings of the file, if there is one of the same conditions."""
        if self._wanted is None:
            return False
        try:
            found, why = saved_settings.load_settings(
                Path(self._wanted.file), self._conditions, self._default
            )
        except (ValueError, KeyError) as mistake:
            found, why = None, str(mistake)
        if found is not None:
            self._is_done = True
            self._use(found)
            _say(f"the exchange uses the settings of {self._wanted.file}: {found}")
            return True
        if why:
            _say(f"{why}; the exchange is tuned again")
        return False

    def _use(self, settings: FusionSettings) -> None:
        if self._change is not None:
            self._change(settings)
        self._present = settings

    def _search(
        self,
    ) -> Generator[Trial[FusionSettings], float, TuningResult[FusionSettings]]:
        yield Trial(self._default, tuner.WARM_UP)
        return (yield from halving(self._default, candidates(self._default, os.environ)))

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Count a step; of several optimizers, those of the first one count."""
        if self._is_done or self._change is None:
            return
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)
        if self._optimizer() is not optimizer:
            return
        before = self._present
        choice = self._trials.after_step()
        if choice is None:
            return
        self._log.write(before, self._trials.last_s)
        if choice != before:
            self._use(choice)
        result = self._trials.result
        if result is not None:
            self._is_done = True  # the hook stays: PyTorch iterates over all hooks while it runs
            words = result.describe(self._trials.steps)
            if self._wanted is not None:
                words += saved_settings.store(self._wanted, result, self._conditions)
            self._log.write(result.choice, result.step_s if result.is_faster else 0.0)
            _say(words)


def candidates(default: FusionSettings, given: Any) -> list[FusionSettings]:
    """Return the settings to try. A setting whose variable is set in ``given`` is not changed."""
    mibs = () if "HOROVOD_FUSION_THRESHOLD" in given else MIBS
    cycles = () if "HOROVOD_CYCLE_TIME" in given else CYCLES_MS
    found = [FusionSettings(default.mib, one) for one in cycles]
    found += [FusionSettings(one, default.cycle_ms) for one in mibs]
    found += [FusionSettings(mibs[-1], cycles[0])] if mibs and cycles else []
    return [one for one in dict.fromkeys(found) if one != default]


class TuningLog:
    """The file of HOROVOD_AUTOTUNE_LOG: a line for each trial, and the result last."""

    def __init__(self, name: str) -> None:
        self._lines: list[tuple[Any, ...]] = [LOG_COLUMNS]
        self._path = Path(name) if name else None

    def write(self, settings: FusionSettings, step_s: float) -> None:
        """Add a line. A file that can't be written ends the log, and not the training."""
        if self._path is None:
            return
        self._lines.append((settings.cycle_ms, settings.mib, f"{1e3 * step_s:.3f}"))
        rows = "".join(",".join(map(str, line)) + "\n" for line in self._lines)
        try:
            write_output(output_target(self._path), rows.encode())
        except OSError as error:
            _say(f"HOROVOD_AUTOTUNE_LOG={self._path} can't be written: {error.strerror or error}")
            self._path = None


def _say(text: str) -> None:
    notify(f"paceline: {text}\n")


_tuner: FusionTuner | None = None  # of this process, from the first hvd.init()


def begin(settings: HorovodSettings, conditions: dict[str, Any], change: Change) -> None:
    """Tune the world that hvd.init() has made. Called on rank 0."""
    global _tuner
    if _tuner is not None:
        _tuner.move(change)
        if conditions["ranks"] != _tuner.ranks:
            _tuner.stop()
        return
    why = ""
    if conditions["ranks"] == 1:
        why = "the script has one rank"
    elif not candidates(settings_to_tune(settings), os.environ):
        why = (
            "HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME are both set. HINT: unset one of them"
        )
    if why:
        _say(f"the exchange is not tuned: {why}")
        tuner.add_other(str)
        return
    _tuner = FusionTuner(settings, conditions, change)
    tuner.add_other(_tuner.left)


def end() -> None:
    """Note that there is no world any more."""
    if _tuner is not None:
        _tuner.move(None)
