"""``paceline diagnose --try``: measure remedies one after the other.

Runs with and without a remedy are interleaved. A remedy is kept only if its gain exceeds the noise.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ...analyze.diagnosis.ladder import Interval, measure_rung
from ...knobs.registry import KNOBS
from ...knobs.settings import exclude, settable
from ...knobs.value_types import Switch
from ...predict.gains import TRIED
from ...predict.remedies import Remedy, gain_after
from ...record.experiments.rung import EVERYTHING, Rung
from .plan import in_bursts
from .run_script import OUT_OF_TIME, FailedError, OutOfTimeError, Runner, RunRequest

ROUNDS = (3, 8)  # minimum and maximum number of rounds of a trial
GLIMPSE_SHARE = 0.5  # of the time of a pass of trials, at most, for micro-measurements
# Half of the interval of a gain at which its measurement ends: absolute, and relative to the gain.
TIGHT, TIGHT_OF_GAIN = 0.02, 0.07
MAX_LOSS_INCREASE = (
    0.01  # relative increase of the loss that is accepted for a knob that changes numbers
)
# Half of the interval of a prediction, as a share of the throughput. A prediction with a wider
# interval is refined by a micro-measurement.
MAX_HALF_WIDTH = 0.05
MICRO_ROUNDS = 3  # rounds of a micro-measurement
MAX_MICRO_STEPS = 15  # most steps of each of these rounds
# Possible common error of all rounds of a micro-measurement even if they agree: plus or minus this
# share of the throughput with the knob.
MICRO_UNCERTAINTY = 0.07
WORKERS = "loader-workers"
ALL = "all"


@dataclass(frozen=True)
class Trial:
    """Result of trying one remedy.

    Gains are shares of the throughput.

    Attributes:
        remedy: The remedy.
        predicted: Gain that was predicted before the trial, with all settings kept by then.
        gain: Measured gain; None if it could not be measured.
        kept: Whether the remedy helped and is kept.
        why: Reason why the remedy was not kept or not tried; may be empty.
        rounds: Number of measured rounds.
        loss: Training losses, for a knob that changes numbers.
        source: Source of ``predicted``.
        first: Original prediction, if a micro-measurement refined it.
        late: Whether there was no time left to try the remedy.
    """

    remedy: Remedy
    predicted: Interval | None
    gain: Interval | None
    kept: bool
    why: str = ""
    rounds: int = 0
    loss: "Losses | None" = None
    source: str = ""
    first: Interval | None = None
    late: bool = False

    @property
    def off(self) -> float | None:
        """Measured minus predicted gain, as a share of the throughput."""
        if self.gain is None or self.predicted is None:
            return None
        return self.gain.mean - self.predicted.mean


@dataclass(frozen=True)
class Losses:
    """Training losses without and with a knob.

    Attributes:
        without: Mean loss without the knob.
        with_it: Mean loss over the same steps with the knob.
        spread: Largest minus smallest mean loss of the runs without the knob.
    """

    without: float
    with_it: float
    spread: float

    @property
    def worse(self) -> bool:
        """Whether the loss increases by more than ``spread`` and ``MAX_LOSS_INCREASE``."""
        return self.with_it - self.without > max(self.spread, MAX_LOSS_INCREASE * abs(self.without))


@dataclass
class TrialResults:
    """Results of all trials.

    Attributes:
        trials: Trials in their order.
        kept: Values of the knobs that were kept.
        faster: Throughput with the kept knobs, relative to the throughput at the beginning.
    """

    trials: list[Trial] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    faster: float = 1.0


def select_remedies(names: list[str], remedies: list[Remedy]) -> list[Remedy]:
    """Return the remedies to try.

    ``names`` contains "all" for all proposed ones that can be set, names of knobs, or name=value.
    """
    proposed = {one.knob: one for one in remedies if one.settable}
    found: dict[str, Remedy] = dict(proposed) if ALL in names else {}
    for text in names:
        name, _, value = text.partition("=")
        if name != ALL:
            found[name] = _requested_remedy(name, value, proposed)
    return list(found.values())


def check_arguments(names: list[str]) -> None:
    """Check the arguments of ``--try`` before any run starts.

    Raises:
        ValueError: A knob does not exist or cannot be set, or a value is not valid for it.
    """
    for text in names:
        name, _, value = text.partition("=")
        if name not in KNOBS and name != ALL:
            hint = f"all, or one of {', '.join(settable())}"
            raise ValueError(f"--try NAME must be all or a knob; this is {name!r}. HINT: {hint}")
        if name != ALL and not KNOBS[name].hook:
            raise ValueError(
                f"--try {name}: this remedy needs an edit of the script. HINT: {KNOBS[name].edit}"
            )
        if value:
            _value(name, value)
    exclude({text.partition("=")[0]: True for text in names if text != ALL})


def _requested_remedy(name: str, value: str, proposed: dict[str, Remedy]) -> Remedy:
    if not value and name in proposed:
        return proposed[name]
    knob = KNOBS[name]
    chosen = _value(name, value) if value else None
    if isinstance(knob.value, Switch):
        chosen = True
    return Remedy(name, "", chosen, None, "", True, knob.edit.format(value=chosen))


def _value(name: str, text: str) -> Any:
    try:
        value: Any = True if text == "true" else float(text)
    except ValueError:
        value = text
    value = int(value) if isinstance(value, float) and value.is_integer() else value
    kind = KNOBS[name].value
    assert kind is not None
    if not kind.fits(value):
        raise ValueError(
            f"--try {name}=VALUE must be {kind}; this is {text!r}. HINT: --try {name} uses the "
            "predicted value"
        )
    return value


def try_remedies(
    asked: RunRequest,
    steps: int,
    remedies: list[Remedy],
    found: TrialResults,
    say: Callable[[str], None],
) -> None:
    """Try each remedy with all settings kept before, and add the trials to ``found``.

    The remedy with the largest predicted gain is tried first. Remedies whose gain only a
    micro-measurement can predict come last. At the deadline of ``asked`` the trial that runs ends
    with the rounds that it has, and none starts. Micro-measurements end earlier, so that time is
    left for the trials.
    """
    with Runner(asked, say) as runner:
        _Trials(runner, steps).all(remedies, found)


def combine_predictions(first: Interval, steps: Interval) -> Interval:
    """Combine a prediction of a gain with a micro-measurement of it.

    Returns the mean weighted by inverse variance, which is more accurate than either of them if
    their errors are independent. If the intervals do not overlap, the measurement is returned.
    """
    half, other = (
        max((one.high - one.low) / 2, least)
        for one, least in ((first, TIGHT), (steps, MICRO_UNCERTAINTY * (1 + max(steps.mean, 0.0))))
    )
    mean = (first.mean / half**2 + steps.mean / other**2) / (half**-2 + other**-2)
    wide = (half**-2 + other**-2) ** -0.5
    if abs(first.mean - steps.mean) > half + other:
        mean, wide = steps.mean, other
    return Interval(mean, mean - wide, mean + wide)


class _Trials:
    def __init__(self, runner: Runner, steps: int) -> None:
        self.runner, self.steps, self.deadline = runner, steps, runner.deadline
        self.glimpses_until = runner.deadline.part(GLIMPSE_SHARE)

    def all(self, remedies: list[Remedy], found: TrialResults) -> None:
        before = found.faster  # the predictions are relative to this throughput
        unknown = [one for one in remedies if one.gain is None]
        known = [one for one in remedies if one not in unknown]
        for remedy in sorted(known, key=_mean_gain, reverse=True):
            assert remedy.gain is not None
            self._try(remedy, gain_after(remedy.gain, found.faster / before), found)
        seen = []
        for one in unknown:
            try:
                seen.append(replace(one, gain=self._glimpse(one, found.kept)))
            except (ValueError, _NoEffectError) as error:
                found.trials.append(_not_measured(one, None, error))
        for remedy in sorted(seen, key=_mean_gain, reverse=True):
            self._try(remedy, remedy.gain, found)

    def _try(self, remedy: Remedy, foreseen: Interval | None, found: TrialResults) -> None:
        """Try one remedy, and add the trial to ``found``; first refine a rough prediction."""
        source, first = remedy.source, None
        if foreseen is not None and source != TRIED and _rough(foreseen):
            try:
                better = self._glimpse(remedy, found.kept)
            except (ValueError, _NoEffectError) as error:
                found.trials.append(_not_measured(remedy, foreseen, error))
                return
            if better is not None:
                first, source = foreseen, f"{source} and {TRIED}" if source else TRIED
                foreseen = combine_predictions(foreseen, better)
        trial = self._measured(remedy, foreseen, found.kept)
        found.trials.append(replace(trial, source=source, first=first))
        if trial.kept and trial.gain is not None:
            found.kept[remedy.knob] = remedy.value
            found.faster *= 1 + trial.gain.mean

    def _glimpse(self, remedy: Remedy, kept: dict[str, Any]) -> Interval | None:
        """Return the gain over a few steps; None if there is no time left or no value to set."""
        if remedy.value is None or not self.glimpses_until.left_s:
            return None
        steps = min(self.steps, MAX_MICRO_STEPS)
        pairs = [self._pair(remedy, kept, steps, at) for at in range(MICRO_ROUNDS)]
        gains = [gain for gain, _ in pairs]
        return Interval(statistics.median(gains), min(gains), max(gains))

    def _measured(self, remedy: Remedy, predicted: Interval | None, kept: dict[str, Any]) -> Trial:
        """Measure interleaved rounds until the gain is known precisely enough."""
        if predicted is not None and predicted.high < 0 and remedy.cause:
            return Trial(remedy, predicted, None, False, "not tried: it would make steps longer")
        if not self.deadline.left_s:
            return _late(remedy, predicted)
        if remedy.value is None:
            why = f"not tried: no cause suggests a value. HINT: --try {remedy.knob}=VALUE"
            return Trial(remedy, None, None, False, why)
        gains: list[float] = []
        losses: list[tuple[float, float]] = []
        try:
            while len(gains) < ROUNDS[1]:
                gain, loss = self._pair(remedy, kept, self.steps, len(gains))
                gains.append(gain)
                losses += [loss] if loss is not None else []
                known = Interval.of(gains)
                enough = max(TIGHT, TIGHT_OF_GAIN * abs(known.mean))
                if len(gains) >= ROUNDS[0] and known.high - known.low < 2 * enough:
                    break
        except OutOfTimeError:
            if not gains:
                return _late(remedy, predicted)
        except (ValueError, _NoEffectError) as error:
            return _not_measured(remedy, predicted, error)
        known = Interval.of(gains)
        lost = _losses(losses)
        why = "" if known.sure else "the gain is within the noise"
        why = "steps became longer" if known.high < 0 else why
        if not why and lost is not None and lost.worse:
            why = "steps became shorter, but the loss is worse"
        return Trial(remedy, predicted, known, not why, why, len(gains), lost)

    def _pair(
        self, remedy: Remedy, kept: dict[str, Any], steps: int, at: int
    ) -> tuple[float, tuple[float, float] | None]:
        """Return the gain of one round, and the losses without and with the remedy.

        The losses are None unless the knob changes numbers. Rounds alternate between starting with
        and without the remedy, so that a machine that warms up or cools down affects both equally.
        """
        rates, losses = {}, {}
        if remedy.knob == WORKERS:  # whole bursts of these, and of 2, as scripts often have
            steps = in_bursts(steps, math.lcm(2, int(remedy.value)))
        changed = {**kept, remedy.knob: remedy.value}
        exclude(changed)
        warm = replace(self.runner.asked, settings=changed).warming
        for on in (False, True) if at % 2 == 0 else (True, False):
            named = f"{'with' if on else 'without'} {remedy.knob}, {steps} steps"
            numbers = KNOBS[remedy.knob].numbers
            rung = Rung(warm, steps, (EVERYTHING,), losses=numbers)
            run = self.runner.run(False, rung, settings=changed if on else kept, named=named)
            if on:
                self._took_effect(remedy, [record.meta for record in run.records])
            rates[on] = measure_rung(run, warm, steps, EVERYTHING).together
            each = [record.meta.get("rung", {}).get("loss") for record in run.records]
            if numbers and None not in each:
                losses[on] = sum(each) / len(each)
        both = (losses[False], losses[True]) if len(losses) == 2 else None
        return rates[True] / rates[False] - 1, both

    def _took_effect(self, remedy: Remedy, told: list[dict[str, Any]]) -> None:
        each = [one.get("knobs", {}).get(remedy.knob, {}) for one in told]
        if not any(one.get("set") for one in each):
            why = next((one["why_not"] for one in each if one.get("why_not")), "")
            raise _NoEffectError(why or "the script never calls what the knob changes")


def _mean_gain(remedy: Remedy) -> float:
    return remedy.gain.mean if remedy.gain is not None else 0.0


def _rough(gain: Interval) -> bool:
    return gain.high - gain.low > 2 * MAX_HALF_WIDTH


def _late(remedy: Remedy, predicted: Interval | None) -> Trial:
    why = f"not tried: {OUT_OF_TIME}. HINT: increase --minutes, or --try {remedy.knob}"
    return Trial(remedy, predicted, None, False, why, late=True)


def _not_measured(
    remedy: Remedy, predicted: Interval | None, error: "ValueError | _NoEffectError"
) -> Trial:
    if isinstance(error, FailedError):
        why = f"dropped, because the script fails with it: {error.short}"
    elif isinstance(error, _NoEffectError):
        why = f"no effect: {error}"
    else:
        why = f"not measured: {error}"
    return Trial(remedy, predicted, None, False, why)


def _losses(pairs: list[tuple[float, float]]) -> Losses | None:
    if not pairs:
        return None
    without, with_it = zip(*pairs, strict=True)
    count = len(pairs)
    return Losses(sum(without) / count, sum(with_it) / count, max(without) - min(without))


class _NoEffectError(Exception):
    """A knob had no effect in the script."""
