"""The draw that decides which injectors are kept out: by kind and way, before they were written.

    python benchmarks/scorecard/draw.py

Of a kind with two ways of injection, one is on each side; of three, two are on a random side.
"""

import random

SEED = 45
WAYS = {
    "whole-file": ("patched", "sample"),
    "chunks": ("hdf5", "zarr"),
    "small-files": ("patched", "sample"),
    "preprocessing": ("collate", "sample"),
    "too-few-workers": ("patched", "sample"),
    "loader-restart": ("monitor", "patched"),
    "python-loop": ("forward", "patched"),
    "padding": ("batch", "collate"),
    "unused-work": ("forward", "gradient", "patched"),
    "recomputation": ("model", "patched"),
    "tiny-operators": ("forward", "patched"),
    "huge-intermediate": ("loss", "patched"),
    "float64": ("default", "model"),
    "garbage-collection": ("patched", "step"),
    "hook-copies": ("model", "patched"),
    "output": ("log", "step"),
    "metrics": ("patched", "step"),
    "buffers": ("model", "step"),
    "small-reduces": ("backward", "patched"),
    "barriers": ("patched", "step"),
    "checkpoints": ("patched", "step"),
    "validation": ("patched", "step"),
    "moving-average": ("patched", "step"),
    "lock": ("patched", "sample"),
    "thread": ("numpy", "python"),
    "too-many-threads": ("environment", "start"),
    "noisy-machine": ("memory", "processor"),
    "affinity": ("start", "taskset"),
    "more-data": ("patched", "sample"),
    "throttled": ("cgroup", "signals"),
    "leak": ("patched", "step"),
}


def kept_out() -> dict[str, tuple[str, ...]]:
    """Return the ways of each kind that are kept out."""
    draw, found = random.Random(SEED), {}
    for kind, ways in WAYS.items():
        mixed = draw.sample(ways, len(ways))
        half = len(ways) // 2 + (len(ways) % 2) * draw.randrange(2)
        found[kind] = tuple(sorted(mixed[:half]))
    return found


if __name__ == "__main__":
    for kind, ways in kept_out().items():
        print(f"{kind:20} kept out: {', '.join(ways)}")
