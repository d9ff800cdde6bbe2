"""POP efficiencies, multiplicative (POP Centre of Excellence), from the states of all ranks."""

from dataclasses import asdict, dataclass

# The losses outside wait and transfer, in the order in which they are subtracted.
LOSSES = ("bubble", "checkpoint", "validation", "input", "starved", "other")


@dataclass(frozen=True)
class Efficiencies:
    """Each in [0, 1]. parallel = load_balance x communication, communication = serialisation x
    transfer (None where nothing could be replayed); parallel times the factors of the LOSSES is
    useful time / window, exactly up to rounding."""

    load_balance: float
    communication: float
    serialisation: float | None
    transfer: float | None
    parallel: float
    checkpoint: float
    validation: float
    input: float
    starved: float
    other: float
    useful: float
    bubble: float = 1.0  # 1 without a pipeline


def busy_ns(states: dict[str, int]) -> int:
    """Return b = T - wait - transfer: the time outside communication (POP's useful time)."""
    return sum(time for name, time in states.items() if name not in ("wait", "transfer"))


def unblocked_ns(states: dict[str, int]) -> int:
    """Return b without the bubble: the time in which no other rank blocks this one."""
    return busy_ns(states) - states["bubble"]


def efficiencies(
    states: list[dict[str, int]], length: int, ideal: int | None = None
) -> Efficiencies:
    """Compute the efficiencies and the losses in b.

    LB = mean(b)/max(b), CommE = max(b)/T, PE = LB x CommE = mean(b)/T, SerE = max(b)/T_id, TE =
    T_id/T.

    states: Nanoseconds of each state, one dict per rank. length: T, the window's length in ns.
    ideal: T_id, the window's length in ns on a network on which transfers take no time.
    """
    times = [busy_ns(rank) for rank in states]
    mean, most = sum(times) / len(times), max(times)
    factors, left = {}, mean
    for name in LOSSES:
        after = left - sum(rank[name] for rank in states) / len(states)
        factors[name] = after / left if left else 1.0
        left = after
    return Efficiencies(
        load_balance=mean / most if most else 1.0,
        communication=most / length,
        serialisation=None if ideal is None else most / ideal if ideal else 1.0,
        transfer=None if ideal is None else ideal / length,
        parallel=mean / length,
        useful=left / length,
        **factors,
    )


def check_identities(e: Efficiencies) -> None:
    """Assert the identities of docs/reference/measures.md."""
    product = e.parallel
    for name in LOSSES:
        product *= getattr(e, name)
    assert abs(product - e.useful) < 1e-9, "the losses do not multiply to the useful share"
    assert abs(e.load_balance * e.communication - e.parallel) < 1e-9, "LB x CommE is not PE"
    if e.serialisation is not None and e.transfer is not None:
        assert abs(e.serialisation * e.transfer - e.communication) < 1e-9, "SerE x TE is not CommE"
    for name, value in asdict(e).items():
        assert value is None or -1e-9 <= value <= 1 + 1e-9, f"{name} is {value}"
