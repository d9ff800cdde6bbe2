"""Events of the timeline, rank by rank, in the Chrome trace format.

Each rank is a process. Its threads show the states, steps, phases, communication, and the times in
which other ranks waited for it.

Slices of one thread never partly overlap: operations in flight at the same time are in several
threads of the same name, and the wait and the transfer of a collective are nested in its slice.
"""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from ...analyze.figures.losses import collective_name
from ...analyze.figures.measured_window import MeasuredWindow
from ...analyze.records.match_collectives import (
    NO_INDEX,
    MatchedCommunication,
    launch_states,
    split_by_record,
)
from ...analyze.records.read_record import Record, mesh_places
from ...analyze.records.state_timeline import STATES, Ints, Window, blocking_states
from ...plurals import named_ranks
from ...record.ring.states import BACKWARD_PARTS, PARTS_PER_CHUNK, Op, State
from ..figure_names import STATE_NAMES
from .chrome_trace import Process, Put, slice_label

PHASES = {
    int(state): state.name.lower()
    for state in (State.FORWARD, State.LOSS, State.BACKWARD, State.OPTIMIZER)
}
PHASES |= {int(s): s.name.lower() for s in (State.INPUT, State.VALIDATION, State.CHECKPOINT)}
MIN_RATED_BYTES = 1 << 16  # the rate of a smaller collective is meaningless
MAX_RANGES = 16  # of ranks that waited, in the arguments of a slice


class Tracks:
    """The events that can be drawn of a measured window.

    Attributes:
        m: The measured window.
        samples: Whether stack samples are drawn.
        dropped: Number of slices left out because too many others overlap.
        launches, waits, rates: Rows of ``m.matched``, and bytes per ns, split by record.
        held: Waits that were caused by another rank; see ``_held_up_waits``.
        messages: Pairs of a send and its receive; see ``_match_messages``.
    """

    def __init__(self, m: MeasuredWindow, samples: bool) -> None:
        self.m, self.samples = m, samples
        self.dropped = 0
        count = len(m.records)
        self.launches = split_by_record(m.matched.launches, count)
        self.waits = split_by_record(m.matched.waits, count)
        self.rates = split_like(_launch_rates(m.matched.launches), self.launches)
        self.held = _held_up_waits(m)
        self.messages = _match_messages(m.matched)

    def count_until(self, times: Ints) -> tuple[Ints, Ints]:
        """Return how many events begin, and how many end, before each time.

        An interval has at most the events begun before its end minus those ended before its start.
        """
        begun, ended = np.zeros((2, len(times)), np.int64)
        arrows = [(rows["start"], rows["end"]) for rows in (self.held, self.messages)]
        spans = (span for i in range(len(self.m.records)) for span in self._spans(i))
        for start, end in (*arrows, *arrows, _waited_for_spans(self.held), *spans):
            begun += np.searchsorted(np.sort(start), times, "left")
            ended += np.searchsorted(np.sort(end), times, "left")
        return begun, ended

    def _spans(self, i: int) -> Iterable[tuple[Ints, Ints]]:
        """Yield starts and ends of all slices of one record, except the "waited for" slices."""
        record, line, waits = self.m.records[i], self.m.timelines[i], self.waits[i]
        yield line.edges[:-1], line.edges[1:]
        kinds = (*PHASES, State.STEP, State.STILL, *launch_states(record))
        kinds += (State.KERNEL,) * record.on_gpu + (State.SAMPLE,) * self.samples
        rows = record.events_in(*kinds)
        yield rows["start"], rows["end"]
        turn = np.clip(waits["latest"], waits["start"], waits["end"])
        if self.m.clocks_unaligned:
            turn = waits["start"]
        for start, end in ((waits["start"], turn), (turn, waits["end"])):
            yield start[end > start], end[end > start]

    def narrow(self, within: Window) -> None:
        """Drop the arrows of all ranks that do not lie completely in ``within``."""
        inside = (self.held["turn"] > within.start + 1) & (self.held["turn"] < within.end)
        self.held = self.held[inside]
        start, end = self.messages["start"], self.messages["end"]
        self.messages = self.messages[(start >= within.start) & (end <= within.end)]

    def write(self, i: int, within: Window, order: int, put: Put) -> None:
        """Write the events of record ``i`` in ``within``; call ``narrow`` with it first.

        order: Position of the rank among all processes.
        """
        record = self.m.records[i]
        process = Process(record.rank, within, put)
        named = named_ranks([record.rank], places=mesh_places([record]), host=record.host)
        process.write_name(named, record.host, order)
        line = self.m.timelines[i]
        names = _state_names(self.m.clocks_unaligned)
        process.slices(
            *("states", line.edges[:-1], line.edges[1:]),
            lambda at: [names[label] for label in line.label[at].tolist()],
        )
        steps = record.events_in(State.STEP)
        process.slices(
            *("steps", steps["start"], steps["end"]),
            lambda at: [slice_label(f"step {number}") for number in steps["step"][at].tolist()],
            lambda at: [f'"samples":{n}' for n in steps["amount"][at].tolist()],
            key=np.arange(len(steps)),
        )
        self._write_phases(record, process)
        still = record.events_in(State.STILL)
        process.slices(
            *("stood still", still["start"], still["end"]),
            lambda at: [slice_label("stood still", "other")] * len(at),
        )
        tids = self._write_communication(i, process)
        self._write_waited_for(i, process)
        self._write_arrows(i, process, tids)
        if self.samples:
            self._write_samples(record, process)
        self.dropped += process.dropped

    def _write_phases(self, record: Record, process: Process) -> None:
        rows = record.events_in(*PHASES)
        names = {number: slice_label(name) for number, name in PHASES.items()}
        process.slices(
            *("phases", rows["start"], rows["end"]),
            lambda at: [
                names[state] if not number else slice_label(_part_name(state, part, number))
                for state, part, number in zip(
                    *(rows[name][at].tolist() for name in ("state", "amount", "seq")), strict=True
                )
            ],
            lambda at: [f'"step":{step}' for step in rows["step"][at].tolist()],
            key=np.zeros(len(rows), np.int64),
        )
        if record.on_gpu:
            kernels = record.events_in(State.KERNEL)
            process.slices(
                *("kernels", kernels["start"], kernels["end"]),
                lambda at: [slice_label("kernels", "useful")] * len(at),
                lambda at: [f'"count":{n}' for n in kernels["amount"][at].tolist()],
                key=np.arange(len(kernels)),
            )

    def _write_communication(self, i: int, process: Process) -> dict[str, Ints]:
        """Write the communication in flight, and in it the times in which the rank was blocked.

        Returns the thread id of each "launch", "wait" and "transfer" (0 outside of the window).
        """
        record, waits = self.m.records[i], self.waits[i]
        in_flight = record.events_in(*launch_states(record))
        blocked = record.events_in(*blocking_states(record))
        turn = np.clip(waits["latest"], waits["start"], waits["end"])
        if self.m.clocks_unaligned:
            turn = waits["start"]
        waiting = np.flatnonzero(turn > waits["start"])
        transferring = np.flatnonzero(waits["end"] > turn)
        rows = np.concatenate([in_flight, blocked[waiting], blocked[transferring]])
        start = np.concatenate([in_flight["start"], waits["start"][waiting], turn[transferring]])
        end = np.concatenate([in_flight["end"], turn[waiting], waits["end"][transferring]])
        kind = np.repeat([0, 1, 2], [len(in_flight), len(waiting), len(transferring)])
        kind[len(in_flight) + len(waiting) :][waits["call"][transferring]] = 3
        waited_for = np.full(len(rows), NO_INDEX)
        waited_for[len(in_flight) : len(in_flight) + len(waiting)] = waits["culprit"][waiting]
        rate = np.full(len(rows), np.nan)
        rate[: len(in_flight)][in_flight["seq"] > 0] = self.rates[i]
        labels = Labels(record, [r.rank for r in self.m.records], self.m.clocks_unaligned)
        tids = process.slices(
            *("communication", start, end),
            lambda at: labels.names(rows[at], kind[at]),
            lambda at: labels.args(rows[at], kind[at], waited_for[at], rate[at]),
            key=_nesting_keys(rows),
        )
        found = {name: np.zeros(len(waits), np.int64) for name in ("wait", "transfer")}
        found["wait"][waiting] = tids[len(in_flight) : len(in_flight) + len(waiting)]
        found["transfer"][transferring] = tids[len(in_flight) + len(waiting) :]
        return {"launch": tids[: len(in_flight)][in_flight["seq"] > 0], **found}

    def _write_waited_for(self, i: int, process: Process) -> None:
        """Write a slice from the first wait for this rank until it arrived; arrows start there."""
        held = self.held[self.held["culprit"] == i]
        if not len(held):
            return
        held = held[np.argsort(held["node"], kind="stable")]
        first = np.flatnonzero(np.diff(held["node"], prepend=NO_INDEX - 1))
        start = np.minimum.reduceat(held["start"], first)
        end = np.maximum.reduceat(held["latest"], first)
        ranks = [record.rank for record in self.m.records]
        waiting = np.split(held["record"], first[1:])
        groups = [json.dumps(name) for name in self.m.matched.groups]
        group, op = held["group"][first].tolist(), held["op"][first].tolist()

        def waiting_ranks(n: int) -> str:
            return named_ranks([ranks[r] for r in np.unique(waiting[n]).tolist()], MAX_RANGES)

        def args(at: Ints) -> list[str]:
            return [
                f'"by":"{waiting_ranks(n)}",'
                f'"collective":"{collective_name(op[n])}","group":{groups[group[n]]}'
                for n in at.tolist()
            ]

        what = slice_label("waited for")
        tids = process.slices(
            *("waited for", start, end), lambda at: [what] * len(at), args, np.arange(len(first))
        )
        at = _arrow_end(held)
        which = np.repeat(tids, np.diff(np.append(first, len(held))))
        process.arrows("s", "held up", which, at - 1, held["number"])

    def _write_arrows(self, i: int, process: Process, tids: dict[str, Ints]) -> None:
        """Write the ends of the arrows to this rank's waits, and both ends of its messages."""
        held = self.held[self.held["record"] == i]
        wait_index = held["own"]
        waits, transfers = tids["wait"][wait_index], tids["transfer"][wait_index]
        held_tids = np.where(held["turn"] < held["end"], transfers, waits)
        process.arrows("f", "held up", held_tids, _arrow_end(held), held["number"])
        for mark, side in (("s", "send"), ("f", "receive")):
            rows = self.messages[self.messages[side] == i]
            at = rows["start"] if mark == "s" else rows["end"] - 1
            process.arrows(mark, "message", tids["launch"][rows[f"{side}_own"]], at, rows["number"])

    def _write_samples(self, record: Record, process: Process) -> None:
        rows = record.events_in(State.SAMPLE)
        rows = rows[(rows["start"] >= process.within.start) & (rows["start"] < process.within.end)]
        if len(rows):
            events = {n: _sample_event(record.lines.get(n)) for n in set(rows["amount"])}
            process.instants("script", rows["start"], [events[n] for n in rows["amount"]])


def _part_name(state: int, part: int, number: int) -> str:
    """Return the name of the forward or backward of a micro-batch: "forward 0"."""
    chunk, kind = divmod(part, PARTS_PER_CHUNK)
    of = {"I": " of activations", "W": " of parameters"}.get(BACKWARD_PARTS.get(kind, ""), "")
    stage = f", virtual stage {chunk}" if chunk else ""
    return f"{PHASES[state]}{of} {number - 1}{stage}"


class Labels:
    """Names and arguments of the slices of one rank's communication; each text is made once.

    Kinds of slices: 0 in flight, 1 wait, 2 transfer, 3 the call that launches the operation.
    """

    def __init__(self, record: Record, ranks: list[int], apart: bool) -> None:
        groups = record.meta.get("groups", {})
        self.groups = {int(n): json.dumps(str(group["name"])) for n, group in groups.items()}
        self.ranks = ranks
        blocked = "wait or transfer" if apart else "transfer"
        self.kinds = (
            "",
            slice_label("wait"),
            slice_label(blocked, "transfer"),
            slice_label("launch", "transfer"),
        )
        self.name_cache: dict[tuple[int, int], str] = {}

    def names(self, rows: Any, kinds: Ints) -> list[str]:
        return [
            self.kinds[kind] or self._in_flight(op, peer)
            for op, peer, kind in zip(
                *(rows[name].tolist() for name in ("op", "peer")), kinds.tolist(), strict=True
            )
        ]

    def _in_flight(self, op: int, peer: int) -> str:
        if (op, peer) not in self.name_cache:
            directions: dict[int, str] = {Op.SEND: f" to {peer}", Op.RECV: f" from {peer}"}
            self.name_cache[op, peer] = slice_label(collective_name(op) + directions.get(op, ""))
        return self.name_cache[op, peer]

    def args(self, rows: Any, kinds: Ints, waited_for: Ints, rates: Any) -> list[str]:
        names = ("op", "group", "seq", "step", "amount")
        columns = zip(
            *(rows[name].tolist() for name in names),
            *(kinds.tolist(), waited_for.tolist(), rates.tolist()),
            strict=True,
        )
        result = []
        for op, group, seq, step, amount, kind, who, rate in columns:
            text = f'"collective":"{collective_name(op)}","group":{self.groups.get(group, "null")}'
            text += f',"number":{seq}'
            if kind == 0:
                text += f',"step":{step},"bytes":{amount}'
                if rate == rate:  # not a nan
                    text += f',"GB/s":{rate:.3g}'
            elif who != NO_INDEX:
                text += f',"for":"rank {self.ranks[who]}"'
            result.append(text)
        return result


def split_like(values: Any, rows: list[Any]) -> list[Any]:
    """Split ``values``, one per row, into parts with the lengths of ``rows``."""
    return np.split(values, np.cumsum([len(part) for part in rows])[:-1])


def _launch_rates(launches: Any) -> Any:
    """Return the bytes per ns of each launch's collective, last start to last end, or NaN."""
    rate = np.full(len(launches), np.nan)
    if not len(launches):
        return rate
    node = launches["node"]
    last, end = np.full((2, int(node.max()) + 1), np.iinfo(np.int64).min)
    np.maximum.at(last, node, launches["start"])
    np.maximum.at(end, node, launches["end"])
    time = (end - last)[node]
    known = launches["whole"] & (launches["amount"] >= MIN_RATED_BYTES) & (time > 0)
    rate[known] = launches["amount"][known] / time[known]
    return rate


_HELD = ("record", "culprit", "start", "turn", "latest", "end", "node", "group", "op")
_HELD_DTYPE = [(name, "i8") for name in (*_HELD, "own", "number")]


def _held_up_waits(m: MeasuredWindow) -> Any:
    """Return the waits that another rank caused and that exceed the clocks' residual.

    turn: When the wait became a transfer, in ns. own: Index of the wait among those of its record.
    number: Id of its arrow.
    """
    waits = m.matched.waits
    turn = np.minimum(waits["latest"], waits["end"])
    real = (waits["culprit"] != NO_INDEX) & (turn - waits["start"] > m.residual_ns)
    real &= m.blocked.wait > 0  # on a GPU a wait under computing holds nothing up
    real &= waits["end"] - waits["start"] > 1  # room for both ends of an arrow
    at = np.flatnonzero(real) if not m.clocks_unaligned else np.empty(0, np.int64)
    held = np.zeros(len(at), _HELD_DTYPE)
    for name in ("record", "culprit", "start", "latest", "end", "node", "group", "op"):
        held[name] = waits[name][at]
    held["turn"], held["number"] = turn[at], at
    first = np.searchsorted(waits["record"], np.arange(len(m.records)))
    held["own"] = at - first[held["record"]]
    return held


def _waited_for_spans(held: Any) -> tuple[Ints, Ints]:
    """Return starts and ends of the "waited for" slices: first start to last end of the waits."""
    held = held[np.lexsort((held["node"], held["culprit"]))]
    change = (np.diff(held["node"]) != 0) | (np.diff(held["culprit"]) != 0)
    if not len(held):
        return held["start"], held["end"]
    first = np.concatenate(([0], np.flatnonzero(change) + 1))
    return np.minimum.reduceat(held["start"], first), np.maximum.reduceat(held["end"], first)


def _arrow_end(held: Any) -> Ints:
    """Return the end of each arrow: in the transfer after the wait, or else in the wait."""
    return np.asarray(np.where(held["turn"] < held["end"], held["turn"], held["end"] - 1))


_MESSAGE = ("send", "receive", "send_own", "receive_own", "start", "end", "number")
_MESSAGE_DTYPE = [(name, "i8") for name in _MESSAGE]


def _match_messages(matched: MatchedCommunication) -> Any:
    """Return the messages whose send and receive are both recorded.

    send, receive: Records. send_own, receive_own: Indices of the launches among those of their
    record. start, end: Start of the send and end of the receive, in ns. number: Id of the arrow.
    """
    launches = matched.launches
    by_op = {op: np.flatnonzero(launches["op"] == op) for op in (Op.SEND, Op.RECV)}
    _, sent, received = np.intersect1d(
        launches["node"][by_op[Op.SEND]], launches["node"][by_op[Op.RECV]], return_indices=True
    )
    sent, received = by_op[Op.SEND][sent], by_op[Op.RECV][received]
    start, end = launches["start"], launches["end"]
    good = (end[sent] > start[sent]) & (end[received] > start[received])
    good &= end[received] - 1 > start[sent]
    sent, received = sent[good], received[good]
    result = np.zeros(len(sent), _MESSAGE_DTYPE)
    for side, rows in (("send", sent), ("receive", received)):
        record = launches["record"][rows]
        result[side] = record
        result[f"{side}_own"] = rows - np.searchsorted(launches["record"], record)
    result["start"], result["end"] = start[sent], end[received]
    result["number"] = len(matched.waits) + np.arange(len(sent))  # after those of waits
    return result


def _nesting_keys(rows: Any) -> Ints:
    """Return a key that is equal for all slices of one rank's collective or message."""
    group, op, peer, seq = (rows[name].astype(np.int64) for name in ("group", "op", "peer", "seq"))
    return np.asarray(((group << 4 | op) << 43) ^ ((peer + 1) << 32) ^ seq, np.int64)


def _state_names(apart: bool) -> list[str]:
    return [
        slice_label("wait or transfer", name)
        if apart and name == "transfer"
        else slice_label(STATE_NAMES[name], name)
        for name in STATES
    ]


def _sample_event(line: dict[str, Any] | None) -> str:
    """Return the name and arguments of a stack sample: the line at which the script was."""
    if line is None:
        return '"name":"an unknown line"'
    file = str(line.get("file")).rpartition("/")[2]
    args = {name: line.get(name) for name in ("code", "function", "inside", "file")}
    name = f"{file}:{line.get('line')}"
    return f'"name":{json.dumps(name)},"args":{json.dumps(args)}'
