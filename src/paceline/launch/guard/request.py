"""What the user wants of the guard."""

import re
from dataclasses import dataclass, field
from enum import Enum

from ...analyze.reference.metric import BACKWARD, LOGGED, PATTERN, Goal, Metric
from ...security.schema import Count

DIVERGED_EXIT_CODE = 79  # of a job that was ended because its loss left the band of the reference
# What a rank sends of each optimizer step (``record.watch.step_watch``): step, samples of the rank
# until its end and in it, loss, learning rate, gradient norm, checksum of the parameters (int64).
Row = tuple[Count, Count, Count, float | None, float | None, float | None, int | None]


class Action(Enum):
    """What happens when a run leaves the band of its reference."""

    TELL = "tell"
    CHECKPOINT = "checkpoint"
    STOP = "stop"


@dataclass(frozen=True)
class GuardRequest:
    """The options of the guard.

    Attributes:
        references: Paths of ``--reference``: files, record folders, outputs of runs.
        metric: Value of ``--metric``; None: that of the reference, or the loss of each backward.
        action: Value of ``--on-divergence``.
        save: File for the values of this run, or None.
        goal: Value of ``--until``: the job ends when the metric reaches it.
    """

    references: list[str] = field(default_factory=list)
    metric: str | None = None
    action: Action = Action.TELL
    save: str | None = None
    goal: Goal | None = None


def parse_metric(text: str | None) -> Metric:
    """Return what ``--metric`` names.

    "backward" is the loss of each backward, another plain name a value of ``world.log``. Anything
    else is a regular expression with a group for the value, and optional groups ``step`` and
    ``samples``.

    Raises:
        ValueError: It is no regular expression, or has no such group.
    """
    if text is None or text == BACKWARD:
        return Metric(BACKWARD)
    if re.fullmatch(r"[A-Za-z_]\w*", text):
        return Metric(LOGGED, text)
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ValueError(
            f"--metric {text!r} is no regular expression: {error}. "
            r"HINT: --metric 'loss[ =:]+(\S+)'"
        ) from None
    unnamed = pattern.groups - len(set(pattern.groupindex) & {"step", "samples"})
    if unnamed < 1 or set(pattern.groupindex) - {"step", "samples", "value"}:
        raise ValueError(
            f"--metric {text!r} needs one group for the value, and may have groups named step and "
            r"samples. HINT: --metric 'step (?P<step>\d+) loss (\S+)'"
        )
    if unnamed > 1 and "value" not in pattern.groupindex:
        raise ValueError(
            f"--metric {text!r} has {unnamed} groups for the value. HINT: name it "
            "(?P<value>...), or write (?:...) for groups that only belong together"
        )
    return Metric(PATTERN, text)
