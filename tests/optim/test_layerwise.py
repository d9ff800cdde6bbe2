"""LARS and LAMB equal the papers' formulas, alone and with sharded parameters."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from paceline.optim import LAMB, LARS

SHAPES = ((8, 5), (6,), (3, 4))  # a layer, a bias, a layer that begins at 0


def lars(w, grads, lr, momentum, decay, trust):
    """Algorithm 1 of arXiv 1708.03888, one parameter."""
    velocity = torch.zeros_like(w)
    is_layer = w.ndim > 1
    for t, g in enumerate(grads):
        rate = 1.0
        if is_layer and w.norm() > 0 and g.norm() > 0:
            rate = trust * w.norm() / (g.norm() + decay * w.norm())
        velocity = momentum * velocity + lr[t] * rate * (g + (decay if is_layer else 0) * w)
        w = w - velocity
    return w


def lamb(w, grads, lr, betas, eps, decay):
    """Algorithm 2 of arXiv 1904.00962, one parameter."""
    m, v = torch.zeros_like(w), torch.zeros_like(w)
    is_layer = w.ndim > 1
    for t, g in enumerate(grads):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        corrected = m / (1 - betas[0] ** (t + 1)), v / (1 - betas[1] ** (t + 1))
        update = corrected[0] / (corrected[1].sqrt() + eps) + (decay if is_layer else 0) * w
        is_scaled = is_layer and w.norm() > 0 and update.norm() > 0
        w = w - lr[t] * (w.norm() / update.norm() if is_scaled else 1.0) * update
    return w


CASES = {
    "lars": (
        lambda params: LARS(params, 0.5, momentum=0.9, weight_decay=0.01, trust_coefficient=0.02),
        lambda w, grads, lr: lars(w, grads, lr, 0.9, 0.01, 0.02),
    ),
    "lamb": (
        lambda params: LAMB(params, 0.5, betas=(0.8, 0.99), eps=1e-6, weight_decay=0.01),
        lambda w, grads, lr: lamb(w, grads, lr, (0.8, 0.99), 1e-6, 0.01),
    ),
}
RATES = [0.5, 0.5, 0.25, 0.1, 0.1]


@pytest.mark.parametrize("name", CASES)
def test_updates_equal_the_papers_formula_when_the_rate_changes(name):
    make, formula = CASES[name]
    torch.manual_seed(0)
    start = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    start[2].zero_()
    grads = [[torch.randn_like(w) for _ in RATES] for w in start]
    params = [nn.Parameter(w.clone()) for w in start]
    optimizer = make(params)
    for t, rate in enumerate(RATES):
        optimizer.param_groups[0]["lr"] = rate
        for parameter, of in zip(params, grads, strict=True):
            parameter.grad = of[t].clone()
        optimizer.step()
    for parameter, w, of in zip(params, start, grads, strict=True):
        torch.testing.assert_close(parameter.detach(), formula(w, of, RATES))
        assert torch.equal(parameter.grad, of[-1])  # not changed by the step


TIMM = json.loads(Path(__file__).with_name("timm_updates.json").read_text())


@pytest.mark.parametrize(
    ("name", "make"),
    [
        (
            "Lars",
            lambda groups, lr, momentum, trust_coeff: LARS(groups, lr, momentum, 0, trust_coeff),
        ),
        ("Lamb", lambda groups, lr, betas, eps, max_grad_norm: LAMB(groups, lr, betas, eps)),
    ],
)
def test_updates_equal_those_of_timm(name, make):
    def tensor(values):
        return torch.tensor(values, dtype=torch.float64)

    params = {key: nn.Parameter(tensor(value)) for key, value in TIMM["start"].items()}
    groups = [{"params": [p], "weight_decay": TIMM["decays"][key]} for key, p in params.items()]
    optimizer = make(groups, **TIMM["options"][name])
    for gradients, expected in zip(TIMM["gradients"], TIMM[name], strict=True):
        for key, parameter in params.items():
            parameter.grad = tensor(gradients[key])
        optimizer.step()
        for key, parameter in params.items():  # timm's Lars adds 1e-8 to a norm
            torch.testing.assert_close(
                parameter.detach(), tensor(expected[key]), rtol=1e-7, atol=1e-9
            )


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_state_is_saved_and_restored(kind):
    def train(steps, state=None):
        torch.manual_seed(1)
        model = nn.Linear(4, 3)
        optimizer = kind(model.parameters(), 0.1)
        for step in range(steps):
            if state is not None and step == 2:
                model.load_state_dict(state[0])
                optimizer = kind(model.parameters(), 0.7)
                optimizer.load_state_dict(state[1])
            elif state is not None and step < 2:
                continue
            optimizer.zero_grad()
            model(torch.full((2, 4), 1.0 + step)).square().sum().backward()
            optimizer.step()
        copies = {name: value.clone() for name, value in model.state_dict().items()}
        return copies, optimizer.state_dict()

    whole, resumed = train(4)[0], train(4, train(2))[0]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_group_chooses_what_is_scaled():
    first = nn.Parameter(torch.full((2, 2), 3.0))
    second = nn.Parameter(torch.full((4,), 3.0))
    for parameter in (first, second):
        parameter.grad = torch.ones_like(parameter)
    groups = [{"params": [first], "adapt": False}, {"params": [second], "adapt": True}]
    LARS(groups, 1.0, weight_decay=0.1, trust_coefficient=0.5).step()
    assert torch.equal(first.detach(), torch.full((2, 2), 2.0))  # plain SGD
    rate = 0.5 * 6 / (2 + 0.1 * 6)
    torch.testing.assert_close(second.detach(), torch.full((4,), 3 - rate * (1 + 0.3)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LARS([nn.Parameter(torch.ones(2, 2))], -1.0), "lr must be at least 0.*-1.0. HINT"),
        (
            lambda: LARS([nn.Parameter(torch.ones(2, 2))], 1.0, momentum=1.0),
            "momentum must be at least 0 and below 1; this is 1.0. HINT",
        ),
        (
            lambda: LAMB([nn.Parameter(torch.ones(2, 2))], 1.0, betas=(0.9, 1.5)),
            r"betas\[1\] must be .* 1.5",
        ),
        (
            lambda: LAMB([nn.Parameter(torch.ones(2, 2))], 1.0, betas=0.9),
            r"betas must be two numbers; this is 0.9. HINT: .*betas=\(0.9, 0.999\)",
        ),
        (
            lambda: LAMB([nn.Parameter(torch.ones(2, 2))], "0.1"),
            "lr must be at least 0 and finite; this is '0.1'",
        ),
        (
            lambda: LARS([{"params": [nn.Parameter(torch.ones(2, 2))], "momentum": -0.9}], 1.0),
            "momentum must be .*this is -0.9",
        ),
        (
            lambda: LARS([{"params": [nn.Parameter(torch.ones(2, 2))], "adapt": "no"}], 1.0),
            "adapt must be True, False or None; this is 'no'",
        ),
        (lambda: LAMB([nn.Parameter(torch.ones(9))], 0.1), "all 1 parameters are vectors.*HINT"),
    ],
)
def test_bad_input_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.fixture
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def flattened(module, views):
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=views)


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("views", [False, True], ids=["flat", "use_orig_params"])
def test_flattened_parameters_beside_others_are_refused(views):
    inner = flattened(nn.Linear(3, 2), views)
    model = nn.Sequential(nn.Linear(4, 3), inner)  # the first layer is not wrapped
    count = len(list(inner.parameters()))
    with pytest.raises(ValueError, match=rf"LARS: {count} of {count + 2} parameters.*HINT"):
        LARS(model.parameters(), 0.1)


@pytest.mark.usefixtures("_one_rank")
def test_parameters_that_are_flattened_after_the_optimizer_is_made_are_refused():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = LAMB(model.parameters(), 0.1)
    flattened(model, views=True)(torch.ones(1, 4)).sum().backward()
    with pytest.raises(ValueError, match=r"LAMB: 4 of 4 parameters are vectors.*HINT"):
        optimizer.step()


def test_sparse_gradient_is_refused():
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"a gradient is sparse.*sparse=False"):
        LARS(table.parameters(), 0.1).step()
