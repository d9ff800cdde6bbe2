"""Pipelines train like one process that computes the same micro-batches."""

import shutil
from pathlib import Path

import pipelined_models
import pytest
import ranks

SCRIPT = """
    import copy
    import sys
    import warnings
    import torch
    import paceline
    from pipelined_models import CASES, OneProcess

    layout, cases, schedules = sys.argv[1], sys.argv[2].split(","), sys.argv[3].split(",")
    dp = int(sys.argv[4]) if len(sys.argv) > 4 else 1
    world = paceline.init(seed=3, progress=False)

    def sizes_of(n, count=4):
        return [n // count + (i < n % count) for i in range(min(count, n))]

    def part(tree, at):
        if isinstance(tree, dict):
            return {k: part(v, at) for k, v in tree.items()}
        return tree[at] if torch.is_tensor(tree) else tree

    def batch_of(case, n):
        _, inputs, targets, loss = CASES[case](n)
        return inputs, targets, loss

    def check_equal(name, model, one):
        expected = one.model.state_dict()
        for key, value in model.state_dict().items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            torch.testing.assert_close(
                value, expected[key], rtol=2e-4, atol=2e-6, msg=lambda m: f"{name}: {key}: {m}"
            )

    def run(case, schedule):
        torch.manual_seed(1)
        model, example, _, _ = CASES[case](2)
        one = OneProcess(model)
        torch.manual_seed(2)
        optimizer = torch.optim.SGD(
            [p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9
        )
        model, optimizer = world.distribute(
            model, optimizer, layout=f"{layout} + schedule={schedule} + micro-batches=4",
            example_inputs=example,
        )
        place = world.mesh.data_rank
        # evaluation first; then 8 samples of each data rank, 7, 8 again, and 3 in 3 micro-batches
        for n in (0, 8, 7, 8, 3):
            if n:
                torch.manual_seed(n)
                inputs, targets, loss = batch_of(case, n * dp)
                own = slice(place * n, (place + 1) * n)
                found = world.forward_backward(
                    model, part(inputs, own), part(targets, own), loss=loss
                )
                world.step(optimizer, clip=0.5)
                if dp == 1:
                    expected = one.step(inputs, targets, loss, sizes_of(n), clip=0.5)
                    assert abs(found.item() - expected) < 1e-4, (case, n, found, expected)
                else:  # micro-batches of both data ranks
                    one.step(inputs, targets, loss, sizes_of(n) * dp, clip=0.5)
            torch.manual_seed(5)
            inputs, _, _ = batch_of(case, 5)
            model.eval(), one.model.eval()
            found = model(**inputs) if isinstance(inputs, dict) else model(inputs)
            expected = one.model(**inputs) if isinstance(inputs, dict) else one.model(inputs)
            torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)
            model.train(), one.model.train()
            check_equal(f"{case} {schedule} {n}", model, one)

    for schedule in schedules:
        for case in cases:
            run(case, schedule)
    print("equal", len(cases) * len(schedules), world.mesh.name(), flush=True)
    """
ALL = ",".join(pipelined_models.CASES)


@pytest.fixture
def script(tmp_path):
    shutil.copy(Path(pipelined_models.__file__), tmp_path)
    return ranks.write(tmp_path, SCRIPT)


def check(script, layout, cases, schedules, count, dp=1):
    done = ranks.run(script, layout, cases, schedules, dp, ranks=count)
    lines = [line for line in ranks.untagged(done.stdout) if line.startswith("equal")]
    assert len(lines) == count, done.stdout


def test_every_model_on_two_stages(script):
    check(script, "pp2", ALL, "1f1b", 2)


@pytest.mark.long
@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero-bubble"])
def test_every_model_on_two_stages_in_other_schedules(script, schedule):
    check(script, "pp2", ALL, schedule, 2)


@pytest.mark.long
@pytest.mark.parametrize("stages", [3, 4])
def test_skips_ties_and_norms_on_more_stages(script, stages):
    check(script, f"pp{stages}", "tied,unet,resnet,heads", "1f1b,zero-bubble", stages)


@pytest.mark.long
def test_replicas_of_stages(script):
    check(script, "pp2 x dp2", "chain,tied,weighted,unet,heads", "1f1b,zero-bubble", 4, dp=2)


@pytest.mark.long
def test_replicas_with_parts_of_the_optimizer_states(script):
    check(script, "pp2 x zero1", "chain,tied,heads", "1f1b", 4, dp=2)


@pytest.mark.long
@pytest.mark.parametrize("zero", ["zero2", "zero3"])
def test_replicas_with_shards_of_parameters(script, zero):
    check(script, f"pp2 x {zero}", "chain,tied,weighted,unet,heads", "1f1b,zero-bubble", 4, dp=2)


@pytest.mark.long
def test_recomputation_in_stages(script):
    check(script, "pp2 + recompute", "tied,unet", "1f1b", 2)
