"""One outlier of a machine."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Outlier:
    """Outlier of a machine.

    Attributes:
        kind: "unreachable", "missing", "slow", "link", "version", "parts", "mask", "limit",
            "vector", "import" or "clock".
        hosts: Names of the affected hosts.
        what: Name of the quantity.
        value: Value of the outlier.
        peers: Value of the peers, or a sufficient value; empty if unknown.
        sentence: Description for the user.
        by: Lost share of the speed, if the quantity is a speed.
    """

    kind: str
    hosts: tuple[str, ...]
    what: str
    value: str
    peers: str
    sentence: str
    by: float = 0.0
