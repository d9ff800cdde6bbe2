"""Gain of one file instead of many for ``import torch``: figures and their interpretation."""

from dataclasses import dataclass
from typing import Any

from .machine.dataclass_tree import to_tree
from .machine.machine_file import Figure
from .machine.units import format_value

MIN_SPEEDUP = 1.2  # minimum speedup for which the additional file is worth it
# File systems on the machine itself, whose readers wait for no server.
LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs", "zfs", "overlay", "tmpfs", "ramfs")


@dataclass(frozen=True)
class Load:
    """Imports in fresh interpreters.

    Attributes:
        first: Seconds of the first import.
        repeated: Seconds of repeated imports.
        busy: CPU-seconds of ``repeat``, as in study/probe/measure/import_time.py.
        in_memory: Share of the bytes that stayed in memory although the system was asked to drop
            them; None if unknown, or if nothing was dropped.
    """

    first: Figure
    repeated: Figure
    busy: Figure
    in_memory: float | None


@dataclass(frozen=True)
class Packed:
    """Packed environment, and both ways to load it.

    ``place`` is the time in seconds to mount or unpack the file. ``place`` and ``load`` are None if
    the file can't be used on this machine. ``notes`` are messages for the user.
    """

    environment: str
    filesystem: str
    files: int
    bytes: int
    outside: tuple[str, ...]
    calls: int
    counted_by: str
    as_it_is: Load
    file: str
    file_filesystem: str
    file_bytes: int
    pack_s: float
    how: str = ""
    place: Figure | None = None
    load: Load | None = None
    notes: tuple[str, ...] = ()

    @property
    def faster(self) -> float | None:
        """Speedup of the first import from the file, including mounting or unpacking."""
        if self.load is None or self.place is None:
            return None
        return self.as_it_is.first.median / (self.load.first.median + self.place.median)

    @property
    def worth_it(self) -> bool:
        """Whether the speedup exceeds the spread and the smallest relevant speedup."""
        if self.load is None or self.place is None or self.faster is None:
            return False
        packed = self.load.first.high + self.place.high
        return self.faster >= MIN_SPEEDUP and packed < self.as_it_is.first.low

    @property
    def sentence(self) -> str:
        """Description of the speedup or slowdown, and whether the file is worth it."""
        if self.load is None or self.place is None or self.faster is None:
            return "The file was written, but its effect can't be measured on this machine."
        does = self.how.partition(" ")[0].replace("mounted", "mounting").replace(
            "unpacked", "unpacking"
        )  # fmt: skip
        now = format_value(self.load.first.median + self.place.median, "s")
        was = format_value(self.as_it_is.first.median, "s")
        start = (
            f"The first import takes {now} from the file, including {does}, and {was} from the "
            "installed files: "
        )
        where = f"from {self.filesystem or 'this file system'}"
        where += " on a local disk" * (self.filesystem in LOCAL)
        if self.worth_it:
            return f"{start}{self.faster:.2g} times faster."
        verdict = f"On this machine, {where}, the file is not worth it."
        if self.faster < 1 / MIN_SPEEDUP:
            return f"{start}{1 / self.faster:.2g} times slower. {verdict}"
        return f"{start}no relevant difference. {verdict}"


def as_json(found: Packed) -> dict[str, Any]:
    """Return every figure, and the derived values."""
    data: dict[str, Any] = to_tree(found, complete=True)
    follows = {"faster": found.faster, "worth_it": found.worth_it, "sentence": found.sentence}
    return {**data, **follows}
