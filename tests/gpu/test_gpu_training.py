"""Training on a GPU: the CPU's numbers in float64, mixed precision, loss scaling, checks."""

import contextlib
import copy

import pytest
import torch
from on_gpu import CUDA, SETTINGS, Net, run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.optim import LAMB, LARS
from paceline.record.pending_value import PendingCopy, PendingValue
from paceline.world import training_state

pytestmark = pytest.mark.gpu


def transformer():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Linear(8, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 4))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.last = nn.LSTM(8, 24, batch_first=True), nn.Linear(24, 4)

    def forward(self, x):
        return self.last(self.cell(x)[0])


def convolutional():
    part = lambda a, b: (nn.Conv1d(a, b, 3, padding=1), nn.BatchNorm1d(b), nn.ReLU())  # noqa: E731
    return nn.Sequential(*part(6, 12), *part(12, 6), nn.Linear(8, 4))


def perceptron():
    return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))


MODELS = {
    "perceptron": perceptron,
    "convolutional": convolutional,
    "recurrent": Recurrent,
    "transformer": transformer,
}
OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "lars": lambda p: LARS(p, lr=1.0, weight_decay=0.01, trust_coefficient=0.02),
    "lamb": lambda p: LAMB(p, lr=1e-2, weight_decay=0.01),
}


def trained(model, make, world, device, accumulate=1, clip=None, steps=6):
    optimizer = make(model.parameters())
    model, optimizer = world.distribute(model, optimizer, accumulate=accumulate)
    g = torch.Generator().manual_seed(3)
    x = torch.randn(8 * steps, 6, 8, dtype=torch.float64, generator=g)
    y = torch.randn(8 * steps, 6, 4, dtype=torch.float64, generator=g)
    loader = world.shard(DataLoader(TensorDataset(x, y), 8))
    losses = []
    for a, b in world.batches(loader):
        assert a.device == world.device
        loss = nn.functional.mse_loss(model(a), b)
        world.backward(loss)
        world.step(optimizer, clip=clip)
        losses.append(loss.detach().cpu())
    return torch.stack(losses), {n: p.detach().cpu() for n, p in model.state_dict().items()}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("name", MODELS)
def test_float64_equals_the_cpu(make_world, device, name, kind):
    torch.manual_seed(0)
    model = MODELS[name]().double()
    other = copy.deepcopy(model)
    world = make_world()
    assert world.device == device
    found = trained(model, OPTIMIZERS[kind], world, device)
    world.close()
    expected = trained(other, OPTIMIZERS[kind], make_world(device="cpu"), device)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-9, atol=1e-11)
    for key, value in expected[1].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_accumulation_and_clipping_equal_the_cpu(make_world, device, accumulate, clip):
    torch.manual_seed(0)
    model = perceptron().double()
    other = copy.deepcopy(model)
    how = {"accumulate": accumulate, "clip": clip}
    world = make_world()
    found = trained(model, OPTIMIZERS["momentum"], world, device, **how)
    world.close()
    expected = trained(other, OPTIMIZERS["momentum"], make_world(device="cpu"), device, **how)
    for key, value in expected[1].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_precision_trains_and_keeps_float32_parameters(make_world, device, precision):
    if precision == "fp16" and not CUDA:
        pytest.skip("fp16 needs a GPU")
    world = make_world(precision=precision, seed=1)
    model = Net(64)
    model, optimizer = world.distribute(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    x = torch.randn(256, 32, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(x, (x[:, 0] > 0).long())
    losses = []
    for _ in range(4):
        for a, b in world.batches(world.shard(DataLoader(data, 32, shuffle=True))):
            output = model(a)
            loss = nn.functional.cross_entropy(output.float(), b)
            world.backward(loss)
            world.step(optimizer)
            losses.append(float(loss.detach()))
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    assert all(p.dtype == torch.float32 and p.device == device for p in model.parameters())
    assert (world._training.scaler is not None) == (precision == "fp16")


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.weight * x


@pytest.fixture
def scaling(make_world, monkeypatch):
    """Return a world with loss scaling: 8 first, doubled by each update without an overflow."""

    class Scaler(torch.amp.GradScaler):
        def __init__(self, device):
            super().__init__(device, init_scale=8.0, growth_interval=1)

    monkeypatch.setattr(torch.amp, "GradScaler", Scaler)
    if not CUDA:
        monkeypatch.setattr("paceline.world.autocast_dtype", lambda *_: torch.float16)
    return make_world(precision="fp16")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("clip", [None, 10.0])
def test_step_with_an_overflow_is_skipped(scaling, device, fused, overflows, clip):
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
    model, optimizer = scaling.distribute(model, optimizer)
    if overflows:
        model.weight.register_hook(lambda gradient: gradient * float("inf"))
    scaling.backward(model(torch.ones((), device=device)))
    assert scaling.step(optimizer, clip=clip) is not overflows
    assert model.weight.item() == (0.0 if overflows else -1.0)
    assert scaling._training.scaler.get_scale() == (4.0 if overflows else 16.0)


def test_two_optimizers_share_one_scale(scaling, device):
    pairs = [
        scaling.distribute(m, torch.optim.SGD(m.parameters(), lr=1.0)) for m in (Scalar(), Scalar())
    ]
    pairs[0][0].weight.register_hook(lambda gradient: gradient * float("inf"))
    one = torch.ones((), device=device)
    scaling.backward(pairs[0][0](one) + pairs[1][0](one))
    assert scaling.step(pairs[0][1]) is False
    assert scaling.step(pairs[1][1]) is True
    assert scaling._training.scaler.get_scale() == 4.0


def test_skipped_step_does_not_advance_the_warm_up(scaling, device):
    model = Scalar()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaling.scale_learning_rate(optimizer, global_batch=2, reference_batch=1, warmup=5)
    scaling.distribute(model, optimizer)
    rate = optimizer.param_groups[0]["lr"]
    handle = model.weight.register_hook(lambda gradient: gradient * float("inf"))
    scaling.backward(model(torch.ones((), device=device)))
    handle.remove()
    assert scaling.step(optimizer) is False
    assert optimizer.param_groups[0]["lr"] == rate
    scaling.backward(model(torch.ones((), device=device)))
    assert scaling.step(optimizer) is True
    assert optimizer.param_groups[0]["lr"] > rate


FP16 = """
    import sys, torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline
    folder, epochs = sys.argv[1], int(sys.argv[2])
    world = paceline.init(seed=3, precision="fp16", progress=False, device=DEVICE)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    model, optimizer = world.distribute(model, torch.optim.Adam(model.parameters(), lr=0.01))
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
    loader = world.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 8, shuffle=True))
    skipped = 0
    for epoch in world.epochs(epochs, checkpoint=folder):
        for a, b in world.batches(loader):
            loss = nn.functional.mse_loss(model(a).float(), b)
            world.backward(loss * (1e6 if epoch == 0 else 1))  # overflows in float16 at first
            skipped += not world.step(optimizer)
    scale = world._training.scaler.get_scale()
    total = sum(float(p.double().abs().sum()) for p in model.parameters())
    print(f"result {skipped} {scale} {total:.9f}")
"""


@pytest.mark.only_gpu
def test_resumed_loss_scale_gives_the_same_training(tmp_path):
    whole = run(tmp_path, FP16, tmp_path / "a", 3).stdout.split()
    run(tmp_path, FP16, tmp_path / "b", 1)
    resumed = run(tmp_path, FP16, tmp_path / "b", 3).stdout.split()
    assert int(whole[whole.index("result") + 1]) > 0
    assert whole[whole.index("result") + 2 :] == resumed[resumed.index("result") + 2 :]


@pytest.mark.only_gpu
@pytest.mark.parametrize("value", ["highest", "high", "medium"])
def test_float32_products_are_counted_by_their_precision(value):
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision(value)
        a = torch.randn(512, 512, device="cuda")
        error = float((a @ a - (a.double() @ a.double())).abs().max())
        assert (error > 5e-3) == (value != "highest"), error
    finally:
        torch.set_float32_matmul_precision(before)


TF32 = """
    import torch, paceline
    a = torch.randn(1024, 1024, device=DEVICE)
    print("precision", torch.get_float32_matmul_precision())
    print("error", float((a @ a - a.double() @ a.double()).abs().max()))
"""


@pytest.mark.only_gpu
def test_knob_sets_tf32(tmp_path):
    settings = tmp_path / "settings.toml"
    settings.write_text(SETTINGS.format('matmul-precision = "high"'))
    found = run(tmp_path, TF32, launcher=f"paceline --settings {settings}", check=False)
    text = found.stdout + found.stderr
    assert "precision high" in text, text
    assert float(text.split("error")[1].split()[0]) > 5e-3


# non-finite values


def step_with(world, device, *, loss_factor=1.0, gradient=1.0, clip=None):
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    model, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(4):
        loss = model(torch.ones(2, 4, device=device)).mean()
        if step == 1:
            loss = loss * loss_factor
            if gradient != 1.0:
                model[2].weight.register_hook(lambda g: g * gradient)
        world.backward(loss)
        world.step(optimizer, clip=clip)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_nonfinite_value_is_an_error(world, device, what, clip):
    bad = {"loss_factor": float("nan")} if what == "loss" else {"gradient": float("inf")}
    with pytest.raises(ValueError, match=f"the {what}.*HINT"):
        step_with(world, device, **bad, clip=clip)


@pytest.mark.parametrize("mode", ["warn", "ignore"])
def test_nonfinite_value_is_a_warning_or_ignored(make_world, device, mode, capfd):
    step_with(make_world(nonfinite=mode), device, loss_factor=float("nan"))
    assert ("not finite" in capfd.readouterr().err) == (mode == "warn")


def test_finite_training_waits_for_no_check(world, device):
    step_with(world, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_pending_value_is_read_after_the_kernel(device, dtype):
    value = torch.full((), 3, dtype=dtype, device=device)
    if CUDA:
        torch.cuda._sleep(20_000_000)
    value += 4
    pending = PendingValue(value)
    value += 100  # after the copy was enqueued
    assert pending.is_known or CUDA
    assert pending.read() == 7


@pytest.mark.only_gpu
def test_pending_value_is_not_known_before_the_kernel_has_ended(device):
    torch.cuda._sleep(2_000_000_000)
    pending = PendingValue(torch.ones((), device=device))
    assert not pending.is_known
    assert pending.read() == 1.0
    assert pending.is_known


def test_pending_copy_holds_the_values_of_its_time(device):
    value = torch.tensor([1.0, 2.0], device=device)
    pending = PendingCopy(value)
    value += 1
    assert pending.wait().tolist() == [1.0, 2.0]
    assert pending.wait().device.type == "cpu"


# state


def test_random_numbers_continue(device):
    torch.manual_seed(1)
    torch.rand(3, device=device)
    saved = training_state.random_states()
    expected = torch.rand(5, device=device)
    torch.rand(7, device=device)
    training_state.set_random_states(saved)
    assert torch.equal(torch.rand(5, device=device), expected)


def test_meter_sums_on_the_device_are_exact(world, device):
    meter = world.meter()
    for value in range(1000):
        meter.add(total=torch.tensor(value + 2**40, device=device), count=1)
    assert meter.sum("total", "count") == (sum(v + 2**40 for v in range(1000)), 1000.0)


def test_meter_does_not_wait_for_the_device(world, device):
    if not CUDA:
        pytest.skip("it has no meaning on the CPU")
    torch.cuda.synchronize()
    with no_synchronization():
        meter = world.meter()
        for _ in range(10):
            meter.add(loss=torch.ones((), device=device))


@contextlib.contextmanager
def no_synchronization():
    """Raise an error where PyTorch waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.only_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_step_does_not_wait_for_the_device(make_world, device, precision, clip):
    world = make_world(precision=precision)
    model = Net(64)
    model, optimizer = world.distribute(model, torch.optim.AdamW(model.parameters(), fused=True))
    x = torch.randn(16, 32, device=device)
    for step in range(6):
        with no_synchronization() if step > 2 else contextlib.nullcontext():
            world.backward(model(x).float().square().mean())
            world.step(optimizer, clip=clip)


@pytest.mark.parametrize("wanted", [None, "cpu"])
def test_device_of_the_world(make_world, wanted):
    expected = "cuda" if torch.cuda.is_available() and wanted is None else "cpu"
    assert make_world(device=wanted).device.type == expected


def test_unknown_precision_and_fp16_on_the_cpu_are_errors(make_world):
    with pytest.raises(ValueError, match="HINT"):
        make_world(device="cpu", precision="fp16")
    paceline._world = None


def test_second_rank_of_a_gpu_is_an_error(monkeypatch):
    if not CUDA:
        pytest.skip("it has no meaning on the CPU")
    from paceline.world import process_group

    if torch.cuda.device_count() > 1:
        with pytest.raises(ValueError, match=r"there is no GPU for local rank 64.*HINT"):
            process_group.select_device(64, None)
        return
    device = process_group.select_device(64, None)  # a launcher may show each rank its own GPU
    assert device == torch.device("cuda", 0)
    monkeypatch.setattr(process_group, "uses_nccl", lambda group: True)
    store = torch.distributed.HashStore()
    process_group.check_own_gpu(device, 0, store)
    with pytest.raises(ValueError, match=r"local rank 64 has the same GPU.*HINT"):
        process_group.check_own_gpu(device, 64, store)
