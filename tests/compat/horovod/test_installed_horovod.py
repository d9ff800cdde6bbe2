"""Operations of an installed Horovod are recorded.

Horovod itself can't be required: ``installed/`` has its Python structure, without its library. The
environment variable PACELINE_TESTS_HOROVOD names a folder with Horovod, whose build with gloo is
then tested as well.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ranks

from paceline.analyze.figures.report import analyse
from paceline.analyze.records.load_run import load_run
from paceline.analyze.records.match_collectives import match_collectives
from paceline.launch.ranks.framework_variables import check_horovod
from paceline.record.hooks.torch_patches import MAX_NAMES, _ProcessSet
from paceline.record.ring.states import Op, State

LATE_S, STEPS, PARAMETER_BYTES = 0.1, 12, 3 * 4 * (60 * 60 + 60)
TRAIN = f"""
    import time
    import torch
    import horovod.torch as hvd

    hvd.init()
    torch.manual_seed(0)
    net = torch.nn.Sequential(*[torch.nn.Linear(60, 60) for _ in range(3)])
    for name, tensor in net.state_dict().items():
        hvd.broadcast_(tensor, root_rank=0, name=name)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    sums = dict(a=torch.ones(2), b=torch.ones(3))
    for step in range({STEPS}):
        if hvd.rank() == 1:
            time.sleep({LATE_S})
        optimizer.zero_grad()
        net(torch.randn(8, 60)).square().mean().backward()
        optimizer.step()
        names = ["a", "b"] if hvd.rank() == 0 or step == 0 else ["b", "a"]
        handles = [hvd.allreduce_async_(sums[name], name=name, op=hvd.Sum) for name in names]
        while not hvd.poll(handles[0]):
            time.sleep(0.001)
        for handle in handles:
            hvd.synchronize(handle)
    assert all((one == 2**{STEPS}).all() for one in sums.values()), sums
    rows = hvd.allgather(torch.ones(1 + hvd.rank(), 2))
    assert rows.shape == (3, 2)
    mean = hvd.allreduce(torch.tensor(1.0 + hvd.rank()))
    assert mean == 1.5
    hvd.barrier()
    hvd.join()
    """


@pytest.fixture(scope="module", params=["structure", "horovod"])
def run(request, tmp_path_factory):
    """Return the record of a job, and what it printed."""
    folder = tmp_path_factory.mktemp("installed")
    script = ranks.write(folder, TRAIN)
    if request.param == "structure":
        installed = str(Path(__file__).parent / "installed")
        done = ranks.run(script, launcher="paceline --record record", PYTHONPATH=installed)
        return load_run(folder / "record"), done.stderr
    installed = os.environ.get("PACELINE_TESTS_HOROVOD", "")
    if not installed:
        pytest.skip("PACELINE_TESTS_HOROVOD names no folder with Horovod")
    words = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", "2"]
    words += [ranks.PACELINE, "record", "record", str(script)]
    done = ranks.run_command(words, folder, ranks.environment(PYTHONPATH=installed), 120)
    assert done.returncode == 0, done.stderr
    return load_run(folder / "record"), done.stderr


def test_record_is_complete(run):
    record, stderr = run
    assert "import horovod uses Paceline's implementation" not in stderr
    assert [one.meta["horovod"] for one in record.records] == ["installed"] * 2
    report = analyse(record)
    assert report.confidence == 1
    assert report.unmatched == 0
    (group,) = report.groups
    assert group.name == "horovod"
    waits = [states["wait"] * report.window_s for states in report.states]
    assert waits[0] > 0.5 * LATE_S * (STEPS - 1)
    assert waits[1] < 0.5 * waits[0]


def test_sums_are_those_of_the_script(run):
    record, _ = run
    expected = {
        Op.BROADCAST: (6, PARAMETER_BYTES),
        Op.ALL_REDUCE: (8 * STEPS + 1, STEPS * (PARAMETER_BYTES + 4 * 2 + 4 * 3) + 4),
        Op.ALL_GATHER: (1, 3 * 2 * 4),
        Op.BARRIER: (2, 0),
    }
    for one in record.records:
        events = one.events_in(State.COLLECTIVE)
        for op, (count, total) in expected.items():
            amounts = events["amount"][events["op"] == op]
            assert (len(amounts), amounts.sum()) == (count, total), op


def test_operations_are_matched_by_name(run):
    """Rank 1 submits a and b in the other order after the first step."""
    record, _ = run
    matched = match_collectives(record.records)
    launches = matched.launches
    assert launches["whole"].all()
    for node in np.unique(launches["node"]):
        of_node = launches[launches["node"] == node]
        assert len(of_node) == 2
        assert len(set(zip(of_node["op"], of_node["amount"], strict=True))) == 1


def test_names_have_numbers_of_their_own():
    ours, theirs = _ProcessSet(1, None), _ProcessSet(1, None)
    for one in (ours, theirs):
        assert [one.next_number(name, "?") for name in "ab"] == [1, 2]
    assert ours.next_number("a", "?") == 1 + MAX_NAMES
    assert theirs.next_number("b", "?") == 2 + MAX_NAMES
    assert theirs.next_number("a", "?") == 1 + MAX_NAMES
    many = {ours.next_number(f"metric {i}", "unnamed") for i in range(2 * MAX_NAMES)}
    assert len(many) == 2 * MAX_NAMES  # names that are used once have no slot after some
    assert len(ours._slots) <= MAX_NAMES


def test_module_of_paceline_is_not_patched():
    import paceline.compat.horovod.torch.mpi_ops as ours
    from paceline.record.hooks.torch_patches import patch_horovod

    before = ours.synchronize
    patch_horovod(None, ours)
    assert ours.synchronize is before


@pytest.mark.parametrize(
    ("mpi", "found", "port", "fails"),
    [
        (False, 2, "", True),  # it would wait for a rendezvous
        (False, 2, "7000", False),
        (True, 1, "", True),  # each rank is a world of its own
        (True, 2, "", False),
    ],
)
def test_ranks_that_it_does_not_find(monkeypatch, mpi, found, port, fails):
    started = []

    class HorovodBasics:
        def init(self):
            started.append(self)

        def mpi_built(self):
            return mpi

        def size(self):
            return found

    monkeypatch.setenv("HOROVOD_SIZE", "2")
    if port:
        monkeypatch.setenv("HOROVOD_GLOO_RENDEZVOUS_PORT", port)
    check_horovod(SimpleNamespace(HorovodBasics=HorovodBasics))
    if fails:
        with pytest.raises(ValueError, match="HINT: paceline run --horovod ours, or horovodrun"):
            HorovodBasics().init()
    else:
        HorovodBasics().init()
    assert bool(started) == (mpi or bool(port))
