"""world.predict without ranks: what it reads and writes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from paceline.world.layouts.inference import SampleParts


@pytest.fixture
def parts():
    found = SampleParts()
    found.device = torch.device("cpu")
    found.mesh = SimpleNamespace(shape={}, rank=0, sharing_samples=[0], model_group=None)
    return found


@pytest.mark.parametrize("stored", ["int16", "uint8", "float64", ">f4", ">i2", "float16"])
@pytest.mark.parametrize("computed", [torch.float32, torch.float64, torch.bfloat16])
def test_volume_is_converted_to_the_dtype_of_the_model(parts, stored, computed):
    model = torch.nn.Conv2d(2, 1, 1).to(computed)
    volume = np.arange(40).reshape(2, 4, 5).astype(stored)
    out = np.zeros((1, 4, 5))
    parts.predict(model, volume, out)
    whole = torch.arange(40, dtype=computed).reshape(1, 2, 4, 5)
    assert out.tolist() == model(whole)[0].tolist()
