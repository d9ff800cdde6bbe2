"""Measure the gathers and reductions of a sharded model (FSDP2), by block.

The events of these collectives have the number of the block (record/hooks/sharded).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...record.ring.states import FIRST_BLOCK_PEER, LAUNCH_STATES, Op, State
from ..records.blocked_time import BlockedTime
from ..records.match_collectives import MatchedCommunication, launch_states, split_by_record
from ..records.read_record import Record
from ..records.state_timeline import Ints, Window, blocking_states

ROOT = "(root)"  # parameters of a model outside of its blocks
UNNAMED = "(unnamed)"  # blocks whose name the header does not have
FORWARD_GATHER, BACKWARD_GATHER, REDUCTION = "forward gather", "backward gather", "reduction"
KINDS = (FORWARD_GATHER, BACKWARD_GATHER, REDUCTION)
_FIGURES = ("count", "bytes", "in_flight_ns", "wait_ns", "transfer_ns")


@dataclass(frozen=True)
class BlockCalls:
    """One kind of collective of a block, in a step of a mean rank.

    Attributes:
        kind: "forward gather" (outside of a backward), "backward gather", or "reduction" (reduce-
            scatters, and all-reduces between the replicas of shards).
        count: Calls per optimizer step.
        bytes: Bytes of a mean call, of the whole vector.
        in_flight_s: Time of a mean call from its launch to its known end.
        wait_s, transfer_s: Exposed time per step, before and after the last rank arrived.
    """

    kind: str
    count: float
    bytes: float
    in_flight_s: float
    wait_s: float
    transfer_s: float

    @property
    def exposed_s(self) -> float:
        """Exposed time per step."""
        return self.wait_s + self.transfer_s

    @property
    def late_s(self) -> float:
        """Exposed time of a mean call: how much too late its result is there."""
        return self.exposed_s / self.count if self.count else 0.0


@dataclass(frozen=True)
class ShardedBlock:
    """One block of a sharded model: parameters that are gathered together.

    Attributes:
        name: Name of the module; ROOT for the model.
        calls: Its collectives, those kinds that the window has.
    """

    name: str
    calls: list[BlockCalls] = field(default_factory=list)

    def exposed_s(self, *kinds: str) -> float:
        """Return the exposed time per step of these kinds; of all without an argument."""
        return sum(one.exposed_s for one in self.calls if not kinds or one.kind in kinds)


def measure_blocks(
    records: list[Record], matched: MatchedCommunication, blocked: BlockedTime, within: Window
) -> list[ShardedBlock]:
    """Return the blocks of the window, in the order of their first gather; empty without any.

    blocked: Exposed time of each row of ``matched.waits``.
    """
    names = list(dict.fromkeys(name for record in records for name in _names(record)))
    if not names:
        return []
    sums = np.zeros((len(names) + 1, len(KINDS), len(_FIGURES)))  # the last one is UNNAMED
    steps = 0
    ends = np.cumsum([len(rows) for rows in split_by_record(matched.waits, len(records))])
    exposed = (np.split(times, ends[:-1]) for times in (blocked.wait, blocked.transfer))
    for record, wait, transfer in zip(records, *exposed, strict=True):
        step_ends = record.events_in(State.STEP)["end"]
        steps += int(((step_ends > within.start) & (step_ends <= within.end)).sum())
        index = np.array([*(names.index(name) for name in _names(record)), len(names)])
        _add_launches(sums, record, index, within)
        _add_waits(sums, record, index, wait, transfer)
    if not steps:
        return []
    return [block for block in _blocks([*names, UNNAMED], sums, steps) if block.calls]


def _names(record: Record) -> list[str]:
    return [str(name) or ROOT for name in record.meta.get("blocks", [])]


def _add_launches(
    sums: npt.NDArray[np.float64], record: Record, index: Ints, within: Window
) -> None:
    """Add number, bytes and time in flight of the collectives that lie in the window."""
    rows = record.events_in(*launch_states(record))
    rows = rows[(rows["start"] >= within.start) & (rows["end"] <= within.end)]
    labelled = rows["peer"] <= FIRST_BLOCK_PEER
    rows = rows[labelled]
    place = (_block_of(rows, index), _kind_of(rows, record))
    np.add.at(sums[:, :, 0], place, 1.0)
    np.add.at(sums[:, :, 1], place, rows["amount"].astype(np.float64))
    np.add.at(sums[:, :, 2], place, (rows["end"] - rows["start"]).astype(np.float64))


def _add_waits(
    sums: npt.NDArray[np.float64], record: Record, index: Ints, wait: Ints, transfer: Ints
) -> None:
    """Add the exposed time. wait, transfer: of each BLOCKED and CALL event of the record (ns)."""
    rows = record.events_in(*blocking_states(record))
    labelled = (rows["peer"] <= FIRST_BLOCK_PEER) & ((wait > 0) | (transfer > 0))
    rows = rows[labelled]
    place = (_block_of(rows, index), _kind_of(rows, record))
    np.add.at(sums[:, :, 3], place, wait[labelled].astype(np.float64))
    np.add.at(sums[:, :, 4], place, transfer[labelled].astype(np.float64))


def _block_of(rows: npt.NDArray[Any], index: Ints) -> Ints:
    """Return the position in ``index`` of each event's block; a damaged number is its last."""
    number = FIRST_BLOCK_PEER - rows["peer"].astype(np.int64)
    return np.asarray(index[np.minimum(number, len(index) - 1)])


def _kind_of(rows: npt.NDArray[Any], record: Record) -> Ints:
    """Return the position in KINDS of each event: a gather by where the rank launched it.

    A kernel of a GPU may run when the rank is in another phase already.
    """
    launched = record.events_in(*LAUNCH_STATES)
    launched = launched[launched["peer"] <= FIRST_BLOCK_PEER]
    start = rows["start"].astype(np.int64)
    if len(launched):
        launched = launched[np.argsort(_call_number(launched), kind="stable")]
        numbers, wanted = _call_number(launched), _call_number(rows)
        at = np.minimum(np.searchsorted(numbers, wanted), len(numbers) - 1)
        start = np.where(numbers[at] == wanted, launched["start"][at], start)
    backward = record.events_in(State.BACKWARD)
    backward = backward[np.argsort(backward["start"], kind="stable")]
    inside = np.zeros(len(rows), bool)
    if len(backward):
        at = np.searchsorted(backward["start"], start, "right") - 1
        inside = (at >= 0) & (start < backward["end"][at])
    gather = np.where(inside, KINDS.index(BACKWARD_GATHER), KINDS.index(FORWARD_GATHER))
    is_gather = rows["op"] == Op.ALL_GATHER
    return np.asarray(np.where(is_gather, gather, KINDS.index(REDUCTION)))


def _call_number(rows: npt.NDArray[Any]) -> Ints:
    """Return a number that is equal for all events of one collective of a rank."""
    return np.asarray(rows["group"].astype(np.int64) << 32 | rows["seq"].astype(np.int64))


def _blocks(names: list[str], sums: npt.NDArray[np.float64], steps: int) -> Iterator[ShardedBlock]:
    for name, kinds in zip(names, sums.tolist(), strict=True):
        calls = [
            BlockCalls(
                kind,
                count / steps,
                size / max(count, 1),
                flight / max(count, 1) / 1e9,
                wait / steps / 1e9,
                transfer / steps / 1e9,
            )
            for kind, (count, size, flight, wait, transfer) in zip(KINDS, kinds, strict=True)
            if count or wait or transfer
        ]
        yield ShardedBlock(name, calls)
