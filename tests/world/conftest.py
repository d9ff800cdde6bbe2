"""A world of one rank in pytest's own process."""

import sys

import pytest
import torch

import paceline


@pytest.fixture
def world(monkeypatch):
    """Return a world of one rank without a record; its lines go to ``capfd``."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    made = paceline.init(progress=False, record=False)
    yield made
    made.close()


@pytest.fixture
def world_float16(monkeypatch):
    """As ``world``, with float16 and loss scaling, which users only get on a GPU.

    The scale is 8, and every update without an infinite gradient doubles it.
    """

    class Scaler(torch.amp.GradScaler):
        def __init__(self, device):
            super().__init__(device, init_scale=8.0, growth_interval=1)

    monkeypatch.setattr(torch.amp, "GradScaler", Scaler)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr("paceline.world.autocast_dtype", lambda *_: torch.float16)
    made = paceline.init(progress=False, record=False, precision="fp16")
    yield made
    made.close()
