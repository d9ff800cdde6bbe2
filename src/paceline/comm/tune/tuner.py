"""``paceline run --tune-exchange``, in a rank: the first DDP that makes steps is tuned over them.

Every rank measures its steps and takes the slowest rank's figure, so that all of them decide the
same. Buckets and ways change between an optimizer's step and the next forward, when no gradient is
under way."""

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
from ...record.ring.launcher_messages import notify
from . import algorithms, saved_settings
from .buckets import Buckets, UnableError, why_not
from .choice import Choice
from .costs import Ready, Seconds, buckets, ends, likely
from .successive_halving import SETTLES, Ask, Verdict, halving, steps_of

WARM_UP = 3  # steps


def begin(wanted: Tuning) -> None:
    """Before the script runs."""
    found: list[Tuner | None] = []

    def look(replica: Any) -> None:
        if not found:
            found.append(_tuner(replica, wanted))
        if found[0] is not None:
            found[0].forward(replica)

    def at_end() -> None:
        if not found:
            _say("--tune-exchange: no DistributedDataParallel made a step")
        elif found[0] is not None and (left := found[0].left()):
            _say(f"--tune-exchange: {left}")

    before_forward(look)
    atexit.register(at_end)


def _tuner(replica: Any, wanted: Tuning) -> "Tuner | None":
    """The replica's; None where it can't have one, which is said."""
    found = algorithms.Ways(replica.process_group)
    found.set(found.default)
    if why := why_not(replica):
        _say(f"the exchange is not tuned: {why}")
        return None
    return Tuner(replica, found, wanted)


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        notify(f"paceline: {text}\n")


class Tuner:
    """Of one replica, whose group has these ways."""

    def __init__(self, replica: Any, over: algorithms.Ways, wanted: Tuning) -> None:
        self.replica, self._ways, self._wanted = replica, over, wanted
        self._buckets = Buckets(replica)
        parameters = self._buckets.parameters
        self._own, self._device = {id(one) for one in parameters}, parameters[0].device
        size = dist.get_world_size(over.group)
        self._mine = saved_settings.signature(
            parameters, size, over.hosts, over.sockets, wanted.bf16
        )
        self._now = self._default = Choice(None, over.default)
        self._next: Choice | None = None  # from the next forward on
        self._steps, self._seconds, self._last = 0, list[float](), 0.0
        self._moved = False  # a forward since the last step
        self._done = False
        self._search: Generator[Ask, float, Verdict] | None = None
        self._ask, self._settles = Ask(self._default, WARM_UP), SETTLES
        self._hook: Any = None

    def forward(self, replica: Any) -> None:
        """Before each forward of any replica that has gradients."""
        if replica is not self.replica:
            return
        self._moved = True
        if self._hook is None and not self._done:
            self._begin()
        if not self._done and self.replica._join_config.enable:
            self._stop("the script has begun model.join(): ranks may end at different steps")
        if self._next is not None:
            self._set(self._next)
            self._next = None
        if self._done:  # the model may go, if the script has another one
            self.replica = None
            del self._buckets, self._ways

    def left(self) -> str:
        """Why a script that has ended is not tuned, or ""."""
        if self._done:
            return ""
        if not self._last:
            return "no optimizer of torch.optim made a step with the model's parameters"
        return (
            f"the script has ended before it was done, in step {self._steps}; nothing is kept. "
            f"HINT: it takes {WARM_UP + SETTLES + steps_of(99)} steps"
        )

    # From here on alike on all ranks.

    def _begin(self) -> None:
        choice, said = self._known()
        if choice is not None:
            self._done, self._next = True, choice
            _say(f"the exchange is set as {self._wanted.file} says: {choice}")
            return
        if said:
            _say(f"{said}: tuned anew")
        self._search = self._searched()
        self._ask = next(self._search)
        self._hook = register_optimizer_step_post_hook(self._stepped)

    def _known(self) -> tuple[Choice | None, str]:
        """What the first rank reads."""
        found: tuple[Choice | None, str] = (None, "")
        if dist.get_rank(self.replica.process_group) == 0:
            try:
                found = saved_settings.known(Path(self._wanted.file), self._mine, self._default)
            except ValueError as mistake:
                found = None, str(mistake)
        choice, said = self._of_first(found)
        return choice, said

    def _of_first(self, mine: Any) -> Any:
        """What the first rank has found, for all of them."""
        told, group = [mine], self.replica.process_group
        first = dist.get_global_rank(group, 0)
        dist.broadcast_object_list(told, src=first, group=group, device=self._device)
        return told[0]

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """After a step of any optimizer: of the model's, one of several counts."""
        if self._done or not self._moved:
            return
        each = (one for group in optimizer.param_groups for one in group["params"])
        if not any(id(one) in self._own for one in each):
            return
        self._moved = False
        algorithms.settled(self._device)
        now = time.perf_counter()
        if self._last:
            self._steps += 1
            self._seconds.append(now - self._last)
        if len(self._seconds) == self._settles + self._ask.steps:
            self._answer(median(self._seconds[self._settles :]))
            now = time.perf_counter()  # without what the answer took
        self._last = now

    def _answer(self, seconds: float) -> None:
        assert self._search is not None
        told = algorithms.slowest(seconds, self.replica.process_group, self._device)
        self._seconds = []
        try:
            self._ask = self._search.send(told)
            self._next = self._ask.choice
            self._settles = SETTLES if self._next != self._now else 0
        except StopIteration as end:
            self._next = end.value.choice
            self._end(end.value)

    def _searched(self) -> Generator[Ask, float, Verdict]:
        """The default; then what the model says of others, and these."""
        seconds = yield Ask(self._default, WARM_UP)
        ready, group = self._buckets.ready(), self.replica.process_group
        at = self._of_first(algorithms.mean([one.at for one in ready], group, self._device))
        self._buckets.order(at)
        gradients = [Ready(when, one.nbytes) for when, one in zip(at, ready, strict=True)]
        measured = self._ways.measured(sum(one.nbytes for one in ready), self._device)
        costs = {way: Seconds(told) for way, told in measured.items()}
        found = self._of_first(likely(gradients, costs, self._default, self._wanted.bf16))
        full = buckets(gradients, self._buckets.caps())
        exposed = ends(full, costs[self._default.way]) - max(at)
        _say(
            f"the exchange is tuned: {1e3 * seconds:.1f} ms a step, {1e3 * exposed:.1f} of them "
            f"exchange that nothing hides, by a model; in at most "
            f"{steps_of(len(found))} steps {len(found)} other settings are tried"
        )
        return (yield from halving(self._default, found))

    def _set(self, choice: Choice) -> None:
        if (choice.mib, choice.bf16) != (self._now.mib, self._now.bf16):
            try:
                self._buckets.set(choice.mib, choice.bf16)
            except UnableError as why:
                self._ways.set(self._default.way)
                self._stop(str(why))
                return
        self._ways.set(choice.way)
        self._now = choice

    def _end(self, verdict: Verdict) -> None:
        self._done = True
        self._hook.remove()
        took, before = 1e3 * verdict.seconds, 1e3 * verdict.before
        if verdict.kept:
            words = f"{verdict.best}: {took:.1f} ms a step, {before:.1f} before"
        elif verdict.before:
            words = f"it stays as it was ({before:.1f} ms a step): {verdict.best} took {took:.1f}"
        else:
            words = "nothing else is likely to be faster"
        if os.environ.get("RANK", "0") == "0":
            words += self._keep(verdict)
        _say(f"the exchange is tuned, in {self._steps} steps: {words}")

    def _keep(self, verdict: Verdict) -> str:
        file = self._wanted.file
        try:
            saved_settings.keep(Path(file), verdict, self._mine, self._wanted.script)
        except OSError as error:
            return f"; {file} can't be written: {error.strerror}"
        return f"; kept in {file}"

    def _stop(self, why: str) -> None:
        self._done = True
        if self._hook is not None:
            self._hook.remove()
        if self._now != self._default:
            self._next = self._default
        _say(f"the exchange is not tuned: {why}")
