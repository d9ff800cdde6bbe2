"""--count-flops: the FLOPs of a step follow from its layers and appear on the roofline."""

import json
from types import SimpleNamespace

import pytest
import ranks
import torch
from records import made
from records import report_text as told
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.analyze.records.load_run import load_run
from paceline.cost.machine.machine_file import (
    Arithmetic,
    Figure,
    HostFacts,
    Machine,
    Memory,
    save,
)
from paceline.record.hooks.sampled_steps import FlopCounter, uses_tf32

TRAIN = """
    import torch, torch.distributed as dist
    from torch import nn
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 32))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(14):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
    dist.destroy_process_group()
    """
# A multiply-add counts as two; the first layer's input needs no gradient.
FLOPS = 2 * 16 * (64 * 128 + 128 * 32) * 3 - 2 * 16 * 64 * 128


def machine(host, device="cpu"):
    one = Figure.of([2e10], "FLOP/s")
    return Machine(
        "2026-01-31T12:00:00+00:00",
        (
            HostFacts(
                host,
                arithmetic=(Arithmetic(device, "matrix product", "float32", one),),
                memory=(Memory(device, Figure.of([1e10], "B/s")),),
            ),
        ),
    )


def test_counted_flops_of_real_run_appear_on_roofline(tmp_path):
    record, file = tmp_path / "record", tmp_path / "machine.toml"
    script = ranks.write(tmp_path, TRAIN)
    ranks.run(script, launcher=f"paceline --record {record} --count-flops")
    host = load_run(record).records[0].host
    save(machine(host), file)
    found = json.loads(told([record], as_json=True, machine=file))
    work, line = found["work"], found["roofline"]
    assert (work["step"], work["ranks"], work["precision"]) == (10, [0, 1], "float32")
    assert work["flops"] == 2 * FLOPS
    by_name = {op["name"]: op for op in work["operators"]}
    assert by_name["addmm"]["calls"] == 4
    assert by_name["addmm"]["flops"] == 2 * 2 * 16 * (64 * 128 + 128 * 32)
    given, weights, out = 16 * (64 + 128), 64 * 128 + 128 * 32, 16 * (128 + 32)
    assert by_name["addmm"]["bytes"] == 2 * 4 * (given + weights + (128 + 32) + out)
    step = line["points"]["a step"]
    assert step["rate"] == pytest.approx(2 * FLOPS / found["step_times"]["median_s"])
    assert step["intensity"] == pytest.approx(work["flops"] / work["bytes"])
    assert (step["bound"], line["host"], line["assumed"]) == ("memory", host, False)
    text = told([record], machine=file)
    assert "20 GFLOP/s" in text
    assert "a step:" in text
    save(machine("another"), file)
    assert "the roofline is that of another" in told([record], machine=file)
    save(machine(host, "cuda:0"), file)
    with pytest.raises(ValueError, match=r"no matrix product and triad of cpu .* HINT"):
        told([record], machine=file)


def counted(step):
    """Return what the FLOP counter reports for one call of ``step``."""
    told = {}
    recorder = SimpleNamespace(step=0, update_header=told.update)
    sampler = FlopCounter(recorder, step=0)
    sampler.after_step()
    try:
        step()
    finally:
        recorder.step = 1
        sampler.after_step()
    return told.get("work", {})


def test_flops_of_convolution_attention_and_lstm():
    image = torch.randn(2, 3, 8, 8)
    conv = counted(lambda: nn.functional.conv2d(image, torch.randn(4, 3, 3, 3)))
    assert conv["flops"] == 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)
    q = torch.randn(2, 4, 16, 8, requires_grad=True)

    def attend():
        nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()

    # Per head, two products of 16 x 16 x 8 forward and five backward, which recomputes the scores.
    assert counted(attend)["flops"] == (2 + 5) * 2 * (2 * 4) * 16 * 16 * 8
    lstm = nn.LSTM(32, 64, batch_first=True)

    def recur():
        lstm(torch.randn(4, 10, 32))[0].sum().backward()

    assert counted(recur)["flops"] == 3 * 2 * (4 * 10) * (4 * 64) * (32 + 64)


def test_flops_of_compiled_model_are_counted_without_changing_result():
    model = nn.Linear(16, 8, bias=False)
    compiled = torch.compile(model, backend="eager")
    given = torch.randn(4, 16)
    before = compiled(given)
    assert counted(lambda: compiled(given))["flops"] == 2 * 4 * 16 * 8
    assert torch.equal(compiled(given), before)


def test_dispatch_mode_left_open_by_script_is_preserved(capsys):
    class Own(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    own = Own()
    try:
        assert counted(own.__enter__) == {}
    finally:
        own.__exit__(None, None, None)
    assert "warning: Paceline could not count the FLOPs of step 0" in capsys.readouterr().err
    torch.utils._python_dispatch._pop_mode()  # the sampler's mode, which now only forwards calls


def test_invalid_arguments_are_reported(tmp_path):
    script = ranks.write(tmp_path, "pass")
    result = ranks.run(script, launcher="paceline --count-flops", check=False)
    assert result.returncode == 2
    assert "--count-flops needs a record. HINT: add --record DIR" in result.stderr
    file = tmp_path / "machine.toml"
    save(machine("node0"), file)
    with pytest.raises(ValueError, match=r"no step of .* was counted\. HINT: .*--count-flops"):
        told([made(tmp_path / "run")], machine=file)


def test_tf32_is_known_also_with_settings_by_operator():
    """With them, torch.get_float32_matmul_precision() raises an error."""
    matmul, conv = torch.backends.cuda.matmul, getattr(torch.backends.cudnn, "conv", None)
    if conv is None:
        pytest.skip("PyTorch before 2.9")
    before = matmul.fp32_precision, conv.fp32_precision
    try:
        matmul.fp32_precision = "tf32"
        conv.fp32_precision = "ieee"
        assert uses_tf32(is_convolution=False)
        assert not uses_tf32(is_convolution=True)
        matmul.fp32_precision, conv.fp32_precision = before
        assert not uses_tf32(is_convolution=False)
        assert uses_tf32(is_convolution=True)  # cuDNN's default
    finally:
        matmul.fp32_precision, conv.fp32_precision = before
