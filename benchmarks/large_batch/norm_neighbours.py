"""Question: how many exchanges of synchronized batch norms could be fused with a neighbour's?

Two norms can share an exchange only if neither needs the other's output. The number of such norms
is counted in the autograd graphs of four networks: the least number of exchanges of a forward is
the longest chain of norms. What a fused exchange saves is measured: two exchanges of a layer's
statistics, and one of twice the size, on 2 ranks.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from common import OUT, console, finish, on_ranks, options, ratio, result_of, run, spread
from rich.table import Table
from torch import nn

CHANNELS = 8  # of all layers: the number of exchanges does not depend on it


class Branches(nn.Module):
    """Modules that take the same input, and whose outputs are combined."""

    def __init__(self, combine: Callable[..., torch.Tensor], *branches: nn.Module) -> None:
        super().__init__()
        self.combine = combine
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.combine(*(branch(x) for branch in self.branches))


def conv(before: int = CHANNELS, size: int = 3) -> nn.Sequential:
    layer = nn.Conv2d(before, CHANNELS, size, padding=size // 2)
    return nn.Sequential(layer, nn.BatchNorm2d(CHANNELS), nn.ReLU())


def resnet(blocks: tuple[int, ...], convs: int, first_projects: bool) -> nn.Sequential:
    """He et al. 2015; a stage's first block has a projection with a norm on its shortcut."""
    parts: list[nn.Module] = [conv(3, 7)]
    for stage, number in enumerate(blocks):
        for block in range(number):
            projects = block == 0 and (stage > 0 or first_projects)
            shortcut = conv(size=1)[:2] if projects else nn.Identity()
            path = nn.Sequential(*(conv() for _ in range(convs)))
            parts.append(Branches(torch.add, path, shortcut))
    return nn.Sequential(*parts)


def googlenet() -> nn.Sequential:
    """Szegedy et al. 2014, with a batch norm after each convolution: 9 modules of 4 branches."""

    def joined(*outputs: torch.Tensor) -> torch.Tensor:
        return torch.cat(outputs, 1)

    def module(before: int) -> Branches:
        branches = (
            conv(before, 1),
            *(nn.Sequential(conv(before, 1), conv()) for _ in range(2)),
            nn.Sequential(nn.MaxPool2d(3, 1, 1), conv(before, 1)),
        )
        return Branches(joined, *branches)

    modules = (module(CHANNELS if number == 0 else 4 * CHANNELS) for number in range(9))
    return nn.Sequential(conv(3, 7), conv(size=1), conv(), *modules)


def densenet(blocks: tuple[int, ...]) -> nn.Sequential:
    """Huang et al. 2016: each layer takes the outputs of all layers before it."""

    def norm_first(before: int, size: int) -> nn.Sequential:
        layer = nn.Conv2d(before, CHANNELS, size, padding=size // 2)
        return nn.Sequential(nn.BatchNorm2d(before), nn.ReLU(), layer)

    def joined(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
        return torch.cat((old, new), 1)

    parts: list[nn.Module] = [conv(3, 7)]
    for stage, number in enumerate(blocks):
        width = CHANNELS
        for _ in range(number):
            path = nn.Sequential(norm_first(width, 1), norm_first(CHANNELS, 3))
            parts.append(Branches(joined, path, nn.Identity()))
            width += CHANNELS
        last = stage == len(blocks) - 1
        parts.append(nn.BatchNorm2d(width) if last else norm_first(width, 1))
    return nn.Sequential(*parts)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet-18": lambda: resnet((2, 2, 2, 2), 2, first_projects=False),
    "ResNet-50": lambda: resnet((3, 4, 6, 3), 3, first_projects=True),
    "DenseNet-121": lambda: densenet((6, 12, 24, 16)),
    "GoogLeNet": googlenet,
}


def counted(model: nn.Module) -> dict[str, int]:
    """Return the number of norms, and that of the longest chain of them in the autograd graph."""
    chains: dict[Any, int] = {}
    open_nodes = [model(torch.empty(2, 3, 16, 16, device="meta")).grad_fn]
    while open_nodes:
        node = open_nodes[-1]
        inputs = [one for one, _ in node.next_functions if one is not None]
        missing = [one for one in inputs if one not in chains]
        if missing:
            open_nodes += missing
            continue
        open_nodes.pop()
        is_norm = "BatchNorm" in node.name()
        chains[node] = is_norm + max((chains[one] for one in inputs), default=0)
    norms = sum("BatchNorm" in node.name() for node in chains)
    return {"norms": norms, "chain": max(chains.values())}


def main() -> None:
    parser = options("norm_neighbours", __doc__ or "", repeats=12)
    parser.add_argument("--exchanges", type=int, default=200, help="of a round, default 200")
    args = parser.parse_args()
    with torch.device("meta"):
        counts = {name: counted(build()) for name, build in NETWORKS.items()}
    with console.status("exchanges"):
        times = measure(args)
    report(args, counts, times)


def measure(args: Any) -> dict[str, list[float]]:
    """Return the seconds of two exchanges, apart and fused, in each round."""
    script, options = "large_batch/fused_exchanges.py", ["--threads", 1]
    return dict(result_of(on_ranks(2, script, OUT, args.repeats, args.exchanges, options=options)))


def report(
    args: Any,
    counts: dict[str, dict[str, int]],
    times: dict[str, list[float]],
) -> None:
    table = Table("network", "norms", "longest chain", "exchanges a step", "least, if fused")
    for name, of in counts.items():
        table.add_row(name, *map(str, (of["norms"], of["chain"], 2 * of["norms"], 2 * of["chain"])))
    console.print(table)
    for name, found in times.items():
        us = {key: 1e6 * value for key, value in spread(found).items()}
        console.print(f"{name}: {us['median']:.1f} us ({us['low']:.1f} to {us['high']:.1f})")
    finish(
        args,
        {"networks": counts, "two_exchanges_s": times},
        {name: spread(found) for name, found in times.items()},
        {"fused": ratio(times["fused"], times["apart"])},
        [],
    )


if __name__ == "__main__":
    run(main)
