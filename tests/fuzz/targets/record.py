"""Records of up to three ranks with any events: analysis, live view, report and timeline.

The first byte gives the number of ranks and how the rest is read: as whole records, as events of 40
bytes, or as short codes for plausible events.
"""

import io
import json
import shutil
import struct
import warnings
from collections.abc import Iterator
from typing import Any

from fuzz.scratch import new_folder
from paceline.analyze.figures.report import TABLES_DIFFER, analyse_with_window
from paceline.analyze.live.live_view import view
from paceline.analyze.records.load_run import Run, load_run
from paceline.analyze.records.read_record import Record, parse_record
from paceline.record.ring.ring import (
    EVENT,
    HEADER,
    HEADER_BYTES,
    LAST_BEGUN,
    LAST_BEGUN_OFFSET,
    MAGIC,
    VERSION,
)
from paceline.record.ring.states import Op, State
from paceline.record.ring.tail import Tail, read_tail
from paceline.report.console import PlainConsole
from paceline.report.run_comparison import comparison_document
from paceline.report.terminal import top
from paceline.report.terminal.draw import draw_panel
from paceline.report.terminal.run_report import panel
from paceline.report.trace import timeline

WHOLE, RAW = 0, 1
CODE = struct.Struct("<BBBBHHHHB")
STATES, OPS = list(State), [0, *Op]
FOLDER = new_folder()
warnings.simplefilter("error", RuntimeWarning)  # a sum or a division that overflowed or was invalid


def ring(meta: dict[str, Any], events: bytes, begun: bytes = b"") -> bytes:
    """Return the bytes of a record."""
    text, count = json.dumps(meta).encode(), len(events) // EVENT.size
    data = bytearray(HEADER_BYTES)
    HEADER.pack_into(
        *(data, 0, MAGIC, VERSION, HEADER_BYTES, EVENT.size, max(count, 1), count, 7, len(text))
    )
    data[HEADER.size : HEADER.size + len(text)] = text
    data[LAST_BEGUN_OFFSET : LAST_BEGUN_OFFSET + LAST_BEGUN.size] = begun[: LAST_BEGUN.size].ljust(
        LAST_BEGUN.size, b"\0"
    )
    return bytes(data) + events[: count * EVENT.size]


def about(rank: int, size: int, hosts: int) -> dict[str, Any]:
    """Return a header's JSON.

    All ranks are in group 1, all but the first in group 2; ranks are distributed over the hosts
    round-robin.
    """
    groups = {"1": {"name": "all", "size": size, "rank": rank}}
    if rank:
        groups["2"] = {"name": "few", "size": max(size - 1, 1), "rank": rank - 1}
    host = f"host{rank % hosts}"
    return {"rank": rank, "size": size, "host": host, "clock": host, "started_ns": 5, "pid": 1} | {
        "groups": groups
    }


def number(code: int) -> int:
    """Decode a number of 12 bits and a power of two: small ones exactly, large ones up to 2**62."""
    return (code & 0xFFF) << ((code >> 12) * 3 + (5 if code >> 12 == 15 else 0))


def decoded(codes: bytes) -> bytes:
    """Return the events for codes of 13 bytes."""
    events, now = [], 10
    for state, op, group, peer, gap, length, seq, step, amount in CODE.iter_unpack(
        codes[: len(codes) // CODE.size * CODE.size]
    ):
        kind = STATES[state % len(STATES)]
        end = min(now + number(length), (1 << 63) - 1)
        what = (seq & 0x3F, number(step) & 0xFFFFFFFF, group % 3)
        with_op = OPS[op % len(OPS)] if group % 3 else 0
        events.append(EVENT.pack(now, end, 1 << (amount % 63), *what, kind, with_op, peer % 5 - 1))
        now = min(end if gap & 1 else now + number(gap >> 1), 1 << 62)
    return b"".join(events)


def seeds() -> Iterator[bytes]:
    good = []
    for rank in range(2):
        events, at = [EVENT.pack(0, 10, 0, 0, 0, 0, State.STEP, 0, -1)], 10
        for step in range(1, 9):
            wait = (step, step, 1)
            events += [
                EVENT.pack(at, at + 9 + rank, 0, 0, step, 0, State.FORWARD, 0, -1),
                EVENT.pack(at + 9 + rank, at + 12, 99, *wait, State.BLOCKED, Op.ALL_REDUCE, -1),
                EVENT.pack(at + 9 + rank, at + 12, 99, *wait, State.COLLECTIVE, Op.ALL_REDUCE, -1),
                EVENT.pack(at, at + 20, 8, 0, step, 0, State.STEP, 0, -1),
            ]
            at += 20
        good.append(b"".join(events))
    yield bytes([RAW + 4]) + b"".join(good)
    yield bytes([WHOLE + 4]) + b"".join(ring(about(i, 2, 2), good[i]) for i in range(2))
    steps = b"".join(CODE.pack(9, 0, 0, 0, 1, 50, 0, i, 3) for i in range(5))
    waits = b"".join(CODE.pack(8, 1, 1, 0, 3, 40, i, i, 20) for i in range(5))
    launches = b"".join(CODE.pack(7, 1, 1, 0, 3, 40, i, i, 20) for i in range(5))
    yield bytes([2 + 4]) + (steps + waits + launches) * 2
    yield bytes([2 + 8 + 64]) + (steps + waits + launches) * 3
    kernels = b"".join(CODE.pack(12 + i % 2, 1, 1, 0, 3, 40, i, i, 20) for i in range(9))
    yield bytes([2 + 4]) + (steps + kernels) * 2


def records(data: bytes) -> tuple[list[bytes], int]:
    """Return the bytes of each rank's record, and the size of the job."""
    kind, ranks = data[0] % 4 % 3, data[0] // 4 % 3 + 1
    rest, hosts = data[1:], data[0] // 64 + 1
    length = len(rest) // ranks
    if kind == WHOLE:
        return [rest[i * length : (i + 1) * length] for i in range(ranks)], ranks
    length -= length % (EVENT.size if kind == RAW else CODE.size)
    parts = [rest[i * length : (i + 1) * length] for i in range(ranks)]
    made = [part if kind == RAW else decoded(part) for part in parts]
    begun = rest[-LAST_BEGUN.size :]
    return [ring(about(i, ranks, hosts), made[i], begun) for i in range(ranks)], ranks


def run(data: bytes) -> None:
    if not data:
        return
    found, size = records(data)
    parsed: list[Record] = []
    for part in found:
        try:
            parsed.append(parse_record(part))
        except ValueError:
            if data[0] % 4 % 3:
                raise
    draw = data[-1] % 16 == 0  # rendering with rich takes most of the time
    live(found, size, draw)
    if data[0] % 64 < 4 and data[-1] % 4 == 0:
        on_disk(found)
    if parsed and len({one.rank for one in parsed}) == len(parsed):
        told(Run("fuzz", sorted(parsed, key=lambda one: one.rank), [], [], ["train.py"]), draw)


def live(found: list[bytes], size: int, draw: bool) -> None:
    tails = [Tail(f"rank-{i}", 1 << 40, "R", part) for i, part in enumerate(found)]
    seen = view(tails, ["train.py"], size)
    if seen is not None:
        json.dumps(seen.as_dict(), allow_nan=False)
        drawing = top.render(seen, 100)
        if draw:
            PlainConsole(file=io.StringIO(), width=100).print(drawing)


def on_disk(found: list[bytes]) -> None:
    for i, part in enumerate(found):
        path = FOLDER / f"rank-{i}.ring"
        path.write_bytes(part)
        path.with_suffix(".lines").write_bytes(part[-200:])
        try:
            read_tail(path, 64)
        except ValueError:
            pass
    try:
        analyse_with_window(load_run(FOLDER))
    finally:
        shutil.rmtree(FOLDER)
        FOLDER.mkdir()


def told(whole: Run, draw: bool) -> None:
    """Produce all output of paceline report except the page, which is the target "report"."""
    examined = analyse_with_window(whole)
    report = examined.report
    assert TABLES_DIFFER not in report.doubts
    json.loads(report.to_json(), parse_constant=_refused)
    for rank in report.states:
        assert abs(sum(rank.values()) - 1) < 1e-6
    drawings = (
        panel(report, 100, full=True),
        draw_panel(comparison_document([report], [report])),
    )
    if draw:
        PlainConsole(file=io.StringIO(), width=100).print(*drawings)
    if examined.measured is not None:
        timeline.write(examined, FOLDER / "trace.json")
        json.loads((FOLDER / "trace.json").read_bytes(), parse_constant=_refused)


def _refused(name: str) -> None:
    raise AssertionError(f"{name} in the JSON")
