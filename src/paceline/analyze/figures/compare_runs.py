"""Compare runs before and after figure by figure, and one script on different numbers of ranks.

Equal runs differ by more than the parts of one run do: with two runs or more of each kind the noise
is measured between them, with one of each it is assumed (``BETWEEN_RUNS``).
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ...plurals import counted
from ...significance import MIN_BLOCKS, Difference, difference_of_runs, error_of_mean
from ..records.state_timeline import STATES
from .report import Report

FIGURES = (
    *("samples_per_s", "step_ms", "useful", "parallel", "load_balance", "communication"),
    *("checkpoint", "validation", "input", "starved", "other", "bubble"),
)
_SAME_SAMPLES = 0.01  # of a step's samples, up to which steps of two runs are alike
_MIN_EXPLAINED = 0.8  # of a difference, by the states that are named
# Assumed standard deviation between equal runs, as a share of the step time, where there are too
# few runs to measure it. Runs on virtual machines of two cores differ by 2 to 5 %.
BETWEEN_RUNS = 0.025
Reports = Sequence[Report]


@dataclass(frozen=True)
class FigureChange:
    """One figure before and after, mean of the runs.

    Attributes:
        noise: Standard error of the difference; None where there are too few ranges of steps.
        real: Whether the difference is more than noise.
        limit: Difference that equal runs exceed in 5 % of cases.
    """

    figure: str
    before: float
    after: float
    noise: float | None
    real: bool | None
    limit: float | None = None


def compare(before: Reports, after: Reports) -> list[FigureChange]:
    """Compare the figures of two groups of equal runs.

    Figures that one of the runs lacks are left out.
    """
    result = []
    for figure in FIGURES:
        found = _difference(figure, before, after)
        if found is not None:
            ends = (found.before, found.after)
            result.append(FigureChange(figure, *ends, found.noise, found.real, found.limit()))
    return result


def _difference(figure: str, before: Reports, after: Reports) -> Difference | None:
    """Return the difference of a figure between two groups of runs; None if a run lacks it."""
    both = (before, after)
    groups = [[_figure_value(figure, report) for report in reports] for reports in both]
    known = [[value for value in values if value is not None] for values in groups]
    if known != groups:
        return None
    errors = [[_standard_error(figure, report) for report in reports] for reports in both]
    between = [_between_runs(figure, statistics.fmean(values)) for values in known]
    return difference_of_runs(known, errors, between)


def _between_runs(figure: str, value: float) -> float:
    """Return the assumed standard deviation of a figure between equal runs.

    The variances of the parts of a step add up to that of the step: a part that takes the share p
    of it varies by sqrt(p) times as much. An efficiency varies as the part that it leaves out.
    """
    if figure in ("samples_per_s", "step_ms"):
        return BETWEEN_RUNS * value
    return BETWEEN_RUNS * math.sqrt(min(max(1 - value, 0.0), 1.0))


def chance_limit(changes: list[FigureChange]) -> float | None:
    """Return the difference of the step times that may be chance, as a share of them."""
    step = next((change for change in changes if change.figure == "step_ms"), None)
    if step is None or step.limit is None or not step.before:
        return None
    return step.limit / step.before


@dataclass(frozen=True)
class StateChange:
    """Time of one state before and after, mean of all ranks and runs (s).

    Attributes:
        noise_s: Standard error of the difference; None where there are too few ranges of steps.
        real: Whether the difference is more than noise.
        limit_s: Difference that equal runs exceed in 5 % of cases.
    """

    state: str
    before_s: float
    after_s: float
    noise_s: float | None
    real: bool | None
    limit_s: float | None = None

    @property
    def longer_s(self) -> float:
        return self.after_s - self.before_s


@dataclass(frozen=True)
class StateChanges:
    """Time of every state per step, or per sample of a rank where steps have other sizes.

    Attributes:
        unit: "step" or "sample".
        rows: One per state that a run has.
        whole: All states together.
        explained_by: States whose changes make up most of that of ``whole``, the largest first.
            Empty where that is within the noise, or no state's change is more than noise.
    """

    unit: str
    rows: list[StateChange]
    whole: StateChange
    explained_by: list[str]


def compare_states(before: Reports, after: Reports) -> StateChanges | None:
    """Compare the time of each state; None where a run has no measured window."""
    if not all(report.ranges and report.window_s for report in (*before, *after)):
        return None
    samples = [_samples_per_step(report) for report in (*before, *after)]
    same = max(samples) - min(samples) <= _SAME_SAMPLES * max(samples)
    unit = "step" if same or not all(samples) else "sample"
    groups = (before, after)
    rows = [_state_change(state, groups, unit) for state in STATES]
    whole = _state_change("whole", groups, unit)
    rows = [row for row in rows if row.before_s or row.after_s]
    return StateChanges(unit, rows, whole, _explaining_states(rows, whole))


def _steps(report: Report) -> int:
    return report.ranges[-1].last - report.ranges[0].first + 1


def _samples_per_step(report: Report) -> float:
    return report.samples / _steps(report)


def _state_change(state: str, groups: tuple[Reports, Reports], unit: str) -> StateChange:
    means, errors, between = [], [], []
    for reports in groups:
        each = [_state_time(state, report, unit) for report in reports]
        means.append([mean for mean, _, _ in each])
        errors.append([error for _, error, _ in each])
        between.append(statistics.fmean(spread for _, _, spread in each))
    found = difference_of_runs(means, errors, between)
    return StateChange(state, found.before, found.after, found.noise, found.real, found.limit())


def _state_time(state: str, report: Report, unit: str) -> tuple[float, float | None, float]:
    """Return a state's time in a run, its standard error, and its spread between equal runs (s)."""
    # A rank's steps, or samples, in each step of the job.
    units = 1.0 if unit == "step" else _samples_per_step(report) / report.size
    times = [
        part.seconds * part.states.get(state, 1.0) / units / (part.last - part.first + 1)
        for part in report.ranges
    ]
    assert report.window_s is not None
    share = statistics.fmean(rank.get(state, 1.0) for rank in report.states)
    whole = report.window_s / units / _steps(report)
    return share * whole, error_of_mean(times), BETWEEN_RUNS * whole * math.sqrt(max(share, 0.0))


def _explaining_states(rows: list[StateChange], whole: StateChange) -> list[str]:
    """Return the states with the largest changes, that make up most of the whole change."""
    if whole.real is False or not whole.longer_s:
        return []
    found, missing = list[str](), _MIN_EXPLAINED * abs(whole.longer_s)
    direction = 1 if whole.longer_s > 0 else -1
    for row in sorted(rows, key=lambda row: -direction * row.longer_s):
        if missing <= 0 or direction * row.longer_s <= 0 or row.real is False:
            break
        found.append(row.state)
        missing -= direction * row.longer_s
    return found


def _figure_value(figure: str, report: Report) -> float | None:
    if figure == "samples_per_s":
        return report.samples_per_s
    if report.efficiencies is None or report.window_s is None:
        return None
    if figure == "step_ms":
        return 1e3 * report.window_s / _steps(report)
    value = getattr(report.efficiencies, figure)
    return None if value is None else float(value)


def _standard_error(figure: str, report: Report) -> float | None:
    """Return a figure's standard error within its run, from its spread over ranges of steps."""
    values = []
    for part in report.ranges:
        steps = part.last - part.first + 1
        if figure == "step_ms":
            values.append(1e3 * part.seconds / steps)
        elif figure == "samples_per_s":
            assert report.window_s is not None
            values.append(_samples_per_step(report) * steps / part.seconds)
        else:
            values.append(float(getattr(part.efficiencies, figure)))
    return error_of_mean(values)


@dataclass(frozen=True)
class Gate:
    """Whether runs are slower than a baseline by more than a tolerance.

    All shares are of the baseline's step time.

    Attributes:
        tolerance: Accepted slowdown.
        slower: Measured slowdown; negative if the runs are faster.
        noise: Part of it that chance exceeds in 5 % of cases.
        verdict: "slower": by more than the tolerance and the noise; "uncertain": by more than the
            tolerance, which may be noise; else "passed".
    """

    tolerance: float
    slower: float
    noise: float
    verdict: str


GATE_TAIL = 0.05  # probability that runs fail which are slower by just the tolerance


def check_gate(before: Reports, after: Reports, tolerance: float) -> Gate:
    """Check whether the steps of ``after`` are longer than those of ``before``.

    Raises:
        ValueError: The runs cannot be compared; the message has the reason.
    """
    for report in (*before, *after):
        if not report.window_s or not report.ranges:
            raise ValueError(
                f"--gate: {report.name} has no measured steps. HINT: record at least 3 steps"
            )
    first = before[0]
    for report in (*before, *after):
        samples = [_samples_per_step(one) for one in (first, report)]
        if abs(samples[0] - samples[1]) > _SAME_SAMPLES * max(samples):
            raise ValueError(
                f"--gate: a step has {samples[0]:.4g} samples in {first.name} and "
                f"{samples[1]:.4g} in {report.name}, and their step times are not comparable. "
                "HINT: record both with the same batch size"
            )
    found = _difference("step_ms", before, after)
    limit = found.limit(GATE_TAIL) if found is not None else None
    if found is None or limit is None:
        raise ValueError(
            f"--gate: too few steps to know the noise of {first.name} and {after[0].name}. HINT: "
            f"record at least {MIN_BLOCKS + 1} steps, or give further runs with --baseline"
        )
    slower, noise = found.after / found.before - 1, limit / found.before
    verdict = "uncertain" if slower > tolerance else "passed"
    return Gate(tolerance, slower, noise, "slower" if slower - noise > tolerance else verdict)


@dataclass(frozen=True)
class ScalingRow:
    """One row of a scaling table, relative to the run with the fewest ranks.

    Attributes:
        speedup: samples/s over the reference's.
        scaling_efficiency: speedup / (ranks / reference's ranks).
        global_efficiency: Useful share x computation_scalability.
    """

    ranks: int
    samples_per_s: float | None
    speedup: float | None
    scaling_efficiency: float | None
    load_balance: float
    serialisation: float | None
    transfer: float | None
    communication: float
    parallel: float
    checkpoint: float
    validation: float
    input: float
    starved: float
    other: float
    bubble: float
    useful: float
    computation_scalability: float | None
    global_efficiency: float | None


def scaling(reports: list[Report]) -> list[ScalingRow]:
    """Return the scaling table of one script's runs, by number of ranks.

    CS = (sum(u_ref)/samples_ref) / (sum(u)/samples); GE = mean(u)/T x CS. Figures that need samples
    are None where a run has none.

    Raises:
        ValueError: A run has no measured window, or two runs have the same size.
    """
    reports = sorted(reports, key=lambda report: report.size)
    for report in reports:
        if report.efficiencies is None:
            raise ValueError(
                f"{report.name} has too few recorded steps to measure. HINT: leave this run out"
            )
    sizes = [report.size for report in reports]
    twice = [size for size in sizes if sizes.count(size) > 1]
    if twice:
        names = [report.name for report in reports if report.size == twice[0]]
        raise ValueError(
            f"{' and '.join(names)} both have {counted(twice[0], 'rank')}. HINT: give one run "
            "for each number of ranks; paceline report A B compares two runs of the same size"
        )
    return [_scaling_row(report, reports[0]) for report in reports]


def _scaling_row(report: Report, reference: Report) -> ScalingRow:
    e = report.efficiencies
    assert e is not None
    each, first = _useful_s_per_sample(report), _useful_s_per_sample(reference)
    computation = first / each if each and first else None
    speedup = None
    if report.samples_per_s and reference.samples_per_s:
        speedup = report.samples_per_s / reference.samples_per_s
    return ScalingRow(
        ranks=report.size,
        samples_per_s=report.samples_per_s,
        speedup=speedup,
        scaling_efficiency=speedup / (report.size / reference.size) if speedup else None,
        **asdict(e),
        computation_scalability=computation,
        global_efficiency=e.useful * computation if computation else None,
    )


def _useful_s_per_sample(report: Report) -> float | None:
    """Return useful seconds per sample, summed over all ranks."""
    assert report.window_s is not None
    useful = sum(rank["useful"] for rank in report.states) * report.window_s
    return useful / report.samples if report.samples else None
