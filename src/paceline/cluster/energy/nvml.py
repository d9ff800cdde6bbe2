"""Energy counters of NVIDIA GPUs, by the package nvidia-ml-py."""

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..topology.visible_gpus import UNKNOWN, visible_devices
from .counters import ALL, Counter

HINT = "HINT: pip install nvidia-ml-py"


def gpu_counters(root: Path = Path("/"), nvml: Any = None) -> tuple[list[Counter], list[str]]:
    """Return a counter for each visible GPU, and why there is none.

    nvml: The module pynvml; None imports it.
    """
    visible = visible_devices(os.environ, root)
    if not visible:
        return [], []
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return [], [f"the energy of GPUs is unknown without NVML. {HINT}"]
    found, notes = [], list[str]()
    try:
        nvml.nvmlInit()
        for index in visible:
            if index == UNKNOWN:
                notes.append("the energy of a GPU is unknown: its index is not known")
                continue
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            counter = Counter(f"GPU {index}", _reader(nvml, handle), None, "NVML", ALL)
            counter.read_j()
            found.append(counter)
    except nvml.NVMLError as error:  # GPUs before Volta have no counter
        notes.append(f"the energy of GPUs cannot be read: {error}")
    return found, notes


def _reader(nvml: Any, handle: Any) -> Callable[[], float]:
    def read() -> float:
        try:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
        except nvml.NVMLError as error:
            raise OSError(str(error)) from error

    return read
