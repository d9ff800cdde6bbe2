"""Knobs that change how a model computes and where its memory lies."""

import pytest
import ranks
import torch

from paceline.knobs import model as compute
from paceline.knobs import process
from paceline.knobs.knob import KnobResult
from paceline.knobs.settings import Setting, write_settings
from paceline.record.ring.recorder import Recorder

MODEL = """
    import sys
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    kinds = set()
    net[0].register_forward_hook(lambda layer, x, y: kinds.add(str(y.dtype)))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn(16, 8))
    for x, in DataLoader(data, 4):
        optimizer.zero_grad()
        y = model(x)
        y.square().mean().backward()
        optimizer.step()
    told = [sorted(kinds), str(y.dtype), net._compiled_call_impl is not None, net.state_dict()]
    if dist.get_rank() == 0:
        torch.save(told, sys.argv[1])
    dist.destroy_process_group()
    """


def run(folder, script, name, knobs, count=2):
    settings = folder / f"{name}.toml"
    write_settings(settings, {knob: Setting(value) for knob, value in knobs.items()}, {})
    path = ranks.write(folder, script)
    done = ranks.run(path, folder / name, launcher=f"paceline --settings {settings}", ranks=count)
    return done, torch.load(folder / name, weights_only=False)


def test_bfloat16_autocast_returns_float32_and_trains_alike(tmp_path):
    _, (kinds, given, _, expected) = run(tmp_path, MODEL, "plain", {})
    assert (kinds, given) == (["torch.float32"], "torch.float32")
    _, (kinds, given, _, found) = run(tmp_path, MODEL, "short", {"autocast-bf16": True})
    assert (kinds, given) == (["torch.bfloat16"], "torch.float32")
    assert any(not torch.equal(found[name], tensor) for name, tensor in expected.items())
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0.02, atol=0.02)


@pytest.mark.long
def test_compiled_model_trains_with_same_result(tmp_path):
    _, (*_, expected) = run(tmp_path, MODEL, "plain", {}, count=1)
    _, (_, _, compiled, found) = run(tmp_path, MODEL, "compiled", {"compile": True}, count=1)
    assert compiled
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.parametrize(
    ("change", "knob", "why"),
    [
        ("double", "autocast-bf16", "its parameters are float64"),
        ("autocast", "autocast-bf16", "the script uses autocast"),
        ("compile", "compile", "the script compiles its model"),
    ],
)
def test_knob_has_no_effect_if_script_sets_it(tmp_path, change, knob, why):
    script = {
        "double": MODEL.replace("torch.manual_seed", "torch.set_default_dtype(torch.float64)\n"
                                "    torch.manual_seed"),
        "autocast": MODEL.replace("y = model(x)", "with torch.autocast('cpu'): y = model(x)"),
        "compile": MODEL.replace("kinds = set()", "kinds = set(); net.compile(backend='eager')"),
    }[change]  # fmt: skip
    done, _ = run(tmp_path, script, "own", {knob: True})
    assert done.stderr.count(f"{knob} has no effect: {why}") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_knob_without_gpu_is_reported(tmp_path):
    done, _ = run(tmp_path, MODEL, "pinned", {"pin-memory": True, "matmul-precision": "high"})
    assert "pin-memory has no effect: there is no GPU to copy batches to" in done.stderr


MEMORY = """
    import ctypes, resource, sys
    import torch

    def huge():
        rows = (line.split() for line in open("/proc/self/smaps_rollup"))
        return next(int(row[1]) for row in rows if row[0] == "AnonHugePages:")

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        kept = torch.ones(48 << 20, dtype=torch.uint8)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    torch.save([hasattr(ctypes.CDLL(None), "mallctl"), faults, huge()], sys.argv[1])
    """


@pytest.mark.long
def test_jemalloc_reduces_page_faults(jemalloc, tmp_path):
    _, (loaded, faults, _) = run(tmp_path, MEMORY, "plain", {}, count=1)
    assert not loaded
    assert faults > 80_000
    _, (loaded, faults, _) = run(tmp_path, MEMORY, "kept", {"jemalloc": True}, count=1)
    assert loaded
    assert faults < 40_000


def test_large_tensors_use_huge_pages(tmp_path):
    with open("/sys/kernel/mm/transparent_hugepage/enabled") as file:
        if "[madvise]" not in file.read():
            pytest.skip("the kernel gives huge pages to all, or to none")
    _, (_, faults, huge) = run(tmp_path, MEMORY, "plain", {}, count=1)
    _, (_, fewer, more) = run(tmp_path, MEMORY, "huge", {"huge-pages": True}, count=1)
    assert more > huge + 30_000  # in KiB
    assert fewer < faults / 10


def test_nothing_asks_the_driver_for_gpus_before_the_script(monkeypatch):
    """Afterwards a script could not choose its GPUs, nor use them in processes that it forks."""

    def asked():
        raise AssertionError("torch.cuda.is_available() initializes the driver")

    monkeypatch.setattr(torch.cuda, "is_available", asked)
    assert Recorder(0, 1)._meta["device"] == "cpu"
    monkeypatch.setattr(compute, "_short_products", lambda precision: False)
    knob = KnobResult("matmul-precision")
    compute.products("high", knob)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert process._is_nccl("paceline")
    assert not process._is_nccl("gloo")


@pytest.mark.parametrize(
    ("mode", "parent", "safe"),
    [(0o700, 0o1777, True), (0o755, 0o700, True), (0o777, 0o700, False), (0o700, 0o777, False)],
)
def test_cache_of_compiled_code_is_not_one_of_other_users(
    tmp_path, monkeypatch, mode, parent, safe
):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("LOGNAME", "me")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    (tmp_path / "torchinductor_me").mkdir()
    (tmp_path / "torchinductor_me").chmod(mode)
    tmp_path.chmod(parent)
    assert (compute._no_cache() == "") == safe
    assert safe or "HINT: TORCHINDUCTOR_CACHE_DIR=" in compute._no_cache()
