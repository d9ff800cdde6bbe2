"""Backwards whose gradients DistributedDataParallel does not synchronize are an error."""

import pytest
import ranks

SCRIPT = """
    import sys
    import torch
    from torch import nn
    import paceline

    case, layout = sys.argv[1], sys.argv[2]
    world = paceline.init(progress=False)
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
            if case == "empty":
                self.none = nn.Parameter(torch.empty(3, 0))
        def encode(self, x):
            return self.b(torch.tanh(self.a(x)))
        def forward(self, x):
            return self.encode(x)

    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = world.distribute(net, optimizer, layout=layout)
    data = torch.arange(32.0).view(8, 4).sin()[world.rank :: world.size]
    for _ in range(3):
        x = data.clone()
        if case in ("bypassed", "plain"):
            loss = getattr(model, "module", model).encode(x).square().mean()
        elif case == "method":
            loss = model.encode(x).square().mean()
        elif case == "twice":
            output = model(x)
            output.square().mean().backward(retain_graph=True)
            loss = output.abs().mean()
        elif case == "forwards":
            world.backward(model(x).square().mean())
            loss = model(x).abs().mean()
        elif case == "penalty":
            x.requires_grad_()
            output = model(x)
            (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            loss = output.square().mean() + (slope.norm(dim=1) - 1).square().mean()
        else:
            loss = model(x).square().mean()
        if case == "plain":
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            world.backward(loss)
            optimizer.step() if case == "step" else world.step(optimizer)
        mean = world.mean(loss.detach(), 1)
        if world.rank == 0:
            print("loss", round(mean, 5))
"""


def run(folder, number, *words, check=True):
    script = ranks.write(folder, SCRIPT)
    launcher = "paceline" if number > 1 else "python"
    return ranks.run(script, *words, ranks=number, launcher=launcher, check=check)


def losses(result):
    return [line.split()[-1] for line in result.stdout.splitlines() if "loss " in line]


@pytest.mark.parametrize("case", ["bypassed", "plain", "twice"])
def test_gradients_that_stay_on_their_rank_are_an_error(tmp_path, case):
    result = run(tmp_path, 2, case, "data", check=False)
    assert result.returncode == 1
    assert "ranks have not synchronized the gradients of " in result.stderr
    assert "call model(...), or model.METHOD(...) with a tensor" in result.stderr
    assert losses(result) == []


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        *(("method", "data"), ("forwards", "data"), ("penalty", "data")),
        *(("step", "data"), ("step", "zero2")),
    ],
)
def test_synchronized_backwards_equal_one_process(tmp_path, case, layout):
    alone = losses(run(tmp_path, 1, case, layout))
    assert len(alone) == 3
    assert losses(run(tmp_path, 2, case, layout)) == alone


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("penalty", "another backward of the same forward has released"),
        ("empty", "the parameter none has no elements"),
    ],
)
def test_what_shards_can_not_do_is_an_error_of_one_sentence(tmp_path, case, said):
    result = run(tmp_path, 2, case, "zero2", check=False)
    assert said in result.stderr
    assert "HINT: " in result.stderr
    assert "Traceback" not in result.stderr
