"""Cross entropy of logits whose classes are divided over the ranks, without gathering them."""

import functools
from unittest import mock

import pytest
import thread_ranks
import torch
import torch.nn.functional as F  # noqa: N812
from tensor_threads import on_threads
from torch import nn

from paceline import Layout
from paceline.parallel.tensor.rules import layers
from paceline.parallel.tensor.split_tensor import SplitTensor
from paceline.parallel.tensor.splits import Split

CLASSES = 12


def compare(x, target, ranks=2, dtype=torch.float64, **options):
    """Compare value and gradient with those of whole logits; nothing may be gathered."""
    x = x.to(dtype)
    leaf = x.clone().requires_grad_()
    expected = F.cross_entropy(leaf, target, **options)
    wanted = None
    if expected.isfinite().all():
        expected.sum().backward()
        wanted = leaf.grad
    split = Split(1 if x.dim() > 1 else 0)

    def on_rank(axis):
        own = split.cut(x, axis.rank, axis.size).clone().requires_grad_()
        found = F.cross_entropy(SplitTensor.of(own * 1, split, axis), target, **options)
        assert type(found) is torch.Tensor
        if wanted is not None:
            found.sum().backward()
            own = split.join(axis.pieces(own.grad))
        return found.detach(), own

    tolerance = {} if dtype is torch.float64 else {"rtol": 2e-2, "atol": 2e-2}
    with mock.patch.object(SplitTensor, "whole", side_effect=AssertionError("gathered")):
        every = on_threads(ranks, on_rank)
    for found, gradient in every:
        torch.testing.assert_close(found, expected.detach(), equal_nan=True, **tolerance)
        if wanted is not None:
            torch.testing.assert_close(gradient, wanted, **tolerance)


WEIGHT = torch.rand(CLASSES, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reduction": "sum", "label_smoothing": 0.2},
        {"reduction": "none", "weight": WEIGHT},
        {"ignore_index": 4},
        {"weight": WEIGHT, "label_smoothing": 0.1, "ignore_index": 4},
    ],
)
def test_classes_and_probabilities(options, ranks):
    generator = torch.Generator().manual_seed(1)
    for shape in ((7, CLASSES), (2, CLASSES, 5), (2, CLASSES, 3, 2)):
        x = 9 * torch.randn(shape, generator=generator)
        target = torch.randint(0, CLASSES, shape[:1] + shape[2:], generator=generator)
        target.view(-1)[0] = 4
        compare(x, target, ranks, **options)
        if "ignore_index" not in options:
            shares = torch.randn(shape, generator=generator).double().softmax(1)
            compare(x, shares, ranks, **options)


def test_extreme_values():
    x = torch.tensor([[1e4, -1e4, 0.0, 3.0], [float("-inf"), 2.0, float("-inf"), 1.0]])
    compare(x, torch.tensor([0, 3]))
    compare(x[0], torch.tensor(2))
    compare(x, torch.tensor([0, 0]))  # an infinite loss
    compare(x, torch.tensor([-100, -100]))  # a mean over no sample
    compare(torch.randn(6, CLASSES), torch.arange(6), dtype=torch.bfloat16)


@pytest.mark.parametrize("wrong", [CLASSES, -1])
def test_a_class_that_does_not_exist(wrong):
    with pytest.raises(IndexError, match=f"Target {wrong} is out of bounds"):
        on_threads(
            2,
            lambda axis: F.cross_entropy(
                SplitTensor.of(torch.randn(2, CLASSES // 2), Split(1), axis),
                torch.tensor([0, wrong]),
            ),
        )


class Language(nn.Module):
    """An embedding that is tied to the output layer."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(12, 4), nn.Linear(4, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x):
        return self.head(torch.tanh(self.embedding(x))).flatten(0, 1)


def train(loss, world=None, layout=None, hook=None, compare=False):
    torch.manual_seed(2)
    model = Language()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randint(0, 12, (4, 3))
    seen = set()
    if world is not None:
        model, optimizer = world.distribute(model, optimizer, layout=layout, compare=compare)
        x = x.chunk(world.mesh.data_size)[world.mesh.data_rank]
        if hook:
            model.register_forward_hook(lambda _m, _a, out: seen.add(tuple(out.shape)))
    found = []
    for _ in range(3):
        y = x.roll(-1, 1).flatten()
        if world is None:
            value = loss(model(x), y)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
        else:
            value = world.forward_backward(model, x, y, loss=loss)
            world.step(optimizer)
        found.append(float(value.detach()))
    return found, seen


@pytest.mark.parametrize(
    ("loss", "is_divided"),
    [
        (F.cross_entropy, True),
        (nn.CrossEntropyLoss(label_smoothing=0.1), True),
        (functools.partial(F.cross_entropy, ignore_index=3), True),
        (lambda out, y: F.cross_entropy(out, y), False),  # it may use outputs on one rank only
    ],
)
@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(tp=2, zero=3)])
def test_forward_backward_with_tied_weights(loss, is_divided, layout):
    expected, _ = train(loss)
    of = mock.patch.object(SplitTensor, "whole", autospec=True, side_effect=SplitTensor.whole)
    with of as gathered:
        every = thread_ranks.run(lambda world: train(loss, world, layout), 2)
    assert bool(gathered.call_count) is not is_divided
    for found, _ in every:
        assert found == pytest.approx(expected, rel=1e-5)


def test_the_loss_is_compared_with_that_of_whole_outputs(monkeypatch):
    expected, _ = train(F.cross_entropy)

    def compared(world):
        return train(F.cross_entropy, world, Layout(tp=2), compare=True)[0]

    for found in thread_ranks.run(compared, 2):
        assert found == pytest.approx(expected, rel=1e-5)
    plain = layers._Terms.of_classes

    def wrong(*args):
        values, norm = plain(*args)
        return values * 1.01, norm

    monkeypatch.setattr(layers._Terms, "of_classes", wrong)
    for error in thread_ranks.run(compared, 2, outcomes=True):
        assert "F.cross_entropy" in str(error)
        assert "differs from that of the whole tensors by 0.01" in str(error)


class WithLoss(Language):
    """It computes its loss itself."""

    def forward(self, x, y):
        return F.cross_entropy(super().forward(x), y, label_smoothing=0.1)


def test_a_model_that_computes_its_loss():
    def train_with_loss(world=None):
        torch.manual_seed(2)
        model = WithLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        x = torch.randint(0, 12, (4, 3))
        if world is not None:
            model, optimizer = world.distribute(model, optimizer, layout="tp2", compare=False)
        found = []
        for _ in range(3):
            loss = model(x, x.roll(-1, 1).flatten())
            if world is None:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            else:
                world.backward(loss)
                world.step(optimizer)
            found.append(float(loss.detach()))
        return found

    expected = train_with_loss()
    with mock.patch.object(SplitTensor, "whole", side_effect=AssertionError("gathered")):
        every = thread_ranks.run(train_with_loss, 2)
    for found in every:
        assert found == pytest.approx(expected, rel=1e-5)


def test_hooks_of_the_script_see_whole_outputs():
    layout = Layout(tp=2)
    for _, seen in thread_ranks.run(
        lambda world: train(F.cross_entropy, world, layout, hook=True), 2
    ):
        assert seen == {(12, 12)}


def test_replicas_of_divided_models():
    """The mean over data ranks is that of the whole batch."""
    expected, _ = train(F.cross_entropy)
    layout = Layout(dp=2, tp=2)
    every = thread_ranks.run(lambda world: train(F.cross_entropy, world, layout), 4)
    for step, value in enumerate(expected):
        assert (every[0][0][step] + every[2][0][step]) / 2 == pytest.approx(value, rel=1e-5)
