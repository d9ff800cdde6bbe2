"""Lost hosts: the job continues on the remaining hosts with the same result."""

import json
import re
import subprocess
import time

import pytest
import ranks
from torch.utils.data import DataLoader, IterableDataset

from paceline.data.sampling.loader_options import batch_schedule
from paceline.data.sampling.sharded_stream import ShardedStream

# An epoch has 17 global batches of 12 samples. In the first attempt, the ranks on the host given as
# an argument stop in the second epoch, one step after a checkpoint; the other ranks wait for them.
TRAIN = """
    import json, os, sys, time
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    x = torch.randn(203, 10, generator=torch.Generator().manual_seed(1))
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    world = paceline.init(seed=5, progress=False)
    model = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = world.distribute(model, optimizer)
    loader = world.shard(DataLoader(TensorDataset(x), batch_size=4, shuffle=True))
    figures = []
    for epoch in world.epochs(2, checkpoint=sys.argv[1] + ".ckpt", every=3):
        seen = world.meter()
        for (batch,) in world.batches(loader):
            if not first and not os.path.exists("again"):
                open("again", "w").close()
            loss = (model(batch) - batch[:, :1]).square().mean()
            world.backward(loss)
            world.step(optimizer)
            seen.add(loss=loss * len(batch), count=len(batch))
            if first and world._recorder.step == 25 and os.uname().nodename in sys.argv[2:]:
                open(f"at-25-{world.rank}", "w").close()
                time.sleep(300)
        figures.append((seen.ratio("loss", "count"), *seen.sum("count")))
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
             "GROUP_WORLD_SIZE", "HOROVOD_CROSS_SIZE", "TF_CONFIG"]
    out = {name: os.environ.get(name) for name in names}
    out |= {"figures": figures, "host": os.uname().nodename}
    json.dump(out, open(f"{sys.argv[1]}-{world.rank}", "w"))
    """
GOES_ON = ["--max-restarts", "3", "--min-hosts"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the figures of a run on three ranks without faults."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ranks.run(ranks.write(folder, TRAIN), folder / "out", ranks=3)
    return json.loads((folder / "out-0").read_text())["figures"]


def stands(hosts, folder, where, stops, *words):
    """Start a job and wait until its ranks on the host ``stops`` stop in the second epoch."""
    ranks.write(folder, TRAIN)
    command = [ranks.PACELINE, "run", *GOES_ON, *words, "-H", where, "script.py", "out", stops]
    process = hosts.start("host0", *command, cwd=folder)
    whole = folder / "out.ckpt" / "step-00000024" / "manifest.json"
    ranks.wait_until(lambda: list(folder.glob("at-25-*")) and whole.exists(), 40)
    return process


def ended(folder, process):
    """Wait for the end of a job.

    Return the results of the last attempt's ranks, the launcher's messages, and the seconds until
    the ranks trained again.
    """
    began = time.time()
    try:
        _, said = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.terminate()
        raise AssertionError(process.communicate(timeout=20)) from None
    assert process.returncode == 0, said
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("out-*"))]
    return found, said, (folder / "again").stat().st_mtime - began


def same(found, undisturbed):
    """Compare the figures of the second epoch: the first epoch ended in the first attempt."""
    (figures,) = found[0]["figures"]
    assert figures == pytest.approx(undisturbed[1], rel=1e-4)
    assert figures[1] == 203


def test_job_continues_without_lost_host_with_same_result(hosts, shared_folder, undisturbed):
    record = shared_folder / "record"
    where = "host1:2,host2:1"
    process = stands(hosts, shared_folder, where, "host2", "1", "--record", record)
    hosts.crash("host2")
    found, said, seconds = ended(shared_folder, process)
    assert (
        "paceline: host2 is lost; the job continues on 1 of 2 nodes, with 2 of 3 ranks, from the "
        "last "
        "checkpoint (restart 1 of 3)\n"
    ) in said
    assert said.count("is lost; ") == 1
    text = (
        "the job continues with 2 of 3 ranks; the global batch remains 12 samples: up to 6 per "
        "rank instead of 4\n"
    )
    assert said.count(text) == 1
    assert re.search(r"resuming from .*step-00000024 \(inside epoch 2, step 24\)", said)
    same(found, undisturbed)
    assert [one["LOCAL_RANK"] for one in found] == ["0", "1"]
    for rank, one in enumerate(found):
        assert (one["RANK"], one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) == (str(rank), "2", "2")
        assert (one["host"], one["GROUP_RANK"], one["GROUP_WORLD_SIZE"]) == ("host1", "0", "1")
        assert len(json.loads(one["TF_CONFIG"])["cluster"]["worker"]) == 2
    assert seconds < 10
    report = hosts.run("host0", ranks.PACELINE, "report", "--json", record).stdout
    assert json.loads(report)["ranks"] == [0, 1]
    assert hosts.left_over(10) == []


@pytest.mark.long
def test_job_continues_without_lost_first_host(hosts, shared_folder, undisturbed):
    where = "host0:1,host1:1,host2:1"
    record = shared_folder / "record"
    process = stands(hosts, shared_folder, where, "host0", "2", "--record", record)
    # Not one of the ssh clients, whose command lines name the agent as well.
    agent = "^[^ ]*python.*paceline.launch.host_agent"
    hosts.run("host0", "pkill", "-KILL", "-f", "-o", agent, check=False)
    found, said, seconds = ended(shared_folder, process)
    assert "host0 is lost; the job continues on 2 of 3 nodes, with 2 of 3 ranks, from" in said
    same(found, undisturbed)
    assert [one["host"] for one in found] == ["host1", "host2"]
    assert [one["GROUP_RANK"] for one in found] == ["0", "1"]
    assert {one["MASTER_ADDR"] for one in found} == {hosts.address("host1")}
    assert {one["HOROVOD_CROSS_SIZE"] for one in found} == {"2"}
    assert seconds < 10
    report = hosts.run("host0", ranks.PACELINE, "report", "--json", record).stdout
    assert json.loads(report)["ranks"] == [0, 1]
    assert {path.name for path in (record / "attempt-0").glob("*.ring")} >= {"rank-0.ring"}
    assert hosts.left_over(10) == []


WAIT = """
    import os, time
    open(f"up-{os.environ['RANK']}", "w")
    time.sleep(300)
    """


@pytest.mark.long
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--min-hosts", "2"], "host2 is lost; 1 of 2 nodes is left, fewer than --min-hosts 2. "),
        pytest.param(
            [],
            "host2 is lost; 1 of 2 nodes is left. HINT: --min-hosts 1 continues on these",
            marks=pytest.mark.long,
        ),
    ],
)
def test_job_ends_with_reason_if_fewer_than_min_hosts(hosts, shared_folder, words, told):
    ranks.write(shared_folder, WAIT)
    command = [ranks.PACELINE, "run", "--fresh", "--max-restarts", "2", *words]
    process = hosts.start("host0", *command, "-H", "host1,host2", "script.py", cwd=shared_folder)
    ranks.wait_until(lambda: len(list(shared_folder.glob("up-*"))) == 2, 30)
    hosts.crash("host2")
    _, said = process.communicate(timeout=20)
    assert process.returncode == 137
    assert f"paceline: no further attempt: {told}" in said
    assert "HINT" in said
    assert "Traceback" not in said
    assert hosts.left_over(10) == []


FAILS = """
    import os, signal, sys, time
    print("attempt", os.environ["TORCHELASTIC_RESTART_COUNT"], flush=True)
    if os.uname().nodename == "host1":
        {fails}
    time.sleep({seconds})
    """


@pytest.mark.long
def test_host_with_repeatedly_killed_rank_is_excluded(hosts, shared_folder):
    fails = "os.kill(os.getpid(), signal.SIGKILL)"
    seconds = 'os.environ["WORLD_SIZE"] == "2" and 300'
    ranks.write(shared_folder, FAILS.format(fails=fails, seconds=seconds))
    command = [ranks.PACELINE, "run", "--fresh", *GOES_ON, "1", "-H", "host1,host2", "script.py"]
    result = hosts.run("host0", *command, cwd=shared_folder, timeout=60)
    assert "paceline: the job restarts from the last checkpoint (restart 1 of 3)" in result.stderr
    assert (
        "paceline: host1 is excluded: in two consecutive attempts, a rank on it was the first to "
        "be "
        "killed; the job continues on 1 of 2 nodes, with 1 of 2 ranks, from the last checkpoint "
        "(restart 2 of 3)\n"
    ) in result.stderr
    assert ranks.untagged(result.stdout) == {"attempt 0", "attempt 1", "attempt 2"}
    assert "attempt 2" in result.stdout.splitlines()  # no rank prefix: printed by all ranks
    assert hosts.left_over(10) == []


@pytest.mark.long
def test_host_is_not_excluded_for_repeated_script_errors(hosts, shared_folder):
    ranks.write(shared_folder, FAILS.format(fails="sys.exit(7)", seconds="300"))
    command = [ranks.PACELINE, "run", "--fresh", *GOES_ON, "1", "-H", "host1,host2", "script.py"]
    result = hosts.run("host0", *command, cwd=shared_folder, timeout=60, check=False)
    assert result.returncode == 7
    assert "the job restarts from the last checkpoint (restart 3 of 3)" in result.stderr
    assert "left out" not in result.stderr
    assert hosts.left_over(10) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--max-restarts", "1", "--min-hosts", "0"],
            "--min-hosts must be 1 or more; this is 0. HINT",
        ),
        (["--min-hosts", "1"], "--min-hosts 1 needs restarts: .* HINT: add --max-restarts 3"),
        (
            ["--max-restarts", "1", "--min-hosts", "3"],
            "the job has 2 nodes. HINT: --min-hosts 2",
        ),
    ],
)
def test_invalid_min_hosts_is_reported_before_ranks_start(hosts, shared_folder, words, message):
    ranks.write(shared_folder, "open('started', 'w')")
    command = [ranks.PACELINE, "run", "--fresh", *words, "-H", "host1,host2", "script.py"]
    result = hosts.run("host0", *command, cwd=shared_folder, timeout=60, check=False)
    assert result.returncode == 2
    assert re.search(message, result.stderr), result.stderr
    assert "Traceback" not in result.stderr
    assert not (shared_folder / "started").exists()


@pytest.mark.long
def test_min_hosts_above_one_is_rejected_on_local_machine(tmp_path):
    script = ranks.write(tmp_path, "open('started', 'w')")
    launcher = "paceline --fresh --max-restarts 1 --min-hosts 2"
    result = ranks.run(script, launcher=launcher, check=False)
    assert result.returncode == 2
    assert "--min-hosts 2: the job has 1 node. HINT: --min-hosts 1\n" in result.stderr
    assert not (tmp_path / "started").exists()


class Numbers(IterableDataset):
    def __init__(self, first=0, each=1):
        self.first, self.each = first, each

    def shard(self, num_shards, index):
        return Numbers(index, num_shards)

    def __iter__(self):
        return iter(range(self.first, 54, self.each))


def test_iterable_dataset_keeps_global_batch_on_fewer_ranks():
    parts = [
        ShardedStream(
            DataLoader(Numbers(), batch_size=3),
            rank=rank,
            ranks=2,
            full_ranks=3,
            seed=0,
            count_all=lambda count: count,
        )
        for rank in range(2)
    ]
    assert [part.batch for part in parts] == [9, 9]
    sizes = [[len(batch) for batch in part] for part in parts]
    assert sizes == [[5] * 5 + [2], [4] * 6 + [3]]


def test_indivisible_global_batch_is_rejected_only_at_full_world_size():
    loader = DataLoader(range(100), batch_size=1)
    assert batch_schedule(loader, 4, 32).at(0) == 32  # on 3 of 4 ranks: 11, 11 and 10
    with pytest.raises(ValueError, match="32 can't be divided by 3 ranks"):
        batch_schedule(loader, 3, 32)
