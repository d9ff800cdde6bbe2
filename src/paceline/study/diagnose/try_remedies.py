"""``paceline diagnose --try``: measure remedies one after the other.

Runs with and without a remedy are interleaved. A remedy is kept only if its gain exceeds the noise,
given the number of looks and of remedies (significance.py). At the end all kept remedies are
measured once more, together: trials that were kept measured too much on average, because those that
measured too little were not kept.
"""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ...analyze.diagnosis.diagnosis import Losses, Remedy, Trial, TrialResults
from ...analyze.diagnosis.ladder_results import why_not_set
from ...analyze.diagnosis.rungs import Interval, measure_rung
from ...knobs.knob import Switch
from ...knobs.registry import KNOBS
from ...knobs.settings import exclude, settable
from ...predict.gains import TRIED
from ...predict.remedies import gain_after
from ...record.experiments.rung import EVERYTHING, Rung
from ...significance import SharedLevel, gain_of_pairs, tail_of_look
from ..trials import in_turn
from .plan import in_bursts
from .run_script import OUT_OF_TIME, FailedError, OutOfTimeError, Runner, RunRequest

# Measure the gain of settings by pairs of runs, one with and one without them.
#
# Pairs alternate between starting with and without the settings, so that a machine that warms up
# or cools down affects both equally. What is averaged and tested is the logarithm of the ratio of
# both throughputs: without an effect its mean is zero, whatever the noise of the two runs.

LOOKS = (3, 5, 8)  # numbers of pairs after which it is decided whether to measure more
MIN_GAIN = 0.02  # a trial ends when a larger gain can be excluded
FUTILE_TAIL = 0.05  # probability of excluding it wrongly
# Half of the interval of a gain at which its measurement ends: absolute, and relative to the gain.
TIGHT, TIGHT_OF_GAIN = 0.02, 0.07
WORKERS = "loader-workers"


class NoEffectError(ValueError):
    """A knob had no effect in the script."""


@dataclass(frozen=True)
class Pair:
    """One run with and one without settings.

    Attributes:
        log_ratio: Logarithm of the throughput with the settings over that without them.
        losses: Training losses without and with them; None unless they change numbers.
    """

    log_ratio: float
    losses: tuple[float, float] | None = None


@dataclass
class Pairs:
    """Pairs of runs of the same settings, and what they say of the gain.

    Attributes:
        level: Probability that an end of an interval is wrong at any of the looks.
    """

    level: float
    pairs: list[Pair] = field(default_factory=list)

    @property
    def gain(self) -> Interval:
        """Gain of the throughput. All intervals of the looks are right together.

        At the end of the time there may be fewer pairs than at a look: they spend its level.
        """
        logs = [pair.log_ratio for pair in self.pairs]
        look = next(count for count in LOOKS if count >= len(logs))
        return Interval(*gain_of_pairs(logs, tail_of_look(look, LOOKS, self.level)))

    @property
    def futile(self) -> bool:
        """Whether the gain is at most ``MIN_GAIN``."""
        logs = [pair.log_ratio for pair in self.pairs]
        return gain_of_pairs(logs, FUTILE_TAIL)[2] < MIN_GAIN

    @property
    def losses(self) -> Losses | None:
        """Mean training losses of all pairs."""
        known = [pair.losses for pair in self.pairs if pair.losses is not None]
        if not known:
            return None
        without, with_it = zip(*known, strict=True)
        spread = max(without) - min(without)
        return Losses(statistics.fmean(without), statistics.fmean(with_it), spread)


def measure_pairs(
    pair: Callable[[int], Pair], level: float, until: Callable[[Pairs], bool]
) -> Pairs:
    """Measure pairs until ``until`` is true of them after one of ``LOOKS``, or the last look.

    Args:
        pair: Measures the pair of this number, from 0 on.
        level: Probability that an end of the interval is wrong at any of the looks.
        until: Returns whether the pairs are enough.

    Returns:
        Fewer pairs if the time is over before, at least those of the first look.

    Raises:
        OutOfTimeError: The time is over before the first look: nothing can be decided then.
    """
    found = Pairs(level)
    for count in LOOKS:
        while len(found.pairs) < count:
            try:
                found.pairs.append(pair(len(found.pairs)))
            except OutOfTimeError:
                if len(found.pairs) < LOOKS[0]:
                    raise
                return found
        if until(found):
            break
    return found


def is_decided(found: Pairs) -> bool:
    """Whether the settings help, make steps longer, or gain too little to go on."""
    return found.gain.low > 0 or found.gain.high < 0 or found.futile


def is_precise(found: Pairs) -> bool:
    """Whether the gain is known precisely enough to report it."""
    gain = found.gain
    return gain.high - gain.low < 2 * max(TIGHT, TIGHT_OF_GAIN * abs(gain.mean))


def run_pair(
    runner: Runner, base: dict[str, Any], added: dict[str, Any], steps: int, at: int, name: str
) -> Pair:
    """Run the script once with ``base`` and once with ``base`` and ``added``.

    Args:
        runner: Runs the script.
        base: Settings of both runs.
        added: Settings whose gain is measured.
        steps: Measured steps of each run.
        at: Number of the pair, which says which run is first.
        name: What the settings are called in messages.

    Raises:
        NoEffectError: A setting was not set on any rank.
        ValueError: One of the runs failed, or the settings exclude each other.
    """
    if WORKERS in added:  # whole bursts of these, and of 2, as scripts often have
        steps = in_bursts(steps, math.lcm(2, int(added[WORKERS])))
    settings = {**base, **added}
    exclude(settings)
    warm = replace(runner.asked, settings=settings).warming
    numbers = any(KNOBS[knob].numbers for knob in added)
    rates, losses = {}, {}
    for on in in_turn((False, True), at):
        description = f"{'with' if on else 'without'} {name}, {steps} steps"
        rung = Rung(warm, steps, (EVERYTHING,), losses=numbers)
        run = runner.run(False, rung, settings=settings if on else base, named=description)
        for knob in added if on else ():
            if why := why_not_set(run, knob):
                raise NoEffectError(why)
        rates[on] = measure_rung(run, warm, steps, EVERYTHING).together
        each = [record.meta.get("rung", {}).get("loss") for record in run.records]
        if numbers and None not in each:
            losses[on] = sum(each) / len(each)
    both = (losses[False], losses[True]) if len(losses) == 2 else None
    return Pair(math.log(rates[True] / rates[False]), both)


# Part of what the passes before left that each pass spends, and shares among its remedies. There is
# a second pass only if the first one has kept a remedy.
SPENT_IN_PASS = 0.75
# Probability that an end of the interval of the gain of all kept remedies together is wrong.
CONFIRM_LEVEL = 0.05
MICRO_SHARE = 0.5  # of the time of a pass of trials, at most, for micro-measurements
# Half of the interval of a prediction, as a share of the throughput. A prediction with a wider
# interval is refined by a micro-measurement.
MAX_HALF_WIDTH = 0.05
MICRO_ROUNDS = 3  # rounds of a micro-measurement
MAX_MICRO_STEPS = 15  # most steps of each of these rounds
# Possible common error of all rounds of a micro-measurement even if they agree: plus or minus this
# share of the throughput with the knob.
MICRO_UNCERTAINTY = 0.07
ALL = "all"


def select_remedies(names: list[str], remedies: list[Remedy]) -> list[Remedy]:
    """Return the remedies to try.

    ``names`` contains "all" for all proposed ones that can be set, names of knobs, or name=value.
    """
    proposed = {remedy.knob: remedy for remedy in remedies if remedy.settable}
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
    kind = KNOBS[name].value
    assert kind is not None
    if kind.fits(text):
        return text
    try:
        value: Any = True if text == "true" else float(text)
    except ValueError:
        value = text
    value = int(value) if isinstance(value, float) and value.is_integer() else value
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
    run_s: float = 0.0,
) -> None:
    """Try each remedy with all settings kept before, and add the trials to ``found``.

    The remedy with the largest predicted gain is tried first. Remedies whose gain only a
    micro-measurement can predict come last. At the deadline of ``asked`` the trial that runs ends
    with the rounds that it has, and none starts. Micro-measurements end earlier, so that time is
    left for the trials; ``run_s`` is the expected duration of a run.
    """
    spent = SPENT_IN_PASS * found.level_left
    found.level_left -= spent
    shared = SharedLevel.among(len(remedies), spent)
    with Runner(asked, say) as runner:
        _Trials(runner, steps, shared, 2 * run_s).run(remedies, found)


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


def confirm_kept(
    asked: RunRequest, steps: int, found: TrialResults, say: Callable[[str], None]
) -> str:
    """Measure all kept remedies together against none of them, and store the gain in ``found``.

    Nothing is kept if the gain is not more than noise. Returns a remark for the user, or "".
    """
    base = dict(asked.settings)
    added = {name: value for name, value in found.kept.items() if base.get(name) != value}
    if not added:
        return ""
    with Runner(asked, say) as runner:

        def pair(at: int) -> Pair:
            return run_pair(runner, base, added, steps, at, "all kept remedies")

        try:
            gain = measure_pairs(pair, CONFIRM_LEVEL, is_precise).gain
        except ValueError as error:
            return f"the gain of all kept remedies together could not be measured: {error}"
    found.confirmed, found.faster = gain, 1 + gain.mean
    if gain.low > 0:
        return ""
    found.kept, found.faster = base, 1.0
    found.trials = [
        replace(trial, kept=False, why="not confirmed by the measurement of all kept remedies")
        if trial.kept
        else trial
        for trial in found.trials
    ]
    return (
        "nothing is kept: measured again together, the remedies that helped in their trials gain "
        f"{100 * gain.mean:+.0f} % ({100 * gain.low:.0f} to {100 * gain.high:.0f}), within the "
        "noise"
    )


class _Trials:
    """Trials of one pass. pair_s: Expected duration of a pair of runs; that of the last one."""

    def __init__(self, runner: Runner, steps: int, shared: SharedLevel, pair_s: float) -> None:
        self.pair_s = pair_s
        self.runner, self.steps, self.deadline = runner, steps, runner.deadline
        self.micro_deadline = runner.deadline.part(MICRO_SHARE)
        self.shared = shared

    def run(self, remedies: list[Remedy], found: TrialResults) -> None:
        before = found.faster  # the predictions are relative to this throughput
        unknown = [remedy for remedy in remedies if remedy.gain is None]
        known = [remedy for remedy in remedies if remedy not in unknown]
        for remedy in sorted(known, key=_mean_gain, reverse=True):
            assert remedy.gain is not None
            self._try(remedy, gain_after(remedy.gain, found.faster / before), found)
        seen = []
        for remedy in unknown:
            try:
                seen.append(replace(remedy, gain=self._measure_shortly(remedy, found.kept)))
            except ValueError as error:
                found.trials.append(_not_measured(remedy, None, error))
        for remedy in sorted(seen, key=_mean_gain, reverse=True):
            self._try(remedy, remedy.gain, found)

    def _try(self, remedy: Remedy, foreseen: Interval | None, found: TrialResults) -> None:
        """Try one remedy, and add the trial to ``found``; first refine a rough prediction."""
        source, first = remedy.source, None
        if foreseen is not None and source != TRIED and _rough(foreseen):
            try:
                better = self._measure_shortly(remedy, found.kept)
            except ValueError as error:
                found.trials.append(_not_measured(remedy, foreseen, error))
                return
            if better is not None:
                first, source = foreseen, f"{source} and {TRIED}" if source else TRIED
                foreseen = combine_predictions(foreseen, better)
        trial = self._measured(remedy, foreseen, found.kept)
        found.trials.append(replace(trial, source=source, first=first))
        self.shared.decided(trial.gain is None or trial.gain.low > 0)
        if trial.kept and trial.gain is not None:
            found.kept[remedy.knob] = remedy.value
            found.faster *= 1 + trial.gain.mean

    def _measure_shortly(self, remedy: Remedy, kept: dict[str, Any]) -> Interval | None:
        """Return the gain over a few steps; None without the time for it or a value to set."""
        if remedy.value is None or not self.micro_deadline.left_s:
            return None
        if (MICRO_ROUNDS + LOOKS[0]) * self.pair_s > self.deadline.left_s:
            return None  # the trial itself needs the time
        steps = min(self.steps, MAX_MICRO_STEPS)
        pairs = [self._pair(remedy, kept, steps, at) for at in range(MICRO_ROUNDS)]
        gains = [math.expm1(pair.log_ratio) for pair in pairs]
        return Interval(statistics.median(gains), min(gains), max(gains))

    def _measured(self, remedy: Remedy, predicted: Interval | None, kept: dict[str, Any]) -> Trial:
        """Measure interleaved rounds until it is decided whether the remedy helps."""
        if predicted is not None and predicted.high < 0 and remedy.cause:
            return Trial(remedy, predicted, None, False, "not tried: it would make steps longer")
        if not self.deadline.left_s:
            return _late(remedy, predicted)
        if remedy.value is None:
            why = f"not tried: no cause suggests a value. HINT: --try {remedy.knob}=VALUE"
            return Trial(remedy, None, None, False, why)
        try:
            pairs = measure_pairs(
                lambda at: self._pair(remedy, kept, self.steps, at), self.shared.level, is_decided
            )
        except ValueError as error:
            return _not_measured(remedy, predicted, error)
        gain, lost = pairs.gain, pairs.losses
        why = "" if gain.low > 0 else "the gain is within the noise"
        why = "steps became longer" if gain.high < 0 else why
        if not why and lost is not None and lost.worse:
            why = "steps became shorter, but the loss is worse"
        return Trial(remedy, predicted, gain, not why, why, len(pairs.pairs), lost)

    def _pair(self, remedy: Remedy, kept: dict[str, Any], steps: int, at: int) -> Pair:
        start = time.monotonic()
        added = {remedy.knob: remedy.value}
        pair = run_pair(self.runner, kept, added, steps, at, remedy.knob)
        self.pair_s = time.monotonic() - start
        return pair


def _mean_gain(remedy: Remedy) -> float:
    return remedy.gain.mean if remedy.gain is not None else 0.0


def _rough(gain: Interval) -> bool:
    return gain.high - gain.low > 2 * MAX_HALF_WIDTH


def _late(remedy: Remedy, predicted: Interval | None) -> Trial:
    why = f"not measured: {OUT_OF_TIME}. HINT: increase --minutes, or --try {remedy.knob}"
    return Trial(remedy, predicted, None, False, why, late=True)


def _not_measured(remedy: Remedy, predicted: Interval | None, error: ValueError) -> Trial:
    if isinstance(error, OutOfTimeError):
        return _late(remedy, predicted)
    if isinstance(error, FailedError):
        why = f"dropped, because the script fails with it: {error.short}"
    elif isinstance(error, NoEffectError):
        why = f"no effect: {error}"
    else:
        why = f"not measured: {error}"
    return Trial(remedy, predicted, None, False, why)
