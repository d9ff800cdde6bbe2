"""Measure the gathers and reductions of a sharded model (FSDP2) by block, and the memory that is
left; and the exchange of a tensor axis by layer.

The events of these collectives have the number of the module (record/hooks/block_labels.py).
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...plurals import counted
from ...record.ring.states import FIRST_BLOCK_PEER, LAUNCH_STATES, Memory, Op, State
from ..records.match_collectives import BlockedTime, MatchedCommunication, launch_states
from ..records.read_record import Record, axes_of_groups
from ..records.state_timeline import Ints, Window, blocking_states, count_steps

ROOT = "(root)"  # parameters of a model outside of its blocks
UNNAMED = "(unnamed)"  # blocks whose name the header does not have
FORWARD_GATHER, BACKWARD_GATHER, REDUCTION = "forward gather", "backward gather", "reduction"
KINDS = (FORWARD_GATHER, BACKWARD_GATHER, REDUCTION)
FORWARD, BACKWARD = "forward", "backward"
LAYER_KINDS = (FORWARD, BACKWARD)
TENSOR = "tensor"  # the axis of such a group
_FIGURES = ("count", "bytes", "in_flight_ns", "wait_ns", "transfer_ns")


@dataclass(frozen=True)
class BlockCalls:
    """One kind of collective of a block, in a step of a mean rank.

    Attributes:
        kind: "forward gather" (outside of a backward), "backward gather", or "reduction" (reduce-
            scatters, and all-reduces between the replicas of shards); of a layer of a tensor axis
            "forward" or "backward".
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
    """One block of a sharded model: parameters that are gathered together; or one layer.

    Attributes:
        name: Name of the module; ROOT for the model.
        calls: Its collectives, those kinds that the window has.
    """

    name: str
    calls: list[BlockCalls] = field(default_factory=list)

    def exposed_s(self, *kinds: str) -> float:
        """Return the exposed time per step of these kinds; of all without an argument."""
        return sum(call.exposed_s for call in self.calls if not kinds or call.kind in kinds)


def measure_blocks(
    records: list[Record], matched: MatchedCommunication, blocked: BlockedTime, within: Window
) -> list[ShardedBlock]:
    """Return the blocks of the window, in the order of their first gather; empty without any.

    blocked: Exposed time of each row of ``matched.waits``.
    """
    return _measure(_Sums(records, KINDS, of_tensor=False), matched, blocked, within)


def measure_layers(
    records: list[Record], matched: MatchedCommunication, blocked: BlockedTime, within: Window
) -> list[ShardedBlock]:
    """Return the exchange of a tensor axis by layer, in the order of their first exchange."""
    return _measure(_Sums(records, LAYER_KINDS, of_tensor=True), matched, blocked, within)


class _Sums:
    """Sums over labelled collectives, by module, kind and figure.

    Attributes:
        of_tensor: Whether they are collectives of a tensor axis, or of all other groups.
    """

    def __init__(self, records: list[Record], kinds: tuple[str, ...], of_tensor: bool) -> None:
        self.records, self.kinds, self.of_tensor = records, kinds, of_tensor
        self.names = list(dict.fromkeys(name for record in records for name in _names(record)))
        # the last module is UNNAMED
        self.values = np.zeros((len(self.names) + 1, len(kinds), len(_FIGURES)))
        self.axes = axes_of_groups(records)

    def index(self, record: Record) -> Ints:
        """Return the places of a record's modules, and that of unnamed ones."""
        known = [self.names.index(name) for name in _names(record)]
        return np.array([*known, len(self.names)])

    def labelled(self, record: Record, rows: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Return which events belong to these sums."""
        groups = record.meta.get("groups", {})
        of_tensor = np.zeros(max([int(number) for number in groups] + [0]) + 1, bool)
        for number, group in groups.items():
            of_tensor[int(number)] = self.axes.get(group["name"]) == TENSOR
        labelled = rows["peer"] <= FIRST_BLOCK_PEER
        return np.asarray(labelled & (of_tensor[rows["group"]] == self.of_tensor))

    def kind_of(self, rows: npt.NDArray[Any], record: Record) -> Ints:
        """Return the place of each event's kind: by where the rank launched it.

        A kernel of a GPU may run when the rank is in another phase already.
        """
        inside = _in_backward(rows, record)
        if self.of_tensor:
            return np.where(inside, LAYER_KINDS.index(BACKWARD), LAYER_KINDS.index(FORWARD))
        gather = np.where(inside, KINDS.index(BACKWARD_GATHER), KINDS.index(FORWARD_GATHER))
        is_gather = rows["op"] == Op.ALL_GATHER
        return np.where(is_gather, gather, KINDS.index(REDUCTION))


def _measure(
    sums: _Sums, matched: MatchedCommunication, blocked: BlockedTime, within: Window
) -> list[ShardedBlock]:
    records, steps = sums.records, 0
    if not sums.names:
        return []
    exposed = blocked.by_record(matched.waits, len(records))
    for record, (wait, transfer) in zip(records, exposed, strict=True):
        steps += count_steps(record, within)
        _add_launches(sums, record, within)
        _add_waits(sums, record, wait, transfer)
    if not steps:
        return []
    return [block for block in _blocks(sums, steps) if block.calls]


def _names(record: Record) -> list[str]:
    return [str(name) or ROOT for name in record.meta.get("blocks", [])]


def _add_launches(sums: _Sums, record: Record, within: Window) -> None:
    """Add number, bytes and time in flight of the collectives that lie in the window."""
    rows = record.events_in(*launch_states(record))
    rows = rows[(rows["start"] >= within.start) & (rows["end"] <= within.end)]
    rows = rows[sums.labelled(record, rows)]
    place = (_block_of(rows, sums.index(record)), sums.kind_of(rows, record))
    np.add.at(sums.values[:, :, 0], place, 1.0)
    np.add.at(sums.values[:, :, 1], place, rows["amount"].astype(np.float64))
    np.add.at(sums.values[:, :, 2], place, (rows["end"] - rows["start"]).astype(np.float64))


def _add_waits(sums: _Sums, record: Record, wait: Ints, transfer: Ints) -> None:
    """Add the exposed time. wait, transfer: of each BLOCKED and CALL event of the record (ns)."""
    rows = record.events_in(*blocking_states(record))
    labelled = sums.labelled(record, rows) & ((wait > 0) | (transfer > 0))
    rows = rows[labelled]
    place = (_block_of(rows, sums.index(record)), sums.kind_of(rows, record))
    np.add.at(sums.values[:, :, 3], place, wait[labelled].astype(np.float64))
    np.add.at(sums.values[:, :, 4], place, transfer[labelled].astype(np.float64))


def _block_of(rows: npt.NDArray[Any], index: Ints) -> Ints:
    """Return the position in ``index`` of each event's block; a damaged number is its last."""
    number = FIRST_BLOCK_PEER - rows["peer"].astype(np.int64)
    return np.asarray(index[np.minimum(number, len(index) - 1)])


def _in_backward(rows: npt.NDArray[Any], record: Record) -> npt.NDArray[np.bool_]:
    """Return which events the rank launched in a backward."""
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
    return inside


def _call_number(rows: npt.NDArray[Any]) -> Ints:
    """Return a number that is equal for all events of one collective of a rank."""
    return np.asarray(rows["group"].astype(np.int64) << 32 | rows["seq"].astype(np.int64))


def _blocks(sums: _Sums, steps: int) -> Iterator[ShardedBlock]:
    for name, kinds in zip([*sums.names, UNNAMED], sums.values.tolist(), strict=True):
        calls = [
            BlockCalls(
                kind,
                count / steps,
                size / max(count, 1),
                flight / max(count, 1) / 1e9,
                wait / steps / 1e9,
                transfer / steps / 1e9,
            )
            for kind, (count, size, flight, wait, transfer) in zip(sums.kinds, kinds, strict=True)
            if count or wait or transfer
        ]
        yield ShardedBlock(name, calls)


# Which gathers of a sharded model come too late, and what would help, in words

GATHERS = (FORWARD_GATHER, BACKWARD_GATHER)
PREFETCH = "prefetch further"
MORE_BLOCKS = "divide the model into more blocks"  # there is none to gather meanwhile
KEEP_GATHERED = "keep it gathered after the forward"
WHEN = {FORWARD_GATHER: "in the forward", BACKWARD_GATHER: "in the backward"}


def exposed_s(blocks: list[ShardedBlock], *kinds: str) -> float:
    """Return the exposed time per step of these kinds of calls; of all without a kind."""
    return sum(block.exposed_s(*kinds) for block in blocks)


def latest_gather(blocks: list[ShardedBlock]) -> tuple[ShardedBlock, BlockCalls] | None:
    """Return the block whose gathers have most exposed time each, and these gathers."""
    found = [(block, one) for block in blocks for one in block.calls if one.kind in GATHERS]
    late = max(found, key=lambda pair: pair[1].late_s, default=None)
    return late if late is not None and late[1].late_s > 0 else None


def describe_blocks(blocks: list[ShardedBlock]) -> str:
    """Return a sentence about exposed gathers and reductions, without full stop.

    It names the gather that comes latest, and what would help.
    """
    whole = 1e3 * exposed_s(blocks)
    text = (
        f"gathers and reductions of {counted(len(blocks), 'sharded block')} are exposed for "
        f"{whole:.3g} ms of a step"
    )
    if (late := latest_gather(blocks)) is None:
        return text
    block, calls = late
    earlier = PREFETCH if len(blocks) > 1 else MORE_BLOCKS
    helps = earlier if calls.kind == FORWARD_GATHER else f"{earlier}, or {KEEP_GATHERED}"
    return (
        f"{text}; the gather of {block.name} {WHEN[calls.kind]} comes {1e3 * calls.late_s:.3g} ms "
        f"late: {helps}"
    )


@dataclass(frozen=True)
class ShardedModel:
    """The sharded blocks of a run.

    Attributes:
        blocks: In the order of their first gather.
        free_bytes: Memory that each rank could have used in addition; None if unknown.
    """

    blocks: list[ShardedBlock]
    free_bytes: int | None

    @property
    def gathered_bytes(self) -> int:
        """Bytes of all whole parameters, in the dtype in which they are gathered."""
        sizes = [[one.bytes for one in self.gathers(block)] for block in self.blocks]
        return round(sum(max(of_block, default=0.0) for of_block in sizes))

    @staticmethod
    def gathers(block: ShardedBlock) -> list[BlockCalls]:
        """Return the gathers of a block, in forward and in backward."""
        return [call for call in block.calls if call.kind in GATHERS]


def sharded_model(blocks: list[ShardedBlock], records: list[Record]) -> ShardedModel | None:
    """Return the sharded model of a run; None without blocks."""
    return ShardedModel(blocks, least_free_bytes(records)) if blocks else None


def least_free_bytes(records: list[Record]) -> int | None:
    """Return the memory that each rank could use in addition, when least was left.

    It is that of the rank's GPU if the record has one, otherwise an equal part of what was left to
    all ranks of the node. None if a rank has no sample.
    """
    ranks_of = Counter(record.host for record in records)
    found = []
    for record in records:
        rows = record.events_in(State.MEMORY)
        of_device = rows["amount"][rows["peer"] == Memory.DEVICE_AVAILABLE]
        of_host = rows["amount"][rows["peer"] == Memory.HOST_AVAILABLE]
        left = of_device if len(of_device) else of_host // ranks_of[record.host]
        if not len(left):
            return None
        found.append(int(np.min(left)))
    return min(found, default=None)
