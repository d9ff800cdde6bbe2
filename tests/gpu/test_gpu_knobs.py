"""Knobs of a training on a GPU."""

import pytest
from on_gpu import CUDA, SETTINGS, run

pytestmark = [pytest.mark.gpu, pytest.mark.limit(100)]

KNOBS = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    dist.init_process_group(BACKEND)
    device = torch.device(DEVICE, 0) if DEVICE == "cuda" else torch.device("cpu")
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).to(device))
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(640, 64))
    loader = DataLoader(data, 16)
    for (x,) in loader:
        y = model(x.to(device, non_blocking=True))
        y.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("pinned", loader.pin_memory, x.is_pinned(), "dtype", y.dtype, flush=True)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "knob",
    [
        "autocast-bf16 = true",
        "channels-last = true",
        "pin-memory = true",
        "loader-workers = 2",
        "bucket-mb = 1",
        "gradient-views = true",
        "compress-bf16 = true",
        "compress-fp16 = true",
        "compress-powersgd = 2",
        pytest.param('nccl-algorithm = "Ring"', marks=pytest.mark.only_gpu),
        pytest.param('nccl-protocol = "Simple"', marks=pytest.mark.only_gpu),
        pytest.param("nccl-channels = 4", marks=pytest.mark.only_gpu),
        pytest.param('matmul-precision = "high"', marks=pytest.mark.only_gpu),
        pytest.param("compile = true", marks=pytest.mark.only_gpu),
    ],
)
def test_knob_on_a_gpu(tmp_path, knob):
    settings = tmp_path / "settings.toml"
    settings.write_text(SETTINGS.format(knob))
    done = run(tmp_path, KNOBS, launcher=f"paceline --settings {settings}")
    assert "pinned" in done.stdout
    assert "is ignored" not in done.stderr, done.stderr
    if knob.startswith("pin-memory") and CUDA:
        assert "pinned True True" in done.stdout
    assert "Traceback" not in done.stderr
