"""What describes a cause: its words, what indicates it, and the experiment that tests it.

Each module of ``rules/`` has the descriptions of its causes and indicators beside its rules;
``table.py`` lists them all.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ...record.experiments.rung import EVERYTHING, SWITCHED
from .evidence import Evidence, NamedCause
from .rungs import Facts, Interval, reference_name, resources_used

# Headings of docs/reference/causes.md.
INPUT, COMMUNICATION, RANKS, NODE = "input", "communication", "ranks", "node"
SCRIPT, COMPUTING, MODEL = "script", "computing", "model"

Rule = Callable[[Evidence], NamedCause | None]


@dataclass(frozen=True)
class CauseKind:
    """A cause of lost time, as far as it is known before anything is measured.

    Attributes:
        id: Id in the JSON of a diagnosis.
        group: Heading under which docs/reference/causes.md lists it.
        lost_to: Noun phrase that continues "is lost to" in a verdict.
        named_if: When a diagnosis names it, as Markdown.
        states: States of a rank whose time it explains, so that no line of the script in them is a
            cause of its own.
        is_of_one_rank: Whether it explains why the ranks wait for one of them.
        is_in_useful: Whether it lies within the useful time, and faster kernels do not shorten it.
        is_usual: Whether any data-parallel training has it, so that it is a cause only from
            ``USUAL_SHARE`` on.
        max_usual_calls: Most collectives per step with which it is a usual cost.
    """

    id: str
    group: str
    lost_to: str
    named_if: str
    states: tuple[str, ...] = ()
    is_of_one_rank: bool = False
    is_in_useful: bool = False
    is_usual: bool = False
    max_usual_calls: float = math.inf


@dataclass(frozen=True)
class FirstRun:
    """What the first run of a diagnosis shows, before the experiments.

    Attributes:
        facts: Facts of each rank.
        broadcast_share: Share of a step in broadcasts of buffers, with waits for a late rank.
    """

    facts: Facts
    broadcast_share: float = 0.0

    @property
    def used(self) -> Facts:
        """Resources that each rank used."""
        return resources_used(self.facts, EVERYTHING)


def _never_void(facts: Facts, used: Facts) -> str:
    return ""


@dataclass(frozen=True)
class Experiment:
    """An experiment that switches a cause off.

    Attributes:
        rung: Name of the rung without the cause.
        reference: Name of the rung that it is compared with.
        words: Description of the rung for the user.
        phase: Phase of the run (record/experiments/rung.py).
        expected: Returns the share of a step that the cause may take, according to the first run;
            None if all diagnoses have the rung.
        reference_words: Description of the steps of a switched phase with the part on.
        settings: Knobs that are set in the run.
        is_separate: Whether it needs a run of its own, from the start of the processes.
        is_alone: Whether one rank runs alone.
        why_void: Returns why a run did not test the cause, from each rank's facts and the resources
            that it used in the phase; "" if it did.
        adapt: Changes the saving of the pairs of blocks of a switched phase, given that of the
            whole rungs, to a share of a step of all ranks.
    """

    rung: str
    reference: str
    words: str
    phase: str = EVERYTHING
    expected: Callable[[FirstRun], float] | None = None
    reference_words: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    is_separate: bool = False
    is_alone: bool = False
    why_void: Callable[[Facts, Facts], str] = _never_void
    adapt: Callable[[Evidence, Interval, Interval | None], Interval] | None = None

    @property
    def rungs(self) -> dict[str, str]:
        """Names of the rungs that it measures, each with its description."""
        both = {reference_name(self.phase): self.reference_words} if self.is_switched else {}
        return both | {self.rung: self.words}

    @property
    def is_switched(self) -> bool:
        """Whether its part is switched off and on again within one run."""
        return self.phase in SWITCHED

    def saving(self, e: Evidence) -> Interval | None:
        """Return the share of a step that it saved; None if it was not run.

        The interval of a switched phase is that of all its pairs of blocks.
        """
        whole = e.step_time_saving(self.rung, self.reference)
        if not (savings := e.savings.get(self.rung)):
            return whole
        found = Interval.of(savings)
        return found if self.adapt is None else self.adapt(e, found, whole)


def _always(e: Evidence) -> bool:
    return True


def _unseen(e: Evidence) -> None:
    return None


@dataclass(frozen=True)
class Indicator:
    """One possible cause, as far as experiments and the record show it, and the rule that names it.

    Attributes:
        name: Name of its ``Witness``.
        title: Name in the tables of a diagnosis.
        definition: What experiment and record measure, for the page.
        rule: Names the cause.
        record: Returns the share of a step in the record; None if it is not seen there.
        ladder: The same by the bars of the waterfall.
        experiment: Experiment that tests it, instead of a bar.
        is_present: Whether the training can have it at all.
        is_estimate: Whether ``record`` is not a time that a clock measured, but is computed from
            the cost of one operation, or from what remains of a step without its known parts.
        overlaps: By name of a more general indicator: the share of a step that both see. The
            more specific cause keeps it.
    """

    name: str
    title: str
    definition: str
    rule: Rule
    record: Callable[[Evidence], float | None] = _unseen
    ladder: Callable[[Evidence], Interval | None] = _unseen
    experiment: Experiment | None = None
    is_present: Callable[[Evidence], bool] = _always
    is_estimate: bool = False
    overlaps: Mapping[str, Callable[[Evidence], float]] = field(default_factory=dict)

    def saving(self, e: Evidence) -> Interval | None:
        """Return the share of a step that the experiment saved, or that the bar lost."""
        return self.ladder(e) if self.experiment is None else self.experiment.saving(e)


def largest_share(used: Facts, what: str) -> float:
    """Return the largest share of its time that a rank spends in something."""
    known = [usage for usage in used if usage.get("seconds")]
    return max(
        (one.get(what, {}).get("seconds", 0.0) / one["seconds"] for one in known), default=0.0
    )


def saved(experiment: Experiment, e: Evidence) -> float:
    """Return the share of a step that an experiment saved; 0 if it was not run, or saved none."""
    found = experiment.saving(e)
    return max(found.mean, 0.0) if found is not None else 0.0


def bar(name: str) -> Callable[[Evidence], Interval | None]:
    """Return a function for the share of a step of a bar of the waterfall."""
    return lambda e: e.waterfall.of_step(name)
