"""Claim: at half of the activations' memory, a step takes at most 1.20 times as long, and
``recompute="auto"`` is within 3 % of the fastest choice that needs no more memory.

First, in interleaved rounds, a step of a transformer without recomputation and with
``recompute="auto"`` whose budget is half of what the plain model keeps. Then all 3^n choices of a
model of n unequal blocks (kept, selective, recomputed): the peak of PyTorch's CPU allocator in
forward and backward, and the median time of a step. For some budgets, the fastest choice whose peak
is not above that of auto's is timed again with auto's, in interleaved rounds. It takes 2 minutes.
"""

import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts/layouts"))
import torch
from allocator_peak import measure_growth
from common import console, finish, options, ratio, rounds, run, spread, target
from rich.table import Table
from torch import nn

from paceline.parallel.recompute.recomputation import GIB, recompute_blocks

LIMIT = 1.20
FRONT_LIMIT = 1.03
WAYS = ("keep", "selective", "blocks")
SHARES = (0.6, 0.75, 0.9)  # budgets, of the activations of the model without recomputation
Choice = tuple[str, ...]


def main() -> None:
    parser = options("recomputation", __doc__ or "", repeats=9)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--searched", type=int, default=4, help="blocks of the exhaustive search")
    args = parser.parse_args()
    batch = torch.randn(8, 64, args.width)
    step_times = half_of_the_memory(args, batch)
    measurements: dict[str, Any] = {**step_times}
    ratios = {"auto / plain": ratio(step_times["auto"], step_times["plain"])}
    claim = "step at half of the activations' memory"
    targets = [target(claim, LIMIT, ratios["auto / plain"])]
    headings = ("budget", "auto's choice", "fastest choice", "auto / fastest")
    table = Table(*headings, title=f"All choices of {args.searched} blocks, and auto's")
    searched = Searched(args.searched, args.width, batch)
    measurements["search"] = searched.measure(3)
    for share in SHARES:
        chosen = searched.choice_of_auto(share)
        fastest = searched.fastest(chosen)
        timed = searched.timed([chosen, fastest], max(args.repeats, 1))
        name = f"auto / fastest, {share:.0%}"
        ratios[name] = ratio(timed[chosen], timed[fastest])
        measurements[f"auto, {share:.0%}"] = {
            "chosen": chosen,
            "fastest": fastest,
            "step_s": [timed[chosen], timed[fastest]],
        }
        claim = f"auto within 3 % of the fastest choice, budget {share:.0%} of the activations"
        targets.append(target(claim, FRONT_LIMIT, ratios[name]))
        shown = (" ".join(chosen), " ".join(fastest), f"{ratios[name]['median']:.3f}")
        table.add_row(f"{share:.0%}", *shown)
    console.print(table)
    medians = {name: spread(values) for name, values in step_times.items()}
    finish(args, measurements, medians, ratios, targets)


def half_of_the_memory(args: Any, batch: torch.Tensor) -> dict[str, list[float]]:
    """Return the times of steps without recomputation, and with half of the activations."""
    models = {
        "plain": build_model(args.blocks, args.width),
        "auto": build_model(args.blocks, args.width),
    }
    budget = kept_bytes(models["plain"], batch) / 2
    recompute_blocks(models["auto"], "auto", budget / GIB, None, print)
    for model in models.values():
        step(model, batch)
    found: dict[str, list[float]] = {name: [] for name in models}
    for names in rounds(list(models), args.repeats):
        for name in names:
            found[name].append(step(models[name], batch))
    return found


class Searched:
    """A model of unequal blocks, each of which may run in any way.

    Attributes:
        peaks: Bytes of the allocator's peak, by choice.
        seconds: Median time of a step, by choice.
    """

    def __init__(self, blocks: int, width: int, batch: torch.Tensor) -> None:
        self._width, self._count, self._batch = width, blocks, batch
        self._kept = kept_bytes(self._made(), batch)
        self._model = self._made()
        recompute_blocks(self._model, "auto", 2 * self._kept / GIB, None, lambda _: None)
        step(self._model, batch)
        self.choices = list(itertools.product(WAYS, repeat=blocks))
        self.peaks: dict[Choice, int] = {}
        self.seconds: dict[Choice, float] = {}

    def _made(self) -> nn.Module:
        torch.manual_seed(0)
        sizes = (self._width << at % 4 for at in range(self._count))
        layers = (nn.TransformerEncoderLayer(self._width, 4, n, batch_first=True) for n in sizes)
        return nn.Sequential(*layers)

    def measure(self, repeats: int) -> dict[str, dict[str, float]]:
        """Measure peaks and times of all choices, and return them by choice."""
        for choice in self.choices:
            self._set(choice)
            self.peaks[choice] = measure_growth(lambda: step(self._model, self._batch))
        for choice, times in self.timed(self.choices, repeats).items():
            self.seconds[choice] = statistics.median(times)
        return {
            " ".join(choice): {"peak_bytes": self.peaks[choice], "step_s": self.seconds[choice]}
            for choice in self.choices
        }

    def choice_of_auto(self, share: float) -> Choice:
        """Return what auto chooses for a share of the activations of the plain model."""
        model = self._made()
        recompute_blocks(model, "auto", share * self._kept / GIB, None, lambda _: None)
        step(model, self._batch)
        return tuple(block.forward.way for block in model.children())

    def fastest(self, chosen: Choice) -> Choice:
        """Return the fastest choice whose peak is not above that of ``chosen``."""
        fitting = [one for one in self.choices if self.peaks[one] <= self.peaks[chosen]]
        return min(fitting, key=lambda one: self.seconds[one])

    def timed(self, choices: list[Choice], repeats: int) -> dict[Choice, list[float]]:
        """Return the times of steps, in interleaved rounds."""
        found: dict[Choice, list[float]] = {choice: [] for choice in choices}
        for turn in rounds(list(found), repeats):
            for choice in turn:
                self._set(choice)
                step(self._model, self._batch)
                found[choice].append(step(self._model, self._batch))
        return found

    def _set(self, choice: Choice) -> None:
        for block, way in zip(self._model.children(), choice, strict=True):
            block.forward.way = way


def build_model(blocks: int, width: int) -> nn.Module:
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
    run(main)
