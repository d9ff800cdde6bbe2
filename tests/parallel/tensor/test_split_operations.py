"""Functions of split tensors have the results and gradients of whole ones."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from tensor_threads import on_threads

from paceline.parallel.tensor.rules import layers, products  # noqa: F401 - registers them
from paceline.parallel.tensor.split_tensor import SplitTensor
from paceline.parallel.tensor.splits import Split, moved_split


class Of:
    """A tensor of a shape, split along a dim; None: the same on all ranks."""

    def __init__(self, *shape, dim=None, blocks=1):
        self.shape, self.dim, self.blocks = shape, dim, blocks


def check(function, *given, ranks=2, is_split=None):
    """Compare ``function`` of split tensors with that of whole ones.

    Args:
        is_split: Whether the result must be a split tensor, if that matters.
    """
    generator = torch.Generator().manual_seed(4)
    whole = [
        torch.randn(one.shape, generator=generator, dtype=torch.float64)
        if isinstance(one, Of)
        else one
        for one in given
    ]
    leaves = [
        one.clone().requires_grad_()
        if isinstance(one, torch.Tensor) and one.is_floating_point()
        else one
        for one in whole
    ]
    expected = function(
        *(one * 1 if isinstance(one, torch.Tensor) and one.requires_grad else one for one in leaves)
    )
    direction = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    tensors = [one for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad]
    wanted = torch.autograd.grad(expected, tensors, direction)

    def on_rank(axis):
        own, args = [], []
        for value, how in zip(whole, given, strict=True):
            if not isinstance(how, Of):
                args.append(value)
                continue
            split = None if how.dim is None else Split(how.dim, how.blocks)
            leaf = value if split is None else split.cut(value, axis.rank, axis.size)
            leaf = leaf.clone().requires_grad_()
            own.append((leaf, split))
            args.append(leaf * 1 if split is None else SplitTensor.of(leaf * 1, split, axis))
        found = function(*args)
        was_split = isinstance(found, SplitTensor)
        result = found.whole() if was_split else found
        gradients = torch.autograd.grad(result, [leaf for leaf, _ in own], direction)
        joined = [
            g if split is None else split.join(axis.pieces(g))
            for g, (_, split) in zip(gradients, own, strict=True)
        ]
        return was_split, result.detach(), joined

    for was_split, result, gradients in on_threads(ranks, on_rank):
        torch.testing.assert_close(result, expected.detach())
        for got, right in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(got, right)
        if is_split is not None:
            assert was_split == is_split


def test_linear_by_columns_rows_and_batch():
    for x, w, b, is_split in (
        (Of(3, 5, 4), Of(6, 4, dim=0), Of(6, dim=0), True),
        (Of(3, 5, 4), Of(6, 4, dim=0, blocks=3), Of(6, dim=0, blocks=3), True),
        (Of(3, 5, 4, dim=2), Of(6, 4, dim=1), Of(6), False),
        (Of(3, 5, 4), Of(6, 4, dim=1), Of(6), False),
        (Of(2, 5, 4, dim=0), Of(6, 4), Of(6), True),
        (Of(3, 4, dim=1), Of(6, 4, dim=0), Of(6, dim=0), True),
        (Of(3, 4, dim=1, blocks=2), Of(6, 4, dim=1), Of(6, dim=0), False),
        (Of(3, 4), Of(6, 4), Of(6, dim=0), True),
    ):
        check(F.linear, x, w, b, is_split=is_split)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("channels", [4, 2])  # 2: pieces of one channel
def test_memory_formats(order, channels):
    def strided(x):
        found = x.contiguous(memory_format=order)
        piece = found.local if isinstance(found, SplitTensor) else found
        assert piece.is_contiguous(memory_format=order)
        return found

    check(strided, Of(2, channels, 3, 3, dim=1), is_split=True)


def test_changes_in_place_in_inference_mode():
    x, weight = torch.randn(2, 4, 6), torch.randn(8, 6)

    def on_rank(axis):
        with torch.inference_mode():
            own, rows = (
                SplitTensor.of(split.cut(one, axis.rank, axis.size).clone(), split, axis)
                for one, split in ((x, Split(1)), (weight, Split(0)))
            )
            F.linear(own, rows)
            own += 1
            return F.linear(own, rows).whole()

    for found in on_threads(2, on_rank):
        torch.testing.assert_close(found, F.linear(x + 1, weight))


def test_elements_with_broadcasting_and_in_place():
    half = Of(4, 3, 6, dim=2)
    check(torch.add, half, Of(6), is_split=True)
    check(lambda a, b: a * b, half, Of(4, 3, 1), is_split=True)
    check(lambda a, b: b - a, half, Of(4, 3, 6), is_split=True)
    check(lambda a, b: a / (b * b + 1), Of(3, 6, dim=1), Of(2, 3, 6, dim=2), is_split=True)
    check(lambda a, b: a * b, half, Of(4, 3, 6, dim=0), is_split=True)
    check(lambda a, b: a.clone().add_(b), half, Of(4, 3, 6), is_split=True)
    check(lambda a, b: b.clone().add_(a), half, Of(4, 3, 6), is_split=False)
    check(lambda a: F.relu(a * 2, inplace=True), half, is_split=True)
    check(lambda a: F.gelu(a, approximate="tanh"), half, is_split=True)
    check(lambda a, b: torch.where(a > 0, a, b), half, Of(1), is_split=True)
    check(lambda a: a[torch.where(a.detach() > 0)], half, is_split=False)
    check(lambda a: F.dropout(a, 0.5, False), half, is_split=True)
    check(lambda a: a.masked_fill(torch.ones(6) > 0, 2.0) + a, half, is_split=True)
    check(lambda a: 2 ** (a.float().double()) + (-a).abs().clamp(min=0.1), half, is_split=True)


def test_views_follow_the_parts():
    check(lambda x: x.view(2, 3, 4, 2).transpose(1, 2), Of(2, 3, 8, dim=2), is_split=True)
    check(lambda x: x.view(2, 3, 3, 4, 2), Of(2, 3, 24, dim=2, blocks=3), is_split=True)
    check(lambda x: x.chunk(3, -1)[1], Of(2, 3, 24, dim=2, blocks=3), is_split=True)
    check(lambda x: x.chunk(chunks=3, dim=-1)[1], Of(2, 3, 24, dim=2, blocks=3), is_split=True)
    check(lambda x: torch.split(x, dim=1, split_size_or_sections=2)[0], Of(2, 4, 6, dim=2))
    check(lambda x: x.split(8, 2)[2], Of(2, 3, 24, dim=2, blocks=3), is_split=True)
    check(lambda x: x.split(8, 2)[2], Of(2, 3, 24, dim=2), is_split=False)
    check(lambda x: x.view(2, 3, 3, 8), Of(2, 3, 24, dim=2), is_split=False)  # 3 heads on 2 ranks
    check(lambda x: x.flatten(1), Of(2, 4, 3, 3, dim=1), is_split=True)
    check(lambda x: x.reshape(-1, 4), Of(2, 3, 4, dim=2), is_split=True)
    check(lambda x: x.unflatten(1, (2, -1)), Of(2, 8, dim=1), is_split=True)
    check(lambda x: x.permute(2, 0, 1)[:, None], Of(2, 3, 4, dim=2), is_split=True)
    check(lambda x: x[..., :2].unsqueeze(0), Of(2, 4, 6, dim=1), is_split=True)
    check(lambda x: x[:, 1:3], Of(2, 4, 6, dim=1), is_split=False)
    check(lambda x: x[0] + x[-1], Of(2, 4, 6, dim=1), is_split=True)
    check(lambda x: torch.stack(x.unbind(0)).movedim(0, 2), Of(2, 4, 6, dim=1), is_split=True)
    check(lambda a, b: torch.cat([a, b], 2), Of(2, 4, 3, dim=1), Of(2, 4, 2), is_split=True)
    check(lambda a, b: torch.cat([a, b], 1) * 2, Of(2, 4, dim=1), Of(2, 4, dim=1), is_split=True)
    check(lambda a, b: torch.stack([a, b]), Of(2, 4, dim=1), Of(2, 4), is_split=True)
    check(lambda x: x[:, [0, 3]], Of(2, 4, 6, dim=1), is_split=False)
    check(lambda x: x.unsqueeze(1).expand(-1, 5, -1), Of(2, 4, dim=1), is_split=True)
    check(lambda x: x.flip(0, 1), Of(2, 4, dim=1), is_split=False)
    check(lambda x: x.flip(0), Of(2, 4, dim=1), is_split=True)
    check(lambda x: x.T.squeeze(), Of(1, 4, dim=1), is_split=True)


def test_reshapes_are_right_for_all_small_shapes():
    shapes = [(4, 6), (2, 2, 6), (24,), (4, 2, 3), (2, 12), (2, 3, 4), (8, 3), (1, 24)]
    for shape in shapes:
        x = torch.arange(24).view(shape)
        for dim, extent in enumerate(shape):
            for blocks in (1, 2, 3):
                split = Split(dim, blocks)
                if not split.divides(extent, 2):
                    continue
                for target in shapes:
                    moved = moved_split(shape, split, 2, target)
                    if moved is None:
                        continue
                    for rank in (0, 1):
                        piece = split.cut(x, rank, 2).reshape(moved.local_shape(target, 2))
                        assert torch.equal(piece, moved.cut(x.view(target), rank, 2))


def test_products():
    check(torch.matmul, Of(2, 4, 3, 5, dim=1), Of(2, 4, 5, 3, dim=1), is_split=True)
    check(torch.matmul, Of(3, 4), Of(4, 6, dim=1), is_split=True)
    check(torch.matmul, Of(3, 4, dim=1), Of(4, 6, dim=0), is_split=False)
    check(torch.matmul, Of(2, 4, 3, 5, dim=1), Of(5, 3), is_split=True)
    check(torch.bmm, Of(4, 3, 5, dim=0), Of(4, 5, 2), is_split=True)
    check(
        lambda a, b: torch.einsum("bhi,hij->bhj", a, b),
        Of(3, 4, 2, dim=1),
        Of(4, 2, 5),
        is_split=True,
    )
    check(
        lambda a, b: torch.einsum("bi,ij->bj", a, b),
        Of(3, 4, dim=1),
        Of(4, 5, dim=0),
        is_split=False,
    )


def test_a_dim_that_is_broadcast_in_a_product():
    check(lambda a, b: torch.einsum("bi,ij->bj", a, b), Of(3, 4, dim=1), Of(1, 5))


def test_convolutions_and_their_norms():
    x = Of(2, 4, 6, 6)
    check(
        lambda x, w, b: F.conv2d(x, w, b, padding=1),
        x,
        Of(8, 4, 3, 3, dim=0),
        Of(8, dim=0),
        is_split=True,
    )
    check(
        lambda x, w, b: F.conv2d(x, w, b, 2),
        Of(2, 4, 6, 6, dim=1),
        Of(8, 4, 3, 3, dim=1),
        Of(8),
        is_split=False,
    )
    check(
        lambda x, w: F.conv2d(x, w, groups=4),
        Of(2, 4, 6, 6, dim=1),
        Of(4, 1, 3, 3, dim=0),
        is_split=True,
    )
    check(lambda x, w: F.conv2d(x, w, groups=2), x, Of(8, 2, 3, 3, dim=0), is_split=True)
    check(lambda x, w: F.conv2d(x, w), Of(2, 4, 6, 6, dim=2), Of(8, 4, 3, 3), is_split=False)
    check(lambda x, w: F.conv1d(x, w), Of(2, 4, 6, dim=1), Of(8, 4, 3, dim=0), is_split=True)
    check(lambda x, w: F.conv_transpose2d(x, w, stride=2), x, Of(4, 6, 2, 2, dim=1), is_split=True)
    check(
        lambda x, w: F.conv_transpose2d(x, w),
        Of(2, 4, 6, 6, dim=1),
        Of(4, 6, 2, 2, dim=0),
        is_split=False,
    )
    check(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
        Of(2, 4, 6, dim=1),
        Of(4, dim=0),
        Of(4),
        is_split=True,
    )
    check(
        lambda x, w, b: F.group_norm(x, 4, w, b),
        Of(2, 8, 6, dim=1),
        Of(8, dim=0),
        Of(8, dim=0),
        is_split=True,
    )
    check(
        lambda x, w, b: F.group_norm(x, 1, w, b),
        Of(2, 8, 6, dim=1),
        Of(8, dim=0),
        Of(8, dim=0),
        is_split=False,
    )
    check(lambda x, w: F.layer_norm(x, (6,), w), Of(2, 8, 6, dim=1), Of(6), is_split=True)
    check(lambda x, w: F.layer_norm(x, (6,), w), Of(2, 8, 6, dim=2), Of(6), is_split=False)
    check(lambda x: F.max_pool2d(x, 2), Of(2, 4, 6, 6, dim=1), is_split=True)
    check(lambda x: F.avg_pool2d(x, 2), Of(2, 4, 6, 6, dim=3), is_split=False)
    check(lambda x: F.adaptive_avg_pool2d(x, 1).flatten(1), Of(2, 4, 6, 6, dim=1), is_split=True)
    check(lambda x: F.pad(x, (1, 1)), Of(2, 4, 6, dim=1), is_split=True)


def test_running_statistics_are_those_of_this_ranks_channels():
    x = torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(1))
    mean, var = torch.zeros(4), torch.ones(4)
    F.batch_norm(x, mean, var, training=True)

    def on_rank(axis):
        own = [torch.zeros(2), torch.ones(2)]
        views = [SplitTensor.of(one, Split(0), axis) for one in own]
        F.batch_norm(x, *views, training=True)  # of a whole input
        return [Split(0).join(axis.pieces(one)) for one in own]

    for found in on_threads(2, on_rank):
        torch.testing.assert_close(found, [mean, var])


def test_attention_and_softmax():
    heads = Of(2, 4, 5, 3, dim=1)
    attention = F.scaled_dot_product_attention
    check(attention, heads, heads, heads, is_split=True)
    check(
        lambda q, k, v: attention(q, k, v, is_causal=True),
        heads,
        Of(2, 4, 5, 3),
        heads,
        is_split=True,
    )
    mask = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    check(lambda q, k, v: attention(q, k, v, mask), heads, heads, heads, is_split=True)
    check(lambda q, k, v: attention(q, k, v, mask > 0), heads, heads, heads, is_split=True)
    check(lambda q, k, v: attention(q, k, v), *(Of(2, 4, 5, 6, dim=3),) * 3, is_split=False)
    check(
        lambda q, k, v: attention(q, k, v, enable_gqa=True),
        Of(2, 8, 5, 3, dim=1),
        heads,
        heads,
        is_split=True,
    )
    check(lambda q, k, v: attention(q, k, v), heads, Of(1, 1, 5, 3), Of(1, 1, 5, 3))
    check(lambda x: x.softmax(-1), heads, is_split=True)
    check(lambda x: torch.softmax(x, 1), heads, is_split=False)
    check(lambda x: F.log_softmax(x, dim=-1).sum(-1), heads, is_split=True)


def test_sums_and_other_reductions():
    x = Of(3, 4, 6, dim=1)
    for function, is_split in (
        (lambda x: x.sum(), False),
        (lambda x: x.mean((1, 2)), False),
        (lambda x: x.mean(-1, keepdim=True), True),
        (lambda x: x.sum(dim=0), True),
        (lambda x: x.sum((0, 2)), True),
        (lambda x: x.amax(1), False),
        (lambda x: x.max(-1).values, True),
        (lambda x: x.var(-1), True),
        (lambda x: x.std(), False),
        (lambda x: x.norm(dim=-1), True),
        (lambda x: x.topk(2, -1)[0], True),
        (lambda x: torch.logsumexp(x, 1), False),
    ):
        check(function, x, is_split=is_split)


def test_assignments():
    def assign(x, value):
        x = x * 1
        x[1] = value
        x[..., 0] = 3.0
        return x

    check(assign, Of(3, 4, 6, dim=1), Of(4, 6), is_split=True)
    check(assign, Of(3, 4, 6, dim=1), Of(4, 6, dim=1), is_split=True)
    check(lambda x: x.cumsum(0) + x.roll(1, 2) + x.sort(2)[0], Of(3, 4, 6, dim=1), is_split=True)


def test_embedding():
    index = torch.tensor([[0, 5, 2], [7, 7, 1]])
    check(lambda w: F.embedding(index, w, padding_idx=7), Of(8, 3, dim=0), is_split=False)
    check(lambda w: F.embedding(index, w), Of(8, 4, dim=1), is_split=True)
    check(lambda w: F.embedding(index, w) @ w.T, Of(8, 3, dim=0), is_split=True)
    check(lambda w: F.cross_entropy(F.embedding(index[0], w) @ w.T, index[1]), Of(8, 3, dim=0))


def test_a_gradient_of_a_gradient():
    def penalty(x, w):
        y = F.linear(torch.tanh(F.linear(x, w)), w.T)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return g.square().sum()

    check(penalty, Of(3, 4), Of(6, 4, dim=0), is_split=False)


def test_what_is_refused():
    def on_rank(axis):
        x = SplitTensor.of(torch.ones(2, 2, requires_grad=True) * 1, Split(1), axis)
        for function in (
            lambda: x.cumsum_(1),
            lambda: x.__setitem__((0, 1), 3.0),
            lambda: x.__setitem__(((1, 0), slice(None)), 3.0),  # rows 1 and 0
            lambda: torch.add(x, x, out=x),
            lambda: x.data_ptr(),
            lambda: torch.autograd.grad(x.sum(), x),
            lambda: x.register_hook(print),
        ):
            with pytest.raises(ValueError, match="HINT: the rule 'replicate'"):
                function()

        class Double(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * 2

            @staticmethod
            def backward(ctx, g):
                return g * 2

        with pytest.raises(ValueError, match=r"autograd\.Function"):
            Double.apply(x).sum().backward()

        class Whole(Double):
            @staticmethod
            def forward(ctx, x):
                return x.cumsum(1)

        with pytest.raises(ValueError, match="its gradient would be lost"):
            Whole.apply(x).sum().backward()
        assert x.shape == (2, 4)
        assert x.tolist() == [[1.0] * 4] * 2
        assert "SplitTensor" in repr(x)

    on_threads(2, on_rank)
