"""``paceline run --rehearse``: what ranks of a job would call and hold, without starting them.

The bytes of each axis are compared with the record of a real run.
"""

import json
import re
import textwrap
from collections import Counter

import pytest
import ranks

from paceline.analyze.records.load_run import load_run
from paceline.record.ring.states import Memory, State

MLP = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    world = paceline.init()

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(32, 96), nn.Linear(96, 32)
        def forward(self, x):
            return x + self.b(nn.functional.gelu(self.a(x)))

    model = nn.Sequential(nn.Linear(16, 32), *(Block() for _ in range(4)), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = world.distribute(model, optimizer)
    data = TensorDataset(torch.randn(640, 16), torch.randint(4, (640,)))
    loader = world.shard(DataLoader(data, batch_size=8))
    meter = world.meter()
    for epoch in world.epochs(1):
        for step, (x, y) in enumerate(world.batches(loader)):
            loss = world.forward_backward(model, x, y, nn.functional.cross_entropy)
            meter.add(loss=loss.item() * len(y), count=len(y))
            world.step(optimizer, clip=1.0)
            meter.ratio("loss", "count")
            if step == 3:
                break
    print("trained")
    """

CNN = """
    import torch
    from torch import nn
    import paceline

    world = paceline.init()
    conv = lambda i, o: nn.Conv2d(i, o, 3, padding=1)
    model = nn.Sequential(conv(1, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = world.distribute(model, optimizer)
    for step in range(4):
        x = torch.randn(2, 1, 16, 16)
        loss = world.forward_backward(model, x, x, nn.functional.mse_loss)
        world.step(optimizer)
    """

TORCHRUN = """
    import sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    assert dist.get_backend() == "gloo"
    config = [{"rate": 0.25} if rank == 0 else None]
    dist.broadcast_object_list(config, src=0)
    assert config[0]["rate"] == 0.25
    counted, part = torch.ones(3), torch.empty(1)
    dist.all_reduce(counted)
    dist.reduce_scatter(part, [torch.ones(1) for _ in range(size)])
    assert (counted.tolist(), part.item()) == ([size] * 3, size)
    dist.all_reduce(counted, dist.ReduceOp.MAX)
    assert counted.tolist() == [size] * 3
    side = dist.new_group(backend="gloo")
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    if "fsdp" in sys.argv:
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        loss = model(torch.randn(8, 16)).square().mean()
        loss.backward()
        dist.all_reduce(loss.detach(), group=side)
        optimizer.step()
        optimizer.zero_grad()
    """


def rehearsed(tmp_path, script, *args, count=4, options="", code=0):
    """Return the process and the JSON of a rehearsal."""
    out = tmp_path / "rehearsal.json"
    launcher = f"paceline --rehearse {count} --json={out} {options}"
    done = ranks.run_command(
        ranks.command(script, *args, ranks=count, launcher=launcher),
        tmp_path,
        ranks.environment(PACELINE_WIDTH="160"),
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done, json.loads(out.read_text())


def recorded(record, step=1):
    """Return calls and bytes of a recorded rank in a step, by group size and operation."""
    calls = record.events_in(State.COLLECTIVE)
    found = Counter()
    for one in calls[calls["step"] == step]:
        group = record.meta["groups"][str(int(one["group"]))]
        axis = group["name"].rpartition(" #")[0].partition(" (")[0]
        found[axis, int(group["size"]), int(one["op"]), "calls"] += 1
        found[axis, int(group["size"]), int(one["op"]), "bytes"] += int(one["amount"])
    return found


def predicted(rank):
    """Return the same of a rehearsed rank."""
    found = Counter()
    for one in rank["collectives_per_step"]:
        axis = one["axis"] if len(rank["place"]) > 1 and one["axis"] != "all ranks" else ""
        found[axis, one["ranks"], one["op"], "calls"] += one["calls"]
        found[axis, one["ranks"], one["op"], "bytes"] += one["bytes"]
    return found


def compare_with_real_run(tmp_path, text, *args, count, options=""):
    """Compare a rehearsal with the record of a real run, rank by rank."""
    script = ranks.write(tmp_path, text)
    _, found = rehearsed(tmp_path, script, *args, count=count, options=options)
    record = tmp_path / "record"
    launcher = f"paceline --record {record} {options}"
    words = ranks.command(script, *args, ranks=count, launcher=launcher)
    done = ranks.run_command(words, tmp_path, ranks.environment())
    assert done.returncode == 0, done.stderr
    run = load_run(record)
    assert [one["rank"] for one in found["rehearsed"]] == [one.rank for one in run.records]
    assert found["mismatches"] == []
    assert found["failure"] is None
    for real, rank in zip(run.records, found["rehearsed"], strict=True):
        assert recorded(real) == predicted(rank), f"rank {rank['rank']}"
        memory = rank["memory_bytes"]
        if "tensors" in real.meta:
            held = {name: real.meta["tensors"][name] for name in ("parameters", "gradients")}
            assert {name: memory[name] for name in held} == held
            assert memory["optimizer_states"] == real.meta["tensors"]["optimizer_states"]
        samples = real.events_in(State.MEMORY)
        peak = max(samples["amount"][samples["peer"] == Memory.HOST], default=0)
        if not peak:  # a run that is too short for a sample
            continue
        print(f"rank {rank['rank']}: peak {memory['process_peak'] / peak - 1:+.1%} of the record's")
    return found


LAYOUTS = ["dp2 x tp2"]
LONG = ["tp2", "pp2", "data", "zero1", "zero2", "zero3", "tp4", "pp4", "zero3/2", "pp2 x tp2"]


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(one, marks=pytest.mark.long) for one in LONG)]
)
def test_bytes_and_memory_of_layouts(tmp_path, layout):
    count = 2 if layout == "tp2" else 4
    found = compare_with_real_run(
        tmp_path, MLP, count=count, options=f"--layout={layout}".replace(" ", "")
    )
    assert found["layout"] == layout


@pytest.mark.parametrize("layout", ["h2", pytest.param("h2xw2", marks=pytest.mark.long)])
def test_bytes_of_parts_of_samples(tmp_path, layout):
    count = 4 if "w" in layout else 2
    compare_with_real_run(tmp_path, CNN, count=count, options=f"--layout={layout}")


@pytest.mark.parametrize("kind", ["ddp", pytest.param("fsdp", marks=pytest.mark.long)])
def test_bytes_of_scripts_for_torchrun(tmp_path, kind):
    compare_with_real_run(tmp_path, TORCHRUN, kind, count=2)


def test_many_ranks_on_hosts(tmp_path):
    script = ranks.write(tmp_path, MLP)
    hosts = ",".join(f"node{number}:8" for number in range(64))
    options = f"-H {hosts} --layout=dp64xtp8"
    done, found = rehearsed(tmp_path, script, count=512, options=options)
    assert [one["rank"] for one in found["rehearsed"]] == [0, 1, 7, 8, 504, 511]
    assert found["rehearsed"][-1]["place"] == {"data": 63, "tensor": 7}
    assert found["rehearsed"][-1]["host"] == "node63"
    links = {one["axis"]: (one["groups"], one["crossing"]) for one in found["links"]}
    assert (links["tensor"], links["data"]) == ((64, 0), (8, 8))
    assert "No error in two steps" in done.stderr
    assert "trained" not in done.stdout


def test_layout_with_a_slow_link(tmp_path):
    script = ranks.write(tmp_path, MLP)
    out = tmp_path / "layout.json"
    launcher = f"paceline --show-layout --json={out} --layout=tp4 -H a:2,b:2"
    done = ranks.run(script, ranks=4, launcher=launcher, PACELINE_WIDTH="160")
    found = json.loads(out.read_text())
    assert found["hosts"] == [{"name": "a", "ranks": 2}, {"name": "b", "ranks": 2}]
    (line,) = found["slow_links"]
    assert "ranks of the axis tensor" in line
    assert "HINT: an extent that divides the 2 ranks of a node" in line
    assert line in done.stderr
    assert re.search(r"^3 +b +3", done.stderr, re.MULTILINE)  # rank, host, place
    assert re.search(r"tensor +all-reduce +4 ranks +between hosts", done.stderr)


FAILING = {
    "another number of ranks": (
        "heads = 64\n"
        "if heads % size:\n"
        "    raise ValueError(f'{heads} heads are not divisible by {size}')",
        "rank 0 would fail at script.py:7, before its first optimizer step: ValueError: 64 heads "
        "are not divisible by 3",
        1,
    ),
    "a collective of one rank": (
        "if rank == 0:\n    dist.all_reduce(torch.ones(1))\ndist.broadcast(torch.ones(2), 0)",
        "rank 1 calls broadcast of 8 bytes with root 0 (script.py:7), and rank 0 calls all-reduce "
        "of 4 bytes (script.py:6)",
        1,
    ),
    "a last collective of one rank": (
        "dist.barrier()\nif rank == 0:\n    dist.all_reduce(torch.ones(1))",
        "collective 2 of their group: rank 0 calls all-reduce of 4 bytes (script.py:7), and rank "
        "1 does not",
        1,
    ),
    "a message that nobody receives": (
        "if rank == 0:\n    dist.send(torch.ones(3), 1)",
        "rank 0 sends 1 message of 12 bytes to rank 1, which receives 0 messages of 0 bytes",
        1,
    ),
    "a killed rank": (
        "import os, signal\nif rank == 2:\n    os.kill(os.getpid(), signal.SIGKILL)",
        "rank 2 would fail before its first optimizer step: the process was ended by SIGKILL",
        1,
    ),
    "the store": (
        "store = dist.distributed_c10d._get_default_store()\n"
        "store.set('x', 'y') if rank == 0 else print(store.get('x'))",
        "rank 1 can't be rehearsed further at script.py:6, before its first optimizer step",
        2,
    ),
}


@pytest.mark.parametrize("case", FAILING)
def test_errors_of_ranks(tmp_path, case):
    code, text, exit_code = FAILING[case]
    head = "import torch\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
    head += "rank, size = dist.get_rank(), dist.get_world_size()\n"
    script = ranks.write(tmp_path, head + code + "\n")
    done, found = rehearsed(tmp_path, script, count=3, code=exit_code)
    shown = " ".join(done.stderr.split())
    assert text in shown
    assert found["failure"] is not None or text in found["mismatches"][0]


def test_error_of_the_last_rank(tmp_path):
    text = """
        import torch
        import paceline
        world = paceline.init()
        model = torch.nn.Linear(8, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = world.distribute(model, optimizer)
        for epoch in world.epochs(1, checkpoint="run/checkpoints", every=1):
            for step in range(3):
                width = 9 if world.rank == 5 and step == 1 else 8
                world.backward(model(torch.randn(4, width)).sum())
                world.step(optimizer)
        """
    script = ranks.write(tmp_path, text)
    _, found = rehearsed(tmp_path, script, count=6, code=1)
    assert found["failure"]["rank"] == 5
    assert found["failure"]["step"] == 2
    assert found["failure"]["line"] == "script.py:11"
    assert "shapes cannot be multiplied (4x9 and 8x8)" in found["failure"]["text"]
    assert not (tmp_path / "run").exists()  # no checkpoint


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--rehearse 4 --record x", "--rehearse records nothing. HINT: leave out --record"),
        ("--rehearse 5", "-n 4 and --rehearse 5 name two numbers of ranks. HINT: leave out -n"),
        ("--rehearse 4 --show-memory", "can't be used together"),
        ("--rehearse 4 --layout=tq4", "--layout: layout='tq4': 'tq4' is no axis"),
        ("--rehearse 4 -H a:2", "4 ranks need as many slots"),
        ("--rehearse 4 --dry-run", "--dry-run and --rehearse can't be used together"),
    ],
)
def test_options_that_contradict(tmp_path, options, text):
    script = ranks.write(tmp_path, "print('started')")
    done = ranks.run(script, ranks=4, launcher=f"paceline {options}", check=False)
    assert done.returncode == 2
    assert text in done.stderr
    assert "started" not in done.stdout


def test_script_for_gpus(tmp_path):
    module = """
        import os
        import torch
        local_rank = int(os.environ["RANK"]) % torch.cuda.device_count()
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
        assert device.type == "cuda"

        def load(model):
            torch.save(model.state_dict(), "model.pt")
            model.load_state_dict(torch.load("model.pt", map_location=f"cuda:{local_rank}"))
            return model.to(local_rank, torch.float32).to(device).cuda()
        """
    (tmp_path / "gpus.py").write_text(textwrap.dedent(module))
    text = """
        import torch
        import torch.distributed as dist
        from gpus import load, local_rank
        from torch.nn.parallel import DistributedDataParallel
        dist.init_process_group("nccl")
        model = load(torch.nn.Linear(8, 8))
        model = DistributedDataParallel(model, device_ids=[local_rank])
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            start.record()
            with torch.cuda.stream(torch.cuda.Stream()), torch.cuda.device(local_rank):
                x = torch.randn(4, 8, pin_memory=True).to(local_rank, non_blocking=True)
            torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
            model(x).sum().backward()
            stop.record()
            torch.cuda.synchronize()
            print(1 / start.elapsed_time(stop))
            optimizer.step()
            optimizer.zero_grad()
        """
    _, found = rehearsed(tmp_path, ranks.write(tmp_path, text), count=2)
    traffic = {one["collective"]: one["bytes"] for one in found["axes_per_step"]}
    assert traffic["all-reduce"] == 4 * (64 + 8)


def test_script_that_needs_a_gpu(tmp_path):
    text = (
        "import torch\nimport paceline\nassert torch.cuda.is_available(), 'CUDA is not available'"
    )
    done, found = rehearsed(tmp_path, ranks.write(tmp_path, text), count=2, code=2)
    assert found["failure"]["is_limit"]
    assert "can't be rehearsed further" in done.stderr


def test_a_layout_without_effect(tmp_path):
    script = ranks.write(tmp_path, "print('trained')")
    done = ranks.run(script, ranks=1, launcher="paceline --layout=tp2")
    assert done.stderr.count("layout has no effect: the script does not call world.distribute") == 1
    script = ranks.write(tmp_path, "raise ValueError('before')")
    done = ranks.run(script, ranks=1, launcher="paceline --layout=tp2", check=False)
    assert "has no effect" not in done.stderr
