"""All facts of one rank."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .events import (
    CollectiveFacts,
    DrawFacts,
    FileFacts,
    MetricFacts,
    OperatorFacts,
    OutputFacts,
    RestoreFacts,
    SeedFacts,
)
from .models import ModelFacts, StateFacts
from .samples import BatchFacts, LoaderFacts, Phase
from .steps import OptimizerFacts, ScheduleFacts, StepFacts


@dataclass
class RankFacts:
    """All that was observed in one rank.

    Attributes:
        rank, size: Rank and number of ranks.
        ended: "limit" if verify ended the run, "script" if the script did, "error" after an
            exception.
        unseen: What could not be observed, each with its reason.
        seeds: Calls that seeded generators, in order.
        operators: Operators of the first step, in order; empty unless they were traced.
        parts: Maximum number of parts in which a replay trains a global batch.
        is_collated: Whether a replay let the loader's ``collate_fn`` make global batches: those of
            the ranks are padded to other lengths.
        restores: Calls that restored states, in order.
        metrics: Values that Lightning logs, in order.
    """

    rank: int
    size: int
    ended: str = ""
    models: list[ModelFacts] = field(default_factory=list)
    optimizers: list[OptimizerFacts] = field(default_factory=list)
    schedules: list[ScheduleFacts] = field(default_factory=list)
    loaders: list[LoaderFacts] = field(default_factory=list)
    batches: list[BatchFacts] = field(default_factory=list)
    steps: list[StepFacts] = field(default_factory=list)
    draws: list[DrawFacts] = field(default_factory=list)
    collectives: list[CollectiveFacts] = field(default_factory=list)
    outputs: list[OutputFacts] = field(default_factory=list)
    states: list[StateFacts] = field(default_factory=list)
    files: list[FileFacts] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    seeds: list[SeedFacts] = field(default_factory=list)
    operators: list[OperatorFacts] = field(default_factory=list)
    parts: int = 1
    is_collated: bool = False
    restores: list[RestoreFacts] = field(default_factory=list)
    metrics: list[MetricFacts] = field(default_factory=list)
    sketches: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))

    def without_evaluated(self, batches: Sequence[int]) -> list[int]:
        """Return those of some batches (numbers in ``batches``) that were not only evaluated."""
        evaluated = {
            (loader.key, one.number)
            for loader in self.loaders
            for one in loader.passes
            if one.phase is Phase.EVALUATION
        }
        places = {at: (self.batches[at].loader, self.batches[at].pass_number) for at in batches}
        return [at for at in batches if places[at] not in evaluated]
