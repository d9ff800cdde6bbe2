"""Bytes of a rank's models and optimizers, for the record at the end of a run."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ...optim.whole_norms import local_part
from ...parallel.strategy.distributed_model import DistributedModel
from ...record.ring.header_schema import MAX_LAYOUTS_CHARS

_CPU = torch.device("cpu")


def tensor_bytes(
    models: Sequence[DistributedModel],
    optimizers: Sequence[Optimizer],
    layouts: Iterable[str],
    predicted_peak: int | None,
    device: torch.device = _CPU,
) -> dict[str, Any]:
    """Return the header field ``tensors``.

    Args:
        layouts: The layouts of the models.
        predicted_peak: Bytes; None if no layout was predicted.
        device: Where the rank computes. What lies in the host's memory instead is counted apart.
    """
    parameters = {p for model in models for p in model.parameters().values()}
    of_optimizers = [state for o in optimizers for state in o.state.values()]
    states = [s for state in of_optimizers if isinstance(state, dict) for s in state.values()]
    tensors: dict[str, Collection[torch.Tensor]] = {
        "parameters": parameters,
        "buffers": {b for model in models for b in model.module.buffers()},
        "gradients": {p for p in parameters if p.requires_grad},
        "optimizer_states": [s for s in states if isinstance(s, torch.Tensor)],
    }
    found: dict[str, Any] = {"layout": ", ".join(sorted(set(layouts)))[:MAX_LAYOUTS_CHARS]}
    found |= {name: _nbytes(of, device.type) for name, of in tensors.items()}
    if device.type != "cpu":
        # a state without dimensions, such as the number of steps, is on the host in any case
        offloaded = sum(_nbytes([t for t in of if t.dim()], "cpu") for of in tensors.values())
        found |= {"offloaded": offloaded} if offloaded else {}
    if predicted_peak is not None:
        found["predicted_peak"] = predicted_peak
    if torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        found["device_peak"] = max(map(torch.cuda.max_memory_allocated, devices))
    return found


def _nbytes(tensors: Iterable[torch.Tensor], device_type: str) -> int:
    """Return the bytes of this rank's parts that lie on a type of device."""
    parts = map(local_part, tensors)
    return sum(part.nbytes for part in parts if part.device.type == device_type)
