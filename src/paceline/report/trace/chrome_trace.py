"""Writer of the Chrome trace format (JSON), which ui.perfetto.dev and chrome://tracing read.

A trace has processes and their threads; a thread has slices, instants and the ends of flow arrows.
Every event is one line of text.
"""

import heapq
import json
from collections.abc import Callable

import numpy as np

from ...analyze.records.state_timeline import Ints, Window

# chrome://tracing accepts only these colour names; Perfetto chooses a colour by the slice's name.
COLOURS = {
    "useful": "thread_state_running",  # green
    "input": "thread_state_iowait",  # orange
    "checkpoint": "background_memory_dump",  # cyan
    "validation": "rail_response",  # blue
    "starved": "thread_state_uninterruptible",  # dark red
    "other": "grey",
    "bubble": "yellow",
    "wait": "terrible",  # red
    "transfer": "detailed_memory_dump",  # magenta
    "forward": "cq_build_passed",  # light green
    "loss": "thread_state_sleeping",  # nearly white
    "backward": "rail_load",  # dark green
    "optimizer": "thread_state_unknown",  # brown
    "waited for": "bad",  # ochre
}

Put = Callable[[list[str]], None]
MAX_LANES = 256  # threads with the same name, for slices that overlap
NO_LANE = -1  # marks a slice that is dropped, because more than MAX_LANES slices overlap


class Process:
    """The process of one rank in the trace: numbers its threads and writes their events.

    Attributes:
        pid: Process id in the trace, the global rank.
        within: The window that is drawn: slices are cut at its ends, times count from its start.
        put: Writes a list of lines, one event each.
        threads: Number of threads created so far.
        dropped: Number of slices left out because too many others overlap.
    """

    def __init__(self, pid: int, within: Window, put: Put) -> None:
        self.pid, self.within, self.put = pid, within, put
        self.threads = 0
        self.dropped = 0

    def write_name(self, name: str, label: str, order: int) -> None:
        """Write the process's name, its label, and its place among the processes."""
        facts: dict[str, dict[str, object]] = {
            "process_name": {"name": name},
            "process_labels": {"labels": label},
            "process_sort_index": {"sort_index": order},
        }
        self.put([_metadata_event(self.pid, 0, what, args) for what, args in facts.items()])

    def thread(self, name: str) -> int:
        """Create a thread and return its id.

        The id differs from the process id, because Perfetto calls that one the main thread.
        """
        self.threads += 1
        tid = self.pid + self.threads
        facts: dict[str, dict[str, object]] = {"thread_name": {"name": name}}
        facts["thread_sort_index"] = {"sort_index": self.threads}
        self.put([_metadata_event(self.pid, tid, what, args) for what, args in facts.items()])
        return tid

    def slices(
        self,
        name: str,
        start: Ints,
        end: Ints,
        what: Callable[[Ints], list[str]],
        args: Callable[[Ints], list[str]] | None = None,
        key: Ints | None = None,
    ) -> Ints:
        """Write slices to threads called ``name`` and return the thread id of each row.

        name: Name of the thread; further threads for slices that overlap get a number.
        start, end: Times in ns, one per row.
        what: Returns the name and colour of the given rows, as JSON without braces.
        args: Returns the arguments of the given rows, as JSON without braces.
        key: Given if slices may overlap; slices with the same key may be nested in one thread.
        The id is 0 for rows that are not drawn.
        """
        tids = np.zeros(len(start), np.int64)
        visible = (end > self.within.start) & (start < self.within.end)
        visible |= (start == self.within.start) & (end == start)
        rows = np.flatnonzero(visible)
        if not len(rows):
            return tids
        rows = rows[np.lexsort((rows, -end[rows], start[rows]))]
        visible_start = np.maximum(start[rows], self.within.start)
        visible_end = np.minimum(end[rows], self.within.end)
        lane = (
            lanes(visible_start, visible_end, key[rows])
            if key is not None
            else np.zeros(len(rows), np.int64)
        )
        fits = lane != NO_LANE
        self.dropped += int(np.count_nonzero(~fits))
        rows, visible_start, visible_end, lane = (
            values[fits] for values in (rows, visible_start, visible_end, lane)
        )
        thread_ids = [
            self.thread(name if n == 0 else f"{name} ({n + 1})") for n in range(int(lane.max()) + 1)
        ]
        tids[rows] = np.array(thread_ids)[lane]
        duration = end[rows] - start[rows]
        more = args(rows) if args is not None else [""] * len(rows)
        for n in np.flatnonzero(duration > visible_end - visible_start).tolist():
            more[n] += f'{"," if more[n] else ""}"cut_from_ms":{duration[n] / 1e6}'
        columns = zip(
            *(tids[rows].tolist(), microseconds(visible_start - self.within.start)),
            *(microseconds(visible_end - visible_start), what(rows), more),
            strict=True,
        )
        prefix = f'{{"ph":"X","pid":{self.pid},"tid":'
        self.put(
            [
                f'{prefix}{tid},"ts":{ts},"dur":{dur},{text}'
                + (f',"args":{{{arg}}}}}' if arg else "}")
                for tid, ts, dur, text, arg in columns
            ]
        )
        return tids

    def arrows(self, mark: str, name: str, tids: Ints, times: Ints, numbers: Ints) -> None:
        """Write one end of each flow arrow; rows whose thread id is 0 have none.

        mark: "s" for the start of the arrows, "f" for their end.
        times: Times of the ends in ns. numbers: Ids that connect both ends of an arrow.
        """
        drawn = tids > 0
        tids, times, numbers = tids[drawn], times[drawn], numbers[drawn]
        suffix = ',"bp":"e"}' if mark == "f" else "}"
        prefix = f'{{"ph":"{mark}","cat":"{name}","name":"{name}","pid":{self.pid}'
        columns = zip(
            *(tids.tolist(), microseconds(times - self.within.start), numbers.tolist()), strict=True
        )
        self.put(
            [f'{prefix},"tid":{tid},"ts":{ts},"id":{number}{suffix}' for tid, ts, number in columns]
        )

    def instants(self, name: str, times: Ints, what: list[str]) -> None:
        """Write instant events to a new thread called ``name``."""
        prefix = f'{{"ph":"i","s":"t","pid":{self.pid},"tid":{self.thread(name)}'
        columns = zip(microseconds(times - self.within.start), what, strict=True)
        self.put([f'{prefix},"ts":{ts},{text}}}' for ts, text in columns])


def slice_label(name: str, state: str | None = None) -> str:
    """Return the name and the colour of a slice, as JSON without braces."""
    colour = COLOURS.get(state or name)
    return f'"name":{json.dumps(name)}' + (f',"cname":"{colour}"' if colour else "")


def lanes(start: Ints, end: Ints, key: Ints) -> Ints:
    """Return the lane of each slice, or NO_LANE where more than MAX_LANES slices overlap.

    Slices in one lane are disjoint, or nested if they have the same key. The slices must be sorted
    by their starts, and the longer ones first where starts are equal.
    """
    result, lane_count = [], 0
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # (end, lane)
    latest_end: dict[int, int] = {}  # by key, over all its lanes
    open_lanes: dict[int, list[tuple[int, list[int]]]] = {}  # by key: lane, ends of nested slices
    for s, e, k in zip(start.tolist(), end.tolist(), key.tolist(), strict=True):
        while busy and busy[0][0] <= s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        full = not free and lane_count == MAX_LANES
        if full and e > latest_end.get(k, 0):  # no lane is free, and no slice can contain this one
            result.append(NO_LANE)
            continue
        key_lanes = [entry for entry in open_lanes.get(k, ()) if entry[1][0] > s]
        for lane, ends in key_lanes:
            while ends[-1] <= s:
                ends.pop()
            if e <= ends[-1]:
                ends.append(e)
                result.append(lane)
                break
        else:
            if full:
                result.append(NO_LANE)
                open_lanes[k] = key_lanes
                continue
            if not free:
                heapq.heappush(free, lane_count)
                lane_count += 1
            lane = heapq.heappop(free)
            heapq.heappush(busy, (e, lane))
            latest_end[k] = max(e, latest_end.get(k, 0))
            key_lanes.append((lane, [e]))
            result.append(lane)
        open_lanes[k] = key_lanes
    return np.array(result, np.int64)


def microseconds(times: Ints) -> list[str]:
    """Convert nanoseconds to decimal microseconds.

    Each number has the fewest digits from which a reader that multiplies by 1000 and truncates
    gets the same nanosecond.
    """
    value = times / 1000
    short = (value * 1000).astype(np.int64) < times
    value[short] = np.nextafter(value[short], np.inf)
    return list(map(repr, value.tolist()))


def _metadata_event(pid: int, tid: int, what: str, args: dict[str, object]) -> str:
    return json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args})
