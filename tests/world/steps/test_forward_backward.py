"""``world.forward_backward`` does what forward, loss and ``world.backward`` do."""

import pytest
import ranks
import torch
from torch import nn
from torch.nn import functional

SCRIPT = """
    import sys
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    world = paceline.init(progress=False)
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(11, 4, generator=generator), torch.arange(11) % 3
    data = TensorDataset(x, y)

    def weighted(outputs, targets):
        each = F.cross_entropy(outputs, targets, reduction="none")
        weight = 1.0 + 2.0 * (targets == 1)
        return (each * weight).sum(), weight.sum()

    def train(layout, one_call, loss):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        model, optimizer = world.distribute(model, optimizer, layout=layout, accumulate=2)
        for inputs, targets in world.batches(world.shard(DataLoader(data), global_batch=4)):
            if one_call:
                world.forward_backward(model, inputs, targets, loss=loss)
            else:
                world.backward(loss(model(inputs), targets))
            world.step(optimizer, clip=1.0)
        whole = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
        return [p.detach().clone() for p in whole]

    for layout in ("data", "zero1", "zero2", "zero3"):
        found = train(layout, True, F.cross_entropy), train(layout, False, F.cross_entropy)
        same = all(torch.equal(a, b) for a, b in zip(*found, strict=True))
        print("same", layout, same, flush=True)
    if world.rank == 0:
        torch.save(train("data", True, weighted), sys.argv[1])
    else:
        train("data", True, weighted)
    """


def test_same_bits_as_separate_calls_and_weights_of_one_process(tmp_path):
    script = ranks.write(tmp_path, SCRIPT)
    done = ranks.run(script, tmp_path / "two.pt")
    assert {f"same {one} True" for one in ("data", "zero1", "zero2", "zero3")} == {
        line for line in ranks.untagged(done.stdout) if line.startswith("same")
    }
    ranks.run(script, tmp_path / "one.pt", ranks=1, launcher="python")
    pairs = zip(torch.load(tmp_path / "two.pt"), torch.load(tmp_path / "one.pt"), strict=True)
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, a, b=2.0):
        return (a * b).mean() * self.weight


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (torch.tensor([1.0, 3.0]), 4.0),
        ((torch.tensor([1.0, 3.0]), 3.0), 6.0),
        ({"b": 5.0, "a": torch.tensor([1.0, 3.0])}, 10.0),
    ],
)
def test_inputs(world, inputs, expected):
    model = world.distribute(Sum())
    loss = world.forward_backward(model, inputs, None, loss=lambda outputs, _: outputs)
    assert loss.item() == expected
    assert not loss.requires_grad
    assert model.weight.grad.item() == expected


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda outputs, _: outputs, r"loss must return the mean .*has the shape \(3, 2\). HINT"),
        (lambda *_: 3.0, "this is a float"),
        (lambda *_: (1.0, 2.0), "this is a tuple"),
        (lambda outputs, _: outputs.detach().mean(), "world.forward_backward: the loss has no"),
    ],
)
def test_loss_of_another_kind(world, loss, said):
    model = world.distribute(nn.Linear(4, 2))
    with pytest.raises(ValueError, match=said):
        world.forward_backward(model, torch.ones(3, 4), None, loss=loss)


def test_model_that_is_not_distributed(world):
    with pytest.raises(ValueError, match=r"this Linear is not one that .*HINT: model, optimizer"):
        world.forward_backward(
            nn.Linear(4, 2), torch.ones(3, 4), torch.zeros(3, 2), loss=functional.mse_loss
        )
