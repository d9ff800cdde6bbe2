"""Ranks on one GPU: sharing it, binding, visible devices, NCCL's refusal, and hangs."""

import json
import os
import re

import pytest
import ranks
import torch
from on_gpu import CUDA, DEVICE, command, filled, report, run

from paceline.cluster.topology.pci_devices import pci_cards
from paceline.cluster.topology.visible_gpus import gpu_count, visible_devices

pytestmark = [pytest.mark.gpu, pytest.mark.limit(120)]

BY_HAND = """
    import os, torch, torch.distributed as dist
    from torch import nn
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8)).to(device)
    KIND
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    g = torch.Generator().manual_seed(rank)
    for step in range(45):
        x = torch.randn(64, 64, generator=g).to(device)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
    # not full_tensor(): gloo's functional all-gather of a GPU's tensors crashes (pytorch 152645)
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    sums = [None] * size
    dist.all_gather_object(sums, sum(float(p.detach().double().sum()) for p in parts))
    assert parts[0] is not next(model.parameters()) or max(sums) - min(sums) < 1e-6, sums
    print("result", rank, round(float(total), 4), flush=True)
    dist.destroy_process_group()
"""
KINDS = {
    "ddp": "model = nn.parallel.DistributedDataParallel(model)",
    "fsdp": "from torch.distributed.fsdp import fully_shard; fully_shard(model)",
}


@pytest.mark.parametrize("launcher", ["paceline", "recorded"])
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_share_a_gpu_over_gloo(tmp_path, kind, launcher):
    if kind == "fsdp" and CUDA:
        mesh = "from torch.distributed.device_mesh import init_device_mesh"
        text = f"{mesh}; from torch.distributed.fsdp import fully_shard; "
        text += "fully_shard(model, mesh=init_device_mesh('cuda', (2,)))"
        text += ".set_force_sum_reduction_for_comms(True)"
    else:
        text = KINDS[kind]
        if kind == "fsdp":
            text += ".set_force_sum_reduction_for_comms(True)"
    how = "paceline" if launcher == "paceline" else f"paceline --record {tmp_path / 'record'}"
    done = run(tmp_path, BY_HAND.replace("KIND", text), number=2, launcher=how)
    assert done.stdout.count("result") == 2
    if launcher == "recorded":
        found = report(tmp_path / "record")
        assert found["ranks"] == [0, 1]
        assert found["unmatched"] == 0
        assert all(sum(s.values()) == pytest.approx(1, abs=0.02) for s in found["states"])
        assert found["groups"]


HOROVOD = """
    import torch
    from torch import nn
    import horovod.torch as hvd
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")
    x = torch.arange(6.0, device=device).reshape(3, 2) + rank
    total = sum(torch.arange(6.0).reshape(3, 2) + other for other in range(size))
    def check(name, found, expected):
        assert found.device.type == device.type, (name, found.device)
        torch.testing.assert_close(found.cpu(), expected, msg=name)
    check("sum", hvd.allreduce(x, op=hvd.Sum), total)
    check("average", hvd.allreduce(x.clone(), op=hvd.Average), total / size)
    check("fp16", hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16), total)
    rows = torch.cat([torch.full((other + 1, 2), float(other)) for other in range(size)])
    check("gather", hvd.allgather(torch.full((rank + 1, 2), float(rank), device=device)), rows)
    check("root", hvd.broadcast(x, 0), torch.arange(6.0).reshape(3, 2))
    handles = [hvd.allreduce_async(x * i, op=hvd.Sum, name=f"g.{i}") for i in range(20)]
    for i, handle in enumerate(handles):
        check(f"many {i}", hvd.synchronize(handle), total * i)
    sent = torch.arange(2.0 * size, device=device) + 10 * rank
    own = torch.arange(2.0 * size)[2 * rank : 2 * rank + 2]
    got = torch.cat([own + 10 * other for other in range(size)])
    check("all to all", hvd.alltoall(sent), got)

    def train(place, distributed):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2)).double().to(place)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if distributed:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            optimizer = hvd.DistributedOptimizer(
                optimizer, named_parameters=model.named_parameters())
        g = torch.Generator().manual_seed(2)
        for step in range(20):
            whole = torch.randn(4 * size, 8, generator=g, dtype=torch.float64)
            part = whole.chunk(size)[rank] if distributed else whole
            optimizer.zero_grad()
            model(part.to(place)).square().mean().backward()
            optimizer.step()
        return [p.detach().cpu() for p in model.parameters()]
    for a, b in zip(train(device, True), train("cpu", False), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)
    print("result", rank, flush=True)
"""


@pytest.mark.parametrize("number", [1, 2])
def test_horovod_script_on_the_gpu(tmp_path, number):
    how = f"paceline --record {tmp_path / 'record'}"
    done = run(tmp_path, HOROVOD, number=number, launcher=how)
    assert done.stdout.count("result") == number
    found = report(tmp_path / "record")
    assert found["unmatched"] == 0


NCCL = """
    import torch, torch.distributed as dist
    torch.cuda.set_device(0)
    dist.init_process_group(BACKEND)
    x = torch.ones(8, device="cuda")
    dist.all_reduce(x)
    torch.cuda.synchronize()
    print("reduced", x.tolist(), flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.only_gpu
@pytest.mark.parametrize("recorded", [False, True])
def test_nccl_with_one_rank(tmp_path, recorded):
    how = f"paceline --record {tmp_path / 'record'}" if recorded else "paceline"
    assert "reduced" in run(tmp_path, NCCL, launcher=how).stdout


@pytest.mark.only_gpu
def test_nccl_refuses_two_ranks_on_a_gpu_and_the_job_ends(tmp_path):
    done = run(tmp_path, NCCL, number=2, check=False, timeout=80)
    assert done.returncode not in (0, 124)
    text = done.stdout + done.stderr
    assert "Duplicate GPU" in text or "same GPU" in text, text[-2000:]
    assert "HINT" in text, text[-2000:]


WORLD = """
    import os, torch, paceline
    from torch import nn
    world = paceline.init(progress=False, OPTIONS)
    if world.device.type == "cuda":
        assert torch.cuda.current_device() == world.device.index == 0
    model = nn.Linear(8, 8)
    model, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(5):
        world.backward(model(torch.ones(2, 8, device=world.device)).mean())
        world.step(optimizer)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    print(f"rank {world.rank} has the device {world.device}, visible: {visible}", flush=True)
"""


@pytest.mark.only_gpu
def test_more_ranks_than_gpus_is_an_error_before_training(tmp_path):
    done = run(tmp_path, WORLD.replace("OPTIONS", ""), number=2, check=False)
    assert done.returncode != 0
    assert re.search(r"local rank [01] has the same GPU as another rank", done.stderr)
    assert "HINT: start at most 1 rank per node" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("number", [1, 2])
def test_ranks_on_the_cpu_of_a_machine_with_a_gpu(tmp_path, number):
    done = run(tmp_path, WORLD.replace("OPTIONS", "device='cpu'"), number=number)
    assert done.stdout.count("has the device cpu") == number


def test_one_rank_has_the_gpu(tmp_path):
    done = run(tmp_path, WORLD.replace("OPTIONS", "device=None"))
    assert f"the device {'cuda:0' if torch.cuda.is_available() else 'cpu'}" in done.stdout


def test_number_of_ranks_is_that_of_the_gpus(tmp_path):
    """Without -n, paceline run starts one rank for each GPU."""
    done = command(tmp_path, "run", write(tmp_path, WORLD.replace("OPTIONS", "device=None")))
    expected = torch.cuda.device_count() or done.stdout.count("the device")
    assert done.stdout.count("the device") == expected


def write(folder, text):
    return ranks.write(folder, filled(text))


@pytest.mark.only_gpu
@pytest.mark.parametrize("value", ["", "-1", "none"])
def test_no_visible_gpu_means_the_cpu(tmp_path, value):
    text = WORLD.replace("OPTIONS", "device=None")
    done = run(tmp_path, text, CUDA_VISIBLE_DEVICES=value)
    assert "device cpu" in done.stdout


@pytest.mark.only_gpu
@pytest.mark.parametrize(
    "value",
    [
        None,
        "0",
        "0,0",
        "0,1",
        "1",
        "1,0",
        "",
        "-1",
        "0,-1",
        " 0",
        "0x",
        "uuid",
        "uuid prefix",
        "GPU-",
    ],
)
def test_visible_gpus_are_those_of_pytorch(monkeypatch, value):
    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    value = {"uuid": uuid, "uuid prefix": uuid[:12]}.get(value, value)
    if value is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
    expected = torch.cuda._device_count_nvml()
    assert expected >= 0
    assert gpu_count() == expected


def test_cards_of_the_pci_bus_are_read():
    gpus = [card for card in pci_cards() if card.kind == "gpu"]
    if CUDA and gpus:  # a virtual machine may hide them
        assert len(gpus) >= torch.cuda.device_count()


@pytest.mark.only_gpu
def test_visible_gpu_has_a_card():
    environment = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    assert visible_devices(environment) == list(range(torch.cuda.device_count()))


@pytest.mark.parametrize("how", ["device", "core", "none"])
def test_binding_beside_a_gpu(tmp_path, how):
    script = write(tmp_path, WORLD.replace("OPTIONS", "device=None"))
    options = ["-n", "1", "--bind", how, "--report-bindings"]
    done = command(tmp_path, "run", *options, script, check=False)
    if how == "device" and (not CUDA or done.returncode):
        assert "HINT" in done.stderr  # virtual machines may not show the GPU on a PCI bus
        return
    assert done.returncode == 0, done.stderr
    assert "device" in done.stdout


@pytest.mark.parametrize("options", ["", "--fresh"])
def test_forked_and_fresh_ranks_use_the_gpu(tmp_path, options):
    done = run(tmp_path, WORLD.replace("OPTIONS", "device=DEVICE"), launcher=f"paceline {options}")
    assert f"device {DEVICE}" in done.stdout


def test_nothing_is_left_in_memory(tmp_path):
    run(tmp_path, WORLD.replace("OPTIONS", "device=DEVICE"))
    assert not ranks.in_memory(tmp_path)
    assert json.dumps(ranks.alive(str(tmp_path / "script.py"))) == "[]"
