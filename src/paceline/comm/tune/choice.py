"""What the tuner chooses between."""

from dataclasses import dataclass
from typing import Any

AS_IT_IS, GLOO, PACELINE = "", "gloo", "paceline"  # ways besides the algorithms by their names


@dataclass(frozen=True)
class Choice:
    """mib: of a bucket; None: buckets as the script has them. way: what all-reduces go through:
    AS_IT_IS, GLOO, PACELINE (which takes the algorithm of the least cost), or an algorithm by its
    name: one between hosts, or "sockets". bf16: gradients travel as bfloat16."""

    mib: float | None = None
    way: str = AS_IT_IS
    bf16: bool = False

    def __str__(self) -> str:
        size = "the script's own buckets" if self.mib is None else f"buckets of {self.mib:g} MiB"
        through = {AS_IT_IS: "", GLOO: " over gloo", PACELINE: " over paceline's exchange"}
        way = through.get(self.way, f" over paceline's exchange by {self.way}")
        return size + way + " as bfloat16" * self.bf16

    def knobs(self) -> dict[str, Any]:
        """As a settings file has them."""
        found: dict[str, Any] = {} if self.mib is None else {"bucket-mb": self.mib}
        if self.way not in (AS_IT_IS, GLOO, PACELINE):
            found |= {"exchange": PACELINE, "algorithm": self.way}
        elif self.way:
            found["exchange"] = self.way
        return found | ({"compress-bf16": True} if self.bf16 else {})

    @classmethod
    def of(cls, knobs: dict[str, Any]) -> "Choice":
        """What ``knobs`` gave."""
        way = knobs.get("algorithm") or knobs.get("exchange", AS_IT_IS)
        return cls(knobs.get("bucket-mb"), way, "compress-bf16" in knobs)
