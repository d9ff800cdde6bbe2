"""The NVIDIA GPUs that CUDA_VISIBLE_DEVICES leaves visible, without a call to a driver.

CUDA reads the list up to the first entry that is not valid, and PyTorch
(``torch.cuda._parse_visible_devices``) takes a list with a repeated entry for an empty one. Both
are followed here. Of several MIG devices, a process sees only the first.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from .pci_devices import is_reachable
from .topology import read_sysfs

DRIVER = "proc/driver/nvidia/gpus"
UNKNOWN = -1  # index of a GPU whose card is not known


def gpu_count() -> int:
    """Return the number of GPUs of this host that are visible to this process."""
    return len(visible_devices(os.environ))


def visible_devices(environment: Mapping[str, str], root: Path = Path("/")) -> list[int]:
    """Return the indices, in the order of bus ids, of the GPUs that are CUDA devices 0, 1, ...

    An index is UNKNOWN if a GPU is listed by a name (UUID) that the driver does not report, or if
    CUDA_DEVICE_ORDER selects another order.
    """
    count = _device_files(root)
    by_bus = environment.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID") == "PCI_BUS_ID" or count == 1
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is None:
        return list(range(count)) if by_bus else [UNKNOWN] * count
    if text.startswith(("GPU-", "MIG-")):
        return _by_name(text, _uuids(root))
    found = _by_index(text, count or None)
    return found if by_bus else [UNKNOWN] * len(found)


def _by_index(text: str, count: int | None) -> list[int]:
    """Return the indices of a list such as "0,2"; ``count``: number of GPUs, if known."""
    found: list[int] = []
    for entry in text.split(","):
        digits = re.match(r"\+?(\d+)", entry.strip(), re.ASCII)  # the rest is ignored, as by CUDA
        if digits is None:
            break
        index = int(digits[1])
        if index in found:
            return []
        if count is not None and index >= count:
            break
        found.append(index)
    return found


def _by_name(text: str, uuids: Sequence[str]) -> list[int]:
    """Return the indices of a list of UUIDs or their beginnings; of MIG devices, of the first."""
    kind = text[:4]
    names: list[str] = []
    for entry in text.split(","):
        if entry in names:
            return []
        if not entry.startswith(kind):
            break
        names.append(entry)
    if kind == "MIG-":
        card = names[0].removeprefix("MIG-").partition("/")[0]  # newer names do not contain it
        return (_matching(card, uuids) if card.startswith("GPU-") else None) or [UNKNOWN]
    if not uuids:
        return [UNKNOWN] * len(names)
    found: list[int] = []
    for name in names:
        matching = _matching(name, uuids)
        if len(matching) != 1:
            break
        found += matching
    return found if len(set(found)) == len(found) else []


def _matching(name: str, uuids: Sequence[str]) -> list[int]:
    return [index for index, uuid in enumerate(uuids) if uuid.startswith(name)]


def _device_files(root: Path) -> int:
    """Return the number of GPUs that this process may open."""
    return sum(
        path.name[6:].isdigit() and os.access(path, os.R_OK | os.W_OK)
        for path in (root / "dev").glob("nvidia[0-9]*")
    )


def _uuids(root: Path) -> list[str]:
    """Return the UUIDs of the GPUs that this process may use, in the order of bus ids.

    Empty if the driver does not report all of them.
    """
    try:
        buses = sorted(
            os.listdir(root / DRIVER), key=lambda bus: [int(n, 16) for n in re.split("[:.]", bus)]
        )
    except (OSError, ValueError):
        return []
    found = []
    for bus in buses:
        if not is_reachable(root, bus):
            continue
        text = read_sysfs(root / DRIVER / bus / "information")
        uuid = re.search(r"^GPU UUID:\s*(GPU-[0-9a-fA-F-]+)", text, re.MULTILINE)
        if uuid is None:
            return []
        found.append(uuid[1])
    return found
