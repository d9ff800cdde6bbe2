"""Claim: at half of the activations' memory, recompute="auto" costs at most 1.25 of a step's time.

A transformer in bfloat16 on one GPU, in interleaved rounds: the plain model, recompute="blocks",
"selective", "auto" with half of the memory that the plain model's activations take, and
offload="optimizer". Measured are the time of a step and the peak of PyTorch's allocator.
"""

import gc
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from common import console, finish, new_table, ratio, rounds, run, spread, target
from on_device import device_options, facts, peak_of, seconds_of
from torch import nn

from paceline.parallel.offload import offload_states
from paceline.parallel.recompute.recomputation import recompute_blocks

LIMIT = 1.25
GIB = 1 << 30


class Alternative:
    """A model, and how it keeps its activations and states."""

    def __init__(self, args: Any, way: str | None, budget: float | None, offloads: bool) -> None:
        width, blocks, self.shape = (64, 2, (2, 16)) if args.quick else (1024, 12, (16, 512))
        torch.manual_seed(0)
        self.device = torch.device(args.device)
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
        model = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False).to(self.device)
        self.model, self.said = model, ""
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=args.device == "cuda")
        if way:
            recompute_blocks(model, way, budget, None, self._say)
        if offloads:
            offload_states(self.optimizer, self.device)
        self.x = torch.randn(*self.shape, width, device=self.device)

    def _say(self, text: str) -> None:
        self.said = text

    def step(self) -> None:
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.model(self.x).float().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    parser = device_options("gpu_recomputation", __doc__ or "", repeats=9)
    args = parser.parse_args()
    args.machine = facts(args.device)
    began = time.perf_counter()
    plain = Alternative(args, None, None, False)
    for _ in range(3):
        plain.step()
    held = torch.cuda.memory_allocated() if args.device == "cuda" else 0
    activations = peak_of(plain.step, args.device) - held
    half = activations / 2 / GIB if activations > 0 else 0.01
    del plain
    gc.collect()
    ways: dict[str, tuple[str | None, float | None, bool]] = {
        "plain": (None, None, False),
        "blocks": ("blocks", None, False),
        "selective": ("selective", None, False),
        "auto": ("auto", half, False),
        "offload": (None, None, True),
    }
    made, peaks, failed = {}, {}, {}
    for name, way in ways.items():
        try:
            one = Alternative(args, *way)
            for _ in range(3):
                one.step()
            before = torch.cuda.memory_allocated() if args.device == "cuda" else 0
            others = before - own_bytes(one)
            peaks[name] = peak_of(one.step, args.device) - others
            made[name] = one
        except Exception as error:  # the other alternatives are measured all the same
            failed[name] = f"{type(error).__name__}: {error}"[:500]
            console.print(f"{name}: {failed[name]}")
    times: dict[str, list[float]] = {name: [] for name in made}
    for number, order in enumerate(rounds(list(made), 2 if args.quick else args.repeats)):
        for name in order:
            times[name].append(
                seconds_of(lambda n=name: [made[n].step() for _ in range(4)], args.device) / 4
            )
        if number >= 2 and time.perf_counter() - began > args.seconds:
            break
    headings = ("way", "step, ms", "of plain", "peak, MiB", "of plain")
    table = new_table(*headings, title="A step with recomputation and offload")
    ratios = {f"{name} / plain": ratio(found, times["plain"]) for name, found in times.items()}
    for name, found in times.items():
        table.add_row(
            name,
            f"{spread(found)['median'] * 1e3:.2f}",
            f"{ratios[f'{name} / plain']['median']:.3f}",
            f"{peaks[name] / (1 << 20):.0f}",
            f"{peaks[name] / max(peaks['plain'], 1):.3f}",
        )
    console.print(table)
    for one in made.values():
        if one.said:
            console.print(one.said)
    targets = []
    if "auto" in made:
        targets.append(target("step of recompute='auto'", LIMIT, ratios["auto / plain"]))
    finish(
        args,
        {"step_s": times, "peak_bytes": peaks, "failed": failed, "half_gib": half},
        {name: spread(found) for name, found in times.items()},
        ratios,
        targets,
    )


def own_bytes(one: Alternative) -> int:
    """Return the bytes of an alternative on its device between steps."""
    tensors = [*one.model.parameters(), *one.model.buffers(), one.x]
    tensors += [t for s in one.optimizer.state.values() for t in s.values()]
    return sum(t.nbytes for t in tensors if t.device.type == one.device.type)


if __name__ == "__main__":
    run(main)
