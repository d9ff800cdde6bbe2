"""Layers that read all positions of divided samples, and convolutions of complex numbers."""

import copy

import pytest
import thread_ranks
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from paceline.parallel.spatial.split_tensor import SplitTensor


class Fourier(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.conv, self.dims = nn.Conv2d(1, 2, 3, padding=1), dims

    def forward(self, x):
        x = self.conv(x)
        return x + torch.fft.fftn(x, dim=self.dims, norm="ortho").real


@pytest.mark.parametrize("given", ["whole samples", "parts"])
def test_the_bytes_that_a_layer_gathers_are_printed_once(given):
    said = [[], []]

    def train(world):
        torch.manual_seed(0)
        world._progress.say_once = said[world.rank].append
        model = world.distribute(Fourier((1, 2, 3)), layout="h2")
        x = torch.randn(1, 1, 256, 256)
        for _ in range(2):
            model(world.part(x) if given == "parts" else x)

    thread_ranks.run(train)
    # not those of the corner that is compared with the whole model
    assert [line for line in said[0] if "gathers" in line] == [
        "the model (Fourier): fftn reads all positions, so each rank gathers 0.5 MiB in each "
        "forward"
    ]


def count_gathers(monkeypatch):
    gathered = []
    whole = SplitTensor.whole
    monkeypatch.setattr(
        SplitTensor, "whole", lambda one, *dims: gathered.append(one) or whole(one, *dims)
    )
    return gathered


class Attention(nn.Module):
    """Self-attention over the positions of images, as in a U-Net."""

    def __init__(self, **options):
        super().__init__()
        self.heads, self.options = nn.MultiheadAttention(8, 2, batch_first=True), options
        self.norm, self.conv = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        found, weights = self.heads(tokens, tokens, tokens, **self.options)
        found = found if weights is None else found + weights @ tokens
        return self.conv(x + found.transpose(1, 2).reshape(x.shape))


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.project, self.conv = nn.Conv2d(8, 24, 1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x):
        q, k, v = self.project(x).flatten(2).chunk(3, 1)
        weights = (q.transpose(1, 2) @ k).softmax(-1)
        return self.conv(torch.einsum("bij,bcj->bci", weights, v).unflatten(2, x.shape[2:]))


class SpectralConvolution(nn.Module):
    """A block of a Fourier neural operator."""

    def __init__(self, count, keep="truncated"):
        super().__init__()
        self.count, self.keep = count, keep
        self.weight = nn.Parameter(torch.randn(8, 8, *[2] * count, dtype=torch.complex128) / 8)
        self.plain = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[count - 1](8, 8, 1)

    def forward(self, x):
        dims = tuple(range(-self.count, 0))
        spectrum = torch.fft.rfftn(x, dim=dims)
        if self.keep == "all":
            spectrum = spectrum * self.weight[0, 0].abs().sum()
        else:
            kept = (..., *[slice(2)] * self.count)
            low = (
                torch.zeros_like(spectrum)
                if self.keep == "like"
                else torch.zeros(spectrum.shape, dtype=spectrum.dtype)
            )
            names = "xyz"[: self.count]
            product = torch.einsum(f"bi{names},io{names}->bo{names}", spectrum[kept], self.weight)
            low[kept] = product
            spectrum = low
        return F.gelu(torch.fft.irfftn(spectrum, s=x.shape[2:], dim=dims) + self.plain(x))


def check_equal(make, shape, layout, ranks):
    """Compare outputs and gradients of a model with those of one process."""
    torch.manual_seed(3)
    plain, x = make().double(), torch.randn(shape, dtype=torch.float64)
    weights = torch.randn(plain(x).shape, dtype=torch.float64)
    expected = plain(x)
    (expected * weights).sum().backward()

    def train(world):
        with torch.random.fork_rng():
            model = world.distribute(copy.deepcopy(plain), layout=layout)
        model.zero_grad()
        found = world.whole(model(x))
        (found * weights).sum().backward()
        return found.detach(), [one.grad for one in model.parameters()]

    for found, gradients in thread_ranks.run(train, ranks):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
        for mine, theirs in zip(gradients, plain.parameters(), strict=True):
            scale = theirs.grad.abs().max().item()
            torch.testing.assert_close(mine, theirs.grad, rtol=0, atol=1e-12 * scale)


@pytest.mark.parametrize(("layout", "ranks", "height"), [("h2", 2, 6), ("w2", 2, 6), ("h3", 3, 7)])
@pytest.mark.parametrize("has_weights", [True, False])
def test_attention_over_positions_equals_that_of_one_process(layout, ranks, height, has_weights):
    check_equal(lambda: Attention(need_weights=has_weights), (2, 8, height, 5), layout, ranks)


@pytest.mark.parametrize(("layout", "ranks"), [("h2", 2), ("h2 x w2", 4)])
def test_attention_written_by_hand_equals_that_of_one_process(layout, ranks):
    check_equal(ByHand, (2, 8, 6, 4), layout, ranks)


@pytest.mark.parametrize("options", [{"need_weights": False}, {}])
def test_attention_gathers_nothing_where_heads_are_divided(monkeypatch, options):
    gathered = count_gathers(monkeypatch)
    x = torch.randn(1, 8, 4, 4)

    def train(world):
        torch.manual_seed(0)
        world.distribute(Attention(**options), layout="h2", compare=False)(x)
        return len(gathered)

    # with weights, keys and values; and tokens for the product with the weights
    assert max(thread_ranks.run(train)) == (0 if options else 6)


def test_attention_with_masks_and_causal_attention():
    attend = F.scaled_dot_product_attention
    x = torch.randn(2, 4, 6, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.randn(2, 4, 6, 6, dtype=torch.float64)
    forms = [
        lambda q: attend(q, q * 2, q.sin(), is_causal=True),
        lambda q: attend(q, q * 2, q.sin(), mask),
        lambda q: attend(q, q[:, :2], q[:, 2:], enable_gqa=True),  # 2 heads for 4
        lambda q: attend(q[:, :3], q[:, :3], q[:, 1:], mask[:, :1]),  # 3 heads on 2 ranks
        lambda q: attend(q[:, :3], q[:, :3], q[:, 1:], is_causal=True, scale=0.3),
        lambda q: attend(q[:, 0], q[:, 1], q[:, 2], mask[:, 0]),
    ]

    def train(world):
        mesh = world.distribute(nn.Conv2d(1, 1, 1), layout="h2") and world
        for form in forms:
            part = mesh.part(x.detach())
            part.local.requires_grad_()
            expected, found = form(x), world.whole(form(part))
            weights = torch.randn(expected.shape, dtype=torch.float64)
            (found * weights).sum().backward()
            (right,) = torch.autograd.grad((expected * weights).sum(), x)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
            mine = part.local.grad / 2  # the ranks that share a sample
            torch.testing.assert_close(mine, right[part.slices], rtol=1e-12, atol=1e-12)

    thread_ranks.run(train)


@pytest.mark.parametrize("keep", ["truncated", "all", "like"])
@pytest.mark.parametrize(
    ("layout", "ranks", "shape"),
    [("w2", 2, (2, 8, 9)), ("h3", 3, (1, 8, 7, 6)), ("d2 x w2", 4, (1, 8, 6, 5, 6))],
)
def test_a_fourier_neural_operator_equals_that_of_one_process(
    monkeypatch, layout, ranks, shape, keep
):
    gathered = count_gathers(monkeypatch)
    check_equal(lambda: SpectralConvolution(len(shape) - 2, keep), shape, layout, ranks)
    wholes = [one for one in gathered if one.is_complex()]
    assert not wholes


@pytest.mark.parametrize("axis", ["w", "h"])
def test_convolutions_of_complex_numbers(axis):
    def train(world):
        torch.manual_seed(0)
        plain = nn.Conv2d(2, 2, 3, padding=1, stride=(2, 1), dtype=torch.complex128)
        model = world.distribute(copy.deepcopy(plain), layout=f"{axis}2")
        x = torch.randn(2, 2, 8, 5, dtype=torch.complex128)
        world.whole(model(x)).abs().square().sum().backward()
        plain(x).abs().square().sum().backward()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)

    thread_ranks.run(train)


def test_a_second_backward_is_not_called_a_change_in_place():
    def train(world):
        torch.manual_seed(0)
        model = world.distribute(nn.Conv2d(1, 2, 3), layout="h2", compare=False)
        loss = world.whole(model(torch.randn(1, 1, 8, 5))).sum()
        loss.backward()
        with pytest.raises(RuntimeError, match="second time") as found:
            loss.backward()
        assert "inplace" not in str(found.value)

    thread_ranks.run(train)
