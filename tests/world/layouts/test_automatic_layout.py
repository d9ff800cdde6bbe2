"""``world.distribute(..., layout="auto")`` on ranks."""

import io
import json

import pytest
import ranks
import torch
from rich.console import Console
from torch import nn

from paceline.cost.layout import Layout
from paceline.cost.layout_memory import (
    MemoryByCategory,
    MemorySample,
    StepMemory,
    predict_layouts,
)
from paceline.parallel.memory.setup import ModelSetup
from paceline.parallel.mesh import Mesh
from paceline.report.terminal.draw import draw
from paceline.report.terminal.previews import memory_blocks
from paceline.world.layouts.distribution import (
    LayoutArguments,
    MemoryOptions,
    layout_problems,
    resolve_automatic,
)

SCRIPT = """
    import torch
    from torch import nn
    import paceline

    world = paceline.init()
    GIB = 1 << 30

    def distributed(**options):
        torch.manual_seed(1)
        layer = nn.TransformerEncoderLayer(64, 2, 256, batch_first=True, dropout=0.0)
        model = nn.TransformerEncoder(layer, 8, enable_nested_tensor=False)
        optimizer = torch.optim.Adam(model.parameters())
        return world.distribute(model, optimizer, **options)

    def trained(model, optimizer):
        x = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(world.rank))
        world.backward(model(x).square().mean())
        world.step(optimizer)
        whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
        return [p.detach().clone() for p in whole]

    x = torch.zeros(8, 16, 64)
    plain = trained(*distributed())
    for mib in (1000, 14, 11.5, 7):
        how = {"memory_budget": mib / 1024, "example_inputs": x}
        model, optimizer = distributed(layout="auto", **how)
        same = all(
            torch.allclose(a, b, atol=1e-5)
            for a, b in zip(plain, trained(model, optimizer), strict=True)
        )
        print("trained", mib, same, flush=True)
    distributed(layout="auto")
    model, optimizer = distributed(recompute="auto", memory_budget=40 / 1024)
    trained(model, optimizer)
    try:
        distributed(layout="auto", memory_budget=0.001, example_inputs=x)
    except ValueError as error:
        print("error", error, flush=True)
    try:
        model, optimizer = distributed(recompute="auto", memory_budget=0.001)
        trained(model, optimizer)
    except ValueError as error:
        print("error", error, flush=True)
    """


@pytest.mark.long
def test_fastest_layout_that_fits(tmp_path):
    done = ranks.run(ranks.write(tmp_path, SCRIPT), timeout=300)
    found = ranks.untagged(done.stdout)
    assert {f"trained {mib} True" for mib in (1000, 14, 11.5, 7)} <= found
    said = [line for line in done.stderr.splitlines() if line.startswith("layout='auto': ")]
    chosen = [line.removeprefix("layout='auto': ").partition(" needs")[0] for line in said]
    assert chosen[0] == "data"
    assert "Activations are left out. HINT: " in said[-1]
    assert any("recompute='auto': activations of 8 blocks: " in line for line in found) or (
        "recompute='auto': activations of 8 blocks: " in done.stderr
    )
    errors = sorted(line for line in found if line.startswith("error"))
    assert "layout='auto': no layout fits 1.0 MiB on 2 ranks: the least is " in errors[0]
    assert "GiB of parameters, gradients and optimizer states. HINT: memory_budget=" in errors[1]


RECORDED = """
    import torch
    from torch import nn
    import paceline

    world = paceline.init()
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in "abcd"]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(8, 64)
    model, optimizer = world.distribute(model, optimizer, layout="auto", example_inputs=x)
    for _ in range(3):
        world.backward(model(x).square().mean())
        world.step(optimizer)
    """


def test_measured_peak_beside_the_prediction(tmp_path):
    script, out = ranks.write(tmp_path, RECORDED), tmp_path / "report.json"
    done = ranks.run(script, launcher=f"paceline --json={out}")
    peaks = json.loads(out.read_text())["peaks"]
    assert [peak["layout"] for peak in peaks] == ["data", "data"]
    parameters = 4 * 4 * (65 * 256 + 257 * 64)
    assert {peak["parameters"] for peak in peaks} == {parameters}
    assert peaks[0]["gradients"] == parameters
    assert peaks[0]["optimizer_states"] == 2 * parameters + 16 * 4  # and the step of each
    assert peaks[0]["predicted"] > 4 * parameters
    assert "Largest host memory, of rank " in done.stderr


def test_recompute_auto_without_a_budget_is_decided_in_the_first_forward():
    asked = MemoryOptions(Layout(recompute="auto"), "auto", None)
    setup = ModelSetup(torch.nn.Linear(2, 2), None, torch.device("cpu"))
    assert resolve_automatic(asked, setup, None, 1, lambda *_: None, lambda one: [one]) == asked


def test_layouts_that_the_model_rules_out_are_named():
    setup = ModelSetup(nn.Embedding(4, 2, sparse=True), None, torch.device("cpu"))
    cpu = torch.device("cpu")
    arguments = LayoutArguments("auto", Mesh(0, 1), cpu, None, "job", None, None, None, {})
    problems = layout_problems(setup, arguments.check)
    assert list(map(str, problems)) == ["zero1", "zero2", "zero3"]
    assert "sparse gradients" in problems[Layout(zero=1)]
    step = StepMemory([MemorySample("", "forward", MemoryByCategory(parameters=8))], {}, 8)
    text = io.StringIO()
    predicted = predict_layouts(step, None, 2, allowed=[Layout()])
    Console(file=text).print(*draw(memory_blocks(predicted, 1000, problems)), sep="\n")
    assert "zero3 is left out: world.distribute: layout='zero3'" in text.getvalue()
