"""The world as scripts see it: values that ranks agree on, meters, seeds, user errors."""

import json
import subprocess
import sys

import pytest
import ranks

AGREE = """
    import json, random, sys, numpy, torch
    import paceline
    world = paceline.init(seed=3, progress=False)
    out = {"any": world.any(world.rank == 1), "none": world.any(False)}
    out["mean"] = world.mean(total=torch.tensor(float(world.rank + 1)), count=2 * world.rank + 1)
    meter = world.meter()
    if world.rank == 0:
        meter.add(big=2**40 + 1, one=1)
    else:
        meter.add(one=torch.tensor(1))
    out["sums"] = meter.sum("big", "one", "never")
    out["draws"] = [torch.rand(()).item(), random.random(), numpy.random.rand()]
    assert paceline.init() is world
    world.log(accuracy=0.98765, count=3)
    json.dump(out, open(f"{sys.argv[1]}-{world.rank}", "w"))
"""


def test_reductions_agree_on_all_ranks_and_random_numbers_differ(tmp_path):
    result = ranks.run(ranks.write(tmp_path, AGREE), tmp_path / "out")
    first, second = (json.loads((tmp_path / f"out-{rank}").read_text()) for rank in range(2))
    draws = first.pop("draws"), second.pop("draws")
    assert first == second
    assert first["any"] is True
    assert first["none"] is False
    assert first["mean"] == 3 / 4
    assert first["sums"] == [2**40 + 1, 2, 0]
    assert all(a != b for a, b in zip(*draws, strict=True))
    assert "step 0  accuracy 0.9877  count 3" in result.stderr
    ranks.run(
        ranks.write(tmp_path, AGREE.replace("world.rank == 1", "True")),
        tmp_path / "a",
        ranks=1,
        launcher="python",
    )
    assert json.loads((tmp_path / "a-0").read_text())["draws"] == draws[0]


def mistake(folder, body, number=2, launcher="paceline", **env):
    head = """
    import torch, torch.nn.functional as F
    from torch.utils.data import DataLoader, TensorDataset
    import paceline
    """
    script = ranks.write(folder, head + body)
    result = ranks.run(script, ranks=number, launcher=launcher, check=False, **env)
    assert result.returncode == 1, result.stderr
    assert "HINT" in result.stderr
    assert "src/paceline" not in result.stderr  # shows no line of Paceline
    assert "script.py" in result.stderr
    return result.stderr


NAN = """
    world = paceline.init(progress=False)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.distribute(model, optimizer)
    for step in range(5):
        loss = model(torch.ones(2, 1)).sum()
        if step == 3 and world.rank == 1:
            loss = loss * float("nan")
        world.backward(loss)
        world.step(optimizer)
    """


def test_nonfinite_loss_is_reported_with_rank_and_step(tmp_path):
    said = mistake(tmp_path, NAN)
    assert "the loss is nan on rank 1 at step 3" in said
    assert "paceline: rank 1 failed: ValueError: the loss is nan" in said


@pytest.mark.parametrize("launcher", ["paceline", "python"])
def test_user_error_shows_script_line_without_traceback(tmp_path, launcher):
    said = mistake(
        tmp_path,
        """
    world = paceline.init(progress=False)
    world.shard(DataLoader(TensorDataset(torch.ones(9)), batch_sampler=[[1]]))
    """,
        launcher=launcher,
    )
    assert "world.shard(DataLoader(" in said
    assert "batch_sampler (list)" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("world.shard(DataLoader(TensorDataset(torch.ones(1))))", "1 sample for 2 ranks"),
        (
            "world.shard(DataLoader(TensorDataset(torch.ones(9))), global_batch=3)",
            "global_batch=3 can't be divided by 2 ranks. HINT: global_batch=4",
        ),
        ("world.keep(thing=3)", "must have state_dict and load_state_dict; this is of type int"),
        (
            "world.epochs(3, checkpoint='c', every='often')",
            "every must be a number of epochs, steps or a time; this is 'often'",
        ),
        (
            "world.distribute(torch.nn.Linear(1, 1), layout='tensor')",
            "layout='tensor': 'tensor' is no axis; the axes are dp, zero1 to zero3",
        ),
        (
            "world.backward(torch.ones(3))",
            "this has the shape (3,). HINT: world.backward(loss.mean())",
        ),
        ("world.meter().add(x=torch.ones(3))", "HINT: meter.add(x=tensor.sum())"),
        ("world.meter().ratio('a', 'b')", "the sum of 'b' over all ranks is 0"),
    ],
)
def test_invalid_arguments_are_rejected_with_hint(tmp_path, call, message):
    said = mistake(
        tmp_path,
        f"""
    world = paceline.init(progress=False)
    {call}
    """,
    )
    assert message in said


@pytest.mark.parametrize(
    ("call", "env", "message"),
    [
        (
            "paceline.init(precision='int4')",
            {},
            "precision must be one of 'fp32', 'bf16', 'fp16'; this is 'int4'",
        ),
        ("paceline.init(precision='fp16', device='cpu')", {}, "HINT: precision='bf16'"),
        ("paceline.init()", {"RANK": "1"}, "WORLD_SIZE=nothing"),
        ("paceline.init()", {"RANK": "3", "WORLD_SIZE": "2"}, "RANK=3 is not below WORLD_SIZE=2"),
    ],
)
def test_invalid_init_arguments_and_environment_are_rejected(tmp_path, call, env, message):
    assert message in mistake(tmp_path, f"\n    {call}\n", launcher="python", **env)


def test_master_port_in_use_is_reported(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        said = mistake(tmp_path, "\n    paceline.init()\n", launcher="python", **env)
    assert f"port {port} on 127.0.0.1 (MASTER_PORT) is in use" in said


def test_unweighted_backward_of_uneven_batch_warns_once(tmp_path):
    script = ranks.write(
        tmp_path,
        """
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    import paceline
    world = paceline.init(progress=False)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.distribute(model, optimizer)
    loader = world.shard(DataLoader(TensorDataset(torch.ones(9, 1)), batch_size=2))
    for _ in range(2):
        for (x,) in world.batches(loader):
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for x in world.batches([torch.ones(2, 1)] * 2):
        pass
    """,
    )
    said = ranks.run(script).stderr
    assert said.count("did not weight its gradient. HINT: call world.backward") == 1
    assert said.count("is not sharded, so each of 2 ranks processes all of its batches. HINT") == 1


ACCUMULATE = """
    import json, sys, torch
    from torch.utils.data import DataLoader, TensorDataset
    import paceline
    from paceline.analyze.records.read_record import parse_record
    from paceline.record.ring.states import Op, State
    world = paceline.init(progress=False)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.distribute(model, optimizer, accumulate=4)
    loader = world.shard(DataLoader(TensorDataset(torch.ones(80, 4)), batch_size=4))
    for (x,) in world.batches(loader):
        world.backward(model(x).mean())
        world.step(optimizer)
    events = parse_record(world._recorder.snapshot()).events
    reduces = ((events["state"] == State.COLLECTIVE) & (events["op"] == Op.ALL_REDUCE)).sum()
    steps = (events["state"] == State.STEP).sum()
    if world.rank == 0:
        json.dump([int(reduces), int(steps)], open(sys.argv[1], "w"))
    """


def test_gradient_accumulation_synchronizes_once_per_step(tmp_path):
    ranks.run(ranks.write(tmp_path, ACCUMULATE), tmp_path / "out")
    assert json.loads((tmp_path / "out").read_text()) == [3, 3]  # 10 batches: 4 + 4 + 2


def test_init_without_launcher_creates_no_process_group(tmp_path):
    code = (
        "import paceline, torch.distributed as d; w = paceline.init(); "
        "print(w.rank, w.size, d.is_initialized())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ranks.environment()
    )
    assert result.stdout.split() == ["0", "1", "False"]


SLOW = """
    import os, sys, time, torch
    from torch.utils.data import DataLoader, Dataset
    import paceline
    where = sys.argv[1]
    class Data(Dataset):
        def __len__(self):
            return 160
        def __getitem__(self, i):
            if where == "input":
                time.sleep(0.01)
            return torch.ones(4)
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)
        def forward(self, x):
            time.sleep(0.02)
            if where == "rank" and world.rank == 1:
                time.sleep(0.02)
            return self.linear(x)
    world = paceline.init(progress=False)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.distribute(model, optimizer)
    loader = world.shard(DataLoader(Data(), batch_size=2))
    validation = world.shard(DataLoader(Data(), batch_size=20), every_sample_once=True)
    for epoch in world.epochs(1):
        for x in world.batches(loader):
            world.backward(model(x).mean())
            world.step(optimizer)
            if where == "other":
                time.sleep(0.02)
        if where == "validation":
            for x in world.batches(validation):
                time.sleep(0.1)
"""


@pytest.mark.alone
@pytest.mark.parametrize(
    "where",
    ["rank", "input", *(pytest.param(w, marks=pytest.mark.long) for w in ("validation", "other"))],
)
def test_summary_attributes_time_to_correct_activity(tmp_path, where):
    """Run 40 steps with 20 ms of computing and one other activity that takes as long."""
    script = ranks.write(tmp_path, SLOW)
    out = tmp_path / "summary.json"
    result = ranks.run(script, where, launcher=f"paceline --json {out}")
    summary = json.loads(out.read_text())
    assert [sum(rank.values()) for rank in summary["states"]] == pytest.approx([1, 1])
    first, second = summary["states"]

    def near(share):
        return pytest.approx(share, abs=0.1)

    if where == "rank":
        assert summary["slowest_rank"] == 1
        assert first["useful"] == near(0.5)
        assert first["wait"] == near(0.5)
        assert second["useful"] == near(1.0)
        assert second["wait"] == near(0.0)
        assert summary["efficiencies"]["load_balance"] == near(0.75)
    else:
        shares = {"input": 0.5, "other": 0.5, "validation": 4 * 0.1 / (40 * 0.02 + 4 * 0.1)}
        for rank in (first, second):
            assert rank[where] == near(shares[where])
            assert rank["useful"] == near(1 - shares[where])
        assert summary["efficiencies"][where] == near(1 - shares[where])
    assert summary["steps"] == 40
    assert 0 < summary["recording_cost"] < 0.1
    assert "Paceline: 2 ranks, 40 steps" in result.stderr
    assert "parallel efficiency" in result.stderr
    assert "\x1b" not in result.stderr  # no colours without a terminal


@pytest.mark.long
def test_summary_is_printed_under_torchrun_and_single_process(tmp_path):
    script = ranks.write(tmp_path, SLOW)
    assert "Paceline: 2 ranks, 40 steps" in ranks.run(script, "x", launcher="torchrun").stderr
    alone = ranks.run(script, "x", launcher="python").stderr
    assert "Paceline: 1 rank, 80 steps" in alone
    assert "load balance" not in alone  # needs two ranks


def test_failed_run_prints_no_summary_and_frees_shared_memory(tmp_path):
    said = mistake(tmp_path, NAN)
    assert "parallel efficiency" not in said
    assert ranks.in_memory(tmp_path) == set()
