"""Content and layout of the live view, from hand-made record tails; times in milliseconds."""

import io
import re
from dataclasses import replace

import pytest
from records import MS, Rank
from rich.console import Console

from paceline.analyze.live.live_view import view
from paceline.record.ring.ring import LAST_BEGUN, LAST_BEGUN_OFFSET
from paceline.record.ring.states import Op, State
from paceline.record.ring.tail import Tail, read_tail
from paceline.report.numbers import elapsed
from paceline.report.terminal.top import hang_report, render


def seen(rank, now, process="S", most=1000):
    return Tail(rank.path.name, round(now * MS), process, read_tail(rank.path, most))


def begins(rank, state, since, seq=0, op=0, step=0, group=1):
    place = (rank.ring._map, LAST_BEGUN_OFFSET)
    LAST_BEGUN.pack_into(*place, round(since * MS), seq, step, group if op else 0, state, op)


def trained(folder, number, size, steps=10, late=0, host="host", at=0, **meta):
    """Record steps of 10 ms: computation for 6 ms plus ``late``, then an all-reduce to the end."""
    rank = Rank(folder, number, size, host=host, started_ns=round(at * MS), **meta)
    for step in range(steps):
        start = at + 10 * step
        rank.was(State.FORWARD, start, start + 6 + late, step=step)
        rank.collective(start + 6 + late, start + 6 + late, start + 10)
        rank.step(start, start + 10, samples=8, number=step)
    return rank


def text(found, width=80, **options):
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, **options).print(render(found, width))
    return out.getvalue()


def plain(found, width=80):
    return " ".join(text(found, width, no_color=True, color_system=None).split())


def test_live_view_shows_shares_rate_and_waits(tmp_path):
    ranks = [trained(tmp_path, i, 3, late=2 * (i == 1)) for i in range(3)]
    found = view([seen(rank, 101) for rank in ranks], ["train.py"])
    assert (found.size, found.ranks, found.step, found.missing_ranks) == (3, [0, 1, 2], 10, [])
    assert (found.first_step, found.last_step) == (1, 9)  # the window begins at the end of step 0
    assert found.steps_per_s == pytest.approx(100)
    assert found.samples_per_s == pytest.approx(2400)
    assert [round(s["useful"], 3) for s in found.states] == [0.6, 0.8, 0.6]
    assert [round(s["wait"], 3) for s in found.states] == [0.2, 0.0, 0.2]
    assert found.slowest_rank == 1
    assert {(p.rank, p.waited_for, round(p.share, 3)) for p in found.waited_for} == {
        (0, 1, 0.2),
        (2, 1, 0.2),
    }
    assert [round(share, 3) for share in found.caused] == [0, 0.4, 0]
    assert found.standing == []


def test_live_view_uses_last_ten_seconds(tmp_path):
    ranks = [trained(tmp_path, i, 2, steps=2500) for i in range(2)]
    found = view([seen(rank, 25_000, most=8000) for rank in ranks], [])
    assert 9.9 < found.window_s < 10.1
    assert found.last_step == 2499


def test_missing_rank_is_reported_with_its_last_event(tmp_path):
    ranks = [trained(tmp_path, i, 4) for i in range(4)]
    for rank in ranks[:3]:
        begins(rank, State.BLOCKED, 106, seq=11, op=Op.ALL_REDUCE, step=10)
    begins(ranks[3], State.COLLECTIVE, 96, seq=10, op=Op.ALL_REDUCE, step=9)  # has ended
    found = view([seen(r, 12_106, "T" if r is ranks[3] else "S") for r in ranks], [])
    (one,) = found.standing
    assert (one.collective, one.number, one.inside, one.absent, one.unseen) == (
        *("all-reduce", 11, [0, 1, 2], [3], 0),
    )
    assert one.for_s == pytest.approx(12.0)
    assert (found.now[3].process, found.now[3].doing) == ("stopped", "script")
    assert (
        "Ranks 0-2 have waited in all-reduce 11 for 12 s. Rank 3 has not entered it: its process "
        "is stopped by a signal (SIGSTOP). The rank last ended optimizer step 10, 12 s ago."
    ) in plain(found)
    assert "ranks 0-2: in all-reduce 11 for 12 s" in plain(found)
    assert "until 12 s ago, steps 1 to 9" in plain(found)


def test_ranks_have_their_place_in_the_mesh(tmp_path):
    axes = [["stage", 2], ["data", 2]]
    ranks = [
        trained(tmp_path, i, 4, late=2 * (i == 3), mesh={"axes": axes, "place": [i // 2, i % 2]})
        for i in range(4)
    ]
    for rank in ranks[:3]:
        begins(rank, State.BLOCKED, 106, seq=11, op=Op.ALL_REDUCE, step=10)
    found = view([seen(r, 12_106, "T" if r is ranks[3] else "S") for r in ranks], [])
    assert found.as_dict()["mesh"][2] == {"stage": 1, "data": 0}
    said = plain(found, 200)
    assert "Rank 3 (data 1, stage 1) has not entered it" in said
    assert "rank 0 (data 0, stage 0) for rank 3 (data 1, stage 1): 20 % of its time" in said
    assert "2 data 0, stage 1" in said
    told = hang_report(found, {}, {3}, 12.0)
    assert "rank 3 (data 1, stage 1): stopped by a signal" in told


def test_clocks_of_hosts_are_not_compared(tmp_path):
    """The second host was started an hour after the first one."""
    first, second = (
        trained(tmp_path, i, 2, host=f"host{i}", clock=f"clock{i}", at=3_600_000 * i)
        for i in range(2)
    )
    begins(first, State.BLOCKED, 106, seq=11, op=Op.ALL_REDUCE)
    begins(second, State.INPUT, 3_600_102)
    found = view([seen(first, 5106), seen(second, 3_605_102)], [])
    assert found.elapsed_s == pytest.approx(5.106)
    assert found.now[0].for_s == found.now[1].for_s == pytest.approx(5.0)
    assert found.steps_per_s == pytest.approx(100, rel=0.2)
    said = plain(found, 100)
    assert "Rank 1 on host1 has not entered it: it has been waiting for a batch for 5.0 s." in said
    assert "2 ranks on 2 nodes (host0, host1) · 5.1 s since its start" in said


def test_unfinished_state_ends_with_its_event(tmp_path):
    rank = trained(tmp_path, 0, 1, steps=1)
    for state, op in ((State.INPUT, 0), (State.CHECKPOINT, 0), (State.BLOCKED, Op.ALL_REDUCE)):
        begins(rank, state, 20, seq=2, op=op)
        (now,) = view([seen(rank, 3020)], []).now
        assert (now.doing, now.for_s) == (
            {State.INPUT: "input", State.CHECKPOINT: "checkpoint"}.get(state, "exchange"),
            3.0,
        )
        rank.was(state, 20, 30, seq=2, op=op, group=rank.number["0"] if op else 0)
        assert view([seen(rank, 3020)], []).now[0].doing == "script"
    rank.was(State.SAMPLE, 3000, 3000)  # the stack sampler continues while a rank stands still
    assert view([seen(rank, 3030)], []).now[0].last_s == pytest.approx(3.0)


def test_live_view_of_job_start_restart_and_end(tmp_path):
    assert view([], []) is None
    ranks = [Rank(tmp_path, i, 2, attempt=1) for i in range(2)]
    old = tmp_path / "old"
    old.mkdir()
    earlier = trained(old, 0, 2)
    found = view([seen(rank, 5) for rank in (*ranks, earlier)], ["train.py"])
    assert (found.attempt, found.step, found.states) == (1, 0, [])
    assert "1 restart" in plain(found)
    assert "starting: no step has ended yet" in plain(found)
    ended = view([seen(trained(tmp_path, 0, 2, attempt=1), 3000, ""), seen(ranks[1], 3000)], [])
    assert [now.process for now in ended.now] == ["ended", "running"]
    assert "rank 0: ended (last operation: optimizer step 10)" in plain(ended)
    alone = view([seen(earlier, 3000)], [], size=2)
    assert alone.missing_ranks == [1]
    assert "no record of rank 1" in plain(alone)


def test_unreadable_records_are_reported(tmp_path):
    good = seen(trained(tmp_path, 0, 1), 110)
    newer = replace(good, data=good.data[:8] + b"\x63" + good.data[9:])
    found = view([good, newer], [])
    assert "has version 99" in found.notes[0]
    torn = replace(good, data=good.data[:-20])
    assert view([torn], []) is None


def test_live_view_fits_terminal_without_colors(tmp_path):
    """Up to 16 ranks have a row each; above that, hosts and the ranks that others wait for."""
    for size in (4, 40):
        ranks = [
            trained(tmp_path, i, size, late=2 * (i == 3), host=f"{i // 4}-has-a-long-name.org")
            for i in range(size)
        ]
        for rank in ranks:
            rank.was(State.CHECKPOINT, 80, 83)
            rank.was(State.VALIDATION, 83, 84)
            rank.was(State.INPUT, 85, 86)
        found = view([seen(rank, 101) for rank in ranks], ["train.py", "--option", "x" * 300])
        for width in (80, 200):
            lines = text(found, width, no_color=True, color_system=None).splitlines()
            assert max(map(len, lines)) <= width
            assert "\x1b" not in "".join(lines)
            rows = [line for line in lines if line.startswith("3 0-" if size > 4 else "3  ")]
            assert len(rows) == 1
            assert "% " in rows[0]
            assert "░" not in rows[0]  # all other ranks wait for this one
        assert "\x1b[32m" in text(found, color_system="standard")
        short = io.StringIO()
        Console(file=short, width=80).print(render(found, 80, rows=10))
        assert len(short.getvalue().splitlines()) <= 24
        hosts = [line for line in lines if re.match(r"\d-has-a-long-name ", line)]
        assert len(hosts) == (10 if size == 40 else 0)


def test_live_view_of_512_ranks_fits_a_screen(tmp_path):
    ranks = [trained(tmp_path, i, 512, steps=100, late=i == 7, host=f"n{i // 8}") for i in range(8)]
    ends = [seen(rank, 1001, most=512) for rank in ranks]
    for i in range(8, 512):
        about = b'"rank": %d,' % i
        data = ends[0].data.replace(b'"rank": 0,', about.ljust(10), 1)
        ends.append(replace(ends[0], name=f"rank-{i}.ring", data=_longer(data, len(about) - 10)))
    found = view(ends, [])
    assert found.size == len(found.ranks) == 512
    assert found.slowest_rank == 7
    assert len(text(found).splitlines()) < 50


def _longer(data, more):
    """Return the record with a longer JSON, its length field and the following offsets adjusted."""
    length = int.from_bytes(data[44:48], "little") + more
    end = 48 + length
    head = data[:44] + length.to_bytes(4, "little") + data[48:end]
    return head + bytes(16384 - end) + data[16384 + more :]


def test_durations_are_formatted():
    assert [elapsed(s) for s in (0.04, 3.21, 45.4, 183, 11_040)] == [
        *("0.0 s", "3.2 s", "45 s", "3 min 3 s", "3 h 4 min"),
    ]
