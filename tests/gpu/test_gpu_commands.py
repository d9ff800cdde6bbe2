"""Commands on a GPU: check, bench comm, verify, guard of the loss."""

import json

import pytest
import ranks
import torch
from on_gpu import CUDA, command, filled, run

from paceline.cost.machine.machine_file import load
from paceline.cost.roofline import roofs
from paceline.launch.guard.request import DIVERGED_EXIT_CODE

pytestmark = [pytest.mark.gpu, pytest.mark.limit(140)]


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    """The machine file of a quick check, and what the command printed."""
    folder = tmp_path_factory.mktemp("check")
    done = command(folder, "check", "--quick", "--out", "m.toml", timeout=130, check=False)
    return done, folder / "m.toml"


def test_check_measures_this_machine(machine):
    done, file = machine
    assert done.returncode == 0, done.stdout + done.stderr
    assert file.exists()


@pytest.mark.only_gpu
@pytest.mark.parametrize("precision", ["float64", "float32", "tf32", "float16", "bfloat16"])
@pytest.mark.parametrize("operation", ["matrix product", "convolution"])
def test_check_measures_the_gpu(machine, operation, precision):
    (host,) = load(machine[1]).hosts
    found = [
        one.rate.median
        for one in host.arithmetic
        if (one.device, one.operation, one.precision) == ("cuda:0", operation, precision)
    ]
    assert len(found) == 1
    least = {"float64": 1e12, "float32": 5e12, "tf32": 2e13, "float16": 5e13, "bfloat16": 5e13}
    if "H" in torch.cuda.get_device_name(0):
        assert found[0] > least[precision] * (0.5 if operation == "convolution" else 1)


@pytest.mark.only_gpu
def test_check_names_the_gpu_and_its_memory(machine):
    done, file = machine
    (host,) = load(file).hosts
    assert host.gpus[0].name == torch.cuda.get_device_name(0)
    assert host.gpus[0].name in done.stdout
    (memory,) = [one for one in host.memory if one.device == "cuda:0"]
    assert memory.triad.median > 1e11
    assert {"cuda", "nccl", "cudnn"} <= set(host.versions)


@pytest.mark.only_gpu
def test_roofline_of_the_gpu(machine):
    done, file = machine
    (host,) = load(file).hosts
    found = roofs(host, "cuda:0")
    assert next(iter(found)) in ("bfloat16", "float16")
    assert found["tf32"].peak > found["float32"].peak
    assert "roof" in done.stdout.lower()


def test_figures_have_a_spread(machine):
    (host,) = load(machine[1]).hosts
    for one in host.arithmetic:
        assert one.rate.low <= one.rate.median <= one.rate.high


COUNTED = """
    import torch
    from torch import nn
    device = torch.device(DEVICE)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(45):
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(torch.randn(1024, 1024, device=device)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.limit(160)
def test_step_is_placed_on_the_roofline(machine, tmp_path):
    text = COUNTED if CUDA else COUNTED.replace("range(45)", "range(12)")
    run(tmp_path, text, launcher=f"paceline --count-flops --record {tmp_path / 'record'}")
    done = command(tmp_path, "report", "record", "--machine", machine[1], "--json")
    roofline = json.loads(done.stdout)["roofline"]
    assert roofline["device"] == ("cuda:0" if CUDA else "cpu")
    assert roofline["points"]
    for point in roofline["points"].values():
        assert point["rate"] > 0
        assert point["limit"] > 0


@pytest.mark.parametrize("operation", ["all-reduce", "all-gather"])
def test_bench_comm_beside_a_gpu(tmp_path, operation):
    words = ["bench", "comm", "--to", "64K", "--operation", operation, "--json"]
    done = command(tmp_path, *words, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)["collectives"]
    assert {"gloo", "paceline"} <= {one["backend"] for one in found}


TRAIN = """
    import sys
    import torch, paceline
    from torch.utils.data import DataLoader, TensorDataset
    mistake = sys.argv[1]
    world = paceline.init(progress=False, device=DEVICE, seed=int(sys.argv[2]))
    inputs = torch.randn(640, 16, generator=torch.Generator().manual_seed(5))
    targets = inputs @ torch.randn(16, 4, generator=torch.Generator().manual_seed(6))
    targets = targets + 0.5 * torch.randn(640, 4, generator=torch.Generator().manual_seed(7))
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    model, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.05))
    loader = world.shard(DataLoader(TensorDataset(inputs, targets), 16, shuffle=True))
    step = 0
    for epoch in world.epochs(int(sys.argv[3])):
        for x, y in world.batches(loader):
            step += 1
            if mistake == "shuffle" and step > 60:
                y = y[torch.randperm(len(y))]
            if mistake == "nan" and step == 30:
                x = x * float("nan")
            world.backward(torch.nn.functional.mse_loss(model(x), y))
            world.step(optimizer)
    print("trained", step, flush=True)
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    run(folder, TRAIN, "none", "{seed}", 4, launcher="paceline --make-reference ref.json --seeds 2")
    return folder / "ref.json"


@pytest.mark.parametrize("mistake", ["none", "shuffle"])
def test_guard_of_the_loss(reference, tmp_path, mistake):
    how = f"paceline --reference {reference} --on-divergence stop"
    done = run(tmp_path, TRAIN, mistake, 7, 4, launcher=how, check=False)
    expected = 0 if mistake == "none" else DIVERGED_EXIT_CODE
    assert done.returncode == expected, done.stderr[-2500:]


def test_guard_beside_a_loss_that_is_not_finite(reference, tmp_path):
    how = f"paceline --reference {reference}"
    done = run(tmp_path, TRAIN, "nan", 7, 4, launcher=how, check=False)
    assert done.returncode != 0
    assert "not finite" in done.stderr or "nan" in done.stderr


VERIFIED = """
    import sys, torch, torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
    dist.init_process_group("gloo")
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    model = torch.nn.parallel.DistributedDataParallel(model.to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    x = torch.randn(320, 16, generator=torch.Generator().manual_seed(5))
    data = TensorDataset(x, x[:, :4].sin())
    sampler = DistributedSampler(data) if sys.argv[1] == "right" else None
    for epoch in range(2):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for a, b in DataLoader(data, 8, sampler=sampler, shuffle=sampler is None):
            a, b = a.to(device), b.to(device)
            loss = torch.nn.functional.mse_loss(model(a), b)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("script", ["right", "no sampler"])
def test_verify_on_a_gpu(tmp_path, script):
    path = ranks.write(tmp_path, filled(VERIFIED))
    words = ["verify", "-n", "2", "--minutes", "0.5", "--json", path, script]
    done = command(tmp_path, *words, check=False, timeout=130)
    assert done.returncode == (0 if script == "right" else 1), done.stdout[-3000:] + done.stderr
    assert json.loads(done.stdout)["format"] == "paceline-verification"
