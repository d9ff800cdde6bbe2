"""Pipelines under Slurm: killed, and resumed in another layout, as one process trains."""

import shutil
from pathlib import Path

import pipelined_models
import pytest
import ranks
import torch

TRAIN = """
    import os
    import signal
    import sys
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    import paceline
    from pipelined_models import CASES

    case, layout, dies = sys.argv[1], sys.argv[2], sys.argv[3] == "dies"
    world = paceline.init(seed=3)
    torch.manual_seed(1)
    model, inputs, targets, loss = CASES[case](24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = world.distribute(
        model, optimizer, layout=layout, example_inputs=inputs[:4]
    )
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=8)
    loader = world.shard(loader, global_batch=8)
    for epoch in world.epochs(3, checkpoint="checkpoints"):
        for number, (x, y) in enumerate(world.batches(loader)):
            if dies and epoch == 2 and number == 1 and world.mesh.place["stage"] == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            world.forward_backward(model, x, y, loss=loss)
            world.step(optimizer, clip=0.5)
    print("trained on", world.size, flush=True)
    """
# layout and ranks of each node: of the job that is killed, and of the one that resumes
LAYOUTS = {
    "tied": (("pp2 + micro-batches=2", 1), ("pp2 x zero1 + micro-batches=1", 2)),
    "unet": (("pp2 + micro-batches=2", 1), ("pp2 x dp2 + micro-batches=1", 2)),
    "resnet": (("pp4 + micro-batches=2", 2), ("pp2 + micro-batches=2", 1)),
}


def alone(case):
    """Return the parameters and statistics of one process with the same micro-batches."""
    torch.manual_seed(1)
    model, inputs, targets, loss = pipelined_models.CASES[case](24)
    one = pipelined_models.OneProcess(model)
    for _ in range(3):
        for x, y in zip(inputs.split(8), targets.split(8), strict=True):
            one.step(x, y, loss, [4, 4], clip=0.5)
    return one.model.state_dict()


def saved(folder):
    from paceline.checkpoint.checkpoint_folder import list_checkpoints
    from paceline.checkpoint.saver import load_checkpoint
    from paceline.checkpoint.sharded_tensor import whole

    shared, _, _ = load_checkpoint(list_checkpoints(folder)[0])
    return {name: whole(tensor) for name, tensor in shared["models"][0].items()}


@pytest.mark.long
@pytest.mark.parametrize("case", LAYOUTS)
def test_a_killed_pipeline_is_resumed_in_another_layout(slurm, shared_folder, case):
    shutil.copy(Path(pipelined_models.__file__), shared_folder)
    script = ranks.write(shared_folder, TRAIN)
    said = []
    for (layout, count), how in zip(LAYOUTS[case], ("dies", "lives"), strict=True):
        words = f"exec {ranks.PACELINE} run {script.name} {case} '{layout}' {how}"
        options = ("-N2", f"--ntasks-per-node={count}")
        job = slurm.batch(f"#!/bin/sh\n{words}\n", *options, cwd=shared_folder)
        state = slurm.wait(job, 120)
        said.append((shared_folder / f"slurm-{job}.out").read_text())
        assert state == ("FAILED" if how == "dies" else "COMPLETED"), said[-1]
    assert "stage 1" in said[0]
    assert "killed" in said[0]
    assert f"trained on {2 * LAYOUTS[case][1][1]}" in said[1]
    found, wanted = saved(shared_folder / "checkpoints"), alone(case)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5, msg=name)
