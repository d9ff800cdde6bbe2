"""Records from another user of the node: no traceback, no hang, bounded memory."""

import gzip
import json
import os
import re
import struct
import tracemalloc

import numpy as np
import pytest
from records import MS, Rank, made
from typer.testing import CliRunner

from paceline.analyze.figures.report import analyse, analyse_with_window
from paceline.analyze.figures.window_steps import MAX_LOST_STEPS
from paceline.analyze.live.live_view import view
from paceline.analyze.records.clock_alignment import align_clocks
from paceline.analyze.records.load_run import Run, load_run
from paceline.analyze.records.match_collectives import match_collectives
from paceline.analyze.records.read_record import parse_record
from paceline.cli import app
from paceline.record.ring.ring import EVENT, HEADER, HEADER_BYTES, WRITTEN_OFFSET
from paceline.record.ring.states import Op, State
from paceline.record.ring.tail import (
    MAX_RECORD_BYTES,
    Tail,
    read_header,
    read_progress,
    read_tail,
    read_tails,
)
from paceline.report.trace import timeline
from paceline.report.trace.chrome_trace import MAX_LANES, NO_LANE, lanes
from paceline.security.files import InvalidFileError, UnsafeFileError

LATE = (1 << 60) - 1  # ns: the latest valid time of an event


@pytest.fixture
def folder(tmp_path):
    return made(tmp_path / "run", size=2)


def header(path, **changes):
    """Change fields of a record's header."""
    data = bytearray(path.read_bytes())
    names = ("magic", "version", "header", "event", "capacity", "written", "cost", "length")
    fields = dict(zip(names, HEADER.unpack_from(data), strict=True)) | changes
    HEADER.pack_into(data, 0, *fields.values())
    path.write_bytes(data)
    return path


def about(path, **changes):
    """Change the JSON of a record's header; the value "gone" removes a key."""
    data = bytearray(path.read_bytes())
    length = HEADER.unpack_from(data)[-1]
    told = json.loads(data[HEADER.size : HEADER.size + length]) | changes
    text = json.dumps({key: value for key, value in told.items() if value != "gone"}).encode()
    data[HEADER.size : HEADER.size + len(text)] = text
    path.write_bytes(data)
    return header(path, length=len(text))


def refusal(folder, *options):
    """Return the one-line error of ``paceline report``."""
    done = CliRunner().invoke(app, ["report", str(folder), *options])
    assert done.exit_code == 2, (done.exit_code, done.exception, done.output)
    assert done.stderr.startswith("paceline: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


@pytest.mark.parametrize(
    "changes",
    [
        {"capacity": 0},
        {"capacity": 0, "written": 0},
        {"header": 64},
        {"header": (1 << 32) - 1},
        {"event": 1},
        {"written": (1 << 64) - 1, "capacity": (1 << 64) - 1},
        {"length": (1 << 32) - 1},
    ],
    ids=str,
)
def test_invalid_header_sizes_are_rejected(folder, changes):
    for rank in range(2):
        header(folder / f"rank-{rank}.ring", **changes)
    assert "rank-0.ring: " in refusal(folder)
    try:
        read_tail(folder / "rank-0.ring", 64)  # as the live view does
        read_progress(folder / "rank-0.ring")
    except InvalidFileError:
        pass
    read_tails(folder, 64)


@pytest.mark.parametrize(
    "changes",
    [
        {"rank": float("inf")},
        {"rank": float("nan")},
        {"rank": True},
        {"rank": "0"},
        {"rank": -1},
        {"rank": 7},
        {"size": 1 << 40},
        {"size": 0},
        {"host": 3},
        {"host": "gone"},
        {"started_ns": 1 << 70},
        {"started_ns": 1e400},
        {"attempt": [1]},
        {"pid": 1 << 80},
        {"groups": [1]},
        {"groups": {"x": {"name": "a", "size": 2, "rank": 0}}},
        {"groups": {"70000": {"name": "a", "size": 2, "rank": 0}}},
        {"groups": {"1": {"name": 1, "size": 2, "rank": 0}}},
        {"groups": {"1": {"name": "a", "size": 2, "rank": 2}}},
        {"groups": {"1": 5}},
        {"loader": 1},
        {"loader": {"seconds": "x"}},
        {"work": {"step": 1}},
        {"work": [1]},
        {"threads": "x"},
        {"device": 1},
        {"rung": {"used": 1}},
        {"rung": {"loader": {"batches": 0}}},
        {"knobs": {"a": 1}},
    ],
    ids=str,
)
def test_header_with_wrong_types_is_rejected(folder, changes):
    for rank in range(2):
        about(folder / f"rank-{rank}.ring", **changes)
    assert re.search(
        r"rank-0\.ring: (is of rank|has rank|has a process group|does not match its format)",
        refusal(folder),
    )
    data = (folder / "rank-0.ring").read_bytes()
    with pytest.raises(InvalidFileError):
        read_header(data)
    seen = Tail("rank-0.ring", 1, "R", data)
    assert view([seen], ["train.py"]) is None
    assert read_tails(folder, 64) == []


def test_counted_work_without_its_step_is_rejected(folder):
    work = {"flops": 1e6, "bytes": 1e3, "device": "cpu", "precision": "float32"}
    for rank in range(2):
        about(folder / f"rank-{rank}.ring", work=work | {"ops": [], "uncounted": []})
    assert "step" in refusal(folder)


def test_deeply_nested_header_is_rejected(folder):
    path = folder / "rank-0.ring"
    data = bytearray(path.read_bytes())
    text = b"[" * 10000
    data[HEADER.size : HEADER.size + len(text)] = text
    path.write_bytes(data)
    header(path, length=len(text))
    report = analyse(load_run(folder))
    assert any("rank-0.ring: can't be read as JSON" in doubt for doubt in report.doubts)


@pytest.mark.parametrize("name", ["rank-1.ring", "rank-1.lines", "run.json"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "dangling link", "device"])
def test_record_that_is_not_a_regular_file_is_skipped(folder, name, kind):
    path = folder / name
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "dangling link":
            path.symlink_to("nowhere")
        case _:
            path.symlink_to("/dev/zero")
    run = load_run(folder)
    assert len(run.records) == 2 - (name == "rank-1.ring")
    if name == "rank-1.ring":
        assert [one for one in run.refused if "rank-1.ring: " in one]
        with pytest.raises((UnsafeFileError, FileNotFoundError)):
            read_tail(path, 10)
    read_tails(folder, 10)


def test_oversized_record_is_rejected(folder):
    os.truncate(folder / "rank-1.ring", MAX_RECORD_BYTES + 1)
    assert "rank-1.ring: has 41,959,425 bytes, and a record at most" in load_run(folder).refused[0]


def test_invalid_script_lines_are_skipped_with_one_note(folder):
    good = {"number": 7, "file": "a.py", "line": 3, "function": "f", "inside": "", "code": "x"}
    bad = [
        "{",
        "[1]",
        '{"number": 1e400}',
        '{"number": "1"}',
        "[" * 5000,
        '{"number": 2, "code": 1}',
    ]
    path = folder / "rank-0.lines"
    path.write_text("".join(f"{line}\n" for line in [*bad, json.dumps(good)]) + '{"number": 8, "fi')
    run = load_run(folder)
    assert run.records[0].lines == {7: good}
    assert run.refused == [f"{path}: 6 of 7 lines can't be read"]
    path.write_bytes(b"\xff\xfe\n")
    assert run.records[0].lines == {7: good}
    assert load_run(folder).refused == [f"{path}: 1 of 1 line can't be read"]


@pytest.mark.parametrize(
    "text", ["[1]", "{", '{"command": 5}', "[" * 5000, '{"command": [1, [2]]}']
)
def test_invalid_run_json_is_tolerated(folder, text):
    (folder / "run.json").write_text(text)
    assert all(isinstance(word, str) for word in load_run(folder).command)


def events(rank, rows):
    for state, start, end, fields in rows:
        rank.ring.write(start, end, state, **fields)
    return rank


def test_large_step_numbers_allocate_no_memory(tmp_path):
    ranks = [Rank(tmp_path, i, 2) for i in range(2)]
    for rank in ranks:
        for at, step in enumerate([0, 1, 2, (1 << 32) - 2, (1 << 32) - 1]):
            rank.ring.write(at * 10, at * 10 + 10, State.STEP, step=step)
    tracemalloc.start()
    examined = analyse_with_window(Run("x", [rank.record() for rank in ranks], []))
    assert tracemalloc.get_traced_memory()[1] < 50 << 20
    tracemalloc.stop()
    assert examined.measured is not None
    assert examined.measured.steps is None


def test_few_lost_steps_keep_their_numbers(tmp_path):
    rank = Rank(tmp_path, 0, 1)
    for at, step in enumerate([0, 1, 2, MAX_LOST_STEPS]):
        rank.ring.write(at * 10, at * 10 + 10, State.STEP, step=step)
    found = analyse_with_window(Run("x", [rank.record()], [])).report.step_times
    assert (found.first, found.last) == (1, MAX_LOST_STEPS)


def test_large_amounts_and_times_do_not_overflow(tmp_path):
    ranks = [Rank(tmp_path, i, 2) for i in range(2)]
    far = 1 << 54
    for rank in ranks:
        rank.ring.write(1, 10, State.STEP)
        for n in range(1, 600):
            fields = {"seq": n, "group": 1, "op": Op.ALL_REDUCE, "amount": (1 << 53) - 1}
            rank.ring.write(10 + n, far, State.BLOCKED, **fields)
            rank.ring.write(10 + n, far, State.COLLECTIVE, **fields)
        for step in range(1, 2000):
            rank.ring.write(far + step, far + step + 1, State.STEP, step=step, amount=(1 << 53) - 1)
    report = analyse(Run("x", [rank.record() for rank in ranks], []))
    assert report.samples > 0
    assert all(0 <= share <= 1 for rank in report.states for share in rank.values())
    assert all(0 <= group.wait <= 600 and group.collectives[0].bytes > 0 for group in report.groups)
    assert 0 <= report.confidence <= 1


def test_impossible_amounts_and_times_are_damaged_events(tmp_path):
    rank = Rank(tmp_path, 0, 1)
    for step in range(5):
        rank.ring.write(step * 10, step * 10 + 10, State.STEP, step=step)
    rank.ring.write(5, LATE, State.FORWARD)  # 36 years after all others
    rank.ring.write(5, 10, State.FORWARD, amount=1 << 60)
    record = rank.record()
    assert (len(record.events), record.damaged) == (5, 2)


def test_excessive_clock_offsets_are_not_aligned(tmp_path):
    """Each host's clock is 2**55 ns before the next one's; the sum of offsets must stay bounded."""
    count, ranks = 40, []
    for i in range(count):
        beside = [j for j in (i - 1, i) if 0 <= j < count - 1]
        groups = {f"{j}-{j + 1}": (2, i - j) for j in beside}
        rank = Rank(tmp_path, i, count, host=f"h{i}", groups=groups)
        for j in beside:
            for n in range(1, 4):
                at = ((1 << 55) if j == i else 0) + n * 1000
                fields = {"seq": n, "group": rank.number[f"{j}-{j + 1}"], "op": Op.BARRIER}
                rank.ring.write(at, at + 10, State.BLOCKED, **fields)
                rank.ring.write(at, at + 10, State.COLLECTIVE, **fields)
        ranks.append(rank.record())
    _, clocks = align_clocks(ranks, match_collectives(ranks))
    assert max(abs(clock.offset_ns) for clock in clocks.clocks) == 31 << 55
    assert "h31" not in clocks.unaligned
    assert {"h32", "h39"} <= set(clocks.unaligned)


def test_kernels_of_unknown_collectives_are_in_unknown_group(tmp_path):
    """On a GPU: group 0, no operation, and in one record no group at all."""
    ranks = [Rank(tmp_path, i, 2, groups={"0": (2, i)} if i else None) for i in range(2)]
    for rank in ranks:
        rank.ring.describe({"rank": 0, "size": 2, "host": "h", "started_ns": 0} | {
            "rank": ranks.index(rank)
        })  # fmt: skip
        for step in range(4):
            at = step * 100
            rank.ring.write(at, at + 50, State.KERNEL)
            rank.ring.write(at + 50, at + 90, State.COMMUNICATION_KERNEL, seq=step + 1)
            rank.ring.write(at, at + 100, State.STEP, step=step)
    examined = analyse_with_window(Run("x", [rank.record() for rank in ranks], []))
    assert {loss.group for loss in examined.report.losses if loss.kind == "transfer"} == {"unknown"}
    timeline.write(examined, tmp_path / "trace.json")


def test_excessive_overlapping_slices_are_skipped_and_reported(tmp_path):
    count = 20_000  # assigning lanes one by one would take quadratic time
    start = np.arange(count)
    found = lanes(start, start + count, np.zeros(count, np.int64))
    assert found.max() == MAX_LANES - 1
    assert (found == NO_LANE).sum() == count - MAX_LANES
    rank = Rank(tmp_path, 0, 1)
    rank.step(0, 1)
    rank.step(1, 2, number=1)
    for at in range(1000):
        rank.ring.write(MS + at, MS * 2 - 1000 + at, State.FORWARD)
    told = timeline.write(
        analyse_with_window(Run("x", [rank.record()], [])), tmp_path / "trace.json.gz"
    )
    assert "744 slices that more than 256 others overlap" in told
    json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))


def test_ranks_without_record_are_listed_as_range(tmp_path):
    rank = Rank(tmp_path, 0, 1 << 20)
    rank.step(0, 10)
    rank.step(10, 20, number=1)
    run = Run("x", [rank.record()], list(range(1, 1 << 20)))
    told = timeline.write(analyse_with_window(run), tmp_path / "trace.json")
    assert "ranks 1-1048575, which have no record" in told
    assert (tmp_path / "trace.json").stat().st_size < 10_000


def test_truncated_or_invalid_tail_is_rejected(folder, tmp_path):
    path = folder / "rank-0.ring"
    for size in (0, 10, HEADER_BYTES - 1, HEADER_BYTES + 100):
        os.truncate(path, size)
        with pytest.raises(InvalidFileError):
            read_progress(path)
    os.mkfifo(tmp_path / "rank-9.ring")
    with pytest.raises(UnsafeFileError):
        read_tail(tmp_path / "rank-9.ring", 1)


def test_excessive_write_counter_is_tolerated(folder):
    path = folder / "rank-0.ring"
    data = bytearray(path.read_bytes())
    struct.pack_into("<Q", data, WRITTEN_OFFSET, (1 << 62) + 5)
    path.write_bytes(data)
    assert len(parse_record(read_tail(path, 64)).events) <= 64
    assert EVENT.size == 40
