"""Why a scaling curve bends: which loss grew from one size to the next, and by how much.

An efficiency compares the seconds of a rank per sample. They are a sum over the parts of a step, so
the lost efficiency is divided among the parts exactly, by what each grew. A part that became
shorter has a negative share.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ...plurals import counted
from .cost_model import SHARED, STEP, CostModel
from .costs import (
    CHECKPOINT,
    COMPUTE,
    EXCHANGE,
    JITTER,
    PARTS,
    SCRIPT,
    STARVED,
    VALIDATION,
    SizeCosts,
)
from .laws import QUANTILE
from .study_model import STRONG
from .study_notes import OTHER_CORES

MIN_WAITED = 0.5  # of what a mean rank does: then others wait for one rank (diagnosis/rules/ranks)
MIN_SHOWN = 0.05  # of the lost efficiency


@dataclass(frozen=True)
class GrownLoss:
    """A loss that takes more time per sample at the larger size.

    Attributes:
        cause: Id of the cause, as ``paceline diagnose`` names it.
        share: Of the lost efficiency; negative if the loss became smaller.
        efficiency: Lost efficiency, in points of 1.
        seconds: Growth per step of the larger size, mean of the ranks.
        step_share: ``seconds`` as a share of the larger size's step.
        gain: Throughput that is gained at the larger size, at most: if the loss had not grown.
        rank: The rank that others wait for; None if there is no such rank.
        sentence: In words.
        calls, bytes: Collectives of a step, for causes of the exchange.
    """

    cause: str
    share: float
    efficiency: float
    seconds: float
    step_share: float
    gain: float
    rank: int | None
    sentence: str
    calls: float = 0.0
    bytes: float = 0.0


@dataclass(frozen=True)
class Bend:
    """The step from one size to the next larger one.

    Attributes:
        kind: STRONG or WEAK.
        smaller, larger: Ranks.
        before, after: Efficiencies relative to the smallest size.
        real: Whether the loss is more than the noise of both sizes.
        losses: All that grew or became smaller, the largest first; the shares add up to 1.
    """

    kind: str
    smaller: int
    larger: int
    before: float
    after: float
    real: bool
    losses: list[GrownLoss]

    @property
    def lost(self) -> float:
        """Lost efficiency, in points of 1; negative if it rose."""
        return self.before - self.after

    @property
    def main(self) -> GrownLoss | None:
        """The loss that grew most; None if the efficiency did not fall by more than noise."""
        return self.losses[0] if self.real and self.lost > 0 and self.losses else None


@dataclass(frozen=True)
class Proposal:
    """A remedy for a loss that grew (predict/remedies.py).

    Attributes:
        cause: Id of the loss.
        knob: Name of the knob.
        edit: What to change in the script, or in how it is started.
        settable: Whether ``paceline run --settings`` can set the knob.
        line: Line of the script to edit, if it is known.
        gain: Predicted gain of throughput at the larger size; None: it must be measured.
        at_most: The gain if the loss had not grown.
    """

    cause: str
    knob: str
    edit: str
    settable: bool
    line: int | None
    gain: float | None
    at_most: float


def find_bends(costs: Sequence[SizeCosts], kind: str, model: CostModel) -> list[Bend]:
    """Return the step from each size of a kind to the next one. costs: By ascending ranks."""
    reference = costs[0].per_sample_s if costs else 1.0
    result = []
    for i in range(len(costs) - 1):
        one, two = costs[i], costs[i + 1]
        before, after = (reference / x.per_sample_s for x in (one, two))
        noise = math.hypot(one.error / one.step_s, two.error / two.step_s)
        real = abs(math.log(after / before)) > QUANTILE * noise
        losses = _grown(one, two, kind, model, before - after)
        result.append(Bend(kind, one.ranks, two.ranks, before, after, real, losses))
    return result


def _grown(
    one: SizeCosts, two: SizeCosts, kind: str, model: CostModel, lost: float
) -> list[GrownLoss]:
    growth: dict[str, dict[str, float]] = {}  # seconds of a rank per sample, by cause and part
    for part in PARTS:
        for cause, seconds in _causes(part, one, two, kind, model).items():
            if seconds:
                growth.setdefault(cause, {})[part] = seconds
    whole = two.per_sample_s - one.per_sample_s
    result = []
    for cause, by_part in growth.items():
        per_sample = sum(by_part.values())
        part = max(by_part, key=lambda name: by_part[name])
        seconds = per_sample * two.batch
        step_share = min(seconds / two.step_s, 1 - 1e-9)
        share = per_sample / whole if whole else 0.0
        exchanges = two.exchanges if part == EXCHANGE else []
        result.append(
            GrownLoss(
                cause,
                share,
                share * lost,
                seconds,
                step_share,
                max(step_share, 0.0) / (1 - max(step_share, 0.0)),
                _late_rank(cause, part, two),
                _sentence(cause, part, one, two, seconds),
                sum(x.calls for x in exchanges),
                sum(x.bytes for x in exchanges),
            )
        )
    return sorted(result, key=lambda loss: -loss.seconds)


def _causes(
    part: str, one: SizeCosts, two: SizeCosts, kind: str, model: CostModel
) -> dict[str, float]:
    """Return the growth of a part, in seconds of a rank per sample, by cause."""
    grown = two.parts[part] / two.batch - one.parts[part] / one.batch
    if part == COMPUTE:
        return _of_computing(grown, one, two, kind, model)
    if part == EXCHANGE:
        return _of_exchange(grown, one, two, model)
    if part in (VALIDATION, CHECKPOINT):
        return {f"{part}-on-one-rank" if _is_waited_for(part, two) else part: grown}
    if part == SCRIPT:
        return {"slow-rank" if _is_waited_for(part, two) else "script": grown}
    if part == STARVED:
        return {_starved_by(two): grown}
    return {part: grown}


def _is_waited_for(part: str, costs: SizeCosts) -> bool:
    own = costs.parts[part] - costs.waits.get(part, 0.0)
    return costs.waits.get(part, 0.0) >= MIN_WAITED * own and costs.waits.get(part, 0.0) > 0


def _starved_by(costs: SizeCosts) -> str:
    """Return the cause of waits for a core: too few cores, too many threads, other programs."""
    if costs.cores is None or costs.per_host > costs.cores:
        return "shared-machine"
    if costs.per_host * (costs.threads or 1) > costs.cores:
        return "too-many-threads"
    is_noisy = (costs.other_cores or 0.0) > OTHER_CORES
    return "noisy-machine" if is_noisy else "shared-machine"


def _of_computing(
    grown: float, one: SizeCosts, two: SizeCosts, kind: str, model: CostModel
) -> dict[str, float]:
    """Divide the growth of computing into the cost of a step without samples, and shared cores."""
    before, after = model.by_term(COMPUTE, one), model.by_term(COMPUTE, two)
    by_cause = {
        cause: max(after.get(term, 0.0) / two.batch - before.get(term, 0.0) / one.batch, 0.0)
        for cause, term in (("fixed-cost", STEP), ("shared-machine", SHARED))
    }
    whole = sum(by_cause.values())
    if whole <= 0:
        smaller_batch = kind == STRONG and two.batch < one.batch
        return {"fixed-cost" if smaller_batch else "shared-machine": grown}
    return {cause: grown * value / whole for cause, value in by_cause.items()}


def _of_exchange(
    grown: float, one: SizeCosts, two: SizeCosts, model: CostModel
) -> dict[str, float]:
    if model.exchange is None:
        return {"exchange-latency": grown}
    late = [
        x.parts[EXCHANGE] / x.batch * model.exchange.latency_share(x) if x.exchanges else 0.0
        for x in (one, two)
    ]
    latency = late[1] - late[0]
    return {"exchange-latency": latency, "exchange-bandwidth": grown - latency}


def _late_rank(cause: str, part: str, costs: SizeCosts) -> int | None:
    if cause == JITTER or part not in costs.late or not costs.waits.get(part):
        return None
    if part in (COMPUTE, EXCHANGE, STARVED):
        return None
    rank, share = costs.late[part]
    return rank if share > MIN_WAITED else None


def _sentence(cause: str, part: str, one: SizeCosts, two: SizeCosts, seconds: float) -> str:
    """Return one sentence on a loss that grew; times are per step at the larger size."""
    if seconds < 0:
        return f"{_NAMES[cause]} takes {_ms(-seconds)} less of a step"
    rank = _late_rank(cause, part, two)
    text = _SENTENCES.get(f"{cause} ({part})") or _SENTENCES.get(cause, _NOT_DIVIDED)
    return text.format(
        more=f"{_ms(seconds)} more of a step",
        part=part,
        who=f"rank {rank}" if rank is not None else "a rank",
        on=f", most of all on rank {rank}" if rank is not None else "",
        before=one.batch,
        after=two.batch,
        sharing=counted(two.per_host, "rank"),
        calls=sum(load.calls for load in two.exchanges),
        mib=sum(load.bytes for load in two.exchanges) / 2**20,
    )


_NOT_DIVIDED = "the {part} takes {more}: it is not divided among the ranks"
_ON_ONE_RANK = "ranks wait {more} for the {part} of {who}"
_SENTENCES = {  # of a loss that grew, by its cause, and where it says more by part of the step
    "fixed-cost": "computing takes {more}: a rank has {after:.4g} samples per step instead of "
    "{before:.4g}, and a part of its work does not depend on their number",
    "shared-machine": "computing a sample takes {more}: {sharing} share a node",
    f"shared-machine ({STARVED})": "ranks wait {more} for a core: {sharing} share a node",
    "slow-rank": "ranks wait {more} for {who}, which computes longer than the others",
    f"slow-rank ({SCRIPT})": "ranks wait {more} for {who}, which does other work of the script",
    "jitter": "ranks wait {more} for whichever computes longest in a step",
    "input": "waits for the next batch take {more}{on}",
    "script": "other work of the script takes {more}: it is not divided among the ranks",
    "too-many-threads": "ranks wait {more} for a core: they have more threads than cores",
    "noisy-machine": "ranks wait {more} for a core, which other programs use",
    "exchange-latency": "the latency of collectives ({calls:.3g} per step) takes {more}",
    "exchange-bandwidth": "the transfer of {mib:.3g} MiB per step takes {more}",
    "validation-on-one-rank": _ON_ONE_RANK,
    "checkpoint-on-one-rank": _ON_ONE_RANK,
}
_NAMES = {
    "fixed-cost": "the part of computing that does not depend on the batch",
    "shared-machine": "sharing of a node",
    "slow-rank": "waiting for one rank",
    "jitter": "waiting for whichever rank is late",
    "input": "waiting for input",
    "script": "other work of the script",
    "too-many-threads": "waiting for a core",
    "noisy-machine": "waiting for a core",
    "exchange-latency": "the exchange's latency",
    "exchange-bandwidth": "the exchange's transfer",
    "validation": "validation",
    "validation-on-one-rank": "validation on one rank",
    "checkpoint": "writing checkpoints",
    "checkpoint-on-one-rank": "writing checkpoints on one rank",
}


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
