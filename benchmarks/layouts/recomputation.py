"""Claim: at half of the activations' memory, recomputation takes at most 1.20 of the step's time.

Measured in interleaved rounds: a step of a transformer without recomputation and with
``recompute="auto"`` whose budget is half of what the plain model keeps.
"""

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from common import finish, machine, options, ratio, rounds, spread, target
from torch import nn

from paceline.parallel.recomputation import GIB, recompute_blocks

LIMIT = 1.20


def main() -> None:
    parser = options("recomputation", __doc__ or "", repeats=9)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    args = parser.parse_args()
    facts = machine()
    batch = torch.randn(8, 64, args.width)
    models = {"plain": made(args.blocks, args.width), "auto": made(args.blocks, args.width)}
    budget = kept_bytes(models["plain"], batch) / 2
    recompute_blocks(models["auto"], "auto", budget / GIB, None, print)
    for model in models.values():
        step(model, batch)
    found: dict[str, list[float]] = {name: [] for name in models}
    for names in rounds(list(models), args.repeats):
        for name in names:
            found[name].append(step(models[name], batch))
    time_ratio = ratio(found["auto"], found["plain"])
    claim = "step at half of the activations' memory"
    finish(
        "recomputation",
        args,
        facts,
        measurements=found,
        medians={name: spread(values) for name, values in found.items()},
        ratios={"auto / plain": time_ratio},
        targets=[target(claim, LIMIT, time_ratio)],
    )


def made(blocks: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)


def step(model: nn.Module, batch: torch.Tensor) -> float:
    start = time.perf_counter()
    model.zero_grad()
    model(batch).square().mean().backward()
    return time.perf_counter() - start


def kept_bytes(model: nn.Module, batch: torch.Tensor) -> int:
    """Return the bytes that autograd keeps after a forward, except parameters."""
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(batch).sum()
    parameters = {p.untyped_storage()._cdata for p in model.parameters()}
    del loss
    return sum(storage.nbytes() for key, storage in kept.items() if key not in parameters)


if __name__ == "__main__":
    main()
