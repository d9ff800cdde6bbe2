"""Every layout gives the result of one process with the same global batch size, to rounding."""

import pytest
import ranks
import torch

SCRIPT = """
    import itertools, sys
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.utils.data import DataLoader, TensorDataset
    import paceline
    from paceline.optim import LAMB, LARS

    out, layouts, models, optimizers = sys.argv[1], *(a.split(",") for a in sys.argv[2:5])
    dropout = float(sys.argv[5])
    g = torch.Generator().manual_seed(1)
    x = torch.randn(43, 6, 8, generator=g)
    y = (x[:, 0, :2].sum(1) > 0).long()

    class Transformer(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 16)
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)
                for _ in range(2)
            )
            self.last = nn.Linear(16, 2)
        def forward(self, x):
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            return self.last(x.mean(1))

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(8, 12, num_layers=2, batch_first=True)
            self.last = nn.Linear(12, 2)
        def forward(self, x):
            return self.last(self.lstm(x)[0][:, -1])

    def convolutional():
        def stage(a, b):
            return nn.Sequential(nn.Conv1d(a, b, 3, padding=1), nn.ReLU())
        return nn.Sequential(stage(6, 7), stage(7, 7), nn.Flatten(), nn.Linear(56, 2))

    MODELS = {"transformer": Transformer, "lstm": Recurrent, "cnn": convolutional}
    OPTIMIZERS = {
        "adam": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-4, foreach=True),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
        "lars": lambda p: LARS(p, lr=1.0, weight_decay=0.01, trust_coefficient=0.02),
        "lamb": lambda p: LAMB(p, lr=1e-2, eps=1e-4, weight_decay=0.01),
        "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, fused=True),
    }
    world = paceline.init(seed=5, progress=False)
    loader = world.shard(DataLoader(TensorDataset(x, y), shuffle=True), global_batch=12)
    validation = world.shard(DataLoader(TensorDataset(x[:13], y[:13]), batch_size=3),
                             every_sample_once=True)

    def train(layout, kind, name):
        torch.manual_seed(world.rank)  # rank 0's parameters count
        model = MODELS[kind]()
        optimizer = OPTIMIZERS[name](model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        accumulate = 1 if name == "momentum" else 2
        model, same = world.distribute(model, optimizer, accumulate=accumulate, layout=layout)
        assert same is optimizer
        losses = []
        for epoch in world.epochs(2):
            for images, labels in world.batches(loader):
                loss = F.cross_entropy(model(images), labels)
                world.backward(loss)
                world.step(optimizer, clip=None if name == "fused" else 0.2)
                losses.append(world.mean(loss * len(labels), len(labels)))
            scheduler.step()
            score = world.meter()
            for images, labels in world.batches(validation):
                score.add(sum=F.cross_entropy(model(images), labels, reduction="sum"),
                          count=len(labels))
            assert score.sum("count") == (13,)
            losses.append(score.ratio("sum", "count"))
        if layout != "data" and world.size > 1:
            states = [t for s in optimizer.state.values() for t in s.values() if t.dim()]
            held = sum(t.to_local().numel() for t in states)
            assert held <= sum(t.numel() for t in states) / world.size + 100 * len(states)
        random = world._collectives.gather(torch.get_rng_state().tolist(), list[int])
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(getattr(model, "module", model), options=options)
        return losses, state, random

    combinations = itertools.product(layouts, models, optimizers)
    results = {f"{l} {m} {o}": train(l, m, o) for l, m, o in combinations}
    if world.rank == 0:
        torch.save(results, out)
"""
SHARDED = ("zero1", "zero2", "zero3")


def train(folder, number, layouts, models, optimizers, dropout=0.0, launcher="paceline"):
    script = ranks.write(folder, SCRIPT)
    out = folder / f"{number}-{layouts}.pt"
    words = [out, layouts, models, optimizers, dropout]
    ranks.run(script, *words, ranks=number, launcher=launcher)
    return torch.load(out)


def check(folder, numbers, layouts, models, optimizers):
    alone = train(folder, 1, "data", models, optimizers, launcher="python")
    for number in numbers:
        results = train(folder, number, ",".join(layouts), models, optimizers)
        for combination, result in results.items():
            _, _, rest = combination.partition(" ")
            compare(combination, result, alone[f"data {rest}"])


def compare(combination, result, reference):
    """Compare losses and parameters to rounding, and the random states of common ranks exactly."""
    losses, state, random = result
    assert losses == pytest.approx(reference[0], rel=1e-5), combination
    assert list(state) == list(reference[1])
    for name, tensor in reference[1].items():
        torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)
    assert random[: len(reference[2])] == reference[2], combination


def test_layouts_equal_one_process(tmp_path):
    check(tmp_path, [3], SHARDED, "transformer", "adam")


def test_norms_of_lars_and_lamb_are_those_of_whole_layers(tmp_path):
    check(tmp_path, [3], ("data", *SHARDED), "transformer", "lars,lamb")


def test_momentum_and_lstm_equal_one_process(tmp_path):
    check(tmp_path, [2], ["zero3"], "lstm,cnn", "momentum")


def test_dropout_draws_the_same_numbers_in_every_layout(tmp_path):
    results = train(tmp_path, 2, ",".join(("data", *SHARDED)), "transformer", "adam", dropout=0.3)
    reference = results["data transformer adam"]
    assert reference[2][0] != reference[2][1]
    for combination, result in results.items():
        compare(combination, result, reference)


@pytest.mark.long
@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_all_models_and_optimizers_equal_one_process(tmp_path, number):
    check(tmp_path, [number], SHARDED, "transformer,lstm,cnn", "adam,momentum,fused")
