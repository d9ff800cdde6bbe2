"""Sentences about the survey of ``paceline diagnose``: what happens seldom in the training."""

import math
from typing import Any

from ..numbers import counted, elapsed, percent

NAMES = {
    "validation": "validation",
    "checkpoint": "checkpoints",
    "input": "waiting for input",
    "other": "the script's own work",
}
SURVEY_SHARE = 0.25  # of the time budget, at most


def describe_survey(seen: Any, minutes: float) -> list[str]:
    """Return sentences without full stops.

    Args:
        seen: A ``Survey`` of analyze/diagnosis/rare_events.py.
        minutes: The time budget of the diagnosis.
    """
    events = []
    for one in seen.events:
        name = NAMES.get(one.kind, one.kind)
        often = f"every {one.period} steps" if one.period else f"in {counted(one.count, 'step')}"
        often = "at the end of each epoch" if one.at_epoch_ends else often
        events.append(f"{name} {percent(one.share)} ({often})")
    over = f"{counted(seen.steps, 'step')} of the unchanged script in {elapsed(seen.seconds)}"
    said = [f"{over} had no validation, no checkpoint and no other event that few steps have"]
    if events:
        said = [f"{over}, as shares of the time of all ranks: {'; '.join(events)}"]
    if seen.missing_s:
        more = math.ceil(minutes + seen.missing_s / SURVEY_SHARE / 60)
        said.append(
            f"The survey did not reach the end of the first epoch ({seen.epoch_batches} batches): "
            f"what happens only there is not in these figures. HINT: --minutes {more} reaches it"
        )
    return said
