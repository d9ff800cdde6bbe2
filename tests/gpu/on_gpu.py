"""What the GPU tests share: the device, scripts on ranks, and models."""

import json
import os
import re
from pathlib import Path

import ranks
import torch
from torch import nn

DEVICE = os.environ.get("GPU_TESTS_DEVICE", "cuda")
CUDA = DEVICE == "cuda"
SETTINGS = 'format = "paceline-settings"\nversion = 1\n\n[knobs]\n{}\n'
BACKEND = "nccl" if CUDA else "gloo"


def filled(text):
    """Return the text of a script with the device and backend of the tests."""
    return re.sub(r"\bBACKEND\b", repr(BACKEND), re.sub(r"\bDEVICE\b", repr(DEVICE), text))


def run(folder, text, *args, number=1, launcher="paceline", timeout=100, check=True, **env):
    """Run a script on ranks; in its text, DEVICE and BACKEND stand for those of the tests."""
    script = folder / "script.py"
    ranks.write(folder, filled(text))
    return ranks.run(
        script, *args, ranks=number, launcher=launcher, timeout=timeout, check=check, **env
    )


def command(folder, *words, timeout=100, check=True, **env):
    """Run ``paceline`` with these words."""
    done = ranks.run_command(
        [ranks.PACELINE, *words],
        folder,
        ranks.environment(NO_COLOR="1", COLUMNS="150", **env),
        timeout,
    )
    if check and done.returncode:
        raise AssertionError(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done


def report(folder, *options):
    """Return the report of a record as JSON."""
    return json.loads(command(Path(folder).parent, "report", folder, "--json", *options).stdout)


def sync():
    if CUDA:
        torch.cuda.synchronize()


def peak_of(work):
    """Return the largest number of bytes that PyTorch has allocated during a call, and its result.

    The bytes are those above the level before; on the CPU 0.
    """
    if not CUDA:
        return 0, work()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, result


class Block(nn.Module):
    def __init__(self, width, dropout=0.1):
        super().__init__()
        self.a, self.b = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(dropout)

    def forward(self, x):
        return x + self.b(self.drop(nn.functional.gelu(self.a(self.norm(x)))))


class Net(nn.Module):
    """A network of equal blocks."""

    def __init__(self, width=256, blocks=4, dropout=0.1):
        super().__init__()
        self.first, self.last = nn.Linear(32, width), nn.Linear(width, 4)
        self.layers = nn.ModuleList(Block(width, dropout) for _ in range(blocks))

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)
