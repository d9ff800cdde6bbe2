"""Find out which ranks train the same samples, so that each sample is counted once.

Records of ``world.distribute`` have the mesh. In others the communication says which: ranks of a
tensor-parallel or pipeline-parallel group work on the same samples, ranks that only exchange
gradients each have their own. Reductions inside the forward, and messages between the first forward
and the last backward of a step, exchange activations.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ...plurals import named_ranks
from ...record.ring.states import POINT_TO_POINT_OPS, Op, State
from .read_record import Record
from .state_timeline import Window, count_steps, merge_intervals, total

REDUCTIONS = (Op.ALL_REDUCE, Op.REDUCE_SCATTER)
MIN_REDUCTIONS_PER_STEP = 0.5  # inside the forward, on average: fewer are not the model's


@dataclass
class DataAxis:
    """Which ranks train the same samples.

    Attributes:
        shards: Indices of the records that train the same samples; each shard has its own samples.
        doubts: What is not known for sure.
    """

    shards: list[list[int]]
    doubts: list[str] = field(default_factory=list)

    def count_samples(self, records: list[Record], within: Window) -> int:
        """Return the samples of the steps that end in the window, each counted once."""
        return sum(max(_samples(records[i], within) for i in shard) for shard in self.shards)


def _samples(record: Record, within: Window) -> int:
    steps = record.events_in(State.STEP)
    return total(steps["amount"][(steps["end"] > within.start) & (steps["end"] <= within.end)])


class _Sets:
    """Disjoint sets of record indices."""

    def __init__(self, count: int) -> None:
        self._parents = list(range(count))

    def root(self, i: int) -> int:
        while self._parents[i] != i:
            self._parents[i] = i = self._parents[self._parents[i]]
        return i

    def join(self, members: Iterable[int]) -> None:
        first, *others = map(self.root, members)
        for other in others:
            self._parents[self.root(other)] = self.root(first)

    def lists(self) -> list[list[int]]:
        found: dict[int, list[int]] = {}
        for i in range(len(self._parents)):
            found.setdefault(self.root(i), []).append(i)
        return list(found.values())


def find_data_axis(records: list[Record], within: Window) -> DataAxis:
    """Return which ranks train the same samples: by the mesh that all records have, else from
    their communication in the window.
    """
    if (of_mesh := _by_mesh(records)) is not None:
        return DataAxis(of_mesh)
    shards, connected = _Sets(len(records)), _Sets(len(records))
    members: dict[str, dict[int, int]] = {}  # by group and rank in it: index of the record
    for i, record in enumerate(records):
        for group in record.meta.get("groups", {}).values():
            members.setdefault(group["name"], {})[int(group["rank"])] = i
    reducing, unsure = dict[str, float](), set[int]()
    for i, record in enumerate(records):
        for name, per_step in _reductions_in_forward(record, within).items():
            reducing[name] = max(reducing.get(name, 0.0), per_step)
        for name, peer in _pipeline_peers(record, within):
            if (other := members[name].get(peer)) is not None:
                shards.join((i, other))
    for name, per_step in reducing.items():
        ranks = list(members[name].values())
        connected.join(ranks)
        if per_step >= MIN_REDUCTIONS_PER_STEP:
            unsure |= _join_same_batches(records, ranks, shards)
    axis = DataAxis(shards.lists())
    for shard in axis.shards:
        connected.join(shard)
    if unsure:
        named = named_ranks([records[i].rank for i in unsure])
        axis.doubts.append(
            f"{named} exchange activations, and the record does not show whether they get the "
            "same batch: their samples are counted once"
        )
    if len(connected.lists()) > 1:
        axis.doubts.append(
            "some ranks never exchange gradients or activations with the others: the samples of "
            "all of them are added up"
        )
    return axis


def _by_mesh(records: list[Record]) -> list[list[int]] | None:
    """Return the records of each data rank; None if not all have the same mesh."""
    shards: dict[int, list[int]] = {}
    first = records[0].meta.get("mesh") if records else None
    for i, record in enumerate(records):
        mesh = record.meta.get("mesh")
        if mesh is None or first is None or mesh["axes"] != first["axes"]:
            return None
        axes = [axis for axis, _ in mesh["axes"]]
        if "data" not in axes:
            return None
        shards.setdefault(mesh["place"][axes.index("data")], []).append(i)
    return list(shards.values()) or None


def _reductions_in_forward(record: Record, within: Window) -> dict[str, float]:
    """Return for each group that reduces in the window: its reductions in a forward, per step."""
    calls = record.events_in(State.COLLECTIVE)
    inside = (calls["start"] >= within.start) & (calls["start"] < within.end)
    calls = calls[inside & np.isin(calls["op"], REDUCTIONS)]
    if not len(calls):
        return {}
    count = count_steps(record, within)
    in_forward = _are_inside(calls["start"], record.events_in(State.FORWARD), within)
    groups = record.meta.get("groups", {})
    found: dict[str, float] = {}
    for number in np.unique(calls["group"]).tolist():
        of_group = calls["group"] == number
        name = groups[str(number)]["name"]
        found[name] = int(np.count_nonzero(in_forward & of_group)) / max(count, 1)
    return found


def _are_inside(times: Any, events: Any, within: Window) -> npt.NDArray[np.bool_]:
    start, end = merge_intervals(events["start"], events["end"], within)
    if not len(start):
        return np.zeros(len(times), bool)
    at = np.searchsorted(start, times, "right") - 1
    return np.asarray((at >= 0) & (times < end[at]))


def _pipeline_peers(record: Record, within: Window) -> set[tuple[str, int]]:
    """Return the group and rank of those with which most messages are amid forward and backward."""
    calls = record.events_in(State.COLLECTIVE)
    inside = (calls["start"] >= within.start) & (calls["start"] < within.end)
    calls = calls[inside & np.isin(calls["op"], POINT_TO_POINT_OPS) & (calls["peer"] >= 0)]
    if not len(calls):
        return set()
    forwards, backwards = record.events_in(State.FORWARD), record.events_in(State.BACKWARD)
    steps, call_step = np.unique(calls["step"], return_inverse=True)
    first, last = np.full(len(steps), within.end), np.full(len(steps), within.start)
    for rows, name, bound, keep in (
        (forwards, "start", first, np.minimum),
        (backwards, "end", last, np.maximum),
    ):
        step = np.minimum(np.searchsorted(steps, rows["step"]), len(steps) - 1)
        known = steps[step] == rows["step"]
        keep.at(bound, step[known], rows[name][known])
    amid = (calls["start"] >= first[call_step]) & (calls["start"] <= last[call_step])
    groups, found = record.meta.get("groups", {}), set()
    for number, peer in np.unique(calls[["group", "peer"]]).tolist():
        of_pair = (calls["group"] == number) & (calls["peer"] == peer)
        if amid[of_pair].mean() > 0.5:
            found.add((str(groups[str(number)]["name"]), int(peer)))
    return found


def _join_same_batches(records: list[Record], members: list[int], shards: _Sets) -> set[int]:
    """Join the members that get the same batches. Return them all if that is not known."""
    for name in ("batches", "inputs"):
        seen = [records[i].meta.get(name) for i in members]
        if all(seen):
            length = min(len(one) for one in seen if one)
            by_batches: dict[tuple[int, ...], list[int]] = {}
            for i, one in zip(members, seen, strict=True):
                by_batches.setdefault(tuple(one[:length] if one else ()), []).append(i)
            for alike in by_batches.values():
                shards.join(alike)
            return set()
    shards.join(members)
    return set(members) if len(members) > 1 else set()
