"""Does one rank train the same when it trains the same batches again?"""

from collections.abc import Sequence

from ...observe.facts.events import OperatorFacts
from ...observe.facts.ranks import RankFacts
from .comparison import percent
from .joined_runs import JoinedRuns
from .relations import epsilon
from .replayed_steps import NOISE_FACTOR
from .steps import parameters

SUSPICIOUS_ROUNDINGS = 2000  # of a gradient, from which on the order of samples is no explanation
MAX_NOISE = 0.05  # relative difference that is suspicious for any dtype
OUTSIDE = ("lift_fresh", "lift")  # operators that make a tensor of a value
# Parts of the names of operators that draw random numbers.
DRAWS = ("rand", "normal", "bernoulli", "uniform", "dropout", "multinomial", "exponential")


def suspicious_noise(joined: JoinedRuns) -> float:
    """Return by how much two replays differ in the first step; 0 if rounding explains it.

    The median over the parameters, relative.
    """
    if not joined.steps:
        return 0.0
    step = joined.steps[0]
    noise = sorted(joined.replay.noise(step).values())
    if not noise:
        return 0.0
    known = parameters(joined.ranks[0])
    dtypes = {known[name].dtype for name in step.names if name in known}
    dtypes |= {one.autocast for facts in step.steps for one in facts.backwards if one.autocast}
    rounding = max((epsilon(dtype) for dtype in dtypes), default=epsilon("float32"))
    median = noise[len(noise) // 2]
    return median if median > min(SUSPICIOUS_ROUNDINGS * rounding, MAX_NOISE) else 0.0


def first_difference(one: RankFacts, other: RankFacts) -> OperatorFacts | None:
    """Return the first operator whose result differs between two runs with the same batches."""
    for ours, theirs in zip(one.operators, other.operators, strict=False):
        if ours != theirs:
            return ours
    return None


def describe_noise(noise: float, traced: Sequence[RankFacts]) -> str:
    """Return what makes two replays differ, and how far it limits the answer.

    Args:
        noise: What ``suspicious_noise`` returned.
        traced: Two runs with the same batches in the same order; empty if they failed.
    """
    found = first_difference(*traced) if traced else None
    limit = "no difference from one process is seen"
    if NOISE_FACTOR * noise < 1:
        limit = f"a difference from one process below {percent(NOISE_FACTOR * noise)} is not seen"
    if found is None:
        return (
            f"the order of the samples of a batch changes gradients by {percent(noise)} "
            f"(median), more than rounding does, so {limit}"
        )
    where = f" in {found.line}" if found.line else ""
    name = found.name.removeprefix("aten.")
    if name in OUTSIDE:
        why = (
            f"a value that does not come from torch (but from numpy, the time, ...){where} differs "
            "when the same batch is trained again"
        )
    elif any(part in name for part in DRAWS):
        why = f"{name}{where} draws other random numbers each time"
    else:
        why = (
            f"the result of {name}{where} differs when the same batch is trained again: either the "
            "operator is not deterministic, or it reads memory that is changed meanwhile"
        )
    return (
        f"the script is not deterministic: {why}. Gradients differ by {percent(noise)} "
        f"(median) from run to run, so {limit}"
    )
