"""Claim: a Loader brings batches to a GPU at least as fast as PyTorch's DataLoader.

Arrays in memory; both loaders have the same number of workers, pinned memory and prefetched
batches. Each batch is copied with non_blocking=True and reduced on the GPU. Rounds are interleaved.
"""

import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import torch
from common import console, finish, new_table, ratio, rounds, run, spread, target
from on_device import device_options, facts, sync
from torch.utils.data import DataLoader, Dataset

from paceline.data import Loader


class Samples(Dataset[Any]):
    """Samples of an array, as a user's dataset returns them."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i], self.y[i]


def main() -> None:
    warnings.filterwarnings("ignore", message=".*pin_memory.*")
    parser = device_options("gpu_loaders", __doc__ or "", repeats=9)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    args.machine = facts(args.device)
    count, side, batch = (256, 16, 32) if args.quick else (8192, 128, 256)
    x = np.random.default_rng(0).integers(0, 256, (count, 3, side, side), dtype=np.uint8)
    y = np.arange(count)
    device = torch.device(args.device)
    pinned = args.device == "cuda"
    plain = {"num_workers": args.workers, "persistent_workers": True, "pin_memory": pinned}
    loaders: dict[str, Any] = {
        "Loader": Loader((x, y), batch, shuffle=True, num_workers=args.workers, pin_memory=pinned),
        "DataLoader": DataLoader(Samples(x, y), batch, shuffle=True, **plain),
        "Loader, not pinned": Loader((x, y), batch, shuffle=True, num_workers=args.workers),
        "copy only": [torch.from_numpy(x[:batch])] * (count // batch),
    }
    if pinned:
        loaders["copy only"] = [loaders["copy only"][0].pin_memory()] * (count // batch)
    times: dict[str, list[float]] = {name: [] for name in loaders}
    began = time.perf_counter()
    for number, order in enumerate(rounds(list(loaders), 2 if args.quick else args.repeats + 1)):
        for name in order:
            sync(args.device)
            start, total = time.perf_counter(), torch.zeros((), device=device)
            for one in loaders[name]:
                images = one[0] if isinstance(one, list) else one
                total += images.to(device, non_blocking=True).float().mean()
            sync(args.device)
            if number:  # the first starts the workers
                times[name].append(time.perf_counter() - start)
        if number >= 3 and time.perf_counter() - began > args.seconds:
            break
    headings = ("loader", "samples/s", "GB/s")
    title = f"Batches of {batch} images on the device, {args.workers} workers"
    table = new_table(*headings, title=title)
    rates = {name: [count / t for t in found] for name, found in times.items()}
    for name, found in rates.items():
        median = spread(found)["median"]
        table.add_row(name, f"{median:.0f}", f"{median * x[0].nbytes / 1e9:.2f}")
    console.print(table)
    compared = ratio(times["Loader"], times["DataLoader"])
    claim = "an epoch of Loader takes at most as long as one of DataLoader"
    finish(
        args,
        times,
        {name: spread(found) for name, found in rates.items()},
        {"Loader / DataLoader": compared},
        [target(claim, 1.0, compared)],
    )


if __name__ == "__main__":
    run(main)
