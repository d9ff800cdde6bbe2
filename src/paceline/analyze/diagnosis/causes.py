"""Find what slows a training down, by rules over the figures of the ladder and the record.

``RULES`` maps each witness to the rule that names its cause. A cause has the share of a step that
it takes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .evidence import MIN_SHARE, Evidence
from .ladder import BARS, Interval, Waterfall
from .rules import compute, exchange, inputs, ranks, script
from .rules.operators import Finding

__all__ = [
    "MIN_SHARE",
    "Cause",
    "Evidence",
    "Witness",
    "causes",
    "operator_causes",
    "uncertain_bars",
    "witnesses",
]


@dataclass(frozen=True)
class Cause:
    """One cause of lost time.

    Attributes:
        share: Share of a step's time, as measured.
        interval: Range of shares that the ladder and the record allow.
    """

    id: str
    share: float
    interval: tuple[float, float]
    sentence: str
    evidence: dict[str, Any]


@dataclass(frozen=True)
class Witness:
    """One possible cause as seen by the ladder and by the record. None: it can't be seen there."""

    name: str
    ladder: Interval | None
    record: float | None

    @property
    def differ(self) -> bool:
        """Whether the two differ by more than the interval and by more than ``MIN_SHARE``."""
        if self.ladder is None or self.record is None:
            return False
        return not (self.ladder.low - MIN_SHARE <= self.record <= self.ladder.high + MIN_SHARE)


def witnesses(e: Evidence) -> list[Witness]:
    """Return the shares of a step's time, from experiments and from the record.

    Those of BARS come first. The others are part of the ideal step, as one rank alone has them too.
    """
    bar, share = e.waterfall.of_step, e.loss_share
    exchanged = share("transfer", doing=("transfer", "wait")) + e.occasional_waits
    return [
        Witness("sharing", bar("sharing"), None),
        Witness("uneven", bar("uneven"), e.compute_imbalance),
        Witness("exchange", bar("exchange"), exchanged),
        Witness("input", bar("input"), share("input", doing=("input",))),
        Witness("validation", bar("validation"), share("validation", doing=("validation",))),
        Witness("checkpoint", bar("checkpoint"), share("checkpoint", doing=("checkpoint",))),
        Witness("script", None, share("other")),
        Witness("standing", None, script.off_core_share(e)),
        Witness("noise", None, ranks.foreign_delay_share(e)),
        Witness("threads", e.step_time_saving("one thread", "silent"), None),
        Witness("layout", e.step_time_saving("alone, channels-last", "alone"), None),
        Witness("precision", None, compute.float64_share(e)),
        Witness("allocator", None, compute.page_fault_share(e)),
        Witness("memory", None, e.mean_usage("everything", "squeezed")),
        Witness("interpreter", None, compute.interpreter_lock_share(e)),
        Witness("search", None, compute.unused_search_share(e)),
    ]


Rule = Callable[[Evidence], tuple[str, str, dict[str, Any]] | None]

# For each witness, the rule that names its cause.
RULES: dict[str, Rule] = {
    "sharing": ranks.sharing,
    "uneven": ranks.uneven,
    "exchange": exchange.exchange,
    "input": inputs.inputs,
    "validation": ranks.rule_for_phase("validation"),
    "checkpoint": ranks.rule_for_phase("checkpoint"),
    "script": script.script,
    "standing": script.off_core,
    "noise": ranks.noisy,
    "threads": ranks.threads,
    "layout": compute.layout,
    "precision": compute.precision,
    "allocator": compute.allocator,
    "memory": compute.memory,
    "interpreter": compute.interpreter,
    "search": compute.search,
}


def causes(e: Evidence) -> list[Cause]:
    """Return the causes above ``MIN_SHARE``, largest first; empty if nothing holds the training
    back.
    """
    found: dict[str, Cause] = {}
    for witness in witnesses(e):
        share, interval = _share_of(witness)
        if witness.name == "exchange":  # the map of used parameters belongs to "search"
            share *= 1 - compute.used_map_share(e)
        if share < MIN_SHARE or not _is_confirmed(witness):
            continue
        named = RULES[witness.name](e)
        if named is None:
            continue
        name, sentence, evidence = named
        cause = Cause(name, share, interval, sentence, evidence)
        found[name] = _merge(found[name], cause, witness) if name in found else cause
    return sorted(found.values(), key=lambda cause: -cause.share)


def operator_causes(found: list[Finding], known: list[Cause]) -> list[Cause]:
    """Return the findings inside the model as causes, except for those that are known already.

    Their share is an upper bound, and no experiment has confirmed it.
    """
    ids = {cause.id for cause in known}
    return [
        Cause(
            one.id,
            one.share,
            (0.0, one.share),
            f"{one.sentence} (at most this share; not confirmed by an experiment)",
            {**one.evidence, "lines": one.lines, "remedy": one.remedy},
        )
        for one in found
        if one.id not in ids
    ]


def _merge(one: Cause, other: Cause, witness: Witness) -> Cause:
    """Merge two findings of the same cause: bars are disjoint and add up, other shares overlap."""
    if witness.name not in BARS:
        return max(one, other, key=lambda cause: cause.share)
    low, high = (a + b for a, b in zip(one.interval, other.interval, strict=True))
    return replace(one, share=one.share + other.share, interval=(low, high))


def _is_confirmed(witness: Witness) -> bool:
    """Whether the ladder and the record confirm a cause.

    Both have to see at least half of ``MIN_SHARE``, and their mean has to reach it: one of them
    alone may be off by that much.
    """
    experiment = witness.ladder is None or witness.ladder.low >= MIN_SHARE / 2
    if witness.ladder is None or witness.record is None:
        return experiment and (witness.record is None or witness.record >= MIN_SHARE / 2)
    both = (witness.ladder.mean + witness.record) / 2
    return experiment and witness.record >= MIN_SHARE / 2 and both >= MIN_SHARE


def uncertain_bars(w: Waterfall) -> list[str]:
    """Return the bars that are above ``MIN_SHARE`` but may be close to zero."""
    least = MIN_SHARE / 2
    return [bar.id for bar in w.bars if bar.of_step.mean >= MIN_SHARE and bar.of_step.low < least]


def _share_of(witness: Witness) -> tuple[float, tuple[float, float]]:
    """Return the ladder's figure where there is one, and an interval that contains both figures."""
    if witness.ladder is None:
        share = witness.record or 0.0
        return share, (share, share)
    bounds = [witness.ladder.low, witness.ladder.high]
    bounds += [witness.record] if witness.record is not None else []
    return witness.ladder.mean, (min(bounds), max(bounds))
