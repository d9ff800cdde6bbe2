"""Chrome's trace format (JSON), as ui.perfetto.dev and chrome://tracing read it: processes, their
threads, and in these slices, instants and the ends of arrows, one line of text an event."""

import heapq
import json
from collections.abc import Callable

import numpy as np

from ...analyze.records.state_timeline import Ints, Window

# Colours that chrome://tracing has names for; Perfetto chooses its own, by the slice's name.
COLOURS = {
    "useful": "thread_state_running",  # green
    "input": "thread_state_iowait",  # orange
    "checkpoint": "background_memory_dump",  # cyan
    "validation": "rail_response",  # blue
    "other": "grey",
    "wait": "terrible",  # red
    "transfer": "detailed_memory_dump",  # magenta
    "forward": "cq_build_passed",  # light green
    "loss": "thread_state_sleeping",  # nearly white
    "backward": "rail_load",  # dark green
    "optimizer": "thread_state_unknown",  # brown
    "waited for": "bad",  # ochre
}

Put = Callable[[list[str]], None]
MAX_LANES = 256  # threads beside each other for what overlaps
NO_LANE = -1


class Process:
    """A rank's process in the trace: gives numbers to its threads, and writes their events.

    ``within``: what is drawn; slices are cut there, and times count from its start.
    """

    def __init__(self, pid: int, within: Window, put: Put) -> None:
        self.pid, self.within, self.put = pid, within, put
        self.threads = 0
        self.dropped = 0  # slices that found no thread

    def named(self, name: str, label: str, order: int) -> None:
        facts: dict[str, dict[str, object]] = {
            "process_name": {"name": name},
            "process_labels": {"labels": label},
            "process_sort_index": {"sort_index": order},
        }
        self.put([_about(self.pid, 0, what, args) for what, args in facts.items()])

    def thread(self, name: str) -> int:
        """A new thread's number: not that of its process, which Perfetto calls the main thread."""
        self.threads += 1
        tid = self.pid + self.threads
        facts: dict[str, dict[str, object]] = {"thread_name": {"name": name}}
        facts["thread_sort_index"] = {"sort_index": self.threads}
        self.put([_about(self.pid, tid, what, args) for what, args in facts.items()])
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
        """Slices in threads of this name. what, args: names and colours, and the arguments, of
        those rows, as JSON without braces. key: of slices that may overlap, and may lie inside
        each other where it is the same. Returns the thread of each row, 0 where it is not drawn."""
        tids = np.zeros(len(start), np.int64)
        seen = (end > self.within.start) & (start < self.within.end)
        seen |= (start == self.within.start) & (end == start)
        at = np.flatnonzero(seen)
        if not len(at):
            return tids
        at = at[np.lexsort((at, -end[at], start[at]))]
        began = np.maximum(start[at], self.within.start)
        ended = np.minimum(end[at], self.within.end)
        lane = lanes(began, ended, key[at]) if key is not None else np.zeros(len(at), np.int64)
        fits = lane != NO_LANE
        self.dropped += int(np.count_nonzero(~fits))
        at, began, ended, lane = (values[fits] for values in (at, began, ended, lane))
        numbers = [
            self.thread(name if n == 0 else f"{name} ({n + 1})") for n in range(int(lane.max()) + 1)
        ]
        tids[at] = np.array(numbers)[lane]
        whole = end[at] - start[at]
        more = args(at) if args is not None else [""] * len(at)
        for n in np.flatnonzero(whole > ended - began).tolist():
            more[n] += f'{"," if more[n] else ""}"cut_from_ms":{whole[n] / 1e6}'
        columns = zip(
            *(tids[at].tolist(), microseconds(began - self.within.start)),
            *(microseconds(ended - began), what(at), more),
            strict=True,
        )
        head = f'{{"ph":"X","pid":{self.pid},"tid":'
        self.put(
            [
                f'{head}{tid},"ts":{ts},"dur":{dur},{text}'
                + (f',"args":{{{arg}}}}}' if arg else "}")
                for tid, ts, dur, text, arg in columns
            ]
        )
        return tids

    def arrows(self, mark: str, name: str, tids: Ints, times: Ints, numbers: Ints) -> None:
        """One side of each arrow: "s" where it starts, "f" where it ends; none where the thread
        is 0."""
        drawn = tids > 0
        tids, times, numbers = tids[drawn], times[drawn], numbers[drawn]
        ending = ',"bp":"e"}' if mark == "f" else "}"
        head = f'{{"ph":"{mark}","cat":"{name}","name":"{name}","pid":{self.pid}'
        columns = zip(
            *(tids.tolist(), microseconds(times - self.within.start), numbers.tolist()), strict=True
        )
        self.put(
            [f'{head},"tid":{tid},"ts":{ts},"id":{number}{ending}' for tid, ts, number in columns]
        )

    def instants(self, name: str, times: Ints, what: list[str]) -> None:
        head = f'{{"ph":"i","s":"t","pid":{self.pid},"tid":{self.thread(name)}'
        columns = zip(microseconds(times - self.within.start), what, strict=True)
        self.put([f'{head},"ts":{ts},{text}}}' for ts, text in columns])


def labelled(name: str, state: str | None = None) -> str:
    """A slice's name and colour."""
    colour = COLOURS.get(state or name)
    return f'"name":{json.dumps(name)}' + (f',"cname":"{colour}"' if colour else "")


def lanes(start: Ints, end: Ints, key: Ints) -> Ints:
    """A lane for each slice, so that those of one lane lie apart, or inside one another where
    they have the same key; NO_LANE where more than MAX_LANES overlap. They must be in the order of
    their starts, the longer ones first."""
    result, made = [], 0
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # until when, and the lane
    widest: dict[int, int] = {}  # of a key: until when its lanes reach at most
    owned: dict[int, list[tuple[int, list[int]]]] = {}  # of a key: lanes, and the ends in them
    for s, e, k in zip(start.tolist(), end.tolist(), key.tolist(), strict=True):
        while busy and busy[0][0] <= s:
            heapq.heappush(free, heapq.heappop(busy)[1])
        full = not free and made == MAX_LANES
        if full and e > widest.get(k, 0):  # no lane is free, and it lies inside of none
            result.append(NO_LANE)
            continue
        mine = [both for both in owned.get(k, ()) if both[1][0] > s]
        for lane, open_until in mine:
            while open_until[-1] <= s:
                open_until.pop()
            if e <= open_until[-1]:
                open_until.append(e)
                result.append(lane)
                break
        else:
            if full:
                result.append(NO_LANE)
                owned[k] = mine
                continue
            if not free:
                heapq.heappush(free, made)
                made += 1
            lane = heapq.heappop(free)
            heapq.heappush(busy, (e, lane))
            widest[k] = max(e, widest.get(k, 0))
            mine.append((lane, [e]))
            result.append(lane)
        owned[k] = mine
    return np.array(result, np.int64)


def microseconds(times: Ints) -> list[str]:
    """Nanoseconds as microseconds in the fewest digits that give the same nanosecond to readers
    who multiply by 1000 and cut off what is left."""
    value = times / 1000
    short = (value * 1000).astype(np.int64) < times
    value[short] = np.nextafter(value[short], np.inf)
    return list(map(repr, value.tolist()))


def _about(pid: int, tid: int, what: str, args: dict[str, object]) -> str:
    return json.dumps({"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args})
