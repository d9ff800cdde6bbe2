"""Single functions of torch on parts of samples have the results and gradients of whole ones."""

import pytest
import thread_ranks
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

X = torch.randn(2, 4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def check(*functions, layout="h2", ranks=2):
    """Compare functions of parts with those of whole samples: values and gradients."""

    def train(world):
        world.distribute(nn.Conv2d(1, 1, 1), layout=layout, compare=False)
        for function in functions:
            leaf, part = X.clone().requires_grad_(), world.part(X)
            part.local.requires_grad_()
            expected, found = function(leaf), world.whole(function(part))
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
            weights = torch.randn(expected.shape, dtype=torch.float64)
            (right,) = torch.autograd.grad((expected * weights).sum(), leaf)
            (found * weights).sum().backward()
            torch.testing.assert_close(part.local.grad / ranks, right[part.slices])

    thread_ranks.run(train, ranks)


def test_variances_of_complex_numbers_and_of_constants():
    check(
        lambda x: (x * (1 + 2j) + x.abs().sqrt()).var((2, 3)),
        lambda x: torch.fft.fft2(x).std(correction=0),
        lambda x: (x * 0 + 1).std((2, 3)),  # the gradient is 0, not NaN
    )


@pytest.mark.parametrize("layout", ["h2", "w2"])
def test_norms_of_spectra_which_are_divided_along_channels(layout):
    shift, scale = torch.ones(4).double(), torch.arange(4).double() + 1
    check(
        lambda x: F.instance_norm(torch.fft.fft2(x).abs()),
        lambda x: F.instance_norm(torch.fft.fft2(x).abs(), shift, scale, use_input_stats=False),
        lambda x: F.batch_norm(torch.fft.fft2(x).abs(), shift, scale),
        layout=layout,
    )


def changed(view):
    """Return a function that changes a view of its input in place, or a copy."""

    def function(x):
        x = x * 1
        view(x).mul_(2)
        return x

    return function


def test_padding_by_nothing_is_a_copy():
    check(
        changed(lambda x: F.pad(x, (0, 0, 0, 0))),
        changed(lambda x: F.pad(x, (-1, 0))),
        layout="w2",
    )


@pytest.mark.parametrize(
    ("view", "layout", "ranks"),
    [
        (lambda x: x.flatten(1)[:, :7], "h2", 2),
        (lambda x: x.view(-1)[3:].unsqueeze(0), "h2", 2),
        (lambda x: x.flatten(2)[:, 1:], "h2 x w2", 4),  # gathered along the width only
    ],
)
def test_views_of_a_gathered_copy_are_not_changed_in_place(view, layout, ranks):
    with pytest.raises(ValueError, match=r"mul_ would change a gathered copy .*HINT"):
        check(changed(view), layout=layout, ranks=ranks)


def test_a_gathered_copy_is_iterated():
    check(lambda x: torch.stack([2 * sample for sample in x.flatten(1)]))


def test_factors_by_name():
    check(
        lambda x: F.pixel_shuffle(x, upscale_factor=2),
        lambda x: F.pixel_unshuffle(F.interpolate(x, (6, 10)), downscale_factor=2),
        lambda x: F.channel_shuffle(x, groups=2),
    )


def test_random_numbers_are_equal_where_ranks_hold_the_same_part():
    def train(world):
        torch.manual_seed(0)
        world.distribute(nn.Conv2d(1, 1, 1), layout="h2 x w2", compare=False)
        rows = world.part(torch.ones(1, 1, 200, 4)).mean(3)  # divided along the height only
        attended = F.scaled_dot_product_attention(*[rows.flatten(0, 1)[..., None]] * 3, None, 0.5)
        return F.dropout(rows).local, attended.local

    found = thread_ranks.run(train, 4)
    for one, (a, b, c, d) in enumerate(zip(*found, strict=True)):
        assert torch.equal(a, b), one
        assert torch.equal(c, d), one
        assert not torch.equal(a, c), one


def test_attention_that_pytorch_refuses_is_refused():
    attend = F.scaled_dot_product_attention
    wrong = [
        (lambda x: attend(x, x[:, :2], x[:, 2:]), "must match|expanded size"),
        (lambda x: causal(x.flatten(2).transpose(1, 2)), "Need attn_mask"),
    ]

    def causal(tokens):
        layer = nn.MultiheadAttention(4, 2, batch_first=True).double()
        return layer(tokens, tokens, tokens, is_causal=True)[0]

    for function, message in wrong:
        with pytest.raises(RuntimeError, match=message):
            check(lambda x, f=function: x if type(x) is torch.Tensor else f(x))


def test_products_of_one_row():
    check(
        lambda x: x[:, :, 2:3].movedim(2, 0) @ torch.ones(5, 2, 5, 3).double(),
        lambda x: torch.einsum("bchw,bchw->bcw", x[:, :, 2:3], x),
        lambda x: x[:, :, 2:3].transpose(-1, -2) @ x[:, :, 3:4],
    )


def test_outputs_of_a_model_are_plain_tensors():
    def train(world):
        flat = world.distribute(nn.Flatten(), layout="h2")(X)
        assert type(flat) is torch.Tensor
        torch.testing.assert_close(flat.mul_(2), X.flatten(1) * 2)

    thread_ranks.run(train)


def test_conjugates_travel():
    def whole(x):
        return x if type(x) is torch.Tensor else x.whole()

    check(lambda x: whole((x * (1 + 2j)).conj()).imag)


@pytest.mark.parametrize(("layout", "ranks"), [("h2", 2), ("h2 x w2", 4)])
def test_extremes_share_their_gradient_among_equal_values(layout, ranks):
    def ties(x):
        return (x * 2).round()

    check(
        lambda x: x.amax((2, 3)),
        lambda x: ties(x).amax((2, 3)) * 3,
        lambda x: ties(x).amin((1, 3), keepdim=True) + x,
        lambda x: ties(x).amax(2),
        lambda x: ties(x).max() * ties(x).min() + x.amin(),
        lambda x: x[:, :, :1].amax(-2),  # a rank without rows
        lambda x: x * (x > 1).any() + x * (x > -9).all((2, 3), keepdim=True),
        layout=layout,
        ranks=ranks,
    )


def test_a_maximum_over_ranks_keeps_what_is_not_a_number():
    values = {place: X.clone().index_fill(2, torch.tensor(place), torch.nan) for place in (0, 5)}

    def train(world):
        world.distribute(nn.Conv2d(1, 1, 1), layout="h2", compare=False)
        for x in values.values():
            assert world.part(x).amax((2, 3)).isnan().all()
        assert not (world.part(X) > 0).amin()
        assert world.part((X * 0).int()).max() == 0
        with pytest.raises(ValueError, match=r"max is not known .*HINT"):
            world.part(X).max(2)
        with pytest.raises(IndexError, match="Dimension out of range"):
            world.part(X).amax(4)

    thread_ranks.run(train)
