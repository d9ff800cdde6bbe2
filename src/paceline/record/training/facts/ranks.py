"""All facts of one rank."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .events import (
    CollectiveFacts,
    DrawFacts,
    FileFacts,
    OperatorFacts,
    OutputFacts,
    RestoreFacts,
    SeedFacts,
)
from .models import ModelFacts, StateFacts
from .samples import BatchFacts, LoaderFacts
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
        restores: Calls that restored states, in order.
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
    restores: list[RestoreFacts] = field(default_factory=list)
    sketches: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
