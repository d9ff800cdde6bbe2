"""POP efficiencies, multiplicative (POP Centre of Excellence), from the states of all ranks."""

from dataclasses import asdict, dataclass

# The losses outside communication, in the order in which they are taken away.
LOSSES = ("checkpoint", "validation", "input", "other")


@dataclass(frozen=True)
class Efficiencies:
    """Each in [0, 1]. parallel = load_balance x communication; parallel times the factors of
    the LOSSES is useful time / window, exactly up to rounding."""

    load_balance: float
    communication: float
    parallel: float
    checkpoint: float
    validation: float
    input: float
    other: float
    useful: float

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def busy(states: dict[str, int]) -> int:
    """b = T - wait - transfer: all time outside communication (what POP calls useful)."""
    return sum(time for name, time in states.items() if name not in ("wait", "transfer"))


def efficiencies(states: list[dict[str, int]], length: int) -> Efficiencies:
    """LB = mean(b)/max(b), CommE = max(b)/T, PE = LB x CommE = mean(b)/T, and the losses in b.

    states: nanoseconds of each state, one dict a rank; length: the window's, in ns.
    """
    times = [busy(rank) for rank in states]
    mean, most = sum(times) / len(times), max(times)
    factors, left = {}, mean
    for name in LOSSES:
        after = left - sum(rank[name] for rank in states) / len(states)
        factors[name] = after / left if left else 1.0
        left = after
    return Efficiencies(
        load_balance=mean / most if most else 1.0,
        communication=most / length,
        parallel=mean / length,
        useful=left / length,
        **factors,
    )
