"""Compare two runs figure by figure, and one script on different numbers of ranks."""

from dataclasses import asdict, dataclass

import numpy as np

from .report import Report

FIGURES = (
    *("samples_per_s", "step_ms", "useful", "parallel", "load_balance", "communication"),
    *("checkpoint", "validation", "input", "other"),
)
_NOISE_STANDARD_ERRORS = 2.0  # a larger difference is more than noise


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
        noise = None
        if errors[0] is not None and errors[1] is not None:
            noise = float(np.hypot(errors[0], errors[1]))
        real = None if noise is None else abs(second - first) > _NOISE_STANDARD_ERRORS * noise
        result.append(FigureChange(figure, first, second, noise, real))
    return result


def _figure_value(figure: str, report: Report) -> float | None:
    if figure == "samples_per_s":
        return report.samples_per_s
    if report.efficiencies is None or report.window_s is None:
        return None
    if figure == "step_ms":
        steps = report.ranges[-1].last - report.ranges[0].first + 1
        return 1e3 * report.window_s / steps
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
            total = report.ranges[-1].last - report.ranges[0].first + 1
            values.append(report.samples / total * steps / part.seconds)
        else:
            values.append(float(getattr(part.efficiencies, figure)))
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
                f"{report.name}: too few steps were recorded to measure. HINT: leave it out"
            )
    sizes = [report.size for report in reports]
    twice = [size for size in sizes if sizes.count(size) > 1]
    if twice:
        names = [report.name for report in reports if report.size == twice[0]]
        raise ValueError(
            f"{' and '.join(names)} both have {twice[0]} ranks. HINT: a scaling table takes one "
            "run a number of ranks; paceline report A B compares two of the same size"
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
