"""The measured window of a run: states, efficiencies and losses of all ranks."""

import numpy as np

from ..records.clock_alignment import Clocks
from ..records.match_collectives import MatchedCommunication
from ..records.read_record import Record
from ..records.state_timeline import Timeline, Window, blocking_states, build_timeline
from . import losses as lost
from .ideal_network import ideal_length
from .losses import Loss, Ranges
from .pop import busy, check, efficiencies

MAX_REPLAY_NS = 1 << 62  # of all ranks' time together: delays in the replay may add up to it


class Measured:
    """What lies in the window: every rank's line of states, the losses, and what tells of the
    figures how sure they are.

    ``timelines`` is in the order of ``records``, whose times are on one clock. ``apart``: whether
    some hosts' clocks could not be aligned; nothing says then who came last.
    """

    def __init__(
        self, records: list[Record], matched: MatchedCommunication, clocks: Clocks, within: Window
    ) -> None:
        self.records, self.matched, self.within = records, matched, within
        self.clocks = clocks
        self.apart = bool(clocks.unaligned)
        self.timelines: list[Timeline] = []
        for record, latest in zip(records, matched.latest_arrivals(len(records)), strict=True):
            if self.apart:  # nothing says who came last
                latest = record.events_in(*blocking_states(record))["start"]
            self.timelines.append(build_timeline(record, latest, within))
        self.states = [line.states for line in self.timelines]
        self.residual = clocks.residual_ns
        ideal, self.contradicts = None, False
        if len(records) > 1 and not self.apart and sum(map(busy, self.states)) < MAX_REPLAY_NS:
            ideal = ideal_length(matched, self.timelines, within)
            assert ideal >= max(map(busy, self.states)), "T_id is below the longest rank's time"
            # Each wait may be off by the clocks' residual; more is not the clocks.
            allowed = self.residual * int(np.bincount(matched.waits["record"], minlength=1).max())
            self.contradicts = ideal > within.length + allowed
            ideal = None if self.contradicts else min(ideal, within.length)
        self.efficiencies = efficiencies(self.states, within.length, ideal)
        check(self.efficiencies)
        self.ranges: Ranges = lost.ranges(records, within)
        self.losses = self._losses()

    def _losses(self) -> list[Loss]:
        found = lost.own(self.records, self.timelines, self.ranges)
        ranks = len(self.records)
        if not self.apart:
            found += lost.waits(
                self.records, self.timelines, self.matched, self.within, self.ranges, self.residual
            )
        found += lost.transfers(self.matched, ranks, self.within, self.ranges)
        return sorted(found, key=lambda loss: -loss.share)
