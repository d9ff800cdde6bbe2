"""Elastic training: within an attempt (elastic_checks.py), and over restarts."""

import re
import signal
from pathlib import Path

import pytest
import ranks
from horovod_checks import Results, names, passed

FILE = "elastic_checks.py"

# A script for Horovod. In each attempt of ``die=RANK,BATCH,...`` that rank is killed after that
# batch; ``spoil`` changes the last commit before.
TRAIN = """
    import glob, os, resource, signal, sys, time
    import torch
    import paceline.compat.horovod.torch as hvd

    options = dict(word.split("=") for word in sys.argv[2:])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    died = [int(word) for word in options.get("die", "").split(",") if word]
    victim, at = (died + [-1, -1] * 9)[2 * attempt : 2 * attempt + 2]

    hvd.init()
    torch.manual_seed(hvd.rank())
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(torch.arange(60), x, x.sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.7)
    sampler = hvd.elastic.ElasticSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=5, sampler=sampler)
    if "limit" in options and attempt == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    class Meter:
        total = 0.0

    @hvd.elastic.run
    def train(state):
        while state.epoch < int(options.get("slow", 3)):
            for number, (indices, inputs, labels) in enumerate(loader):
                optimizer.zero_grad()
                loss = (model(inputs) - labels).square().mean()
                loss.backward()
                optimizer.step()
                scheduler.step()
                state.batch += 1
                state.meter.total += hvd.allreduce(loss.detach(), name="loss").item()
                state.seen += [(state.epoch, int(i)) for i in indices]
                state.sampler.record_batch(number, 5)
                if hvd.rank() == victim and state.batch == at:
                    if "spoil" in options:
                        for path in glob.glob(os.environ["PACELINE_RECORD"] + "/elastic/*"):
                            with open(path, "r+b") as file:
                                file.seek(100)
                                file.write(b"spoilt " * 30)
                    os.kill(os.getpid(), signal.SIGKILL)
                if "wait" in options and attempt == 0 and state.batch == 7:
                    open(f"waits-{hvd.rank()}", "w").close()
                    time.sleep(300)
                if "slow" in options:
                    time.sleep(0.2)
                if "limit" in options and state.batch == 6 and attempt == 0:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
                if state.batch % 2 == 0:
                    state.commit()
            state.epoch += 1
            state.sampler.set_epoch(state.epoch)
            state.commit()

    more = {"function": lambda: 1} if "lambda" in options else {}
    if "more" in options and attempt:
        more = {"other": torch.nn.Linear(1, 1)}
    state = hvd.elastic.TorchState(
        model=model, optimizer=optimizer, scheduler=scheduler, sampler=sampler,
        epoch=0, batch=0, meter=Meter(), seen=[], **more,
    )
    told = lambda: print("reset at batch", state.batch, "of", hvd.size(), flush=True)
    state.register_reset_callbacks([told])
    train(state)
    every = hvd.allgather_object(state.seen)
    if hvd.rank() == 0:
        torch.save({"model": model.state_dict(), "total": state.meter.total, "batch": state.batch,
                    "rate": optimizer.param_groups[0]["lr"], "seen": every}, sys.argv[1])
    """


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    return Results(FILE, tmp_path_factory.mktemp("elastic"))


@pytest.mark.parametrize("size", [1, 2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", names(FILE))
def test_elastic(results, name, size):
    passed(results, name, size)


def train(folder: Path, *options, ranks_=2, restarts=2, check=True):
    script = folder / "script.py"
    if not script.exists():
        ranks.write(folder, TRAIN)
    launcher = f"paceline --max-restarts {restarts}"
    return ranks.run(
        script, folder / "out.pt", *options, ranks=ranks_, launcher=launcher, check=check
    )


def load(folder: Path):
    import torch

    return torch.load(folder / "out.pt", weights_only=False)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    train(folder)
    return load(folder)


def same(found, expected):
    import torch

    for name, tensor in expected["model"].items():
        assert torch.equal(found["model"][name], tensor), name
    for name in ("total", "batch", "rate"):
        assert found[name] == expected[name], name


def test_killed_ranks_continue_from_the_last_commit(tmp_path, undisturbed):
    result = train(tmp_path, "die=1,5,0,11")
    said = result.stderr
    assert said.count("rank 1 was killed by SIGKILL") == 1
    assert said.count("rank 0 was killed by SIGKILL") == 1
    assert "the training continues from commit 2 of attempt 1" in said
    assert "the training continues from commit 6 of attempt 2" in said
    assert {"reset at batch 4 of 2", "reset at batch 10 of 2"} <= ranks.untagged(result.stdout)
    found = load(tmp_path)
    same(found, undisturbed)
    assert not ranks.in_memory(tmp_path)


def test_no_sample_is_lost_or_repeated_over_a_restart(tmp_path):
    train(tmp_path, "die=1,9")
    # Each batch has 5 samples of each rank. In epoch 1 the list of rank 0 at the commit after 2
    # batches is that of both ranks after the restart, as for every Python object of a state.
    each = [[index for epoch, index in seen if epoch == 1] for seen in load(tmp_path)["seen"]]
    assert [len(one) for one in each] == [30, 30]
    assert each[0][:10] == each[1][:10]
    assert len(set(each[0]) | set(each[1])) == 10 + 20 + 20


def test_rank_killed_before_the_first_commit_starts_from_the_beginning(tmp_path, undisturbed):
    result = train(tmp_path, "die=0,1")
    assert "continues from commit" not in result.stderr
    assert "reset at" not in result.stdout
    same(load(tmp_path), undisturbed)


def test_last_commit_that_was_written_is_used(tmp_path, undisturbed):
    result = train(tmp_path, "limit=1", "die=1,11")
    assert result.stderr.count("commit 3 can't be written to") == 1
    assert "a restart continues from the last one that was written" in result.stderr
    assert "the training continues from commit 2 of attempt 1" in result.stderr
    same(load(tmp_path), undisturbed)


def test_damaged_commit_is_an_error(tmp_path):
    result = train(tmp_path, "die=1,5", "spoil=1", restarts=1, check=False)
    assert result.returncode == 1
    assert re.search(r"ValueError: the last commit can't be read: .*HINT: start the", result.stderr)


def test_other_state_in_the_next_attempt_is_an_error(tmp_path):
    result = train(tmp_path, "die=1,5", "more=1", restarts=1, check=False)
    assert result.returncode == 1
    assert "the last commit and this TorchState differ in other. HINT" in result.stderr


def test_object_that_cannot_be_kept_is_named(tmp_path):
    result = train(tmp_path, "lambda=1", restarts=1)
    assert result.stderr.count("commits do not contain function of the state") == 1


def test_without_restarts_the_job_ends(tmp_path):
    result = train(tmp_path, "die=1,5", restarts=0, check=False)
    assert result.returncode == 128 + signal.SIGKILL
    assert "rank 1 was killed by SIGKILL" in result.stderr


@pytest.mark.long
@pytest.mark.parametrize("number", [3, 4])
def test_more_ranks_continue_from_the_last_commit(tmp_path, number):
    for name, options in (("whole", ()), ("killed", ("die=2,3,0,7",))):
        folder = tmp_path / name
        folder.mkdir()
        train(folder, *options, ranks_=number)
    same(load(tmp_path / "killed"), load(tmp_path / "whole"))


@pytest.mark.long
def test_two_nodes_continue_after_a_rank_is_killed(hosts, shared_folder, undisturbed):
    ranks.write(shared_folder, TRAIN)
    words = ["--max-restarts", "2", "-H", "host1,host2", "script.py", "out.pt", "die=1,5,0,11"]
    result = hosts.run("host0", ranks.PACELINE, "run", *words, cwd=shared_folder)
    assert "continues from commit 2 of attempt 1" in result.stderr
    assert "continues from commit 6 of attempt 2" in result.stderr
    same(load(shared_folder), undisturbed)


@pytest.mark.long
@pytest.mark.parametrize("lost", ["host1", "host2"])
def test_job_continues_from_the_commit_of_the_other_node(hosts, shared_folder, lost):
    ranks.write(shared_folder, TRAIN)
    words = ["--max-restarts", "2", "--min-hosts", "1", "-H", "host1,host2"]
    command = [ranks.PACELINE, "run", *words, "script.py", "out.pt", "wait=1"]
    job = hosts.start("host0", *command, cwd=shared_folder)
    ranks.wait_until(lambda: len(list(shared_folder.glob("waits-*"))) == 2, 60)
    hosts.crash(lost)
    out, said = job.communicate(timeout=90)
    assert job.returncode == 0, said
    assert f"{lost} is lost; the job continues on 1 of 2 nodes" in said
    assert "the training continues from commit 4 of attempt 1" in said
    assert "reset at batch 6 of 1" in out
    assert load(shared_folder)["batch"] == 6 + 2 * 12  # a rank has all samples of two epochs


@pytest.mark.long
def test_returned_node_takes_part_from_the_next_commit(hosts, shared_folder):
    ranks.write(shared_folder, TRAIN)
    words = ["--max-restarts", "1", "--min-hosts", "1", "-H", "host1,host2"]
    command = [ranks.PACELINE, "run", *words, "script.py", "out.pt", "wait=1", "slow=20"]
    job = hosts.start("host0", *command, cwd=shared_folder)
    ranks.wait_until(lambda: len(list(shared_folder.glob("waits-*"))) == 2, 60)
    hosts.crash("host2")
    said = ""
    for line in job.stderr:
        said += line
        if "the training continues from commit" in line:
            break
    hosts.boot("host2")
    out, rest = job.communicate(timeout=120)
    said += rest
    assert job.returncode == 0, said
    assert "paceline: host2 is back: the ranks write a checkpoint, and the job continues" in said
    assert "paceline: host2 is back; the job continues on 2 of 2 nodes, with 2 of 2 ranks" in said
    resets = re.findall(r"reset at batch (\d+) of (\d)", out)
    assert resets[0] == ("6", "1")
    assert int(resets[1][0]) > 6
    assert resets[1][1] == "2"
    each = load(shared_folder)["seen"]
    for epoch in range(3, 20):  # all samples, however many ranks there are
        seen = {index for one in each for of, index in one if of == epoch}
        assert len(seen) in (30, 60), epoch


@pytest.mark.long
def test_new_node_takes_part_from_the_next_commit(hosts, shared_folder):
    ranks.write(shared_folder, TRAIN)
    names, script = shared_folder / "names", shared_folder / "hosts.sh"
    names.write_text("host1\n")
    script.write_text(f"#!/bin/sh\ncat {names}\n")
    script.chmod(0o755)
    words = ["-np", "1", "--max-np", "2", "--slots-per-host", "1"]
    words += ["--host-discovery-script", script, "python", "script.py", "out.pt", "slow=12"]
    job = hosts.start("host0", ranks.PACELINE, "horovodrun", *words, cwd=shared_folder)
    said = ""
    for line in job.stderr:
        said += line
        if "[0]" in line or "paceline run" in line:
            break
    names.write_text("host1\nhost2\nhost3\n")  # one more than --max-np allows
    out, rest = job.communicate(timeout=120)
    said += rest
    assert job.returncode == 0, said
    assert re.search(r"host[23].* (is|are) new: the ranks write a checkpoint, and the job", said)
    assert re.search(r" new; the job continues on 2 nodes, with 2 ranks, from the last", said)
    (reset,) = re.findall(r"reset at batch (\d+) of (\d)", out)
    assert reset[1] == "2"
    each = load(shared_folder)["seen"]
    for epoch in range(12):  # all samples, however many ranks there are
        seen = {index for one in each for of, index in one if of == epoch}
        assert len(seen) in (30, 60), epoch
    assert hosts.left_over(10) == []


TWO_TRAININGS = """
    import os, signal
    import torch
    import paceline.compat.horovod.torch as hvd

    hvd.init()
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

    @hvd.elastic.run
    def train(state, fold):
        begin = state.epoch
        while state.epoch < 3:
            hvd.allreduce(torch.ones(1), name="step")
            state.epoch += 1
            state.commit()
            if fold == 1 and state.epoch == 2 and attempt == 0 and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        print("fold", fold, "attempt", attempt, "from", begin, flush=True)

    for fold in range(2):
        model = torch.nn.Linear(1, 1)
        train(hvd.elastic.TorchState(model=model, epoch=0), fold)
"""


def test_each_training_of_a_script_continues_from_its_own_commits(tmp_path):
    script = ranks.write(tmp_path, TWO_TRAININGS)
    done = ranks.run(script, launcher="paceline --max-restarts 1")
    found = {line for line in ranks.untagged(done.stdout) if line.startswith("fold")}
    assert found == {
        "fold 0 attempt 0 from 0",
        "fold 0 attempt 1 from 3",  # it had ended
        "fold 1 attempt 1 from 2",
    }
