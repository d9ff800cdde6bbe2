"""What holds a training back, by rules over the figures of ladder and record: a table that can be
read and extended. A rule says from what its cause does, and how much of a step it takes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .evidence import WORTH, Evidence
from .ladder import BARS, Interval, Waterfall
from .rules import compute, exchange, inputs, ranks, script

__all__ = ["WORTH", "Cause", "Evidence", "Witness", "causes", "unsure", "witnesses"]


@dataclass(frozen=True)
class Cause:
    """share: of a step's time, as measured; interval: between what the two witnesses allow."""

    id: str
    share: float
    interval: tuple[float, float]
    sentence: str
    evidence: dict[str, Any]


@dataclass(frozen=True)
class Witness:
    """One cause as the ladder and the record saw it; None: this one can't."""

    name: str
    ladder: Interval | None
    record: float | None

    @property
    def differ(self) -> bool:
        """By more than the interval, and by more than is worth a word."""
        if self.ladder is None or self.record is None:
            return False
        return not (self.ladder.low - WORTH <= self.record <= self.ladder.high + WORTH)


def witnesses(e: Evidence) -> list[Witness]:
    """Shares of a step's time, from experiment and from observation. Those of BARS first; what
    comes after them is inside of the ideal, as one rank alone has it, too."""
    bar, share = e.waterfall.of_step, e.share
    exchanged = share("transfer", doing=("transfer", "wait")) + e.in_turns
    return [
        Witness("sharing", bar("sharing"), None),
        Witness("uneven", bar("uneven"), e.longer),
        Witness("exchange", bar("exchange"), exchanged),
        Witness("input", bar("input"), share("input", doing=("input",))),
        Witness("validation", bar("validation"), share("validation", doing=("validation",))),
        Witness("checkpoint", bar("checkpoint"), share("checkpoint", doing=("checkpoint",))),
        Witness("script", None, share("other")),
        Witness("standing", None, script.standing(e)),
        Witness("noise", None, ranks.taken(e)),
        Witness("threads", e.gained("one thread", "silent"), None),
        Witness("layout", e.gained("alone, channels-last", "alone"), None),
        Witness("precision", None, compute.wide(e)),
        Witness("allocator", None, compute.touching(e)),
        Witness("memory", None, e.used("everything", "squeezed")),
        Witness("interpreter", None, compute.held(e)),
        Witness("search", None, compute.searching(e)),
    ]


Rule = Callable[[Evidence], tuple[str, str, dict[str, Any]] | None]

# What a witness names, and the rule that says more of it.
RULES: dict[str, Rule] = {
    "sharing": ranks.sharing,
    "uneven": ranks.uneven,
    "exchange": exchange.exchange,
    "input": inputs.inputs,
    "validation": ranks.on_one("validation"),
    "checkpoint": ranks.on_one("checkpoint"),
    "script": script.script,
    "standing": script.stands,
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
    """Those that are worth a word, the largest first; none, if nothing holds it back."""
    found: dict[str, Cause] = {}
    for witness in witnesses(e):
        share, interval = _share(witness)
        if witness.name == "exchange":  # the rest is that of "search"
            share *= 1 - compute.mapped(e)
        if share < WORTH or not _seen(witness):
            continue
        said = RULES[witness.name](e)
        if said is None:
            continue
        name, sentence, evidence = said
        cause = Cause(name, share, interval, sentence, evidence)
        found[name] = _joined(found[name], cause, witness) if name in found else cause
    return sorted(found.values(), key=lambda cause: -cause.share)


def _joined(one: Cause, other: Cause, witness: Witness) -> Cause:
    """The same cause, seen twice: bars lie beside each other and add up; the rest does not."""
    if witness.name not in BARS:
        return max(one, other, key=lambda cause: cause.share)
    low, high = (a + b for a, b in zip(one.interval, other.interval, strict=True))
    return replace(one, share=one.share + other.share, interval=(low, high))


def _seen(witness: Witness) -> bool:
    """Whether all who can see it have seen half of what is worth a word, at the least, and in the
    mean as much as is worth it: one alone may be off by that much."""
    experiment = witness.ladder is None or witness.ladder.low >= WORTH / 2
    if witness.ladder is None or witness.record is None:
        return experiment and (witness.record is None or witness.record >= WORTH / 2)
    both = (witness.ladder.mean + witness.record) / 2
    return experiment and witness.record >= WORTH / 2 and both >= WORTH


def unsure(w: Waterfall) -> list[str]:
    """Bars that are worth a word, and may be next to nothing."""
    least = WORTH / 2
    return [bar.id for bar in w.bars if bar.of_step.mean >= WORTH and bar.of_step.low < least]


def _share(witness: Witness) -> tuple[float, tuple[float, float]]:
    """The experiment's figure where there is one; an interval that holds both."""
    if witness.ladder is None:
        share = witness.record or 0.0
        return share, (share, share)
    told = [witness.ladder.low, witness.ladder.high]
    told += [witness.record] if witness.record is not None else []
    return witness.ladder.mean, (min(told), max(told))
