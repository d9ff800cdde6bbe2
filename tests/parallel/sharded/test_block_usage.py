"""Ranks that use different parameters or blocks in a step: the result of one process, or an error.

Each case trains with one process and with two ranks in each layout.
"""

import pytest
import ranks
import torch

SCRIPT = """
    import sys
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    world = paceline.init(seed=0, progress=False)
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(12, 8, generator=g), torch.randint(0, 4, (12,), generator=g)
    LOADER = world.shard(DataLoader(TensorDataset(x, y), shuffle=True), global_batch=2)

    class Experts(nn.Module):
        "Each sample is for one of four experts; nothing uses the fifth, which has no gradient."
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 16)
            self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
            self.last = nn.Linear(16, 4)
        def forward(self, x):
            h = torch.tanh(self.first(x))
            which = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0).long()
            more = torch.zeros_like(h)
            for i in which.unique().tolist():
                more[which == i] = self.experts[i](h[which == i])
            return self.last(h + more)

    class Branches(nn.Module):
        "Blocks that are called twice, or not at all, in some steps, on all ranks alike."
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 16)
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))
            self.last = nn.Linear(16, 4)
            self.calls = 0
        def forward(self, x):
            self.calls += 1
            h = self.first(x)
            for at in ((0, 1), (1, 1), (2,))[self.calls // 2 % 3]:
                h = self.layers[at](h)
            return self.last(h)

    class Tied(nn.Module):
        "A weight that two layers share, one of which only some samples need."
        def __init__(self):
            super().__init__()
            self.a, self.b, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
            self.b.weight = self.a.weight
        def one(self, x):
            h = self.a(x) if float(x[0]) > 0 else x
            return self.last(self.b(h) if float(x[1]) > 0 else h)
        def forward(self, x):
            return torch.stack([self.one(sample) for sample in x])

    def train(kind, layout, accumulate):
        torch.manual_seed(3)
        model = kind()
        frozen = model.first if kind is Branches else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        how = {"accumulate": accumulate, "layout": layout}
        model, optimizer = world.distribute(model, optimizer, **how)
        losses = []
        for epoch in world.epochs(2):
            if frozen is not None:
                frozen.requires_grad_(epoch == 1)
            for one, label in world.batches(LOADER):
                loss = F.cross_entropy(model(one), label)
                world.backward(loss)
                world.step(optimizer)
                losses.append(world.mean(loss.detach() * len(one), len(one)))
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return losses, get_model_state_dict(getattr(model, "module", model), options=options)

    CASES = {
        (Experts, 1): ("zero1", "zero2", "zero3"),
        (Experts, 2): ("zero1", "zero3"),
        (Branches, 1): ("zero3",),
        (Tied, 2): ("zero2",),
    }
    results = {
        (kind.__name__, accumulate, layout): train(kind, layout, accumulate)
        for (kind, accumulate), layouts in CASES.items()
        for layout in layouts[:3 if world.size > 1 else 1]
    }
    if world.rank == 0:
        torch.save(results, sys.argv[1])
"""


def results(folder, number):
    script, out = ranks.write(folder, SCRIPT), folder / f"{number}.pt"
    ranks.run(script, out, ranks=number)
    return torch.load(out)


def test_parameters_that_some_ranks_use_count_as_in_one_process(tmp_path):
    alone = {case[:2]: result for case, result in results(tmp_path, 1).items()}
    for (kind, accumulate, layout), (losses, state) in results(tmp_path, 2).items():
        expected = alone[kind, accumulate]
        assert losses == pytest.approx(expected[0], rel=1e-5), (kind, accumulate, layout)
        for name, tensor in expected[1].items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)


MISMATCH = """
    import sys
    import torch
    from torch import nn
    import paceline

    world = paceline.init(progress=False)

    class Experts(nn.Module):
        def __init__(self, sizes):
            super().__init__()
            self.experts = nn.ModuleList(
                nn.Sequential(nn.Linear(4, n), nn.Linear(n, 4)) for n in sizes)
        def forward(self, x):
            return self.experts[world.rank](x)

    model = Experts([4, 4] if sys.argv[1] == "equal" else [4, 5])
    before = [p.clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: print("STEPPED"))
    model, optimizer = world.distribute(model, optimizer, layout=sys.argv[2])
    world.backward(model(torch.ones(2, 4)).mean())
    world.step(optimizer)
"""
OF_BLOCKS = "experts.0 (experts.0.0.weight, experts.0.0.bias"


@pytest.mark.parametrize(
    ("sizes", "layout", "checked", "said"),
    [
        ("equal", "zero3", "1", f"all-gather of 20 float32 by FSDP for {OF_BLOCKS}"),
        ("equal", "zero1", "0", "ranks use different blocks of the Experts in one step"),
        ("uneven", "zero2", "0", "this rank gathers or reduces experts."),
    ],
)
def test_ranks_that_run_different_blocks_are_an_error_before_the_step(
    tmp_path, sizes, layout, checked, said
):
    script = ranks.write(tmp_path, MISMATCH)
    options = {"check": False, "PACELINE_AGREE": checked}
    result = ranks.run(script, sizes, layout, ranks=2, launcher="paceline", **options)
    text = result.stdout + result.stderr
    assert result.returncode == 1
    assert said in text
    assert "experts.0.0.weight" in text or "experts.1.0.weight" in text
    assert "blocks=['Experts']" in text or "blocks=[...]" in text
    assert "STEPPED" not in text
