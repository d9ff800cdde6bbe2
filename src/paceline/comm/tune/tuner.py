"""``paceline run --tune-exchange`` in a rank: tune the exchange of the first DDP that makes steps.

Every rank measures its steps and takes the slowest rank's time, so that all of them decide alike.
Buckets and methods change between an optimizer's step and the next forward, when no gradient is
being exchanged.
"""

import atexit
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...knobs.model import before_forward, torchs_hook
from ...knobs.tuning import Tuning
from ...plurals import counted
from ...record.ring.launcher_messages import notify
from ..members.exchange_objects import broadcast_object
from . import algorithms, saved_settings
from .choice import ExchangeSettings
from .successive_halving import (
    MAX_CANDIDATES,
    WARM_UP_STEPS,
    Trial,
    TrialSteps,
    TuningResult,
    halving,
    max_steps,
)

WARM_UP = 3  # steps
MIN_STEPS = WARM_UP + WARM_UP_STEPS + max_steps(99)  # of a training that is tuned
_others: list[Callable[[], str]] = []  # of exchanges beside DDP's: why they were not tuned


# A cost model of DDP's exchange: which buckets and methods are likely to be fast.
#
# Gradients are ready at measured times; DDP fills buckets in that order; each bucket is sent when
# it is full and the previous one has arrived. What ends after the backward is exposed. The model
# ignores that the exchange takes CPU time from the backward: therefore several candidates are
# tried.

MIB = 1 << 20
MIN_BUCKET_MIB = 0.25  # below it a bucket's fixed cost dominates
BUCKET_COUNTS = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # numbers of buckets to try
SIZE_FACTORS = (1.0, 0.8, 0.9, 1.1, 1.25)  # times an even division: the last bucket should be short
MIN_SIZE_RATIO = 1.3  # of two bucket sizes, for both to be tried
MAX_PER_METHOD = 3  # candidates of each method


@dataclass(frozen=True)
class ReadyGradient:
    """A gradient, or a bucket.

    Attributes:
        at: Seconds since the backward began when it is ready.
        nbytes: Size in bytes.
    """

    at: float
    nbytes: int


class AllReduceCost:
    """Seconds of an all-reduce by its bytes: linear between measurements, extrapolated from the
    last two.

    measured: seconds by bytes.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        assert measured
        self._sizes = sorted(measured)
        self._seconds = [measured[size] for size in self._sizes]
        for at in range(1, len(self._sizes)):  # more bytes never take less time
            self._seconds[at] = max(self._seconds[at], self._seconds[at - 1])

    def __call__(self, nbytes: float) -> float:
        sizes, seconds = self._sizes, self._seconds
        if len(sizes) == 1 or nbytes <= sizes[0]:
            return seconds[0]
        at = min(bisect_left(sizes, nbytes), len(sizes) - 1)
        slope = (seconds[at] - seconds[at - 1]) / (sizes[at] - sizes[at - 1])
        return seconds[at] + slope * (nbytes - sizes[at])


def buckets(gradients: Iterable[ReadyGradient], caps: Sequence[float]) -> list[ReadyGradient]:
    """Return the buckets as DDP fills them, in the order in which gradients are ready.

    Bucket i is full with ``caps[i]`` bytes or more; later ones use the last cap.
    """
    found: list[ReadyGradient] = []
    at, size = 0.0, 0
    for gradient in sorted(gradients, key=lambda key: key.at):
        at, size = gradient.at, size + gradient.nbytes
        if size >= caps[min(len(found), len(caps) - 1)]:
            found.append(ReadyGradient(at, size))
            size = 0
    return [*found, ReadyGradient(at, size)] if size else found


def finish_time(
    full: Iterable[ReadyGradient], seconds: Callable[[float], float], narrower: int = 1
) -> float:
    """Return the seconds from the start of the backward until the last bucket has arrived."""
    end = 0.0
    for bucket in full:
        end = max(end, bucket.at) + seconds(bucket.nbytes / narrower)
    return end


def likely_settings(
    gradients: Sequence[ReadyGradient],
    costs: Mapping[str, AllReduceCost],
    default: ExchangeSettings,
    bf16: bool = False,
) -> list[ExchangeSettings]:
    """Return at most MAX_CANDIDATES settings besides the default, in the order of the model's cost.

    They are the best bucket sizes of each method, without two sizes that are almost equal. bf16:
    whether it may be chosen.
    """
    total_bytes = sum(gradient.nbytes for gradient in gradients)
    by_cost: list[tuple[float, ExchangeSettings]] = []
    for method, seconds in costs.items():
        for narrow in (False, True) if bf16 else (False,):
            for mib in _sizes(gradients, total_bytes, seconds, 1 + narrow):
                full = buckets(gradients, [mib * MIB])
                by_cost.append(
                    (finish_time(full, seconds, 1 + narrow), ExchangeSettings(mib, method, narrow))
                )
    by_cost.sort(key=lambda key: key[0])
    max_per_method = MAX_PER_METHOD if len(costs) > 1 or bf16 else MAX_CANDIDATES
    chosen: list[ExchangeSettings] = []
    for _, choice in by_cost:
        like = [
            other for other in chosen if (other.method, other.bf16) == (choice.method, choice.bf16)
        ]
        if len(like) < max_per_method and not any(_is_similar(other, choice) for other in like):
            chosen.append(choice)
    return [other for other in chosen if other != default][:MAX_CANDIDATES]


def _is_similar(one: ExchangeSettings, other: ExchangeSettings) -> bool:
    return 1 / MIN_SIZE_RATIO < (one.mib or 0) / (other.mib or 1) < MIN_SIZE_RATIO


def _sizes(
    gradients: Sequence[ReadyGradient], total_bytes: int, seconds: AllReduceCost, narrower: int
) -> Iterable[float]:
    """Yield bucket sizes in MiB.

    For each number of buckets it is the size, near the even division, whose last bucket ends first.
    """
    for count in BUCKET_COUNTS:
        size = total_bytes / count / MIB
        if size < MIN_BUCKET_MIB and count > 1:
            return
        nearby = (
            [_round_up(size * factor) for factor in SIZE_FACTORS]
            if count > 1
            else [_round_up(1.01 * size)]
        )
        yield min(
            nearby, key=lambda mib: finish_time(buckets(gradients, [mib * MIB]), seconds, narrower)
        )


def _round_up(mib: float) -> float:
    """Round up to three figures: the value is shown to people and written to files."""
    unit = 1.0 if mib >= 100 else 0.1 if mib >= 10 else 0.01
    return max(round(math.ceil(mib / unit) * unit, 2), 0.1)


# Changes the buckets of a DDP that has begun, by replacing its reducer.
#
# DDP does the same for a copy of it that was pickled.

REQUIRED_METHODS = (
    "_ddp_init_helper",
    "_build_params_for_reducer",
    "_build_debug_param_to_name_mapping",
)


class UnableError(Exception):
    """This torch's DDP can't be given other buckets; it continues with those it had."""


def unsupported_reason(replica: Any) -> str:
    """Return why this replica's buckets can't be changed, or ""."""
    if torch.distributed.get_world_size(replica.process_group) == 1:
        return "the model has one rank"
    if replica._comm_hooks:
        return "the model has a communication hook, which may store data of each bucket"
    if getattr(replica, "_join_config", None) and replica._join_config.enable:
        return "ranks may end at different steps (model.join())"
    if getattr(replica, "mixed_precision", None) is not None:
        return "the model uses mixed_precision of DDP"
    if getattr(replica, "_use_python_reducer", False):
        return "the compiled backward contains the exchange"
    if getattr(replica, "_delay_all_reduce_params", None):
        return "a hook of the script exchanges gradients of the model"
    if getattr(replica, "bucket_bytes_cap_list", None):
        return "the script sets the size of each bucket (bucket_cap_mb_list)"
    if any(not hasattr(replica, name) for name in REQUIRED_METHODS):
        return f"DDP of torch {torch.__version__} has no replaceable reducer"
    return ""


class BucketRebuilder:
    """Rebuilds the buckets of one replica; its present ones are the original ones."""

    def __init__(self, replica: Any) -> None:
        self._replica = replica
        self.parameters, self._sparse = replica._build_params_for_reducer()
        # parameters in the order in which gradients are ready, once that is known
        self._order: list[int] | None = None
        names = ("bucket_bytes_cap", "bucket_bytes_cap_default", "_bucket_config")
        self._original = {name: getattr(replica, name) for name in names if hasattr(replica, name)}

    def ready_gradients(self) -> list[ReadyGradient]:
        """Return when each gradient was ready in the last backward."""
        times_ns = self._replica.reducer.get_backward_stats()  # ns, by parameter
        return [
            ReadyGradient(ns / 1e9, p.numel() * p.element_size())
            for p, ns in zip(self.parameters, times_ns, strict=True)
        ]

    def set_order(self, ready_s: list[float]) -> None:
        """Set the order in which gradients are put into buckets from now on.

        ready_s: when each gradient is ready, the same on all ranks. Gradients without a time come
        last.
        """
        self._order = sorted(range(len(ready_s)), key=lambda key: ready_s[key] or math.inf)

    def bucket_caps(self) -> list[float]:
        """Return the bytes of the replica's original buckets; the first may be smaller."""
        first = 1 << 20  # DDP's default first bucket
        cap = self._original["bucket_bytes_cap"]
        return [first, cap] if self._original.get("bucket_bytes_cap_default") else [cap]

    def rebuild(self, mib: float | None, bf16: bool = False) -> None:
        """Rebuild the buckets. Call it between an optimizer's step and the next forward.

        mib: bucket size; None for the original one. Raises UnableError where that fails.
        """
        replica = self._replica
        before = {name: getattr(replica, name) for name in (*self._original, "reducer", "logger")}
        try:
            self._make_reducer(mib)
        except Exception as error:  # DDP's internals are not a stable interface
            for name, value in before.items():
                setattr(replica, name, value)
            raise UnableError(f"torch {torch.__version__}: {error}") from error
        before["reducer"]._remove_autograd_hooks()
        replica._comm_hooks.clear()
        if bf16:
            replica.register_comm_hook(None, torchs_hook("bf16_compress_hook"))

    def _make_reducer(self, mib: float | None) -> None:
        replica = self._replica
        for name, value in self._original.items():
            setattr(replica, name, value)
        if mib is not None:
            replica.bucket_bytes_cap = int(mib * MIB)
            replica.bucket_bytes_cap_default = False
            if "_bucket_config" in self._original:
                replica._bucket_config = type(self._original["_bucket_config"])(
                    replica.bucket_bytes_cap, (), replica.bucket_bytes_cap
                )
        fixed = hasattr(replica, "settle")  # parallel.replicated.replica.FixedBuckets
        order = None if fixed or replica.find_unused_parameters else self._order
        places = range(len(self.parameters)) if order is None else order
        parameters = [self.parameters[place] for place in places]
        sparse = [self._sparse[place] for place in places]
        names = replica._build_debug_param_to_name_mapping(parameters)
        replica._ddp_init_helper(parameters, sparse, names, replica.static_graph)
        replica._has_rebuilt_buckets = False
        if replica.static_graph:
            replica._static_graph_delay_allreduce_enqueued = False
            replica.reducer._set_static_graph()
            replica.logger._set_static_graph()
        if fixed:
            replica.settle()
        elif order is not None:
            # At once, not after a step: DDP puts them into buckets in the order of ``parameters``.
            replica.reducer._push_all_rebuilt_params()
            replica.reducer._rebuild_buckets()


def add_other(left: Callable[[], str]) -> None:
    """Note that another exchange than DDP's is tuned.

    left: returns why a script that has ended was not tuned, or "".
    """
    _others.append(left)


def begin(wanted: Tuning) -> None:
    """Install the tuner, before the script runs."""
    found: list[Tuner | None] = []

    def look(replica: Any) -> None:
        if not found:
            found.append(_tuner(replica, wanted))
        if found[0] is not None:
            found[0].forward(replica)

    def at_end() -> None:
        if not found and _others:
            if left := _others[-1]():
                _say(f"--tune-exchange: {left}")
        elif not found:
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
        self._parameter_ids, self._device = (
            {id(parameter) for parameter in parameters},
            parameters[0].device,
        )
        size = dist.get_world_size(methods.group)
        self._signature = saved_settings.signature(
            parameters, size, methods.hosts, methods.sockets, wanted.bf16
        )
        self._current_settings = self._default = ExchangeSettings(None, methods.default)
        self._next_settings: ExchangeSettings | None = None  # applied before the next forward
        self._has_forward = False  # whether a forward has run since the last step
        self._done = False
        self._trials: TrialSteps[ExchangeSettings] | None = None
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
        if self._trials is None or not self._trials.has_begun:
            return "no optimizer of torch.optim made a step with the model's parameters"
        return ended_early(self._trials.steps)

    # From here on all ranks do the same.

    def _begin(self) -> None:
        choice, reason = self._load_settings()
        if choice is not None:
            self._done, self._next_settings = True, choice
            _say(f"the exchange uses the settings of {self._wanted.file}: {choice}")
            return
        if reason:
            _say(f"{reason}; the exchange is tuned again")
        self._trials = TrialSteps(self._search_steps(), self._slowest)
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
        each = (p for group in optimizer.param_groups for p in group["params"])
        if not any(id(p) in self._parameter_ids for p in each):
            return
        self._has_forward = False
        algorithms.synchronize(self._device)
        assert self._trials is not None
        choice = self._trials.after_step()
        if choice is not None:
            self._next_settings = choice
        if self._trials.result is not None:
            self._end(self._trials.result, self._trials.steps)

    def _slowest(self, seconds: float) -> float:
        return algorithms.max_over_ranks(seconds, self.replica.process_group, self._device)

    def _search_steps(
        self,
    ) -> Generator[Trial[ExchangeSettings], float, TuningResult[ExchangeSettings]]:
        """Measure the default; then the candidates of the cost model."""
        seconds = yield Trial(self._default, WARM_UP)
        ready, group = self._buckets.ready_gradients(), self.replica.process_group
        mean = algorithms.mean_over_ranks([g.at for g in ready], group, self._device)
        at = broadcast_object(mean, list[float], group)
        self._buckets.set_order(at)
        gradients = [ReadyGradient(when, g.nbytes) for when, g in zip(at, ready, strict=True)]
        measured = self._methods.measured(sum(g.nbytes for g in ready), self._device)
        costs = {way: AllReduceCost(seconds_of_size) for way, seconds_of_size in measured.items()}
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

    def _end(self, result: TuningResult[ExchangeSettings], steps: int) -> None:
        self._done = True  # the hook stays: PyTorch iterates over all hooks while it runs
        words = result.describe(steps)
        if os.environ.get("RANK", "0") == "0":
            words += saved_settings.store(self._wanted, result, self._signature)
        _say(words)

    def _stop(self, why: str) -> None:
        self._done = True
        if self._hook is not None:
            self._hook.remove()
        if self._current_settings != self._default:
            self._next_settings = self._default
        _say(f"the exchange is not tuned: {why}")


def ended_early(steps: int) -> str:
    """Return why a script that has ended after so many steps was not tuned."""
    return (
        f"the script ended in step {steps}, before the tuning was complete; no settings are "
        f"stored. HINT: train at least {MIN_STEPS} steps"
    )
