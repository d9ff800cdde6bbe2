"""What a pipeline can't compute as one process does is refused, and the rest is equal to it."""

import copy
import dataclasses
import functools
import re
import types

import numpy as np
import pytest
import thread_ranks
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from paceline.parallel.pipeline.attributes import KeptByAnotherStage
from paceline.parallel.pipeline.pipeline_model import _loss_key

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(8) % 4


class Four(nn.Module):
    """Four layers; ``between(model, x)`` runs after the second one."""

    def __init__(self, between):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))
        self.norm, self.between = nn.BatchNorm1d(4), between
        self.cfg, self.beta, self.aux = types.SimpleNamespace(scale=1.0), torch.tensor(1.0), 0.0
        self.register_buffer("queue", torch.zeros(4))

    def forward(self, x):
        x = self.between(self, self.b(F.relu(self.a(x))))
        return self.d(F.relu(self.c(x)))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


def hooked(model, x):
    x.register_hook(lambda g: g * 0.1)
    return x


def needs_gradient(model, x):
    x.requires_grad = True
    return x


def recomputed(model, x):
    return checkpoint(F.relu, x, use_reentrant=True)


def keeps_a_queue(model, x):
    with torch.no_grad():
        model.queue[:] = x.mean(0)
    return x


def averages(model, x):
    model.queue.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return x


def keeps_a_loss(model, x):
    model.aux = x.square().mean()
    return x


def counts(model, x):
    model.cfg.scale += 1
    return x


def distribute(world, between, options="", prepare=None, model=None):
    torch.manual_seed(1)
    model = Four(between) if model is None else model(between)
    if prepare:
        prepare(model)
    one = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.distribute(
        model, optimizer, layout=f"pp2 + micro-batches=2{options}", example_inputs=(X[:4],)
    )
    return model, optimizer, one


def steps(world, between, change=None, loss=F.cross_entropy, targets=Y, **given):
    """Train a step, change the model, and train again; return the error."""
    model, optimizer, _ = distribute(world, between, **given)
    try:
        for step in range(2):
            if step and change:
                change(model)
            world.forward_backward(model, X, targets, loss=loss)
            world.step(optimizer)
    except ValueError as error:
        return str(error)
    return "no error"


def errors(*args, **options):
    """Return the errors of two ranks, which are the same."""
    first, second = thread_ranks.run(lambda world: steps(world, *args, **options))
    assert first == second
    assert "HINT: " in first, first
    return first


@pytest.mark.parametrize(
    ("between", "text"),
    [
        (lambda model, x: Reversed.apply(x), "calls the autograd function Reversed outside of"),
        (recomputed, "calls the autograd function CheckpointFunction outside of a module"),
        (hooked, r"calls register_hook\(\) of a tensor outside of a module"),
        (needs_gradient, "sets an attribute of a tensor outside of a module"),
        (keeps_a_queue, "changes queue .*once for each micro-batch.*micro-batches=1"),
        (averages, "changes queue .*once for each micro-batch"),
        (counts, r"changes self\.cfg"),
        (lambda model, x: x * np.random.rand(), r"draws from numpy.random outside of a module"),
        (keeps_a_loss, "replaces the attribute aux by a tensor with a gradient"),
    ],
)
def test_forwards_that_stages_would_not_repeat_are_refused(between, text):
    def run(world):
        try:
            return steps(world, between)
        except ValueError as error:
            return str(error)

    for found in thread_ranks.run(run):
        assert re.search(text, found), found
        assert "HINT: " in found


def test_requires_grad_that_changes_is_refused_on_all_ranks():
    found = errors(
        lambda model, x: x,
        prepare=lambda model: model.a.requires_grad_(False),
        change=lambda model: [p.requires_grad_(True) for p in model.parameters()],
    )
    assert "requires_grad of a.weight was False in world.distribute" in found


def test_an_evaluation_with_random_numbers_leaves_equal_generators():
    def draw(world):
        model, _, _ = distribute(world, lambda model, x: x + torch.randn_like(x))
        model.eval()
        first, second = model(X), model(X)
        assert not first.equal(second)
        return torch.rand(1).item()

    first, second = thread_ranks.run(draw)
    assert first == second


class Head(nn.Linear):
    def forward(self, x):
        return F.linear(x.detach(), self.weight, self.bias)


class Twice(Four):
    def forward(self, x):
        x = self.b(F.relu(self.a(x)))
        x = self.norm(x) + self.norm(2 * x + 1)
        return self.d(F.relu(self.c(x)))


def with_detached_head(between):
    model = Four(between)
    model.d = Head(4, 4)
    return model


def test_zero_bubble_trains_a_stage_whose_loss_does_not_depend_on_what_it_received():
    def train(world):
        model, _, one = distribute(
            world, lambda model, x: x, " + schedule=zero-bubble", model=with_detached_head
        )
        world.forward_backward(model, X, Y, loss=F.cross_entropy)
        F.cross_entropy(one(X), Y).backward()
        wanted = dict(one.named_parameters())
        for name, found in model.module.named_parameters():
            if name.startswith("d."):
                torch.testing.assert_close(found.grad, wanted[name].grad)
        return [n for n, p in model.module.named_parameters() if n.startswith("d.")]

    assert ["d.weight", "d.bias"] in thread_ranks.run(train)


def test_statistics_of_a_layer_that_a_forward_uses_twice():
    def train(world):
        model, _, one = distribute(world, lambda model, x: x, model=Twice)
        world.forward_backward(model, X, Y, loss=F.cross_entropy)
        x = one.b(F.relu(one.a(X)))
        one.norm(x), one.norm(2 * x + 1)
        found = {n: b for n, b in model.module.named_buffers() if n.startswith("norm.")}
        wanted = dict(one.named_buffers())
        # the second call has samples that do not depend on the micro-batch
        for name, value in found.items():
            torch.testing.assert_close(value, wanted[name])
        return len(found)

    assert 3 in thread_ranks.run(train)


def plain(model, x):
    return x


def ignoring(outputs, targets):
    """A sum over what counts, and its weight."""
    return F.cross_entropy(outputs, targets, reduction="sum"), (targets >= 0).sum()


def test_a_loss_that_is_no_mean_over_samples_is_refused():
    targets = Y.clone()
    targets[:3] = -100
    found = errors(plain, targets=targets)
    assert "it is no mean over samples. HINT: return the sum over what counts" in found
    weight = torch.arange(1.0, 5.0)
    assert "no mean over samples" in errors(
        plain, loss=lambda x, y: F.cross_entropy(x, y, weight=weight), targets=Y.sort().values
    )
    for loss in (ignoring, lambda x, y: F.mse_loss(x, x + torch.rand_like(x))):
        run = functools.partial(steps, between=plain, loss=loss, targets=targets)
        assert thread_ranks.run(run) == ["no error"] * 2


def test_a_loss_that_returns_a_pair_later_is_seen_or_refused():
    def train(world):
        model, _, _ = distribute(world, plain)

        def loss_of(is_pair):
            return lambda x, y: ignoring(x, y) if is_pair else F.cross_entropy(x, y)

        first, second = (
            world.forward_backward(model, X, Y, loss=loss_of(is_pair)) for is_pair in (False, True)
        )
        torch.testing.assert_close(first, second)
        state = {"calls": 0}

        def sometimes(outputs, targets):
            state["calls"] += 1
            return loss_of(state["calls"] > 1)(outputs, targets)

        return world.forward_backward(model, X, Y, loss=sometimes)

    found = thread_ranks.run(train, outcomes=True)
    assert "the loss returns a pair now, and the mean alone without data. HINT: " in str(found[1])


def test_a_loss_with_parameters_of_the_last_stage_is_explained():
    def train(world):
        model, _, _ = distribute(world, plain)
        world.forward_backward(
            model, X, Y, loss=lambda x, y: F.cross_entropy(x, y) + model.d.weight.norm()
        )

    found = thread_ranks.run(train, outcomes=True)
    assert "the loss uses the parameter d.weight beside the outputs" in str(found[1])


def scaled(model, x):
    return x * model.cfg.scale * model.beta


def test_a_configuration_that_the_script_changes_is_followed():
    def train(world):
        model, optimizer, one = distribute(world, scaled)
        found = []
        for scale in (1.0, 3.0):
            model.cfg.scale = one.cfg.scale = scale
            loss = world.forward_backward(model, X, Y, loss=F.cross_entropy)
            torch.testing.assert_close(loss, F.cross_entropy(one(X), Y))
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    first, second = thread_ranks.run(train)
    assert first == second
    assert first[0] != first[1]


def test_tensors_and_hooks_that_change_after_distribute_are_refused():
    changed = {
        "needs beta as it was": lambda model: setattr(model, "beta", torch.tensor(3.0)),
        "needs hooks as it was": lambda model: model.module.register_forward_hook(
            lambda module, inputs, out: out * 2
        ),
    }
    for text, change in changed.items():
        assert text in errors(scaled, change=change)


class Hidden(nn.Linear):
    """Changes a buffer in a way that no counter of versions sees."""

    def __init__(self, change):
        super().__init__(4, 4)
        self.change = change
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        self.change(self)
        return super().forward(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.seen.data.add_(1),
        lambda layer: layer.seen[:2].data.add_(1),
        lambda layer: setattr(layer.seen, "data", layer.seen + 1),
    ],
    ids=["in place", "of a view", "assigned"],
)
def test_buffers_that_a_module_changes_through_data_are_refused(change):
    def model(between):
        found = Four(between)
        found.b = Hidden(change)
        return found

    assert "the forward changes b.seen" in errors(plain, model=model)
    read = functools.partial(
        steps, between=plain, model=lambda _: with_layer(Hidden(lambda one: one.seen.data.sum()))
    )
    assert thread_ranks.run(read) == ["no error"] * 2


def with_layer(layer):
    model = Four(plain)
    model.b = layer
    return model


def test_a_loss_that_ignores_labels_of_a_later_batch_is_refused():
    ignored = Y.clone()
    ignored[:3] = -100

    def train(world):
        model, _, _ = distribute(world, plain)
        for batch in range(6):
            targets = ignored if batch == 4 else Y  # batch 4 is the fifth one
            try:
                world.forward_backward(model, X, targets, loss=F.cross_entropy)
            except ValueError as error:
                return batch, str(error)
        return "no error"

    for batch, text in thread_ranks.run(train):
        assert batch == 4
        assert "it is no mean over samples" in text


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_on_gradients_which_would_see_those_of_micro_batches_are_refused(when):
    def limited(model):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return model

    def train(world):
        before = (lambda between: limited(Four(between))) if when == "before" else Four
        model, _, _ = distribute(world, plain, model=before)
        world.forward_backward(limited(model), X, Y, loss=F.cross_entropy)

    for error in thread_ranks.run(train, outcomes=True):
        assert "has a hook on its gradient, which would run for each micro-batch" in str(error)


@dataclasses.dataclass
class Scaled:
    """A loss that has no hash, as dataclasses that can be compared."""

    factor: float

    def __call__(self, outputs, targets):
        return self.factor * F.cross_entropy(outputs, targets)


@pytest.mark.parametrize("kind", [Scaled, lambda factor: functools.partial(times, factor)])
def test_losses_that_are_objects_are_compared_as_one_loss(kind):
    def train(world):
        model, _, _ = distribute(world, plain)
        return [
            float(world.forward_backward(model, X, Y, loss=kind(2.0 if i < 4 else 3.0)))
            for i in range(5)
        ]

    first, second = thread_ranks.run(train)
    assert first == second
    assert first[4] == pytest.approx(1.5 * first[0])


def times(factor, outputs, targets):
    return factor * F.cross_entropy(outputs, targets)


def test_a_partial_in_a_loop_is_one_loss():
    keys = [_loss_key(functools.partial(times, factor)) for factor in (2.0, 2.0, 3.0)]
    assert keys[0] == keys[1] != keys[2]


def keeps_a_penalty(model, x):
    model.aux = x.square().mean()
    return x


def test_a_loss_that_reads_what_another_stage_keeps_is_refused():
    def without_aux(between):
        model = Four(between)
        model.aux = None
        return model

    def train(world, loss_of):
        model, _, _ = distribute(world, keeps_a_penalty, model=without_aux)

        def loss(x, y):
            return loss_of(F.cross_entropy(x, y), model.module.aux)

        return [world.forward_backward(model, X, Y, loss=loss) for _ in range(2)]

    reads = functools.partial(
        train, loss_of=lambda loss, aux: loss if aux is None else loss + 0.1 * aux
    )
    found = thread_ranks.run(reads, outcomes=True)
    assert "keeps aux as an attribute, and another stage runs it" in str(found[1])
    plain_loss = functools.partial(train, loss_of=lambda loss, aux: loss)
    first, second = thread_ranks.run(plain_loss)
    torch.testing.assert_close(first, second)


@pytest.mark.parametrize(
    "use",
    [
        lambda kept: 1 + kept,
        lambda kept: torch.ones(2) * kept,
        lambda kept: torch.add(torch.ones(2), kept),
        lambda kept: torch.add(torch.ones(2), other=kept),
        lambda kept: kept.mean(),
        lambda kept: kept[0],
        bool,
        float,
        sum,
    ],
)
def test_each_use_of_what_another_stage_keeps_is_an_error(use):
    kept = KeptByAnotherStage("block.aux")
    with pytest.raises(ValueError, match=r"keeps block\.aux as an attribute.*HINT: return it"):
        use(kept)
    assert copy.deepcopy(kept).name == "block.aux"
