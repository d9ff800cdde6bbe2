"""What the timeline shows of one rank: a process whose threads are its states, steps, phases,
communication and whom it kept waiting, as events of Chrome's trace format.

Slices of one thread never partly overlap: what is in flight at the same time gets threads beside
each other, and what a rank did for a collective (wait, transfer) lies inside it.
"""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from ...analyze.figures.losses import collective_name
from ...analyze.figures.measured_window import MeasuredWindow
from ...analyze.records.match_collectives import NO_INDEX, MatchedCommunication, split_by_record
from ...analyze.records.read_record import Record
from ...analyze.records.state_timeline import STATES, Ints, Window, blocking_states
from ...record.ring.states import Op, State
from .chrome_trace import Process, Put, labelled

PHASES = {
    int(state): state.name.lower()
    for state in (State.FORWARD, State.LOSS, State.BACKWARD, State.OPTIMIZER)
}
PHASES |= {int(s): s.name.lower() for s in (State.INPUT, State.VALIDATION, State.CHECKPOINT)}
LARGE = 1 << 16  # bytes: below that a rate says nothing
NAMED = 16  # ranks that are named one by one


class Tracks:
    """All that can be drawn of a window, rank by rank."""

    def __init__(self, m: MeasuredWindow, samples: bool) -> None:
        self.m, self.samples = m, samples
        self.dropped = 0  # slices that too many others overlap
        count = len(m.records)
        self.launches = split_by_record(m.matched.launches, count)
        self.waits = split_by_record(m.matched.waits, count)
        self.rates = by_record_of(_rates(m.matched.launches), self.launches)
        self.held = _held(m)
        self.messages = _messages(m.matched)

    def count_until(self, times: Ints) -> tuple[Ints, Ints]:
        """How many events begin before each time, and how many are over by then: between two
        times there are at most the first at the later less the second at the earlier one."""
        begun, over = np.zeros((2, len(times)), np.int64)
        arrows = [(rows["start"], rows["end"]) for rows in (self.held, self.messages)]
        spans = (span for i in range(len(self.m.records)) for span in self._spans(i))
        for start, end in (*arrows, *arrows, _first_to_last(self.held), *spans):
            begun += np.searchsorted(np.sort(start), times, "left")
            over += np.searchsorted(np.sort(end), times, "left")
        return begun, over

    def _spans(self, i: int) -> Iterable[tuple[Ints, Ints]]:
        """Starts and ends of all slices of one rank, without those in which others wait for it."""
        record, line, waits = self.m.records[i], self.m.timelines[i], self.waits[i]
        yield line.edges[:-1], line.edges[1:]
        kinds = (*PHASES, State.STEP, State.STILL, *_flying(record))
        kinds += (State.KERNEL,) * record.on_gpu + (State.SAMPLE,) * self.samples
        rows = record.events_in(*kinds)
        yield rows["start"], rows["end"]
        turn = np.clip(waits["latest"], waits["start"], waits["end"])
        if self.m.clocks_unaligned:
            turn = waits["start"]
        for start, end in ((waits["start"], turn), (turn, waits["end"])):
            yield start[end > start], end[end > start]

    def narrow(self, within: Window) -> None:
        """Leave out arrows that are not whole in ``within``, once for all ranks."""
        over = (self.held["turn"] > within.start + 1) & (self.held["turn"] < within.end)
        self.held = self.held[over]
        start, end = self.messages["start"], self.messages["end"]
        self.messages = self.messages[(start >= within.start) & (end <= within.end)]

    def write(self, i: int, within: Window, order: int, put: Put) -> None:
        """One rank's events in ``within``, to which arrows are narrowed; order: its place among
        all."""
        record = self.m.records[i]
        process = Process(record.rank, within, put)
        process.named(f"rank {record.rank} ({record.host})", record.host, order)
        line = self.m.timelines[i]
        names = _state_names(self.m.clocks_unaligned)
        process.slices(
            *("states", line.edges[:-1], line.edges[1:]),
            lambda at: [names[label] for label in line.label[at].tolist()],
        )
        steps = record.events_in(State.STEP)
        process.slices(
            *("steps", steps["start"], steps["end"]),
            lambda at: [labelled(f"step {number}") for number in steps["step"][at].tolist()],
            lambda at: [f'"samples":{n}' for n in steps["amount"][at].tolist()],
            key=np.arange(len(steps)),
        )
        self._phases(record, process)
        still = record.events_in(State.STILL)
        process.slices(
            *("stood still", still["start"], still["end"]),
            lambda at: [labelled("stood still", "other")] * len(at),
        )
        tids = self._exchanges(i, process)
        self._waited_for(i, process)
        self._arrows_in(i, process, tids)
        if self.samples:
            self._lines(record, process)
        self.dropped += process.dropped

    def _phases(self, record: Record, process: Process) -> None:
        rows = record.events_in(*PHASES)
        names = {number: labelled(name) for number, name in PHASES.items()}
        process.slices(
            *("phases", rows["start"], rows["end"]),
            lambda at: [names[state] for state in rows["state"][at].tolist()],
            lambda at: [f'"step":{step}' for step in rows["step"][at].tolist()],
            key=np.zeros(len(rows), np.int64),
        )
        if record.on_gpu:
            kernels = record.events_in(State.KERNEL)
            process.slices(
                *("kernels", kernels["start"], kernels["end"]),
                lambda at: [labelled("kernels", "useful")] * len(at),
                lambda at: [f'"count":{n}' for n in kernels["amount"][at].tolist()],
                key=np.arange(len(kernels)),
            )

    def _exchanges(self, i: int, process: Process) -> dict[str, Ints]:
        """What was in flight, and in it where the rank stood still. Returns the threads of each
        launch, and of each wait and its transfer (0 outside of the window)."""
        record, waits = self.m.records[i], self.waits[i]
        flying, standing = (
            record.events_in(*_flying(record)),
            record.events_in(*blocking_states(record)),
        )
        turn = np.clip(waits["latest"], waits["start"], waits["end"])
        if self.m.clocks_unaligned:
            turn = waits["start"]
        real, after = np.flatnonzero(turn > waits["start"]), np.flatnonzero(waits["end"] > turn)
        rows = np.concatenate([flying, standing[real], standing[after]])
        start = np.concatenate([flying["start"], waits["start"][real], turn[after]])
        end = np.concatenate([flying["end"], turn[real], waits["end"][after]])
        kind = np.repeat([0, 1, 2], [len(flying), len(real), len(after)])
        kind[len(flying) + len(real) :][waits["call"][after]] = 3
        whom = np.full(len(rows), NO_INDEX)
        whom[len(flying) : len(flying) + len(real)] = waits["culprit"][real]
        rate = np.full(len(rows), np.nan)
        rate[: len(flying)][flying["seq"] > 0] = self.rates[i]
        labels = Labels(record, [r.rank for r in self.m.records], self.m.clocks_unaligned)
        tids = process.slices(
            *("communication", start, end),
            lambda at: labels.names(rows[at], kind[at]),
            lambda at: labels.args(rows[at], kind[at], whom[at], rate[at]),
            key=_keys(rows),
        )
        found = {name: np.zeros(len(waits), np.int64) for name in ("wait", "transfer")}
        found["wait"][real] = tids[len(flying) : len(flying) + len(real)]
        found["transfer"][after] = tids[len(flying) + len(real) :]
        return {"launch": tids[: len(flying)][flying["seq"] > 0], **found}

    def _waited_for(self, i: int, process: Process) -> None:
        """From when the first other stood still for this rank, until it came. The arrows to
        those it held up begin there."""
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

        def args(at: Ints) -> list[str]:
            return [
                f'"by":"{_ranks([ranks[r] for r in np.unique(waiting[n]).tolist()])}",'
                f'"collective":"{collective_name(op[n])}","group":{groups[group[n]]}'
                for n in at.tolist()
            ]

        what = labelled("waited for")
        tids = process.slices(
            *("waited for", start, end), lambda at: [what] * len(at), args, np.arange(len(first))
        )
        at = _arrow_end(held)
        which = np.repeat(tids, np.diff(np.append(first, len(held))))
        process.arrows("s", "held up", which, at - 1, held["number"])

    def _arrows_in(self, i: int, process: Process, tids: dict[str, Ints]) -> None:
        """The ends of arrows to this rank's waits, and both sides of its messages."""
        held = self.held[self.held["record"] == i]
        own = held["own"]
        which = np.where(held["turn"] < held["end"], tids["transfer"][own], tids["wait"][own])
        process.arrows("f", "held up", which, _arrow_end(held), held["number"])
        for mark, side in (("s", "send"), ("f", "receive")):
            mine = self.messages[self.messages[side] == i]
            at = mine["start"] if mark == "s" else mine["end"] - 1
            process.arrows(mark, "message", tids["launch"][mine[f"{side}_own"]], at, mine["number"])

    def _lines(self, record: Record, process: Process) -> None:
        rows = record.events_in(State.SAMPLE)
        rows = rows[(rows["start"] >= process.within.start) & (rows["start"] < process.within.end)]
        if len(rows):
            lines = {number: _line(record.lines.get(number)) for number in set(rows["amount"])}
            process.instants("script", rows["start"], [lines[number] for number in rows["amount"]])


class Labels:
    """Names and arguments of what a rank exchanged, each text made once.

    kinds: 0 in flight, 1 wait, 2 transfer, 3 the call that launches.
    """

    def __init__(self, record: Record, ranks: list[int], apart: bool) -> None:
        groups = record.meta.get("groups", {})
        self.groups = {int(n): json.dumps(str(group["name"])) for n, group in groups.items()}
        self.ranks = ranks
        standing = "wait or transfer" if apart else "transfer"
        self.kinds = (
            "",
            labelled("wait"),
            labelled(standing, "transfer"),
            labelled("launch", "transfer"),
        )
        self.known: dict[tuple[int, int], str] = {}

    def names(self, rows: Any, kinds: Ints) -> list[str]:
        return [
            self.kinds[kind] or self._in_flight(op, peer)
            for op, peer, kind in zip(
                *(rows[name].tolist() for name in ("op", "peer")), kinds.tolist(), strict=True
            )
        ]

    def _in_flight(self, op: int, peer: int) -> str:
        if (op, peer) not in self.known:
            ways: dict[int, str] = {Op.SEND: f" to {peer}", Op.RECV: f" from {peer}"}
            self.known[op, peer] = labelled(collective_name(op) + ways.get(op, ""))
        return self.known[op, peer]

    def args(self, rows: Any, kinds: Ints, whom: Ints, rates: Any) -> list[str]:
        names = ("op", "group", "seq", "step", "amount")
        columns = zip(
            *(rows[name].tolist() for name in names),
            *(kinds.tolist(), whom.tolist(), rates.tolist()),
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


def by_record_of(values: Any, rows: list[Any]) -> list[Any]:
    """Values of rows, apart as the rows are."""
    return np.split(values, np.cumsum([len(part) for part in rows])[:-1])


def _flying(record: Record) -> tuple[State, ...]:
    return (State.COMMUNICATION_KERNEL,) if record.on_gpu else (State.COLLECTIVE,)


def _rates(launches: Any) -> Any:
    """Bytes per nanosecond of each launch's collective, from the last start to the last end."""
    rate = np.full(len(launches), np.nan)
    if not len(launches):
        return rate
    node = launches["node"]
    last, end = np.full((2, int(node.max()) + 1), np.iinfo(np.int64).min)
    np.maximum.at(last, node, launches["start"])
    np.maximum.at(end, node, launches["end"])
    time = (end - last)[node]
    known = launches["whole"] & (launches["amount"] >= LARGE) & (time > 0)
    rate[known] = launches["amount"][known] / time[known]
    return rate


_HELD = [("record", "i8"), ("culprit", "i8"), ("start", "i8"), ("turn", "i8"), ("latest", "i8")]
_HELD += [("end", "i8"), ("node", "i8"), ("group", "i8"), ("op", "i8"), ("own", "i8")]
_HELD += [("number", "i8")]


def _held(m: MeasuredWindow) -> Any:
    """The waits that were for somebody, and longer than the clocks' residual. own: the wait's
    number among those of its record."""
    waits = m.matched.waits
    turn = np.minimum(waits["latest"], waits["end"])
    real = (waits["culprit"] != NO_INDEX) & (turn - waits["start"] > m.residual_ns)
    real &= waits["end"] - waits["start"] > 1  # room for both ends of an arrow
    at = np.flatnonzero(real) if not m.clocks_unaligned else np.empty(0, np.int64)
    held = np.zeros(len(at), _HELD)
    for name in ("record", "culprit", "start", "latest", "end", "node", "group", "op"):
        held[name] = waits[name][at]
    held["turn"], held["number"] = turn[at], at
    first = np.searchsorted(waits["record"], np.arange(len(m.records)))
    held["own"] = at - first[held["record"]]
    return held


def _first_to_last(held: Any) -> tuple[Ints, Ints]:
    """For each that others stood still for: from the first one's start to the last one's end."""
    held = held[np.lexsort((held["node"], held["culprit"]))]
    change = (np.diff(held["node"]) != 0) | (np.diff(held["culprit"]) != 0)
    if not len(held):
        return held["start"], held["end"]
    first = np.concatenate(([0], np.flatnonzero(change) + 1))
    return np.minimum.reduceat(held["start"], first), np.maximum.reduceat(held["end"], first)


def _arrow_end(held: Any) -> Ints:
    """When the wait was over, inside the transfer after it, or else inside the wait itself."""
    return np.asarray(np.where(held["turn"] < held["end"], held["turn"], held["end"] - 1))


_MESSAGE = [("send", "i8"), ("receive", "i8"), ("send_own", "i8"), ("receive_own", "i8")]
_MESSAGE += [("start", "i8"), ("end", "i8"), ("number", "i8")]


def _messages(matched: MatchedCommunication) -> Any:
    """Both sides of each message: records, the launches' numbers among theirs, and from the
    send's start to the receive's end."""
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
    result = np.zeros(len(sent), _MESSAGE)
    for side, rows in (("send", sent), ("receive", received)):
        record = launches["record"][rows]
        result[side] = record
        result[f"{side}_own"] = rows - np.searchsorted(launches["record"], record)
    result["start"], result["end"] = start[sent], end[received]
    result["number"] = len(matched.waits) + np.arange(len(sent))  # after those of waits
    return result


def _keys(rows: Any) -> Ints:
    """The same for all that a rank did for one collective or message."""
    group, op, peer, seq = (rows[name].astype(np.int64) for name in ("group", "op", "peer", "seq"))
    return np.asarray(((group << 4 | op) << 43) ^ ((peer + 1) << 32) ^ seq, np.int64)


def _state_names(apart: bool) -> list[str]:
    return [
        labelled("wait or transfer", name) if apart and name == "transfer" else labelled(name)
        for name in STATES
    ]


def _ranks(ranks: list[int]) -> str:
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"rank {', '.join(map(str, ranks[:NAMED]))}{more}"


def _line(line: dict[str, Any] | None) -> str:
    """An instant's name and arguments: where the script was."""
    if line is None:
        return '"name":"an unknown line"'
    file = str(line.get("file")).rpartition("/")[2]
    args = {name: line.get(name) for name in ("code", "function", "inside", "file")}
    name = f"{file}:{line.get('line')}"
    return f'"name":{json.dumps(name)},"args":{json.dumps(args)}'
