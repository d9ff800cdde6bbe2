"""What the guard prints: at the start, when the job leaves the band, and at the end."""

from collections.abc import Sequence

from ..analyze.reference.changes import Change, RateRise
from ..analyze.reference.metric import Goal, Metric
from ..analyze.reference.run_guard import Divergence, Standard
from ..analyze.reference.sequential import FALSE_ALARM_RATE
from ..analyze.reference.series import SAMPLES, Reference
from ..plurals import counted
from ..security.text import printable


def describe_start(reference: Reference, standard: Standard) -> str:
    """Return what the job is held against."""
    band, axis = standard.band, standard.axis
    lines = [
        f"paceline: guard: {printable(str(reference.metric))} is held against "
        f"{counted(band.runs, 'reference run')} of {band.values:,} values, up to "
        f"{band.end:,.0f} {axis} (false alarms: at most {100 * FALSE_ALARM_RATE:.0f} % of healthy "
        "runs of that length)"
    ]
    copies = len(reference.runs) - band.runs
    if copies:
        lines.append(
            f"  {counted(copies, 'run')} of the reference repeat another one value by value. "
            "HINT: use another seed for each run"
        )
    if band.runs == 1:
        lines.append(
            "  With one run the difference between seeds is not known, and the band is wide. "
            "HINT: paceline run --make-reference FILE --seeds 3"
        )
    if axis != SAMPLES:
        lines.append(
            "  The reference does not know its samples: runs are compared at equal steps. HINT: a "
            "DataLoader that Paceline sees, or a group (?P<samples>...) in --metric"
        )
    return "\n".join(lines) + "\n"


def describe_divergence(
    divergence: Divergence,
    step: int,
    samples: float,
    found_step: int,
    standard: Standard,
    changes: Sequence[Change],
) -> str:
    """Return what is told when the metric has left the band.

    Args:
        step, samples: Where it left; ``samples`` 0 if not known.
        found_step: Step at which that was certain.
    """
    at = f"step {step}" + (f" ({samples:,.0f} samples)" if samples else "")
    metric = _short(standard.metric)
    if divergence.kind == "nonfinite":
        text = f"{metric} is not finite since {at}"
    else:
        side = "above" if divergence.kind == "high" else "below"
        text = (
            f"{metric} has left the band of the reference at {at}: it is {divergence.value:.4g} "
            f"on average since then, {side} the {divergence.expected:.4g} expected"
        )
    return f"paceline: guard: {text} (certain at step {found_step}).\n{describe_changes(changes)}"


def describe_replicas(changes: Sequence[Change]) -> str:
    """Return what is told when ranks no longer hold the same parameters."""
    head, *rest = changes
    text = f"paceline: guard: {head.text}\n"
    return text + (describe_changes(rest) if rest else "")


def describe_rise(rise: RateRise) -> str:
    """Return what is told when the learning rate rises and that of the reference does not."""
    return (
        f"paceline: guard: the learning rate rose from {rise.old:.3g} to {rise.new:.3g} at step "
        f"{rise.step}, that of the reference did not. The loss is within the band until now\n"
    )


def describe_changes(changes: Sequence[Change]) -> str:
    if not changes:
        return (
            "  What changed there is not known: learning rate, gradient norm and parameters do "
            "not explain it. HINT: look at the data and its order at this step\n"
        )
    return "".join(f"  There, {change.text}\n" for change in changes)


def describe_end(values: int, metric: Metric, end: float, axis: str) -> str:
    """Return the last line of a job that stayed within the band."""
    return (
        f"paceline: guard: {counted(values, 'value')} of {_short(metric)}, up to {end:,.0f} "
        f"{axis}, stayed within the band of the reference\n"
    )


def describe_reached(goal: Goal, step: float, samples: float, value: float) -> str:
    """Return the message for a job that has reached its goal, without its end."""
    where = f"step {step:,.0f}" + (f" ({samples:,.0f} samples)" if samples else "")
    return f"paceline: {goal} is reached at {where} with {value:.6g}"


def describe_unreached(goal: Goal, best: float | None) -> str:
    """Return the last line of a job that has not reached its goal."""
    found = "no value is a number" if best is None else f"the best value is {best:.6g}"
    return f"paceline: {goal} was not reached: {found}\n"


def _short(metric: Metric) -> str:
    return printable(f"the metric {metric.name!r}" if metric.name else "the loss")
