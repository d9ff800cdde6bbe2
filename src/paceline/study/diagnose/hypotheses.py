"""Experiments that only some scripts need, chosen by the first run of ``paceline diagnose``.

A cause whose share is only estimated is a hypothesis. Here are the experiments that test one. They
are part of each round of the ladder, so that their intervals are those of the rounds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...analyze.diagnosis.confirmation import (
    FLOAT32,
    KEPT_MEMORY,
    SEARCH_OFF,
)
from ...analyze.diagnosis.evidence import MIN_SHARE
from ...analyze.diagnosis.ladder import RungResult, measure_rung
from ...analyze.diagnosis.rules.compute import MIN_FLOAT64_SHARE
from ...analyze.diagnosis.switched import measure_switched, reference_name
from ...analyze.records.load_run import Run
from ...record.experiments.rung import (
    CHANNELS_LAST,
    EVERYTHING,
    NO_BROADCASTS,
    NO_COLLECTION,
    SINGLE_PRECISION,
    SWITCHED,
    THREADS_PAUSED,
    Rung,
)

MAX_SEPARATE_RUNS = 2  # of each round, in addition to those of one rank and of all ranks
MIN_EXPECTED_SHARE = MIN_SHARE / 2  # of a step; a first run of few steps is uncertain
CHANNELS_LAST_RUNG = "alone, channels-last"
WORDS = {
    CHANNELS_LAST_RUNG: "one rank, batches in memory, images as channels-last",
    reference_name(CHANNELS_LAST): "interleaved with it: images as they are",
    NO_COLLECTION: "all ranks, no garbage collection",
    reference_name(NO_COLLECTION): "interleaved with it: garbage collection",
    THREADS_PAUSED: "all ranks, other Python threads paused",
    reference_name(THREADS_PAUSED): "interleaved with it: other Python threads running",
    NO_BROADCASTS: "all ranks, no broadcasts of buffers",
    reference_name(NO_BROADCASTS): "interleaved with it: broadcasts of buffers",
    KEPT_MEMORY: "all ranks, freed memory kept",
    SEARCH_OFF: "all ranks, no search for unused parameters",
    FLOAT32: "all ranks, float32 instead of float64",
}


@dataclass(frozen=True)
class Hypothesis:
    """An experiment, and the share of a step that it is expected to save.

    Attributes:
        rung: Name of the rung in which the cause is absent.
        phase: Phase of the run.
        settings: Knobs that are set in the run.
        separate: Whether it needs a run of its own, from the start of the processes.
        alone: Whether it is tested with one rank.
    """

    rung: str
    phase: str
    expected: float
    settings: dict[str, Any] = field(default_factory=dict)
    separate: bool = True
    alone: bool = False

    @property
    def rungs(self) -> tuple[str, ...]:
        """Names of the rungs that it measures."""
        switched = self.phase in SWITCHED
        return (reference_name(self.phase), self.rung) if switched else (self.rung,)

    def measure(self, run: Run, rung: Rung) -> tuple[dict[str, RungResult], list[float]]:
        """Return the results by the rung's name, and the savings of a switched phase."""
        if self.phase in SWITCHED:
            found = measure_switched(run, rung, self.phase)
            results = (found.reference, found.without)
            return dict(zip(self.rungs, results, strict=True)), found.savings
        first = rung.first_measured_step(self.phase)
        return {self.rung: measure_rung(run, first, rung.steps, self.phase)}, []

    def why_void(self, run: Run) -> str:
        """Return why the run did not test the hypothesis; empty if it did."""
        for name in self.settings:
            each = [record.meta.get("knobs", {}).get(name, {}) for record in run.records]
            if not any(one.get("set") for one in each):
                why = next((one["why_not"] for one in each if one.get("why_not")), "")
                return f"{name} has no effect: {why or 'the script never calls what it changes'}"
        used = [
            record.meta.get("rung", {}).get("used", {}).get(self.phase, {})
            for record in run.records
        ]
        sizes = run.records[0].meta.get("rung", {}).get("parameters", {})
        if self.phase == SINGLE_PRECISION and sizes.get("float64"):
            return "the parameters remain float64"
        if any(one.get("gave_up") for one in used):
            return "the training waits for another Python thread, which cannot be paused"
        if self.phase == THREADS_PAUSED and not any(one.get("paused") for one in used):
            return "the other Python threads run no code of the script, and cannot be paused"
        if self.phase == NO_BROADCASTS and not any(one.get("broadcasting") for one in used):
            return "the script broadcasts the buffers itself, and not DistributedDataParallel"
        return ""


def hypotheses(
    facts: Sequence[Mapping[str, Any]], broadcast_share: float = 0.0
) -> list[Hypothesis]:
    """Return the experiments that the first run suggests, the largest expected share first.

    Args:
        facts: Facts of each rank (record/experiments/observer.py).
        broadcast_share: Share of a step in broadcasts of buffers, with waits for a late rank.
    """
    used = [one.get("used", {}).get(EVERYTHING, {}) for one in facts]
    found = [
        Hypothesis(NO_COLLECTION, NO_COLLECTION, _largest(used, _collecting), separate=False),
        Hypothesis(THREADS_PAUSED, THREADS_PAUSED, _largest(used, _other_threads)),
        Hypothesis(NO_BROADCASTS, NO_BROADCASTS, broadcast_share, separate=False),
        Hypothesis(CHANNELS_LAST_RUNG, CHANNELS_LAST, _contiguous(facts), {}, False, True),
        Hypothesis(KEPT_MEMORY, EVERYTHING, _page_faults(facts, used), {"keep-memory": True}),
        Hypothesis(SEARCH_OFF, EVERYTHING, _search(facts), {"unused-search-off": True}),
        Hypothesis(FLOAT32, SINGLE_PRECISION, _float64(facts)),
    ]
    worth = sorted(
        (one for one in found if one.expected >= MIN_EXPECTED_SHARE), key=lambda one: -one.expected
    )
    separate = [one for one in worth if one.separate][:MAX_SEPARATE_RUNS]
    return [one for one in worth if not one.separate or one in separate]


def _largest(used: Sequence[Mapping[str, Any]], seconds: Any) -> float:
    return max((seconds(one) / one["seconds"] for one in used if one.get("seconds")), default=0.0)


def _collecting(used: Mapping[str, Any]) -> float:
    return float(used.get("collecting", {}).get("seconds", 0.0))


def _other_threads(used: Mapping[str, Any]) -> float:
    return float(used.get("others", {}).get("seconds", 0.0))


def _page_faults(facts: Sequence[Mapping[str, Any]], used: Sequence[Mapping[str, Any]]) -> float:
    shares = [
        min(one["faults"] * told.get("fault_s", 0.0), one["system"])
        / one["seconds"]
        / max(told.get("threads", 1), 1)
        for told, one in zip(facts, used, strict=True)
        if one.get("seconds") and "faults" in one and "system" in one
    ]
    return max(shares, default=0.0)


def _contiguous(facts: Sequence[Mapping[str, Any]]) -> float:
    """Return 1.0 if there are convolutions in the contiguous format: the share is not known yet."""
    return float(any(one.get("convolutions") and not one.get("channels_last") for one in facts))


def _search(facts: Sequence[Mapping[str, Any]]) -> float:
    """Return 1.0 if DDP searches for unused parameters without need: the share is not known yet."""
    each = [one.get("ddp", {}) for one in facts]
    return float(any(one.get("searches") and not one.get("unused_bytes") for one in each))


def _float64(facts: Sequence[Mapping[str, Any]]) -> float:
    """Return the share that float64 costs over float32, if all of a step is matrix products."""
    sizes, took = facts[0].get("parameters", {}), facts[0].get("product_s", {})
    if sizes.get("float64", 0) <= MIN_FLOAT64_SHARE * sum(sizes.values()):
        return 0.0
    if not took.get("float64") or "float32" not in took:
        return 0.0
    return float(max(1 - took["float32"] / took["float64"], 0.0))
