"""Batches on the GPU: contents while copies overlap kernels, pinned memory, streams, graphs."""

import gc

import numpy as np
import pytest
import torch
from on_gpu import CUDA, Net, run, sync
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.data import Loader
from paceline.world.loops.training_loops import move_to_device

pytestmark = pytest.mark.gpu
COUNT, WIDTH = 512, 20_000  # 1.3 MB a batch of 16: copies take longer than a Python loop
BUSY_CYCLES = 30_000_000  # some 20 ms of a GPU


@pytest.fixture(scope="module")
def arrays():
    x = np.random.default_rng(0).normal(size=(COUNT, WIDTH)).astype("float32")
    x[:, 0] = np.arange(COUNT)
    return x, np.arange(COUNT)


def busy():
    """Keep the present stream of the GPU busy, so that what follows waits."""
    if CUDA:
        torch.cuda._sleep(BUSY_CYCLES)


def loaders(arrays, name, pinned):
    x, y = arrays
    if name == "Loader":
        return Loader((x, y), 16, shuffle=True, num_workers=2, pin_memory=pinned, seed=1)
    if name == "Loader, inline":
        return Loader((x, y), 16, shuffle=True, num_workers=0, pin_memory=pinned, seed=1)
    data = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    workers = 2 if name == "DataLoader, workers" else 0
    return DataLoader(data, 16, shuffle=True, num_workers=workers, pin_memory=pinned and CUDA)


NAMES = ["Loader", "Loader, inline", "DataLoader", "DataLoader, workers"]


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_batches_arrive_whole_while_the_gpu_is_busy(make_world, arrays, name, pinned):
    """The memory of a batch must not be reused while its copy still waits behind a kernel."""
    x, _ = arrays
    world = make_world(seed=2)
    sums, ids = [], []
    for number, (a, b) in enumerate(world.batches(world.shard(loaders(arrays, name, pinned)))):
        if number % 4 == 0:
            busy()
        sums.append(a.double().sum(1))
        ids.append(b)
        del a, b
    ids = torch.cat(ids).cpu()
    assert sorted(ids.tolist()) == list(range(COUNT))
    expected = torch.from_numpy(x.astype("float64").sum(1))[ids]
    torch.testing.assert_close(torch.cat(sums).cpu(), expected, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_copies_of_the_loader_by_hand_arrive_whole(arrays, device, threads):
    """As a script does it without a world: pinned memory, non_blocking, no reference kept."""
    x, _ = arrays
    loader = Loader(arrays, 8, num_workers=threads, pin_memory=True)
    found = []
    for number, (a, _b) in enumerate(loader):
        if number % 8 == 0:
            busy()
        found.append(a.to(device, non_blocking=True))
        del a, _b
    assert torch.equal(torch.cat(found).cpu(), torch.from_numpy(x))


@pytest.mark.only_gpu
@pytest.mark.parametrize("threads", [0, 2])
def test_batches_of_the_loader_are_pinned(arrays, threads):
    for a, b in Loader(arrays, 64, num_workers=threads, pin_memory=True):
        assert a.is_pinned()
        assert b.is_pinned()


@pytest.mark.only_gpu
def test_batches_without_pin_memory_are_not_pinned(arrays):
    a, _ = next(iter(Loader(arrays, 8)))
    assert not a.is_pinned()


@pytest.mark.only_gpu
def test_copies_of_pinned_batches_do_not_wait(arrays, device):
    loader = Loader(arrays, 16, num_workers=2, pin_memory=True)
    batches = list(loader)
    sync()
    torch.cuda.set_sync_debug_mode("error")
    try:
        moved = [move_to_device(batch, device) for batch in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(torch.cat([a for a, _ in moved]).cpu(), torch.from_numpy(arrays[0]))


@pytest.mark.parametrize("epochs", [3])
def test_pinned_memory_is_reused(arrays, device, epochs):
    """Later passes allocate no further pinned memory."""
    loader = Loader(arrays, 16, num_workers=2, pin_memory=True)
    sizes = []
    for _ in range(epochs):
        total = sum(float(a.to(device).sum()) for a, _ in loader)
        gc.collect()
        sizes.append(total)
    assert max(sizes) == pytest.approx(min(sizes))


@pytest.mark.parametrize("kind", ["tuple", "dict", "named", "nested"])
def test_batches_of_any_structure_move(device, kind):
    from collections import namedtuple

    pair = namedtuple("Pair", "x y")
    a = torch.arange(6.0)
    value = {
        "tuple": (a, "text"),
        "dict": {"a": a, "n": 3},
        "named": pair(a, None),
        "nested": [{"a": (a,)}],
    }[kind]
    moved = move_to_device(value, device)
    found = [t for t in torch.utils._pytree.tree_leaves(moved) if isinstance(t, torch.Tensor)]
    assert type(moved) is type(value)
    assert all(t.device == device and torch.equal(t.cpu(), a) for t in found)
    assert len(found) == 1


@pytest.mark.only_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_training_on_another_stream_is_the_same(make_world, device, precision):
    def train(stream):
        world = make_world(seed=4, precision=precision)
        torch.manual_seed(0)
        model = Net(64, dropout=0.0)
        model, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        x = torch.randn(128, 32, generator=torch.Generator().manual_seed(2))
        loader = world.shard(DataLoader(TensorDataset(x, x[:, :4]), 16, pin_memory=True))
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for a, b in world.batches(loader):
                world.backward((model(a) - b).float().square().mean())
                world.step(optimizer, clip=1.0)
        stream.synchronize()
        found = [p.detach().clone() for p in model.parameters()]
        world.close()
        return found

    expected = train(torch.cuda.default_stream())
    found = train(torch.cuda.Stream())
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


GRAPH = """
    import sys, torch
    from torch import nn
    if "world" in sys.argv:
        import paceline
        world = paceline.init(progress=False, device=DEVICE)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, capturable=True)
    x = torch.randn(32, 64, device="cuda")
    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    print(f"loss {float(loss):.6f} done")
"""


@pytest.mark.only_gpu
@pytest.mark.parametrize("how", ["plain", "recorded", "world"])
def test_cuda_graph_of_a_step_is_captured(tmp_path, how):
    launcher = "paceline" if how != "recorded" else f"paceline --record {tmp_path / 'record'}"
    done = run(tmp_path, GRAPH, *(["world"] if how == "world" else []), launcher=launcher)
    assert "done" in done.stdout
    assert "nan" not in done.stdout


COMPILED = """
    import torch
    from torch import nn
    import paceline
    world = paceline.init(progress=False, device=DEVICE, precision="bf16")
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    model, optimizer = world.distribute(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    compiled = torch.compile(model)
    x = torch.randn(32, 64, device=world.device)
    first = last = None
    for step in range(60):
        loss = compiled(x).float().square().mean()
        world.backward(loss)
        world.step(optimizer)
        last = float(loss.detach())
        first = first or last
    print("fell", last < first, "done")
"""


@pytest.mark.limit(100)
@pytest.mark.only_gpu
def test_compiled_model_trains_recorded(tmp_path):
    done = run(tmp_path, COMPILED, launcher=f"paceline --record {tmp_path / 'record'}")
    assert "fell True done" in done.stdout


def test_dali_makes_batches_on_the_device(tmp_path, device):
    pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")
    from nvidia.dali import fn, types

    x = np.arange(48, dtype="float32").reshape(12, 4)

    def graph(samples):
        return fn.cast(samples.gpu() if CUDA else samples, dtype=types.FLOAT)

    for batch in Loader(x, 4, dali=graph):
        assert batch.device == device


@pytest.mark.parametrize("sparse", [False, True])
def test_module_with_buffers_and_sparse_gradients_moves(world, device, sparse):
    model = nn.Sequential(nn.Embedding(50, 8, sparse=sparse), nn.Linear(8, 2))
    model.register_buffer("seen", torch.zeros(3))
    model, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.seen.device == device
    before = model[0].weight.detach().clone()
    world.backward(model(torch.tensor([[1, 2], [3, 4]], device=device)).square().mean())
    assert world.step(optimizer)
    assert not torch.equal(before, model[0].weight.detach())
