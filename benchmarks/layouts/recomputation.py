"""Claims: at half of the activations' memory, recomputation takes at most 1.20 of the step's time;
and ``recompute="auto"`` is within 3 % of the fastest choice that fits its budget.

The model has equal blocks, so a choice is how many of them keep their activations, recompute them
in part ("selective") or wholly. All choices are measured, in interleaved rounds. For each budget,
that of auto is compared with the fastest one whose activations fit. One thread computes, and its
CPU time is measured, so that other programs on the machine change little. Takes two minutes.
"""

import gc
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from common import console, finish, machine, options, ratio, rounds, run, spread, target
from rich.table import Table
from torch import nn

from paceline.parallel.recomputation import GIB, recompute_blocks
from paceline.parallel.recompute_choice import Way, peak_bytes

LIMIT = 1.20
PARETO_LIMIT = 1.03
HALF = 0.5
SHARES = (0.35, HALF, 0.75)  # budgets, of the bytes that the plain model keeps
WAYS = ("keep", "selective", "blocks")
Choice = tuple[str, ...]
PLAIN: Choice = ("plain",)


def main() -> None:
    parser = options("recomputation", __doc__ or "", repeats=15)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--samples", type=int, default=8)
    args = parser.parse_args()
    facts = machine()
    torch.set_num_threads(1)
    batch = torch.randn(args.samples, 64, args.width)
    plain, model = made(args.blocks, args.width), made(args.blocks, args.width)
    recompute_blocks(model, "blocks", None, None, console.print)
    choices = list(itertools.combinations_with_replacement(WAYS, args.blocks))
    every = kept_bytes(plain, batch)
    peaks = peaks_of(model, choices, batch)
    chosen = {share: auto_choice(args.blocks, args.width, batch, share * every) for share in SHARES}
    seconds = measure(plain, model, choices, batch, args.repeats)
    report(args, facts, every, peaks, chosen, seconds)


def report(
    args: Any,
    facts: dict[str, Any],
    every: int,
    peaks: dict[Choice, int],
    chosen: dict[float, Choice],
    seconds: dict[Choice, list[float]],
) -> None:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    table = Table(title=f"auto against {len(peaks)} choices, {args.repeats} rounds")
    for heading in ("budget", "auto", "of the budget", "of the plain step", "fastest", "auto / it"):
        table.add_column(heading)
    ratios, targets = {}, []
    for share, auto in chosen.items():
        fitting = [name for name, peak in peaks.items() if peak <= share * every]
        fastest = min([*fitting, auto], key=medians.__getitem__)
        used = peaks[auto] / (share * every)
        beside = ratio(seconds[auto], seconds[fastest])
        step_ratio = ratio(seconds[auto], seconds[PLAIN])
        ratios |= {f"{share} auto / fastest": beside, f"{share} auto / plain": step_ratio}
        row = (f"{share:.0%}", shown(auto), f"{used:.2f}", f"{step_ratio['median']:.3f}")
        table.add_row(*row, shown(fastest), f"{beside['median']:.3f}")
        claim = f"auto against the fastest choice within {share:.0%} of the activations"
        targets.append(target(claim, PARETO_LIMIT, beside))
        if share == HALF:
            targets.append(target("step at half of the activations' memory", LIMIT, step_ratio))
    console.print(table)
    finish(
        "recomputation",
        args,
        facts,
        measurements={shown(name): values for name, values in seconds.items()},
        medians={shown(name): spread(values) for name, values in seconds.items()},
        ratios=ratios,
        targets=targets,
        peaks={shown(name): peak / every for name, peak in peaks.items()},
        chosen={str(share): shown(auto) for share, auto in chosen.items()},
    )


def shown(choice: Choice) -> str:
    return ", ".join(f"{choice.count(way)} {way}" for way in dict.fromkeys(choice))


def made(blocks: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)


def blocks_of(model: nn.Module) -> list[Any]:
    """Return the forwards that recompute, in the order of forward."""
    return [layer.forward for layer in model.layers]


def set_choice(model: nn.Module, choice: Sequence[str]) -> None:
    # Blocks that are kept come last: their backward runs before others recompute.
    for block, way in zip(blocks_of(model), reversed(choice), strict=True):
        block.way = way


def auto_choice(blocks: int, width: int, batch: torch.Tensor, budget: float) -> Choice:
    """Return what auto chooses for a budget in bytes, in the order of ``WAYS``."""
    model = made(blocks, width)
    recompute_blocks(model, "auto", budget / GIB, None, console.print)
    model(batch)
    return tuple(sorted((block.way for block in blocks_of(model)), key=WAYS.index))


def step(model: nn.Module, batch: torch.Tensor) -> float:
    """Return the seconds of CPU time of a step."""
    model.zero_grad()
    start = time.process_time()
    model(batch).square().mean().backward()
    return time.process_time() - start


def measure(
    plain: nn.Module,
    model: nn.Module,
    choices: list[Choice],
    batch: torch.Tensor,
    repeats: int,
) -> dict[Choice, list[float]]:
    found: dict[Choice, list[float]] = {choice: [] for choice in (PLAIN, *choices)}
    for warmup in (True, False):
        for names in rounds(list(found), 1 if warmup else repeats):
            for name in names:
                if name != PLAIN:
                    set_choice(model, name)
                seconds = step(plain if name == PLAIN else model, batch)
                if not warmup:
                    found[name].append(seconds)
    return found


def peaks_of(model: nn.Module, choices: list[Choice], batch: torch.Tensor) -> dict[Choice, int]:
    """Return the largest number of bytes that each choice keeps during forward and backward."""
    count = len(model.layers)
    kept = {}
    for way in WAYS:
        set_choice(model, (way,) * count)
        kept[way] = kept_bytes(model, batch) // count
    again = kept[WAYS[0]]  # a block's recomputation adds this for a moment
    ways = {
        way: Way(way, bytes_, 0 if way == WAYS[0] else again, 0.0) for way, bytes_ in kept.items()
    }
    return {choice: peak_bytes([ways[way] for way in reversed(choice)]) for choice in choices}


def kept_bytes(model: nn.Module, batch: torch.Tensor) -> int:
    """Return the bytes that autograd and recomputation keep after a forward, except parameters."""
    outside = {p.untyped_storage()._cdata for p in model.parameters()}
    outside |= {storage for storage, _ in live_storages()}
    kept: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(batch).sum()
    kept |= dict(live_storages())  # "selective" holds them itself, not by autograd
    del loss
    return sum(storage.nbytes() for key, storage in kept.items() if key not in outside)


def live_storages() -> list[tuple[int, Any]]:
    tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    storages = [one.untyped_storage() for one in tensors if one.device.type == "cpu"]
    return [(storage._cdata, storage) for storage in storages]


if __name__ == "__main__":
    run(main)
