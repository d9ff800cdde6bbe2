"""Compute states, efficiencies and losses of all ranks in the measured window."""

from dataclasses import replace

import numpy as np

from ..records.blocked_time import assign_blocked_time
from ..records.clock_alignment import Clocks
from ..records.match_collectives import NO_INDEX, MatchedCommunication
from ..records.read_record import Record
from ..records.state_timeline import Timeline, Window, build_timeline
from . import losses as lost
from .ideal_network import ideal_length
from .losses import Loss, StepRanges
from .pop import busy_ns, check_identities, efficiencies
from .window_steps import steps_in_window

MAX_REPLAY_NS = 1 << 62  # of all ranks' time together: delays in the replay may add up to it


class MeasuredWindow:
    """States, efficiencies and losses in the measured window, and how reliable they are.

    Attributes:
        matched: The communication; without last arrivals where they are unknown.
        timelines: In the order of ``records``, whose times are on one clock.
        steps: The steps that all ranks completed; None where they have none in common.
        blocked: Exposed time of each row of ``matched.waits``.
        apart: Whether some hosts' clocks could not be aligned; then the last arrival is unknown.
        contradicts: Whether the replay on an ideal network takes longer than the clocks allow.
        residual: Error of the aligned clocks (ns).
    """

    def __init__(
        self, records: list[Record], matched: MatchedCommunication, clocks: Clocks, within: Window
    ) -> None:
        self.clocks = clocks
        self.clocks_unaligned = bool(clocks.unaligned)
        if self.clocks_unaligned:
            matched = _without_arrivals(matched)
        self.records, self.matched, self.within = records, matched, within
        self.timelines: list[Timeline] = [
            build_timeline(record, latest, within)
            for record, latest in zip(records, matched.latest_arrivals(len(records)), strict=True)
        ]
        self.blocked = assign_blocked_time(matched, self.timelines)
        self.states = [line.states for line in self.timelines]
        self.residual_ns = clocks.residual_ns
        ideal, self.replay_contradicts = None, False
        if (
            len(records) > 1
            and not self.clocks_unaligned
            and sum(map(busy_ns, self.states)) < MAX_REPLAY_NS
        ):
            ideal = ideal_length(matched, self.timelines, within)
            assert ideal >= max(map(busy_ns, self.states)), "T_id is below the longest rank's time"
            # Each wait may be off by the clocks' residual; more is not the clocks.
            allowed = self.residual_ns * int(
                np.bincount(matched.waits["record"], minlength=1).max()
            )
            self.replay_contradicts = ideal > within.length + allowed
            ideal = None if self.replay_contradicts else min(ideal, within.length)
        self.efficiencies = efficiencies(self.states, within.length, ideal)
        check_identities(self.efficiencies)
        self.ranges: StepRanges = lost.split_into_ranges(records, within)
        self.steps = steps_in_window(records, within)
        self.losses = self._losses()

    def _losses(self) -> list[Loss]:
        place = lost.LossPlaces(self.records, self.matched, self.ranges, self.steps)
        found = lost.own_losses(self.records, self.timelines, place)
        found += lost.wait_losses(
            self.records,
            self.timelines,
            self.matched,
            self.blocked,
            self.within,
            place,
            self.residual_ns,
        )
        found += lost.transfer_losses(self.matched, self.blocked, len(self.records), place)
        return sorted(found, key=lambda loss: -loss.share)


def _without_arrivals(matched: MatchedCommunication) -> MatchedCommunication:
    """Return the communication with all blocked time as transfer: nothing says who came last."""
    waits = matched.waits.copy()
    waits["latest"], waits["culprit"] = waits["start"], NO_INDEX
    return replace(matched, waits=waits)
