"""The draw that decides which injectors are kept out: by kind and way, before they were written.

    python benchmarks/scorecard/draw.py

Of a kind with two ways of injection, one is on each side; of three, two are on a random side.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from halves import kept_out_ways

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
    return kept_out_ways(WAYS, SEED)


if __name__ == "__main__":
    for kind, ways in kept_out().items():
        print(f"{kind:20} kept out: {', '.join(ways)}")
