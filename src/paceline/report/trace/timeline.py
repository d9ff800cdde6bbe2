"""``paceline report --timeline FILE``: write a run as a trace for ui.perfetto.dev.

chrome://tracing opens the file too. Events are never sampled: if the window has more events than
viewers can open, the file contains fewer steps, and the printed line says so.
"""

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
from ...analyze.records.state_timeline import Ints, Window
from ...plurals import counted, named_ranks
from ...record.ring.states import State
from ...security.files import error_reason
from ...security.outputs import open_output, output_target
from ...version import __version__
from .chrome_trace import MAX_LANES
from .tracks import Tracks

MAX_EVENTS = 1_000_000  # in a file: 140 MB, which Perfetto opens in 12 s
MAX_SAMPLES = 20_000  # stack samples of all ranks; if there are more, none is drawn
_WINDOW_PARTS = 1000  # equal parts of a window without whole steps; as many as fit are drawn


@dataclass(frozen=True)
class Part:
    """The part of the window that is drawn.

    Attributes:
        within: The part, in ns.
        words: The part in words: steps, or seconds.
        of: All that could have been drawn, in words; None if the part is all of it.
    """

    within: Window
    words: str
    of: str | None = None


def write(examined: RunAnalysis, path: Path, steps: tuple[int, int] | None = None) -> str:
    """Write the run's timeline and return the line to print.

    path: Output file, compressed with gzip if the name ends with .gz.
    steps: Draw only the steps from the first number up to, but not including, the second.

    Raises:
        ValueError: The run has no window, or the file cannot be written. An existing file is
            then unchanged.
    """
    m, report = examined.measured, examined.report
    if m is None:
        raise ValueError(
            f"{report.name} has fewer than two optimizer steps of every rank, so it has no "
            "timeline. HINT: use paceline report without --timeline"
        )
    samples = sum(record.count(State.SAMPLE) for record in m.records)
    tracks = Tracks(m, samples <= MAX_SAMPLES)
    part = choose_part(m, tracks, report, steps)
    tracks.narrow(part.within)
    left_out = _left_out(report, m, samples)
    with _open_atomically(path) as file:
        events = _write_events(file, tracks, part, report, left_out)
    return _summary_line(path, part, len(m.records), events, left_out)


def choose_part(
    m: MeasuredWindow, tracks: Tracks, report: Report, steps: tuple[int, int] | None
) -> Part:
    """Return the part to draw: as many whole steps around the typical step as fit."""
    steps_found = m.steps
    if steps_found is None or report.step_times is None:
        if steps is not None:
            raise ValueError(f"{report.name}: no step is complete on all ranks. HINT: omit --steps")
        return _choose_by_time(m, tracks)
    first, last = steps_found.first, steps_found.first + len(steps_found) - 1
    edges = steps_found.bounds.max(axis=0)
    if steps is None:
        edges = edges.copy()
        # What follows the last step is drawn with it.
        edges[0], edges[-1] = m.within.start, m.within.end
    a, b = first, last
    if steps is not None:
        a, b = max(steps[0], first), min(steps[1] - 1, last)
    if steps is not None and a > b:
        raise ValueError(
            f"--steps {steps[0]}:{steps[1]} selects no step of {report.name}, which has the steps "
            f"{first} to {last}. HINT: --steps {first}:{last + 1} selects all of them"
        )
    typical = min(max(report.step_times.typical, a), b)
    i, j = _longest_fitting_range(
        *tracks.count_until(edges), typical - first, (a - first, b - first + 1)
    )
    in_words = _steps_in_words(first + i, first + j - 1)
    within = Window(int(edges[i]), int(edges[j]))
    is_complete = (first + i, first + j - 1) == (a, b)
    return Part(within, in_words, None if is_complete else f"{a} to {b}")


def _choose_by_time(m: MeasuredWindow, tracks: Tracks) -> Part:
    """Return as much of the middle of the window as fits, if no step is whole on all ranks."""
    edges = np.linspace(m.within.start, m.within.end, _WINDOW_PARTS + 1).astype(np.int64)
    i, j = _longest_fitting_range(
        *tracks.count_until(edges), _WINDOW_PARTS // 2, (0, _WINDOW_PARTS)
    )
    seconds = (edges[j] - edges[i]) / 1e9
    of = None if (i, j) == (0, _WINDOW_PARTS) else f"{m.within.length / 1e9:.3g} s"
    return Part(Window(int(edges[i]), int(edges[j])), f"{seconds:.3g} s", of)


def _longest_fitting_range(
    begun: Ints, ended: Ints, middle: int, allowed: tuple[int, int]
) -> tuple[int, int]:
    """Return the longest range around ``middle`` with at most MAX_EVENTS events.

    begun, ended: Events begun and ended before each edge, from ``Tracks.count_until``.
    middle: Index of the part that the range contains in any case.
    allowed: First part, and the end of the parts, that may be drawn.
    """
    i, j = middle, middle + 1
    while True:
        wider = [(i, j + 1)] * (j < allowed[1]) + [(i - 1, j)] * (i > allowed[0])
        fitting = [(a, b) for a, b in wider if begun[b] - ended[a] <= MAX_EVENTS]
        if not fitting:
            return i, j
        # The side that is shorter grows first.
        i, j = min(
            fitting, key=lambda candidate: max(middle - candidate[0], candidate[1] - 1 - middle)
        )


def _left_out(report: Report, m: MeasuredWindow, samples: int) -> list[str]:
    left_out = []
    if report.missing_ranks:
        left_out.append(f"{named_ranks(report.missing_ranks)}, which have no record")
    if samples > MAX_SAMPLES:
        left_out.append(f"the lines of the script ({counted(samples, 'stack sample')})")
    if m.clocks_unaligned:
        left_out.append(
            "arrows to waiting ranks, because the clocks of some nodes could not be aligned"
        )
    if any(record.on_gpu for record in m.records):
        left_out.append("the CPU calls of collectives, because the trace has their kernels")
    return left_out


def _write_events(
    file: IO[bytes], tracks: Tracks, part: Part, report: Report, left_out: list[str]
) -> int:
    """Write the whole trace; return the number of events, without metadata events.

    left_out: What the trace does not show, in words; slices that are dropped are added here.
    """
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
    for position, i in enumerate(order):
        tracks.write(i, part.within, position, put)
    if tracks.dropped:
        left_out.append(
            f"{counted(tracks.dropped, 'slice')} that more than {MAX_LANES} others overlap"
        )
    metadata = {
        "command": " ".join(report.command),
        "record": report.name,
        "paceline": __version__,
        "shown": part.words,
        "of": part.of or "all selected steps",
        "left out": "; ".join(left_out) or "nothing",
    }
    file.write(b'\n],"otherData":' + json.dumps(metadata).encode() + b"}\n")
    return events


@contextmanager
def _open_atomically(path: Path) -> Iterator[Any]:
    """Open ``path`` with ``open_output``, with compression if its name ends with .gz.

    The file is replaced only if all of it was written.

    Raises:
        ValueError: The path is a directory, or cannot be written.
    """
    if path.is_dir():
        raise ValueError(
            f"--timeline {path} is a directory. HINT: --timeline {path / 'run.json.gz'}"
        )
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
            f"--timeline cannot write {path}: {error_reason(error)}. "
            "HINT: name a file in another folder, or select fewer steps with --steps"
        ) from None


def _summary_line(path: Path, part: Part, ranks: int, events: int, left_out: list[str]) -> str:
    text = f"{path}: {part.words}"
    text += f" of {part.of}, the maximum that fits," if part.of else ""
    text += f" of {counted(ranks, 'rank')}, {counted(events, 'event')}"
    text += f", {path.stat().st_size / 1e6:.3g} MB." if path.is_file() else "."
    text += f" Left out: {'; '.join(left_out)}." if left_out else ""
    text += " HINT: "
    if part.of and part.words.startswith("step"):
        text += "--steps FIRST:END selects other steps; "
    return text + "open it in https://ui.perfetto.dev or chrome://tracing"


def _steps_in_words(first: int, last: int) -> str:
    return f"steps {first} to {last}" if last > first else f"step {first}"
