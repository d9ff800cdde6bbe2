"""An out-of-memory error says what was predicted, what took it, and what would fit."""

import re

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

from paceline.cost.layout import Layout
from paceline.parallel.memory import out_of_memory
from paceline.parallel.memory.setup import ModelSetup
from paceline.record.hooks.collectives import RecordedGroup
from paceline.record.hooks.phases import PhaseRecorder
from paceline.record.ring.recorder import Recorder

CPU_ERROR = RuntimeError(
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 512000000 bytes. Error code 12 (Cannot allocate memory)"
)


def layer():
    return nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)


def watch(count, **options):
    model = nn.TransformerEncoder(layer(), 3, enable_nested_tensor=False)
    setup = ModelSetup(model, torch.optim.Adam(model.parameters()), torch.device("cpu"), **options)
    out_of_memory.watch_model(setup, model, Layout(), count)
    return model


@pytest.fixture(autouse=True)
def no_models_of_other_tests():
    out_of_memory.forget_models()


@pytest.fixture
def watched():
    yield watch(4)
    out_of_memory.forget_models()


def test_prediction_and_smallest_change(watched, monkeypatch):
    x = torch.randn(16, 8, 32)
    with torch.no_grad():
        watched(x[:1])  # an evaluation is not noted
    watched(x)
    watched(x[:2])
    assert not watched._forward_pre_hooks  # later forwards cost nothing
    monkeypatch.setattr(out_of_memory, "available_bytes", lambda _: 1 << 40)
    text = out_of_memory.explain(CPU_ERROR)
    assert "you tried to allocate 512000000 bytes" in text
    assert "with layout='data' is " in text
    assert "MiB activations" in text
    assert "HINT: world.distribute(..., layout='zero1') needs" in text


def test_smaller_batch_where_no_layout_fits(monkeypatch):
    watch(1, recomputes=True)(torch.randn(16, 8, 32))
    monkeypatch.setattr(out_of_memory, "available_bytes", lambda _: 900_000)
    text = out_of_memory.explain(torch.OutOfMemoryError("CUDA out of memory"))
    out_of_memory.forget_models()
    assert "instead of 16 samples per rank" in text


def test_other_errors_and_models_that_never_ran(watched):
    assert out_of_memory.explain(RuntimeError("shapes differ")) is None
    assert out_of_memory.explain(CPU_ERROR) is None


SCRIPT = """
    import resource, sys
    import torch
    from torch import nn
    import paceline

    world = paceline.init(progress=False)
    torch.manual_seed(1)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 2048), nn.Linear(2048, 64)
        def forward(self, x):
            return self.b(nn.functional.gelu(self.a(x)))

    model = nn.Sequential(*(Block() for _ in range(6)))
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = world.distribute(model, optimizer, **eval(sys.argv[1]))
    x = torch.randn(8192, 64)
    with open("/proc/self/status") as status:
        used = next(int(line.split()[1]) for line in status if line.startswith(sys.argv[3]))
    kind = getattr(resource, sys.argv[2])
    resource.setrlimit(kind, (1024 * used + (300 << 20), resource.RLIM_INFINITY))
    world.backward(model(x).square().mean())
    """


@pytest.mark.parametrize(
    ("layout", "limit"), [("data", ("RLIMIT_AS", "VmSize")), ("zero3", ("RLIMIT_DATA", "VmData"))]
)
def test_error_of_a_rank_that_has_too_little_memory(tmp_path, layout, limit):
    script = ranks.write(tmp_path, SCRIPT)
    done = ranks.run(script, {"layout": layout}, *limit, check=False)
    assert done.returncode == 1
    assert "error: out of memory (" in done.stderr
    assert f"with layout='{layout}' is " in done.stderr
    assert "MiB activations, in " in done.stderr
    assert re.search(r"It can take \d+(\.\d)? MiB", done.stderr), done.stderr
    assert "HINT: world.distribute(..., " in done.stderr
    assert "recompute='blocks') needs" in done.stderr


def test_error_of_a_recorded_rank_is_explained(watched):
    """The hooks of its recorder, which holds the process groups, can't be copied."""
    recorder = Recorder(0, 1)
    group = RecordedGroup(dist.ProcessGroup(dist.HashStore(), 0, 1), "0", recorder)
    PhaseRecorder(recorder).watch_model(watched)
    watched(torch.ones(8, 16, 32)).sum().backward()
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 512 MiB.")
    assert "The predicted peak of this rank" in (out_of_memory.explain(error) or "")
    assert group in recorder.groups
