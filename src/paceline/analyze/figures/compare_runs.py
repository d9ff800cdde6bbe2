"""Compare two runs figure by figure, and one script on different numbers of ranks."""

from dataclasses import asdict, dataclass

import numpy as np

from ...plurals import counted
from ..records.state_timeline import STATES
from .report import Report

FIGURES = (
    *("samples_per_s", "step_ms", "useful", "parallel", "load_balance", "communication"),
    *("checkpoint", "validation", "input", "other"),
)
_SAME_SAMPLES = 0.01  # of a step's samples, up to which steps of two runs are alike
_MIN_EXPLAINED = 0.8  # of a difference, by the states that are named
NOISE_STANDARD_ERRORS = 2.0  # a larger difference is more than noise


@dataclass(frozen=True)
class FigureChange:
    """One figure before and after.

    Attributes:
        noise: Standard error of the difference, from the spread between ranges of steps. None where
            there are too few ranges.
        real: Whether the difference is more than noise.
    """

    figure: str
    before: float
    after: float
    noise: float | None
    real: bool | None


def compare(before: Report, after: Report) -> list[FigureChange]:
    """Compare the figures of two runs; those that one of the runs lacks are left out."""
    result = []
    for figure in FIGURES:
        values = [_figure_value(figure, report) for report in (before, after)]
        first, second = values
        if first is None or second is None:
            continue
        errors = [_standard_error(figure, report) for report in (before, after)]
        noise, real = _difference_noise([first, second], errors)
        result.append(FigureChange(figure, first, second, noise, real))
    return result


@dataclass(frozen=True)
class StateChange:
    """Time of one state before and after, mean of all ranks (s).

    Attributes:
        noise_s: Standard error of the difference; None where there are too few ranges of steps.
        real: Whether the difference is more than noise.
    """

    state: str
    before_s: float
    after_s: float
    noise_s: float | None
    real: bool | None

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


def compare_states(before: Report, after: Report) -> StateChanges | None:
    """Compare the time of each state; None where a run has no measured window."""
    reports = (before, after)
    if not all(report.ranges and report.window_s for report in reports):
        return None
    samples = [report.samples / _steps(report) for report in reports]
    same = abs(samples[0] - samples[1]) <= _SAME_SAMPLES * max(samples)
    unit = "step" if same or not all(samples) else "sample"
    # A rank's steps, or samples, in each step of the job.
    per_step = [
        1.0 if unit == "step" else n / r.size for n, r in zip(samples, reports, strict=True)
    ]
    rows = [_state_change(state, reports, per_step) for state in STATES]
    whole = _state_change("whole", reports, per_step)
    rows = [row for row in rows if row.before_s or row.after_s]
    return StateChanges(unit, rows, whole, _explaining_states(rows, whole))


def _steps(report: Report) -> int:
    return report.ranges[-1].last - report.ranges[0].first + 1


def _state_change(state: str, reports: tuple[Report, Report], per_step: list[float]) -> StateChange:
    means, errors = [], []
    for report, units in zip(reports, per_step, strict=True):
        times = [
            part.seconds * part.states.get(state, 1.0) / units / (part.last - part.first + 1)
            for part in report.ranges
        ]
        assert report.window_s is not None
        shares = [rank.get(state, 1.0) for rank in report.states]
        means.append(report.window_s * sum(shares) / len(shares) / units / _steps(report))
        errors.append(_error_of_mean(times))
    noise, real = _difference_noise(means, errors)
    return StateChange(state, means[0], means[1], noise, real)


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


def _difference_noise(
    values: list[float], errors: list[float | None]
) -> tuple[float | None, bool | None]:
    """Return the standard error of a difference, and whether the difference is more than noise."""
    if errors[0] is None or errors[1] is None:
        return None, None
    noise = float(np.hypot(errors[0], errors[1]))
    return noise, abs(values[1] - values[0]) > NOISE_STANDARD_ERRORS * noise


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
    """Return a figure's standard error: its spread over ranges of steps / sqrt(their number)."""
    values = []
    for part in report.ranges:
        steps = part.last - part.first + 1
        if figure == "step_ms":
            values.append(1e3 * part.seconds / steps)
        elif figure == "samples_per_s":
            assert report.window_s is not None
            values.append(report.samples / _steps(report) * steps / part.seconds)
        else:
            values.append(float(getattr(part.efficiencies, figure)))
    return _error_of_mean(values)


def _error_of_mean(values: list[float]) -> float | None:
    if len(values) < 4:
        return None
    return float(np.std(values, ddof=1) / np.sqrt(len(values)))


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
    other: float
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
