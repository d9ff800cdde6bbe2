"""Clock offsets and drift between hosts, put into records and estimated again."""

import random
import shutil
import subprocess

import numpy as np
import pytest
import ranks as launcher
from records import Rank, report_of

from paceline.analyze.figures.report import analyse
from paceline.analyze.records.clock_alignment import align_clocks
from paceline.analyze.records.load_run import load_run
from paceline.analyze.records.match_collectives import match_collectives
from paceline.record.ring.states import Op, State


def run_of(folder, clocks, steps=400, seed=0, latency=0.05):
    """Ranks on hosts with wrong clocks: local = (true - offset) / (1 + drift), times in ms.

    clocks: offset and drift of each rank's host.
    """
    draw = random.Random(seed)
    size = len(clocks)
    made = [
        Rank(folder, i, size, host=f"host{i}", clock=f"clock{i}", started_ns=0) for i in range(size)
    ]

    def local(i, true):
        offset, drift = clocks[i]
        return (true - offset) / (1 + drift)

    at = 1e7  # the hosts have been up for long
    truth = [0.0] * size
    for step in range(steps):
        arrived = [at + draw.uniform(5, 15) + (8 if i == 1 else 0) for i in range(size)]
        done = [max(arrived) + latency * draw.uniform(1, 3) for _ in range(size)]
        for i, rank in enumerate(made):
            rank.was(State.FORWARD, local(i, at), local(i, arrived[i]))
            begin = local(i, arrived[i])
            rank.collective(begin, begin, local(i, done[i]), amount=1000)
            rank.step(local(i, at), local(i, done[i]), number=step)
            if step:
                truth[i] += max(arrived) - arrived[i]
        at = max(done)
    return made, truth


@pytest.mark.parametrize(
    "clocks",
    [
        [(0, 0), (5e6, 0)],
        [(0, 0), (-3e9, 0), (12345.6, 0)],
        [(0, 0), (700, 50e-6), (-1e6, -80e-6)],
    ],
    ids=["offset", "three hosts", "drift"],
)
def test_clock_offset_and_drift_are_estimated(tmp_path, clocks):
    made, truth = run_of(tmp_path, clocks)
    report = report_of(made)
    assert report.clocks_aligned
    assert 0 < report.clock_residual_s < 300e-6
    for i, clock in enumerate(report.clocks):
        assert clock["drift"] == pytest.approx(clocks[i][1], abs=2e-6)
    wait = [rank["wait"] * report.window_s * 1e3 for rank in report.states]
    steps = report.steps
    for found, true in zip(wait, truth, strict=True):
        assert found == pytest.approx(true, abs=steps * report.clock_residual_s * 1e3 * 2)
    assert report.losses[0].kind == "wait"
    assert report.losses[0].rank == 1
    assert "aligned within" in " ".join(report.doubts)


def test_aligned_events_satisfy_all_bounds(tmp_path):
    made, _ = run_of(tmp_path, [(0, 0), (4e4, 30e-6)])
    records = [rank.record() for rank in made]
    moved, clocks = align_clocks(records, match_collectives(records))
    starts, ends = (
        np.stack([record.events_in(State.COLLECTIVE)[name] for record in moved])
        for name in ("start", "end")
    )
    assert (ends.min(axis=0) >= starts.max(axis=0) - clocks.residual_ns).all()


def test_no_straggler_below_clock_residual(tmp_path):
    made = [Rank(tmp_path, i, 2, host=f"host{i}", clock=f"clock{i}") for i in range(2)]
    # Long exchanges say little about the clocks. Rank 1 arrives 2 ms later.
    for step in range(50):
        for i, rank in enumerate(made):
            begin = 1000 * i + 60 * step + 2 * i
            rank.was(State.FORWARD, begin - 10, begin)
            rank.collective(begin, begin, 1000 * i + 60 * step + 50)
            rank.step(begin - 10, 1000 * i + 60 * step + 50, number=step)
    report = report_of(made)
    assert report.clock_residual_s > 2e-3
    assert not [loss for loss in report.losses if loss.kind == "wait" and loss.rank is not None]
    assert report.confidence < 1


def test_hosts_without_communication_are_reported_as_unaligned(tmp_path):
    made = [
        Rank(tmp_path, i, 2, host=f"host{i}", clock=f"clock{i}", groups={f"g{i}": (1, 0)})
        for i in range(2)
    ]
    for rank in made:
        rank.step(0, 10)
        rank.was(State.FORWARD, 10, 20)
        rank.step(10, 30, number=1)
    report = report_of(made)
    assert not report.clocks_aligned
    assert report.confidence == pytest.approx(0.5)
    assert report.efficiencies.serialisation is None


def test_buffered_send_gives_no_clock_bound(tmp_path):
    """A small send ends before its receiver arrives, so it gives no bound on the clocks."""
    made = [Rank(tmp_path, i, 2, host=f"host{i}", clock=f"clock{i}") for i in range(2)]
    for rank in made:
        rank.step(0, 10)
    for n in range(1, 20):
        made[0].message(20 * n, 20 * n, 20 * n + 0.1, Op.SEND, 1, n)
        made[1].message(20 * n + 10, 20 * n + 10, 20 * n + 10.1, Op.RECV, 0, n)
        made[1].message(20 * n + 11, 20 * n + 11, 20 * n + 11.1, Op.SEND, 0, n)
        made[0].message(20 * n + 11, 20 * n + 11, 20 * n + 11.2, Op.RECV, 1, n)
    for rank in made:
        rank.step(10, 500, number=1)
    report = report_of(made)
    assert report.clocks[1]["offset_ns"] == pytest.approx(0, abs=6e6)


def namespaces():
    """Whether this machine can start a process in its own time namespace."""
    if shutil.which("unshare") is None:
        return False
    command = ["unshare", "--time", "--monotonic", "5", "true"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.long
@pytest.mark.skipif(not namespaces(), reason="needs unshare --time, as root")
def test_real_clock_offset_between_two_ranks_is_estimated(tmp_path):
    """Start two real ranks, one of them with a clock that is 5000 s ahead."""
    script = launcher.write(
        tmp_path,
        """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        model = torch.nn.Linear(256, 256)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(60):
            loss = model(torch.randn(64, 256)).square().mean()
            loss.backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
            optimizer.step()
            dist.barrier()
        dist.destroy_process_group()
        """,
    )
    record = tmp_path / "record"
    elsewhere = ["unshare", "--time", "--monotonic", "5000", "--fork"]
    launcher.run_by_hand(script, record, prefixes=[[], elsewhere])
    report = analyse(load_run(record))
    assert report.clocks_aligned
    assert report.clocks[1]["offset_ns"] == pytest.approx(-5000e9, abs=1e6)
    assert report.clock_residual_s < 1e-3
    assert report.unmatched == 0
    assert sum(report.states[1].values()) == pytest.approx(1)
