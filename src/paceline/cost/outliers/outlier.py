"""One odd thing of a machine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Odd:
    """kind: "unreachable", "missing", "slow", "link", "version", "parts", "mask", "limit",
    "import" or "clock". by: the part of the speed that is lost, where a speed is odd."""

    kind: str
    hosts: tuple[str, ...]
    what: str
    value: str
    peers: str  # what others have, or what would do; empty: nobody knows
    sentence: str
    by: float = 0.0
