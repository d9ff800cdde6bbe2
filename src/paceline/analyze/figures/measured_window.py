"""Compute states, efficiencies and losses of all ranks in the measured window."""

import numpy as np

from ..records.clock_alignment import Clocks
from ..records.match_collectives import MatchedCommunication
from ..records.read_record import Record
from ..records.state_timeline import Timeline, Window, blocking_states, build_timeline
from . import losses as lost
from .ideal_network import ideal_length
from .losses import Loss, StepRanges
from .pop import busy_ns, check_identities, efficiencies

MAX_REPLAY_NS = 1 << 62  # of all ranks' time together: delays in the replay may add up to it


class MeasuredWindow:
    """States, efficiencies and losses in the measured window, and how reliable they are.

    Attributes:
        timelines: In the order of ``records``, whose times are on one clock.
        apart: Whether some hosts' clocks could not be aligned; then the last arrival is unknown.
        contradicts: Whether the replay on an ideal network takes longer than the clocks allow.
        residual: Error of the aligned clocks (ns).
    """

    def __init__(
        self, records: list[Record], matched: MatchedCommunication, clocks: Clocks, within: Window
    ) -> None:
        self.records, self.matched, self.within = records, matched, within
        self.clocks = clocks
        self.clocks_unaligned = bool(clocks.unaligned)
        self.timelines: list[Timeline] = []
        for record, latest in zip(records, matched.latest_arrivals(len(records)), strict=True):
            if self.clocks_unaligned:  # nothing says who came last
                latest = record.events_in(*blocking_states(record))["start"]
            self.timelines.append(build_timeline(record, latest, within))
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
        self.losses = self._losses()

    def _losses(self) -> list[Loss]:
        found = lost.own_losses(self.records, self.timelines, self.ranges)
        ranks = len(self.records)
        if not self.clocks_unaligned:
            found += lost.wait_losses(
                self.records,
                self.timelines,
                self.matched,
                self.within,
                self.ranges,
                self.residual_ns,
            )
        found += lost.transfer_losses(self.matched, ranks, self.within, self.ranges)
        return sorted(found, key=lambda loss: -loss.share)
