"""Known faults in a real run change the right figure by the right amount."""

import functools
import shutil
import subprocess
from pathlib import Path

import pytest
import ranks

from paceline.analyze.figures.report import analyse
from paceline.analyze.records.load_run import load_run
from paceline.report.losses import largest_losses

pytestmark = pytest.mark.alone
ZOO = Path(__file__).parent / "zoo"

STEPS = 40
TOLERANCE = 0.08  # of the window; the test machines are busy


def trouble(tmp_path, *args, prefix=()):
    """Return the report of the plain loop run with these options."""
    record = tmp_path / "record"
    command = ranks.command(
        ZOO / "plain_loop.py",
        *("--steps", STEPS, *args),
        launcher=f"paceline --record {record} --threads 1",
    )
    subprocess.run([*prefix, *command], check=True, env=ranks.environment(), timeout=300)
    report = analyse(load_run(record))
    assert report.confidence == 1.0
    return report


def share(report, seconds, times):
    """Return ``seconds`` in ``times`` of the steps as a share of the window."""
    return seconds * times / report.window_s


def in_window(report):
    return report.ranges[-1].last - report.ranges[0].first + 1


def waits_for(report, rank, doing):
    return sum(
        loss.share
        for loss in report.losses
        if (loss.kind, loss.rank, loss.doing) == ("wait", rank, doing)
    )


def page_says(report, words):
    """Check that the page explains its first loss with these words, without profiler terms."""
    first = largest_losses(report)[0]
    assert words in first.why, first


def nothing_else(report, *moved, alone=0.0):
    """Check that states other than ``moved`` are almost absent.

    alone: seconds that rank 0 works after the other ranks have ended; they are "other" time of
    those ranks.
    """
    for rank in report.states:
        for state in {"checkpoint", "validation", "other", "input"} - set(moved):
            ended = alone / report.window_s if state == "other" else 0.0
            assert rank[state] < TOLERANCE + ended, state


close = functools.partial(pytest.approx, abs=TOLERANCE)


def test_balanced_run_has_no_losses(tmp_path):
    report = trouble(tmp_path)
    nothing_else(report)
    assert report.efficiencies.load_balance > 0.8


def test_slow_rank_lowers_load_balance_and_causes_wait(tmp_path):
    report = trouble(tmp_path, "--slow-rank", 1, "--factor", 3)
    nothing_else(report)
    fast, slow = (rank["useful"] for rank in report.states)
    assert slow / fast == pytest.approx(3, rel=0.35)
    e = report.efficiencies
    assert e.load_balance == close((1 + slow / fast) / 2 / (slow / fast))
    assert report.slowest_rank == 1
    assert report.slowest_excess == close(slow / ((slow + fast) / 2) - 1)
    # The fast rank waits for as long as the slow rank computes longer.
    assert 2 * waits_for(report, 1, "useful") == close(slow - fast)
    assert waits_for(report, 0, "useful") < TOLERANCE
    page_says(report, "Rank 1 needed longer to compute the same step")


@pytest.mark.long
def test_slow_loader_is_input_time_on_all_ranks(tmp_path):
    report = trouble(tmp_path, "--input-sleep", 0.03)
    nothing_else(report, "input")
    for rank in report.states:
        assert rank["input"] == close(share(report, 0.03, in_window(report)))
    assert report.losses[0].kind == "input"
    assert report.efficiencies.load_balance > 0.85
    page_says(report, "its next batch was not ready")


@pytest.mark.long
def test_slow_loader_on_one_rank_causes_wait_on_others(tmp_path):
    report = trouble(tmp_path, "--input-sleep", 0.15, "--input-rank", 0)
    nothing_else(report, "input")
    slept = share(report, 0.15, in_window(report))
    first, second = report.states
    assert first["input"] == close(slept)
    assert second["input"] < TOLERANCE
    assert 2 * waits_for(report, 0, "input") == close(slept)


@pytest.mark.parametrize(
    ("knob", "state"),
    [
        ("--validate-rank0", "validation"),
        pytest.param("--save-rank0", "checkpoint", marks=pytest.mark.long),
    ],
)
def test_validation_or_checkpoint_on_rank_0_causes_wait_on_others(tmp_path, knob, state):
    report = trouble(tmp_path, knob, 0.6)
    nothing_else(report, state, alone=0.6)
    done = share(report, 0.6, STEPS // 10)
    first, second = report.states
    assert first[state] == close(done)
    assert second[state] < 0.001
    # The last one is at the end of the run, where no rank waits for it.
    assert 2 * waits_for(report, 0, state) == close(share(report, 0.6, STEPS // 10 - 1))
    assert report.slowest_rank == 0
    what = {"validation": "evaluated alone", "checkpoint": "saved a checkpoint"}[state]
    stood = {"validation": "the script evaluated", "checkpoint": "copied or written"}[state]
    both = [one.why for one in largest_losses(report)[:2]]
    assert any(f"Rank 0 {what} while" in why for why in both)
    assert any(stood in why for why in both)


@pytest.mark.long
def test_unclassified_script_time_is_other(tmp_path):
    report = trouble(tmp_path, "--other", 0.03)
    nothing_else(report, "other")
    for rank in report.states:
        assert rank["other"] == close(share(report, 0.03, in_window(report)))
    (other,) = [loss for loss in report.losses if loss.kind == "other"]
    assert other.lines[0]["code"] == "time.sleep(args.other)"
    assert other.lines[0]["file"].endswith("plain_loop.py")
    assert other.lines[0]["inside"] == ""


def throttled(rate):
    """Return a command prefix: a separate network whose loopback is limited to ``rate``."""
    setup = (
        f"ip link set lo up && tc qdisc add dev lo root tbf rate {rate} burst 256kb latency 1s && "
        'exec "$@"'
    )
    return ["unshare", "--net", "sh", "-c", setup, "throttled"]


def can_throttle():
    if not all(map(shutil.which, ("unshare", "ip", "tc"))):
        return False
    return subprocess.run([*throttled("1gbit"), "true"], capture_output=True).returncode == 0


@pytest.mark.long
@pytest.mark.skipif(not can_throttle(), reason="needs iproute2 and root")
def test_throttled_link_is_transfer_time(tmp_path):
    report = trouble(tmp_path, "--steps", 20, prefix=throttled("400mbit"))
    nothing_else(report)
    parameters = 64 * 512 + 4 * 512 * 512 + 512 + 5 * 512 + 1
    # Each of the two ranks sends all bytes once, over the same link.
    seconds = in_window(report) * 2 * 4 * parameters / (400e6 / 8)
    moved = report.efficiencies
    (group,) = [g for g in report.groups if g.size == 2]
    assert group.transfer + group.hidden > 0.8 * seconds / report.window_s
    assert moved.transfer < 0.5
    assert report.losses[0].kind == "transfer"
    (reduced,) = [c for c in group.collectives if c.name == "all-reduce"]
    assert reduced.busbw < 2 * 400e6 / 8 / 1e9
    page_says(report, "the communication itself took this time")
    page_says(report, "GB/s of bus bandwidth")
