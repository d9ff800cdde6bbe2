"""Copies of a shard on several hosts are compared by content before they are saved."""

import ranks

from paceline.checkpoint.shard_copies import DifferentCopy, name_copies, shards_that_differ

MODEL, OPTIMIZER = ("models", 0), ("optimizers", 0)
FIRST, SECOND = "0a copy, S(0) 0", "0a copy, S(0) 1"


def test_only_copies_of_the_same_shard_are_compared():
    equal = [{(MODEL, FIRST): b"x"}, {(MODEL, SECOND): b"y"}] * 2
    assert shards_that_differ(equal) == set()
    third = {(MODEL, FIRST): b"z", (OPTIMIZER, FIRST): b"x"}
    assert shards_that_differ([*equal, third]) == {(MODEL, FIRST)}


def test_first_tensor_that_differs_is_named_with_its_ranks():
    def of(value, step=b"0"):
        tensors = {("0.weight",): b"same", ("1.weight",): value, ("2.weight",): value}
        return {(MODEL, FIRST): tensors, (OPTIMIZER, FIRST): {("state", 0, "step"): step}}

    found = name_copies([{}, of(b"a"), {}, of(b"b"), of(b"a", b"1")])
    assert found == [
        DifferentCopy(MODEL, ("1.weight",), 3, 1),
        DifferentCopy(OPTIMIZER, ("state", 0, "step"), 4, 1),
    ]
    fewer = {(MODEL, FIRST): {("0.weight",): b"same"}}
    assert name_copies([of(b"a"), fewer])[0].tensor == ("1.weight",)


SCRIPT = """
    import os, sys
    import torch
    from torch import nn
    import paceline
    from paceline.parallel.sharded import fully_sharded

    fully_sharded.sharing_domain = lambda: f"host {int(os.environ['RANK']) // 2}"
    world = paceline.init(progress=False, replicas="ignore")
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in "ab")
            self.last = nn.Linear(4, 3)
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.last(x)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    model, optimizer = world.distribute(model, optimizer, layout="zero3", shard_over="host")
    average = {}
    class Average:
        def state_dict(self):
            return average
        def load_state_dict(self, state):
            pass
    world.keep(average=Average())
    try:
        for epoch in world.epochs(3, checkpoint=sys.argv[1]):
            world.backward(model(torch.ones(2, 4)).sum())
            world.step(optimizer)
            weight = dict(model.named_parameters())["layers.1.0.weight"]
            if epoch == 0:
                average["weight"] = weight.detach().clone()
            if world.rank == 3 and epoch == 1:
                weight.to_local().data.add_(1)
                optimizer.state[model.last.bias]["exp_avg"].to_local().add_(1)
            if world.rank == 2 and epoch == 2:
                average["weight"].to_local().add_(1)
    except ValueError as error:
        print("error:", error, flush=True)
"""


def test_rank_parameter_and_block_of_a_copy_that_differs_are_named(tmp_path):
    result = ranks.run(ranks.write(tmp_path, SCRIPT), tmp_path / "ckpt", ranks=4)
    for label in (
        "models[0]: parameter layers.1.0.weight (block layers.1)",
        "optimizers[0]: exp_avg of parameter last.bias",
    ):
        assert f"rank 3's copy of {label} differs from rank 1's" in result.stderr
    assert "checkpoints contain that of rank 1. HINT: find code" in result.stderr
    error = "error: rank 2's copy of kept[average]: weight differs from rank 0's"
    assert any(line.startswith(error) for line in ranks.untagged(result.stdout))
    assert (tmp_path / "ckpt/step-00000002/manifest.json").exists()
