"""The settings that the tuner chooses between."""

from dataclasses import dataclass
from typing import Any

UNCHANGED, GLOO, PACELINE = "", "gloo", "paceline"  # methods besides the named algorithms


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
