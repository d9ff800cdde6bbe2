"""``paceline run --tune-exchange`` in a rank: tune the exchange of the first DDP that makes steps.

Every rank measures its steps and takes the slowest rank's time, so that all of them decide alike.
Buckets and methods change between an optimizer's step and the next forward, when no gradient is
being exchanged.
"""

import atexit
import os
import time
from collections.abc import Generator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...knobs.ddp import before_forward
from ...knobs.tuning import Tuning
from ...plurals import counted
from ...record.ring.launcher_messages import notify
from ..members.exchange_objects import broadcast_object
from . import algorithms, saved_settings
from .buckets import BucketRebuilder, UnableError, unsupported_reason
from .choice import ExchangeSettings
from .costs import AllReduceCost, ReadyGradient, buckets, finish_time, likely_settings
from .successive_halving import WARM_UP_STEPS, Trial, TuningResult, halving, max_steps

WARM_UP = 3  # steps


def begin(wanted: Tuning) -> None:
    """Install the tuner, before the script runs."""
    found: list[Tuner | None] = []

    def look(replica: Any) -> None:
        if not found:
            found.append(_tuner(replica, wanted))
        if found[0] is not None:
            found[0].forward(replica)

    def at_end() -> None:
        if not found:
            horovod = "HOROVOD_RANK" in os.environ
            hint = ". HINT: paceline diagnose --try all measures Horovod's settings"
            _say(f"--tune-exchange: no DistributedDataParallel made a step{hint * horovod}")
        elif found[0] is not None and (left := found[0].left()):
            _say(f"--tune-exchange: {left}")

    before_forward(look)
    atexit.register(at_end)


def _tuner(replica: Any, wanted: Tuning) -> "Tuner | None":
    """Return the tuner of a replica; None, with a message, where it can't be tuned."""
    found = algorithms.ExchangeMethods(replica.process_group, replica.device_type)
    found.set(found.default)
    if why := unsupported_reason(replica):
        _say(f"the exchange is not tuned: {why}")
        return None
    return Tuner(replica, found, wanted)


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        notify(f"paceline: {text}\n")


class Tuner:
    """Tunes the exchange of one replica."""

    def __init__(self, replica: Any, methods: algorithms.ExchangeMethods, wanted: Tuning) -> None:
        self.replica, self._methods, self._wanted = replica, methods, wanted
        self._buckets = BucketRebuilder(replica)
        parameters = self._buckets.parameters
        self._parameter_ids, self._device = {id(one) for one in parameters}, parameters[0].device
        size = dist.get_world_size(methods.group)
        self._signature = saved_settings.signature(
            parameters, size, methods.hosts, methods.sockets, wanted.bf16
        )
        self._current_settings = self._default = ExchangeSettings(None, methods.default)
        self._next_settings: ExchangeSettings | None = None  # applied before the next forward
        self._steps, self._step_times, self._last_step_time = 0, list[float](), 0.0
        self._has_forward = False  # whether a forward has run since the last step
        self._done = False
        self._search: Generator[Trial, float, TuningResult] | None = None
        self._trial, self._warm_up_steps = Trial(self._default, WARM_UP), WARM_UP_STEPS
        self._hook: Any = None

    def forward(self, replica: Any) -> None:
        """Apply pending settings. Called before each forward with gradients enabled."""
        if replica is not self.replica:
            return
        self._has_forward = True
        if self._hook is None and not self._done:
            self._begin()
        if not self._done and self.replica._join_config.enable:
            self._stop("the script called model.join(), so ranks may end at different steps")
        if self._next_settings is not None:
            self._apply(self._next_settings)
            self._next_settings = None
        if self._done:  # release the model, if the script has another one
            self.replica = None
            del self._buckets, self._methods

    def left(self) -> str:
        """Return why a script that has ended was not tuned, or ""."""
        if self._done:
            return ""
        if not self._last_step_time:
            return "no optimizer of torch.optim made a step with the model's parameters"
        return (
            f"the script ended in step {self._steps}, before the tuning was complete; no settings "
            f"are stored. HINT: train at least {WARM_UP + WARM_UP_STEPS + max_steps(99)} steps"
        )

    # From here on all ranks do the same.

    def _begin(self) -> None:
        choice, said = self._load_settings()
        if choice is not None:
            self._done, self._next_settings = True, choice
            _say(f"the exchange uses the settings of {self._wanted.file}: {choice}")
            return
        if said:
            _say(f"{said}; the exchange is tuned again")
        self._search = self._search_steps()
        self._trial = next(self._search)
        self._hook = register_optimizer_step_post_hook(self._after_step)

    def _load_settings(self) -> tuple[ExchangeSettings | None, str]:
        """Return what the first rank reads from the settings file."""
        found: tuple[ExchangeSettings | None, str] = (None, "")
        if dist.get_rank(self.replica.process_group) == 0:
            try:
                found = saved_settings.load_settings(
                    Path(self._wanted.file), self._signature, self._default
                )
            except ValueError as mistake:
                found = None, str(mistake)
        return broadcast_object(
            found, tuple[ExchangeSettings | None, str], self.replica.process_group
        )

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Count a step of any optimizer; of several optimizers of the model, one counts."""
        if self._done or not self._has_forward:
            return
        each = (one for group in optimizer.param_groups for one in group["params"])
        if not any(id(one) in self._parameter_ids for one in each):
            return
        self._has_forward = False
        algorithms.synchronize(self._device)
        now = time.perf_counter()
        if self._last_step_time:
            self._steps += 1
            self._step_times.append(now - self._last_step_time)
        if len(self._step_times) == self._warm_up_steps + self._trial.steps:
            self._answer(median(self._step_times[self._warm_up_steps :]))
            now = time.perf_counter()  # without the time that the answer took
        self._last_step_time = now

    def _answer(self, seconds: float) -> None:
        assert self._search is not None
        slowest = algorithms.max_over_ranks(seconds, self.replica.process_group, self._device)
        self._step_times = []
        try:
            self._trial = self._search.send(slowest)
            self._next_settings = self._trial.choice
            self._warm_up_steps = (
                WARM_UP_STEPS if self._next_settings != self._current_settings else 0
            )
        except StopIteration as end:
            self._next_settings = end.value.choice
            self._end(end.value)

    def _search_steps(self) -> Generator[Trial, float, TuningResult]:
        """Measure the default; then the candidates of the cost model."""
        seconds = yield Trial(self._default, WARM_UP)
        ready, group = self._buckets.ready_gradients(), self.replica.process_group
        mean = algorithms.mean_over_ranks([one.at for one in ready], group, self._device)
        at = broadcast_object(mean, list[float], group)
        self._buckets.set_order(at)
        gradients = [ReadyGradient(when, one.nbytes) for when, one in zip(at, ready, strict=True)]
        measured = self._methods.measured(sum(one.nbytes for one in ready), self._device)
        costs = {way: AllReduceCost(told) for way, told in measured.items()}
        likely = likely_settings(gradients, costs, self._default, self._wanted.bf16)
        found = broadcast_object(likely, list[ExchangeSettings], group)
        full = buckets(gradients, self._buckets.bucket_caps())
        exposed = finish_time(full, costs[self._default.method]) - max(at)
        _say(
            f"tuning the exchange: a step takes {1e3 * seconds:.1f} ms, of which a model estimates "
            f"{1e3 * exposed:.1f} ms of exposed communication; Paceline tries "
            f"{counted(len(found), 'other setting')} in at most {max_steps(len(found))} steps"
        )
        return (yield from halving(self._default, found))

    def _apply(self, choice: ExchangeSettings) -> None:
        if (choice.mib, choice.bf16) != (self._current_settings.mib, self._current_settings.bf16):
            try:
                self._buckets.rebuild(choice.mib, choice.bf16)
            except UnableError as why:
                self._methods.set(self._default.method)
                self._stop(str(why))
                return
        self._methods.set(choice.method)
        self._current_settings = choice

    def _end(self, result: TuningResult) -> None:
        self._done = True  # the hook stays: PyTorch iterates over all hooks while it runs
        took, before = 1e3 * result.step_s, 1e3 * result.default_step_s
        if result.is_faster:
            words = f"{result.best}: {took:.1f} ms a step, {before:.1f} before"
        elif result.default_step_s:
            words = (
                f"the original settings remain ({before:.1f} ms a step); {result.best} took "
                f"{took:.1f}"
            )
        else:
            words = "no other setting is likely to be faster"
        if os.environ.get("RANK", "0") == "0":
            words += self._save(result)
        _say(f"the exchange is tuned after {counted(self._steps, 'step')}: {words}")

    def _save(self, result: TuningResult) -> str:
        file = self._wanted.file
        try:
            saved_settings.save_settings(Path(file), result, self._signature, self._wanted.script)
        except OSError as error:
            return f"; {file} can't be written: {error.strerror}"
        return f"; stored in {file}"

    def _stop(self, why: str) -> None:
        self._done = True
        if self._hook is not None:
            self._hook.remove()
        if self._current_settings != self._default:
            self._next_settings = self._default
        _say(f"the exchange is not tuned: {why}")
