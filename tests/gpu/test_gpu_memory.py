"""Memory of a GPU: recomputation, activations on the host, offload, and predictions."""

import copy
import gc
import json

import pytest
import torch
from on_gpu import CUDA, Block, Net, command, peak_of, run, sync
from torch import nn

from paceline.cost.layout import Layout
from paceline.cost.layout_memory import predict_layout
from paceline.parallel import memory_budget
from paceline.parallel.deferred import deferred
from paceline.parallel.memory.trace import TrainingStep, trace_step
from paceline.parallel.offload import offload_states
from paceline.parallel.recompute import host_activations
from paceline.parallel.recompute.host_activations import activations_on_host, is_movable
from paceline.parallel.recompute.recomputation import recompute_blocks

pytestmark = pytest.mark.gpu
MIB = 1 << 20
WIDTH, BATCH = (512, 2048) if CUDA else (64, 64)
BUDGET = 0.05 if CUDA else 0.02  # GiB: some blocks have to recompute


def step_of(model, x, autocast=False):
    torch.manual_seed(3)
    model.zero_grad()
    with torch.autocast(x.device.type, torch.bfloat16, enabled=autocast):
        loss = model(x).float().square().mean()
    loss.backward()
    return loss.detach().clone(), [p.grad.clone() for p in model.parameters()]


@pytest.fixture
def pair(device):
    """Two equal networks with dropout, and a batch."""
    torch.manual_seed(0)
    plain = Net(WIDTH).to(device)
    return plain, copy.deepcopy(plain), torch.randn(BATCH, 32, device=device)


def assert_same(one, other, exact=True):
    for a, b in zip([one[0], *one[1]], [other[0], *other[1]], strict=True):
        if exact:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("way", ["blocks", "selective", "auto"])
def test_recomputation_gives_the_same_bits(pair, way, autocast):
    plain, model, x = pair
    recompute_blocks(model, way, BUDGET if way == "auto" else None, None, lambda _: None)
    for _ in range(2):
        expected = step_of(plain, x, autocast)
        found = step_of(model, x, autocast)
        assert_same(expected, found)


@pytest.mark.only_gpu
@pytest.mark.parametrize(("way", "share"), [("blocks", 0.6), ("selective", 0.9)])
def test_recomputation_saves_memory(pair, way, share):
    plain, model, x = pair
    step_of(plain, x), step_of(model, x)
    recompute_blocks(model, way, None, None, lambda _: None)
    before, _ = peak_of(lambda: step_of(plain, x))
    after, _ = peak_of(lambda: step_of(model, x))
    assert after < share * before


@pytest.mark.only_gpu
@pytest.mark.parametrize("free", [0.45, 0.7, 1.5])
def test_automatic_recomputation_keeps_its_budget(pair, free):
    plain, model, x = pair

    def forward(of):
        return of(x).float().square().mean()

    kept, loss = peak_of(lambda: forward(plain))
    loss.backward()
    said = []
    recompute_blocks(model, "auto", free * kept / (1 << 30), None, said.append)
    forward(model).backward()
    model.zero_grad()
    sync()
    used, loss = peak_of(lambda: forward(model))
    loss.backward()
    assert used < (free + 0.15) * kept + 8 * MIB, said
    assert said
    assert said[0].startswith("recompute='auto': activations of 4 blocks")


def test_automatic_recomputation_takes_the_free_memory(pair, capfd):
    _, model, x = pair
    said = []
    recompute_blocks(model, "auto", None, None, said.append)
    step_of(model, x)
    assert "GiB of the rank's memory are available" in said[0]
    assert "4 kept" in said[0]


@pytest.mark.only_gpu
def test_copies_to_the_host_are_measured(device):
    host_activations.seconds_per_byte.cache_clear()
    rate = 2 / host_activations.seconds_per_byte(device)
    assert 5e8 < rate < 5e11, f"{rate / 1e9:.1f} GB/s"


@pytest.mark.only_gpu
def test_automatic_recomputation_chooses_the_host(pair, monkeypatch):
    _, model, x = pair
    said = []
    monkeypatch.setattr(
        "paceline.parallel.recompute.recomputation.seconds_per_byte", lambda device: 1e-15
    )
    recompute_blocks(model, "auto", BUDGET, None, said.append)
    step_of(model, x)
    assert "moved to the host's memory" in said[0]


# activations on the host


def through(block, x, on_host, backwards=1):
    torch.manual_seed(1)
    block.zero_grad()
    x = x.clone().requires_grad_()
    if on_host:
        with activations_on_host(block):
            y = block(x)
    else:
        y = block(x)
    for k in range(backwards):
        y.square().sum().backward(retain_graph=k + 1 < backwards)
    return y.detach(), [x.grad, *(p.grad.clone() for p in block.parameters())]


@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("number", [1, 5])
def test_activations_on_the_host_give_the_same_bits(device, number, backwards):
    torch.manual_seed(0)
    block = nn.Sequential(*(Block(WIDTH) for _ in range(number))).to(device)
    x = torch.randn(BATCH, WIDTH, device=device)
    for _ in range(3):
        assert_same(through(block, x, False, backwards), through(block, x, True, backwards))


@pytest.mark.only_gpu
def test_activations_leave_the_device(device, monkeypatch):
    monkeypatch.setattr(host_activations.leaving_storages(device), "limit", 16 * MIB)
    block = nn.Sequential(*(Block(WIDTH) for _ in range(4))).to(device)
    x = torch.randn(BATCH, WIDTH, device=device, requires_grad=True)
    block(x)  # allocates the workspace of cuBLAS, which stays
    gc.collect()  # memory of earlier tests
    free = torch.cuda.memory_allocated()
    y = block(x)
    held = torch.cuda.memory_allocated() - free
    del y
    assert held > 128 * MIB
    with activations_on_host(block):
        y = block(x)
    sync()
    assert torch.cuda.memory_allocated() - free < 0.25 * held
    y.sum().backward()


@pytest.mark.only_gpu
@pytest.mark.parametrize("busy", [False, True])
def test_memory_of_moved_activations_is_not_reused_too_early(device, busy):
    """What the script allocates next, on a stream that is ahead, must not change the copies."""
    torch.manual_seed(0)
    block = nn.Sequential(*(Block(WIDTH, 0.0) for _ in range(3))).to(device)
    x = torch.randn(BATCH, WIDTH, device=device)
    expected = through(block, x, False)
    for _ in range(5):
        block.zero_grad()
        a = x.clone().requires_grad_()
        if busy:
            with torch.cuda.stream(host_activations.copy_stream(device)):
                torch.cuda._sleep(50_000_000)
        torch.manual_seed(1)
        with activations_on_host(block):
            y = block(a)
        junk = [torch.full((BATCH, 4 * WIDTH), float("nan"), device=device) for _ in range(12)]
        del junk
        y.square().sum().backward()
        found = y.detach(), [a.grad, *(p.grad for p in block.parameters())]
        assert_same(expected, found)


@pytest.mark.only_gpu
@pytest.mark.parametrize("stream", ["default", "side"])
def test_activations_on_the_host_on_another_stream(device, stream):
    torch.manual_seed(0)
    block = nn.Sequential(*(Block(WIDTH, 0.0) for _ in range(3))).to(device)
    x = torch.randn(BATCH, WIDTH, device=device)
    expected = through(block, x, False)
    sync()
    one = torch.cuda.Stream() if stream == "side" else torch.cuda.default_stream()
    with torch.cuda.stream(one):
        found = through(block, x, True)
    sync()
    assert_same(expected, found, exact=False)


def test_what_is_movable(device):
    large = torch.ones(1 << 18, device=device)
    assert is_movable(large) == CUDA
    assert not is_movable(large[:4].clone())
    assert not is_movable(torch.ones(1 << 18))


# offload of the optimizer


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw loop": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.001, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


@pytest.mark.parametrize("chunk", [1 << 16, 64 << 20])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_offloaded_optimizer_gives_the_same_bits(pair, device, monkeypatch, kind, chunk):
    monkeypatch.setattr("paceline.parallel.offload.CHUNK_BYTES", chunk)
    plain, model, x = pair
    one, other = OPTIMIZERS[kind](plain.parameters()), OPTIMIZERS[kind](model.parameters())
    offload_states(other, device)
    for _ in range(3):
        step_of(plain, x), step_of(model, x)
        one.step(), other.step()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)
    states = [t for s in other.state.values() for t in s.values() if t.dim()]
    assert states
    assert all(t.device.type == "cpu" and t.is_pinned() == CUDA for t in states)
    expected = [t for s in one.state.values() for t in s.values() if t.dim()]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(expected, states, strict=True))


@pytest.mark.only_gpu
def test_offload_frees_the_memory_of_the_states(device):
    model = Net(1024, 4).to(device)
    count = sum(p.nbytes for p in model.parameters())
    x = torch.randn(8, 32, device=device)

    def train(optimizer):
        for _ in range(2):
            step_of(model, x)
            optimizer.step()
        model.zero_grad()
        sync()

    held = {}
    for name in ("plain", "offload"):
        gc.collect()  # memory of earlier tests
        before = torch.cuda.memory_allocated()
        optimizer = torch.optim.AdamW(model.parameters())
        if name == "offload":
            offload_states(optimizer, device)
        train(optimizer)
        held[name] = torch.cuda.memory_allocated() - before
        del optimizer
    assert held["plain"] > 1.9 * count
    assert held["offload"] < 0.2 * count


@pytest.mark.parametrize("begins", ["offload", "plain"])
def test_state_dict_continues_with_and_without_offload(pair, device, begins):
    plain, model, x = pair
    whole = OPTIMIZERS["adam"](plain.parameters())
    first, then = OPTIMIZERS["adam"](model.parameters()), OPTIMIZERS["adam"](model.parameters())
    offload_states(first if begins == "offload" else then, device)
    for number in range(4):
        step_of(plain, x), step_of(model, x)
        whole.step()
        if number == 2:
            then.load_state_dict(first.state_dict())
        (first if number < 2 else then).step()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b)


# budgets and predictions


def test_available_and_free_memory(device, monkeypatch):
    available, free = memory_budget.available_bytes(device), memory_budget.free_bytes(device)
    assert 0 < free <= available
    if CUDA:
        total = torch.cuda.get_device_properties(device).total_memory
        assert 0.9 * total < available <= total

        def of_this_process(device):  # other programs may use the GPU
            return total - torch.cuda.memory_reserved(device), total

        monkeypatch.setattr(torch.cuda, "mem_get_info", of_this_process)
        gc.collect()  # memory of earlier tests
        free = memory_budget.free_bytes(device)
        held = torch.empty(256 * MIB, dtype=torch.uint8, device=device)
        assert memory_budget.free_bytes(device) == free - 256 * MIB
        del held
        assert memory_budget.free_bytes(device) == free  # PyTorch keeps the block


def built(device, sgd=False, autocast=False):
    def build():
        with device:
            model = Net(512, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        if sgd:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.zeros(4096, 32, device=device)

        def step():
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
                loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()

        return TrainingStep([model], [optimizer], [x], step)

    return build


@pytest.mark.only_gpu
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("sgd", [False, True])
def test_predicted_memory_is_that_of_the_device(device, sgd, autocast):
    build = built(device, sgd, autocast)
    predicted = predict_layout(trace_step(build), Layout(), 1).memory.total

    def work():
        step = build()
        for _ in range(2):
            step.run()

    work()  # workspace of the libraries
    measured, _ = peak_of(work)
    assert predicted == pytest.approx(measured, rel=0.15)


def test_trace_of_a_step_takes_no_memory_of_the_device(device):
    used, _ = peak_of(lambda: trace_step(built(device)))
    assert used < MIB


@pytest.mark.parametrize("layout", ["data", "auto"])
def test_deferred_model_is_built_on_the_device(make_world, device, layout):
    torch.manual_seed(7)
    expected = Net(64).state_dict()
    world = make_world()
    torch.manual_seed(7)
    with deferred():
        model = Net(64)
    options = {"layout": layout}
    if layout == "auto":
        options["example_inputs"] = torch.zeros(4, 32)
    model = world.distribute(model, **options)
    for name, value in model.state_dict().items():
        assert value.device == device
        assert torch.equal(value.cpu(), expected[name])


@pytest.mark.parametrize("options", [{"recompute": "auto"}, {"layout": "auto"}])
def test_world_distributes_with_automatic_memory(make_world, device, options):
    world = make_world()
    model = Net(WIDTH)
    x = torch.randn(BATCH, 32, device=device)
    if "layout" in options:
        options = {**options, "example_inputs": x}
    model, optimizer = world.distribute(model, torch.optim.AdamW(model.parameters()), **options)
    for _ in range(3):
        world.backward(model(x).square().mean())
        assert world.step(optimizer)


SHOWN = """
    import torch
    from torch import nn
    import paceline
    world = paceline.init(device=DEVICE, precision="bf16")
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
    model, optimizer = world.distribute(model, torch.optim.AdamW(model.parameters()))
    for step in range(30):
        batch = 16 if world.device.type == "cuda" else 1
        x = torch.randn(batch, 128, 256, device=world.device)
        world.backward(model(x).float().square().mean())
        world.step(optimizer)
    if world.device.type == "cuda":
        print("peak", torch.cuda.max_memory_allocated())
    print("trained")
"""


@pytest.mark.limit(100)
@pytest.mark.parametrize("number", [1, 8])
def test_show_memory_predicts_a_script(tmp_path, number):
    out = tmp_path / "memory.json"
    done = run(tmp_path, SHOWN, number=number, launcher=f"paceline --show-memory --json={out}")
    assert "trained" not in done.stdout
    rows = json.loads(out.read_text())["layouts"]
    data = next(r for r in rows if (r["layout"], r["recompute"]) == ("data", None))
    assert data["fits"]
    if number == 1 and CUDA:
        measured = int(run(tmp_path, SHOWN).stdout.split("peak")[1].split()[0])
        assert data["peak_bytes"] == pytest.approx(measured, rel=0.3)


TOO_LARGE = """
    import torch
    from torch import nn
    import paceline
    world = paceline.init(device=DEVICE)
    model = nn.Sequential(*(nn.Linear(8192, 8192) for _ in range(8)))
    model, optimizer = world.distribute(model, torch.optim.AdamW(model.parameters()))
    total = torch.cuda.get_device_properties(0).total_memory
    world.backward(model(torch.randn(total // 8192 // 8, 8192, device=world.device)).mean())
    world.step(optimizer)
"""


@pytest.mark.only_gpu
@pytest.mark.limit(100)
def test_out_of_memory_is_explained(tmp_path):
    done = run(tmp_path, TOO_LARGE, check=False)
    assert done.returncode != 0
    assert "out of memory" in done.stderr.lower()
    assert "HINT" in done.stderr


def test_memory_is_recorded(tmp_path):
    run(tmp_path, SHOWN, launcher=f"paceline --record {tmp_path / 'record'}")
    text = command(tmp_path, "report", "record", "--json").stdout
    (peak,) = json.loads(text)["peaks"]
    assert peak["kind"] == ("device" if CUDA else "host")
    assert peak["bytes"] >= peak["parameters"] + peak["gradients"] + peak["optimizer_states"] > 0
