"""``paceline report --timeline FILE``: the run as a trace that ui.perfetto.dev and chrome://tracing
open. Never sampled: where a window has more events than viewers bear, the file has fewer steps,
and what is printed says so."""

import gzip
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from ...analyze.figures.measured_window import MeasuredWindow
from ...analyze.figures.report import Report, RunAnalysis
from ...analyze.figures.steps import find_steps
from ...analyze.records.state_timeline import Ints, Window
from ...record.ring.states import State
from ...security.error_reason import reason_of
from ...security.outputs import open_output, output_target
from ...version import __version__
from ..terminal.top import numbered
from .chrome_trace import MAX_LANES
from .tracks import Tracks

MOST = 1_000_000  # events in a file: 140 MB, which Perfetto opens in 12 s
MOST_SAMPLES = 20_000
_PARTS = 1000  # of a window without steps, of which as many are drawn as fit


@dataclass(frozen=True)
class Part:
    """What is drawn of the window, in words, and of how much if that is not all."""

    within: Window
    words: str
    of: str | None = None


def write(examined: RunAnalysis, path: Path, steps: tuple[int, int] | None = None) -> str:
    """Write the run's timeline, compressed if the name ends with .gz. Returns what to tell.

    steps: only those from the first number up to the second. Raises ValueError where there is no
    window, or where the file can't be written; then it is as it was before.
    """
    m, report = examined.measured, examined.report
    if m is None:
        raise ValueError(
            f"{report.name} has fewer than two optimizer steps of every rank: no timeline. "
            "HINT: paceline report without --timeline says what is there"
        )
    samples = sum(record.count(State.SAMPLE) for record in m.records)
    tracks = Tracks(m, samples <= MOST_SAMPLES)
    part = chosen(m, tracks, report, steps)
    tracks.narrow(part.within)
    left_out = _left_out(report, m, samples)
    with _whole_or_not_at_all(path) as file:
        events = _written(file, tracks, part, report, left_out)
    return _told(path, part, len(m.records), events, left_out)


def chosen(
    m: MeasuredWindow, tracks: Tracks, report: Report, steps: tuple[int, int] | None
) -> Part:
    """The whole steps around the typical one that fit, all of the window if it does."""
    found = find_steps(m)
    if found is None or report.step_times is None:
        if steps is not None:
            raise ValueError(f"{report.name}: no step is whole on all ranks. HINT: no --steps")
        return _by_time(m, tracks)
    first, last = found.first, found.first + len(found) - 1
    edges = found.bounds.max(axis=0)
    if steps is None:
        edges = edges.copy()
        edges[0], edges[-1] = m.within.start, m.within.end  # what follows the last step is with it
    a, b = first, last
    if steps is not None:
        a, b = max(steps[0], first), min(steps[1] - 1, last)
    if steps is not None and a > b:
        raise ValueError(
            f"{report.name}: steps {steps[0]}:{steps[1]} are not there. "
            f"HINT: two numbers between {first} and {last + 1}"
        )
    typical = min(max(report.step_times.typical, a), b)
    i, j = _fitting(*tracks.count_until(edges), typical - first, (a - first, b - first + 1))
    words = _steps(first + i, first + j - 1)
    within = Window(int(edges[i]), int(edges[j]))
    all_of_it = (first + i, first + j - 1) == (a, b)
    return Part(within, words, None if all_of_it else f"{a} to {b}")


def _by_time(m: MeasuredWindow, tracks: Tracks) -> Part:
    """Where no step is whole on all ranks: the middle of the window, as much as fits."""
    edges = np.linspace(m.within.start, m.within.end, _PARTS + 1).astype(np.int64)
    i, j = _fitting(*tracks.count_until(edges), _PARTS // 2, (0, _PARTS))
    seconds = (edges[j] - edges[i]) / 1e9
    of = None if (i, j) == (0, _PARTS) else f"{m.within.length / 1e9:.3g} s"
    return Part(Window(int(edges[i]), int(edges[j])), f"{seconds:.3g} s", of)


def _fitting(begun: Ints, over: Ints, middle: int, allowed: tuple[int, int]) -> tuple[int, int]:
    """The longest range around ``middle`` with at most MOST events; that one at least."""
    i, j = middle, middle + 1
    while True:
        wider = [(i, j + 1)] * (j < allowed[1]) + [(i - 1, j)] * (i > allowed[0])
        fits = [(a, b) for a, b in wider if begun[b] - over[a] <= MOST]
        if not fits:
            return i, j
        # The side that is shorter grows first.
        i, j = min(fits, key=lambda both: max(middle - both[0], both[1] - 1 - middle))


def _left_out(report: Report, m: MeasuredWindow, samples: int) -> list[str]:
    left_out = []
    if report.missing_ranks:
        left_out.append(f"rank {numbered(report.missing_ranks)}: no record")
    if samples > MOST_SAMPLES:
        left_out.append(f"the script's lines ({samples:,} samples of them)")
    if m.clocks_unaligned:
        left_out.append("arrows to who waited: the clocks of some hosts could not be aligned")
    if any(record.on_gpu for record in m.records):
        left_out.append("the host's calls of collectives: their kernels are there")
    return left_out


def _written(
    file: IO[bytes], tracks: Tracks, part: Part, report: Report, left_out: list[str]
) -> int:
    """Write it all; returns the number of events, without the names of ranks and threads."""
    events, comma = 0, b""

    def put(lines: list[str]) -> None:
        nonlocal events, comma
        if lines:
            events += len(lines) * (not lines[0].startswith('{"ph": "M"'))
            file.write(comma + ",\n".join(lines).encode("ascii"))
            comma = b",\n"

    records = tracks.m.records
    hosts = list(dict.fromkeys(record.host for record in records))
    order = sorted(
        range(len(records)), key=lambda i: (hosts.index(records[i].host), records[i].rank)
    )
    file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
    for place, i in enumerate(order):
        tracks.write(i, part.within, place, put)
    if tracks.dropped:
        left_out.append(f"{tracks.dropped:,} slices that over {MAX_LANES} others overlap")
    about = {
        "command": " ".join(report.command),
        "record": report.name,
        "paceline": __version__,
        "shown": part.words,
        "of": part.of or "all that was chosen",
        "left out": "; ".join(left_out) or "nothing",
    }
    file.write(b'\n],"otherData":' + json.dumps(about).encode() + b"}\n")
    return events


@contextmanager
def _whole_or_not_at_all(path: Path) -> Iterator[Any]:
    """Open ``path`` as ``open_output`` does, compressed if its name ends with .gz."""
    if path.is_dir():
        raise ValueError(f"{path} is no file. HINT: --timeline run.json or run.json.gz")
    try:
        name = output_target(path).name
        with open_output(path) as raw:
            if name.endswith(".gz"):
                with gzip.GzipFile(name[:-3], "wb", 5, raw, mtime=0) as file:
                    yield file
            else:
                yield raw
    except OSError as error:
        raise ValueError(
            f"the timeline can't be written to {path}: {reason_of(error)}. "
            "HINT: another folder, or --steps for fewer steps"
        ) from None


def _told(path: Path, part: Part, ranks: int, events: int, left_out: list[str]) -> str:
    text = f"{path}: {part.words}"
    text += f" of {part.of}, the most that fit," if part.of else ""
    text += f" of {ranks} rank{'s' * (ranks != 1)}, {events:,} events"
    text += f", {path.stat().st_size / 1e6:.3g} MB." if path.is_file() else "."
    text += f" Left out: {'; '.join(left_out)}." if left_out else ""
    text += " HINT: "
    if part.of and part.words.startswith("step"):
        text += "--steps a:b chooses others; "
    return text + "open it in https://ui.perfetto.dev or chrome://tracing"


def _steps(first: int, last: int) -> str:
    return f"steps {first} to {last}" if last > first else f"step {first}"
