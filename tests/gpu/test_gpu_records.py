"""Records of a training on a GPU: kernels of sampled steps, states, losses, planted faults."""

import itertools
import json
import re

import pytest
import ranks
import torch
from faults import FAULTS, SCRIPT, line_of
from on_gpu import CUDA, command, filled, report, run

from paceline.analyze.records.load_run import load_run
from paceline.record.ring.states import Memory, State

pytestmark = [pytest.mark.gpu, pytest.mark.limit(120)]
STEPS = 120 if CUDA else 60


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return a function: fault to (folder of the record, its report); each is run once."""
    made = {}

    def get(fault):
        if fault not in made:
            folder = tmp_path_factory.mktemp(fault)
            record = folder / "record"
            run(folder, SCRIPT, fault, STEPS, launcher=f"paceline --record {record}")
            made[fault] = record, report(record)
        return made[fault]

    return get


def events(record, state):
    (rank,) = load_run(record).records
    found = rank.events
    return found[found["state"] == state]


@pytest.mark.parametrize("fault", FAULTS)
def test_report_adds_up(recorded, fault):
    _, found = recorded(fault)
    (states,) = found["states"]
    assert sum(states.values()) == pytest.approx(1.0, abs=0.02)
    assert all(-1e-9 <= share <= 1 + 1e-9 for share in states.values())
    assert found["steps"] == STEPS
    assert found["lost_events"] == 0


@pytest.mark.only_gpu
@pytest.mark.parametrize("fault", ["none", "sync", "kernel"])
def test_kernels_of_the_sampled_steps_are_recorded(recorded, fault):
    record, _ = recorded(fault)
    kernels, steps = events(record, State.KERNEL), events(record, State.STEP)
    assert len(kernels) > 20
    assert kernels["amount"].sum() > 20 * 20  # 20 steps of more than 20 kernels
    sampled = steps[(steps["step"] > 19) & (steps["step"] <= 41)]
    slack = 50_000_000
    assert kernels["start"].min() >= sampled["start"].min() - slack
    assert kernels["end"].max() <= sampled["end"].max() + slack
    assert (kernels["end"] >= kernels["start"]).all()


@pytest.mark.only_gpu
def test_kernels_do_not_overlap_in_one_stream(recorded):
    record, _ = recorded("none")
    kernels = sorted(events(record, State.KERNEL)[["start", "end"]].tolist())
    overlaps = sum(b[0] < a[1] for a, b in itertools.pairwise(kernels))
    assert overlaps <= 0.01 * len(kernels)


@pytest.mark.only_gpu
def test_device_and_its_memory_are_recorded(recorded):
    record, found = recorded("none")
    (rank,) = load_run(record).records
    assert rank.meta["device"] == "cuda"
    assert rank.on_gpu
    memory = events(record, State.MEMORY)
    kinds = set(memory["peer"].tolist())
    assert {int(Memory.DEVICE), int(Memory.DEVICE_AVAILABLE)} <= kinds
    assert torch.cuda.get_device_name(0)[:4] in json.dumps(found["places"]) or found["places"]


def losses_of(found):
    return [(one["kind"], one["share"]) for one in found["losses"]]


def test_planted_input_stall_is_named(recorded):
    record, found = recorded("input")
    assert found["losses"][0]["kind"] == "input", losses_of(found)
    assert found["efficiencies"]["input"] < 0.8
    text = (record.parent / "script.py").read_text()
    lines = [line["line"] for line in found["losses"][0].get("lines", [])]
    assert not lines or min(abs(line_of(text, "input") - line) for line in lines) < 3


@pytest.mark.only_gpu
def test_planted_synchronization_leaves_the_gpu_idle(recorded):
    _, with_fault = recorded("sync")
    _, without = recorded("none")
    assert with_fault["states"][0]["useful"] < without["states"][0]["useful"] - 0.1


@pytest.mark.only_gpu
def test_planted_slow_kernel_is_useful_time(recorded):
    _, found = recorded("kernel")
    assert found["states"][0]["useful"] > 0.6


@pytest.mark.only_gpu
def test_steps_of_the_report_are_those_of_a_clock(recorded):
    """The mean step of the record is that of the script's own time."""
    record, found = recorded("kernel")
    steps = events(record, State.STEP)
    mean = float((steps["end"][-1] - steps["start"][10]) / 1e9 / (len(steps) - 10))
    assert found["step_times"]["median_s"] == pytest.approx(mean, rel=0.2)


def test_verdict_and_page_and_timeline(recorded, tmp_path):
    record, found = recorded("none")
    assert found["verdict"]["verdict"]
    command(tmp_path, "report", record, "--html", "page.html", "--timeline", "trace.json")
    assert (tmp_path / "page.html").stat().st_size > 100_000
    trace = json.loads((tmp_path / "trace.json").read_text())
    names = {event.get("name") for event in trace["traceEvents"]}
    assert names
    if CUDA:
        assert any("kernel" in str(name).lower() for name in names), names


def test_two_records_are_compared(recorded, tmp_path):
    one, _ = recorded("none")
    other, _ = recorded("kernel")
    done = command(tmp_path, "report", one, other, "--json")
    assert json.loads(done.stdout)["format"] == "paceline-comparison"


PROFILED = """
    import torch
    from torch import nn
    device = torch.device(DEVICE)
    model = nn.Linear(256, 256).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(64, 256, device=device)
    def steps(count):
        for _ in range(count):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    steps(15)
    with torch.profiler.profile() as profile:
        steps(20)
    on_device = sum("cuda" in str(e.device_type).lower() for e in profile.events())
    steps(15)
    print("events", len(profile.events()), on_device)
"""


def test_profiler_of_the_script_keeps_its_kernels(tmp_path):
    done = run(tmp_path, PROFILED, launcher=f"paceline --record {tmp_path / 'record'}")
    _, total, on_device = done.stdout.split()[-3:]
    assert int(total) > 100
    if CUDA:
        assert int(on_device) >= 20
        assert "the script runs a profiler" in done.stderr


FLOPS = """
    import torch
    from torch import nn
    torch.set_float32_matmul_precision(PRECISION)
    device = torch.device(DEVICE)
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 1024, bias=False))
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(45):
        with torch.autocast(device.type, torch.bfloat16, enabled=AUTOCAST):
            loss = model(torch.randn(512, 1024, device=device)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize(
    ("precision", "autocast", "expected"),
    [
        ("highest", False, "float32"),
        pytest.param("high", False, "tf32", marks=pytest.mark.only_gpu),
        ("highest", True, "bfloat16"),
    ],
)
def test_work_of_a_step_is_counted_by_precision(tmp_path, precision, autocast, expected):
    text = FLOPS.replace("PRECISION", repr(precision)).replace("AUTOCAST", str(autocast))
    record = tmp_path / "record"
    run(tmp_path, text, launcher=f"paceline --count-flops --record {record}")
    work = report(record)["work"]
    products = 5 * 2 * 512 * 1024 * 1024  # the first layer has no gradient of its input
    assert work["flops"] == pytest.approx(products, rel=0.1)
    assert work["precision"] == expected
    assert work["device"] == ("cuda:0" if CUDA else "cpu")


BY_HAND = """
    import torch
    import paceline
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    world = paceline.init(progress=False, device=DEVICE, precision="bf16")
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
    model, optimizer = world.distribute(model, torch.optim.AdamW(model.parameters()))
    x = torch.randn(64 * 60, 64)
    loader = world.shard(DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 64, pin_memory=True))
    for epoch in world.epochs(1):
        for a, b in world.batches(loader):
            world.backward((model(a).float() - b).square().mean())
            world.step(optimizer, clip=1.0)
"""


def test_training_with_a_world_is_recorded(tmp_path):
    record = tmp_path / "record"
    done = run(tmp_path, BY_HAND, launcher=f"paceline --record {record}")
    found = report(record)
    assert found["steps"] == 60
    assert found["samples"] > 0
    assert "Traceback" not in done.stderr
    if CUDA:
        assert len(events(record, State.KERNEL)) > 20


def test_ring_is_read_while_it_is_written(tmp_path):
    record = tmp_path / "record"
    words = ranks.command(
        ranks.write(tmp_path, filled(SCRIPT)),
        *("none", 100_000_000),
        ranks=1,
        launcher=f"paceline --record {record}",
    )
    job = ranks.start(words, cwd=tmp_path)
    try:

        def shown():
            done = command(tmp_path, "top", record, "--once", check=False)
            return re.search(r"\bstep [1-9]\d", done.stdout) and done.returncode == 0

        ranks.wait_until(shown, 60)
    finally:
        job.send_signal(2)
        job.wait(30)
    assert report(record)["steps"] > 0
