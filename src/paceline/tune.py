"""Reports of a training script to ``paceline tune``."""

from typing import Any

from .record.trial_reports import trial_reporter

__all__ = ["report"]


def report(value: Any = None, step: int | None = None, **values: Any) -> None:
    """Report the metric of a trial to ``paceline tune``; without it, do nothing.

    Every rank may call it; rank 0 reports. Where the search decides whether the trial continues,
    rank 0 waits for the decision. Scripts that use ``world.log`` need no call.

    Args:
        value: Value of the study's metric: a number or a tensor of one element.
        step: Number of the epoch or step, from 1. Default: the number of calls.
        values: Further values by name.

    Raises:
        OSError: The report can't be written.
    """
    reporter = trial_reporter()
    if reporter is not None:
        named = {} if value is None else {reporter.request.metric: value}
        reporter.report({**named, **values}, step)
