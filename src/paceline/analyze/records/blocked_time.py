"""Assign the blocked time of each rank's timeline to the communication that blocked it.

Communications of one rank may overlap each other, and on a GPU also computing. Losses, groups and
the matrix of waits use the times computed here, so each of them adds up to the timeline's states.
"""

from dataclasses import dataclass

import numpy as np

from .match_collectives import MatchedCommunication, split_by_record
from .state_timeline import Ints, Timeline, is_pipeline_group


@dataclass(frozen=True)
class BlockedTime:
    """Exposed time of each row of ``MatchedCommunication.waits`` in the window (ns).

    Attributes:
        wait: Time in the state wait. The rows of a record add up to its timeline's state.
        transfer, bubble: The same for these states.
    """

    wait: Ints
    transfer: Ints
    bubble: Ints


def assign_blocked_time(matched: MatchedCommunication, timelines: list[Timeline]) -> BlockedTime:
    """Book every blocked instant of the timelines to one row of ``matched.waits``.

    Of several communications that block a rank at the same time, the one that began first counts.
    """
    found: dict[str, list[Ints]] = {"wait": [], "transfer": [], "bubble": []}
    pipelines = np.array([is_pipeline_group(name) for name in matched.groups], bool)
    for rows, line in zip(split_by_record(matched.waits, len(timelines)), timelines, strict=True):
        start, end = rows["start"].astype(np.int64), rows["end"].astype(np.int64)
        turn = np.clip(rows["latest"], start, end)
        in_pipeline = pipelines[rows["group"]]
        for state, of in (("bubble", in_pipeline), ("wait", ~in_pipeline)):
            times = np.zeros(len(rows), np.int64)
            times[of] = _exposed(line, state, start[of], turn[of])
            found[state].append(times)
        found["transfer"].append(_exposed(line, "transfer", turn, end))
    return BlockedTime(**{state: np.concatenate(times) for state, times in found.items()})


def _exposed(line: Timeline, state: str, start: Ints, end: Ints) -> Ints:
    """Return for each interval the time of ``state`` in it that lies in no earlier interval."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    end = np.maximum.accumulate(end)
    start[1:] = np.maximum(start[1:], end[:-1])
    result = np.empty(len(order), np.int64)
    result[order] = line.cumulative_in(state, end) - line.cumulative_in(state, start)
    return result
