"""The settings that the tuner chooses between."""

from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

UNCHANGED, GLOO, PACELINE = "", "gloo", "paceline"  # methods besides the named algorithms


class TunedSettings(Protocol):
    """Settings that a search compares; ``str()`` describes them in a message."""

    def to_knobs(self) -> dict[str, Any]:
        """Return the settings as knobs of a settings file."""

    @classmethod
    def from_knobs(cls, knobs: dict[str, Any]) -> Self:
        """Return the settings that ``knobs`` describe."""


S = TypeVar("S", bound=TunedSettings)


@dataclass(frozen=True)
class ExchangeSettings:
    """One candidate of the tuner.

    Attributes:
        mib: Bucket size in MiB; None for the script's buckets.
        method: What all-reduces use: UNCHANGED, GLOO, PACELINE (with the algorithm of the least
            cost), or an algorithm by name: one between hosts, or "sockets".
        bf16: Whether gradients are exchanged as bfloat16.
    """

    mib: float | None = None
    method: str = UNCHANGED
    bf16: bool = False

    def __str__(self) -> str:
        size = "the script's buckets" if self.mib is None else f"buckets of {self.mib:g} MiB"
        through = {UNCHANGED: "", GLOO: " over gloo", PACELINE: " over paceline's exchange"}
        method_text = through.get(self.method, f" over paceline's exchange by {self.method}")
        return size + method_text + " as bfloat16" * self.bf16

    def to_knobs(self) -> dict[str, Any]:
        """Return the settings as knobs of a settings file."""
        knobs: dict[str, Any] = {} if self.mib is None else {"bucket-mb": self.mib}
        if self.method not in (UNCHANGED, GLOO, PACELINE):
            knobs |= {"exchange": PACELINE, "algorithm": self.method}
        elif self.method:
            knobs["exchange"] = self.method
        return knobs | ({"compress-bf16": True} if self.bf16 else {})

    @classmethod
    def from_knobs(cls, knobs: dict[str, Any]) -> "ExchangeSettings":
        """Return the settings that ``knobs`` describe."""
        method = knobs.get("algorithm") or knobs.get("exchange", UNCHANGED)
        return cls(knobs.get("bucket-mb"), method, "compress-bf16" in knobs)


@dataclass(frozen=True)
class FusionSettings:
    """One candidate of the tuner for scripts that use Horovod's interface.

    Attributes:
        mib: Maximum size of tensors that are exchanged together, in MiB.
        cycle_ms: Time in which submitted tensors are collected, in ms.
    """

    mib: float
    cycle_ms: float

    def __str__(self) -> str:
        return f"a fusion threshold of {self.mib:g} MiB and a cycle time of {self.cycle_ms:g} ms"

    def to_knobs(self) -> dict[str, Any]:
        return {"fusion-mb": self.mib, "cycle-ms": self.cycle_ms}

    @classmethod
    def from_knobs(cls, knobs: dict[str, Any]) -> "FusionSettings":
        return cls(float(knobs["fusion-mb"]), float(knobs["cycle-ms"]))
