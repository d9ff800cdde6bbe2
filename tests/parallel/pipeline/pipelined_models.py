"""Models of the tests of pipelines, and one process that trains them in the same micro-batches.

``CASES`` has for each name a function that returns a model, its inputs and its targets.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.modules.batchnorm import _BatchNorm


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        # a bias of keys has no gradient but rounding, which Adam would scale up
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width)

    def forward(self, x, mask=None):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=mask is None, attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x, mask=None):
        x = x + self.attention(self.norm(x), mask)
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Token and position embeddings, a list of blocks, and a head with the embedding's weights."""

    def __init__(self, depth=3, width=8, tied=True, dropout=0.0):
        super().__init__()
        self.tokens = nn.Embedding(11, width)
        self.positions = nn.Parameter(torch.randn(5, width) * 0.1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 11, bias=False)
        self.dropout = dropout
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids, mask=None):
        x = self.tokens(ids) + self.positions[: ids.size(1)]
        x = F.dropout(x, self.dropout, self.training)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class UNet(nn.Module):
    """Skip connections from the way down to the way up; registered in another order than used."""

    def __init__(self, width=4):
        super().__init__()
        self.up = nn.ModuleList(nn.Conv2d(2 * width, width, 3, padding=1) for _ in range(2))
        self.down = nn.ModuleList(
            [nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)]
        )
        self.middle, self.out = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, 1, 1)

    def forward(self, x):
        skips = []
        for layer in self.down:
            x = F.relu(layer(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = F.relu(self.middle(x))
        for layer, skip in zip(self.up, reversed(skips), strict=True):
            x = F.interpolate(x, scale_factor=2)
            x = F.relu(layer(torch.cat([x, skip], 1)))
        return self.out(x)


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = (
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width, momentum=None)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.norm2(self.second(self.relu(self.norm1(self.first(x)))))
        return self.relu(y + x)


def resnet(width=4, depth=3):
    return nn.Sequential(
        nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        ),
        *(Residual(width) for _ in range(depth)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 3),
    )


class Heads(nn.Module):
    """Several inputs by name, two outputs (one of an early layer), and a frozen part."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 6), nn.Linear(2, 6)
        self.trunk = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        self.early, self.late = nn.Linear(6, 2), nn.Linear(6, 2)
        self.a.requires_grad_(False)
        self.trunk[3].requires_grad_(False)

    def forward(self, first, second, scale=1.0):
        x = torch.tanh(self.a(first) + self.b(second) * scale)
        early = self.early(x)
        return {"late": self.late(torch.tanh(self.trunk(x)) + second.mean()), "early": early}


class InPlace(nn.Module):
    """Blocks that change their input in place."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x):
        x = self.layers[0](x)
        for layer in self.layers[1:]:
            x = F.relu(x, inplace=True) if layer is self.layers[2] else x
            y = layer(x)
            y += 1
            x = y.mul(0.5)
        return x


def heads_loss(outputs, targets):
    return F.mse_loss(outputs["late"], targets) + 0.3 * F.mse_loss(outputs["early"], targets)


def weighted_loss(outputs, targets):
    """A sum over tokens that are not padding, and their number."""
    flat = F.cross_entropy(
        outputs.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum"
    )
    return flat, (targets != 0).sum()


def token_loss(outputs, targets):
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def _tokens(n, **options):
    return (
        Transformer(**options),
        torch.randint(11, (n, 5)),
        torch.randint(11, (n, 5)),
        token_loss,
    )


def _images(model, n, targets, loss):
    return model, torch.randn(n, 1, 4, 4), targets, loss


def _half_frozen():
    """The first of two stages has nothing to train."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    model[:3].requires_grad_(False)
    return model


CASES = {
    "chain": lambda n: (
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))),
        torch.randn(n, 4),
        torch.randn(n, 4),
        F.mse_loss,
    ),
    "transformer": lambda n: _tokens(n, tied=False),
    "tied": _tokens,
    "weighted": lambda n: (*_tokens(n, tied=False)[:3], weighted_loss),
    "unet": lambda n: _images(UNet(), n, torch.randn(n, 1, 4, 4), F.mse_loss),
    "resnet": lambda n: _images(resnet(), n, torch.randint(3, (n,)), F.cross_entropy),
    "heads": lambda n: (
        Heads(),
        {"first": torch.randn(n, 3), "second": torch.randn(n, 2), "scale": 0.5},
        torch.randn(n, 2),
        heads_loss,
    ),
    "frozen": lambda n: (_half_frozen(), torch.randn(n, 4), torch.randn(n, 4), F.mse_loss),
    "in_place": lambda n: (InPlace(), torch.randn(n, 4), torch.randn(n, 4), F.mse_loss),
}


def slices(tree, sizes):
    """Return the micro-batches of a tensor or a dict."""
    if isinstance(tree, dict):
        each = {k: slices(v, sizes) for k, v in tree.items()}
        return [{k: v[i] for k, v in each.items()} for i in range(len(sizes))]
    return tree.split(sizes) if torch.is_tensor(tree) else [tree] * len(sizes)


class OneProcess:
    """A model that one process trains in micro-batches, with statistics of whole batches."""

    def __init__(self, model, rate=0.1):
        self.model = copy.deepcopy(model)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(trained, lr=rate, momentum=0.9)

    def step(self, inputs, targets, loss, sizes, clip=None):
        norms = [m for m in self.model.modules() if isinstance(m, _BatchNorm)]
        seen = {norm: [] for norm in norms}
        hooks = [
            norm.register_forward_pre_hook(lambda m, x: seen[m].append(x[0].detach()))
            for norm in norms
        ]
        before = [copy.deepcopy(norm.state_dict()) for norm in norms]
        values = []
        for x, y in zip(slices(inputs, sizes), slices(targets, sizes), strict=True):
            out = self.model(**x) if isinstance(x, dict) else self.model(x)
            values.append(loss(out, y))
        if isinstance(values[0], tuple):
            value = sum(total for total, _ in values) / sum(weight for _, weight in values)
        else:
            value = sum(v * n for v, n in zip(values, sizes, strict=True)) / sum(sizes)
        value.backward()
        for hook in hooks:
            hook.remove()
        with torch.no_grad():
            for norm, state in zip(norms, before, strict=True):
                x = torch.cat(seen[norm]).transpose(0, 1).flatten(1)
                norm.num_batches_tracked.copy_(state["num_batches_tracked"] + 1)
                rate = norm.momentum or 1 / float(norm.num_batches_tracked)
                norm.running_mean.copy_(state["running_mean"].lerp(x.mean(1), rate))
                norm.running_var.copy_(state["running_var"].lerp(x.var(1), rate))
        if clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(value.detach())
