"""Knobs of a training on a GPU."""

import pytest
from on_gpu import CUDA, SETTINGS, run

pytestmark = [pytest.mark.gpu, pytest.mark.limit(100)]

SCRIPT = """
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


KNOBS = {
    "precision": ["autocast-bf16 = true", "pin-memory = true", "bucket-mb = 1"],
    "loader": ["loader-workers = 2", "gradient-views = true", "channels-last = true"],
    "bf16": ["compress-bf16 = true"],
    "fp16": ["compress-fp16 = true"],
    "powersgd": ["compress-powersgd = 2"],
    "topk": ["compress-topk = 0.1"],
    "nccl": ['nccl-algorithm = "Ring"', 'nccl-protocol = "Simple"', "nccl-channels = 4"],
    "products": ['matmul-precision = "high"'],
    "compile": ["compile = true"],
}
ONLY_GPU = ("nccl", "products", "compile")
CASES = [pytest.param(n, marks=pytest.mark.only_gpu) if n in ONLY_GPU else n for n in KNOBS]


@pytest.mark.parametrize("name", CASES)
def test_knob_on_a_gpu(tmp_path, name):
    settings = tmp_path / "settings.toml"
    settings.write_text(SETTINGS.format("\n".join(KNOBS[name])))
    done = run(tmp_path, SCRIPT, launcher=f"paceline --settings {settings}")
    assert "pinned" in done.stdout
    assert "is ignored" not in done.stderr, done.stderr
    if name == "precision" and CUDA:
        assert "pinned True True" in done.stdout
    assert "Traceback" not in done.stderr
