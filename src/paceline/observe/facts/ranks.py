"""All facts of one rank, and their files.

A rank writes ``facts-RANK.json`` and ``facts-RANK.npz`` into the folder of the run. The array
``sketches`` of the latter has one row for each tensor that was observed (``SketchTable`` of
observation.py).
"""

import json
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...security.files import read_regular
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
from .samples import BatchFacts, LoaderFacts, PassFacts, Phase
from .steps import OptimizerFacts, ScheduleFacts, StepFacts

SKETCH_SIZE = 32
# A row: the sketch, the sum of the squares, the number of elements that are not finite, and a
# checksum of the values' bytes (an integer below 2**53, so that float64 holds it exactly).
SQUARES, NONFINITE, CHECKSUM = SKETCH_SIZE, SKETCH_SIZE + 1, SKETCH_SIZE + 2
ROW_SIZE = SKETCH_SIZE + 3


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

    def loader(self, key: int) -> LoaderFacts | None:
        """Return a loader by its key; None if there is none."""
        return next((loader for loader in self.loaders if loader.key == key), None)

    def passes(self, phase: Phase) -> dict[tuple[int, int], PassFacts]:
        """Return the passes of a phase by the loader's key and their number."""
        return {
            (loader.key, made.number): made
            for loader in self.loaders
            for made in loader.passes
            if made.phase is phase
        }

    def without_evaluated(self, batches: Sequence[int]) -> list[int]:
        """Return those of some batches (numbers in ``batches``) that were not only evaluated."""
        evaluated = self.passes(Phase.EVALUATION)
        return [at for at in batches if self.batches[at].pass_key not in evaluated]


VERSION = 1
MAX_FACTS_MIB = 512  # of one file


def write_facts(folder: Path, facts: RankFacts) -> None:
    """Write the files of one rank. Where the JSON file exists, both are complete."""
    np.savez(folder / f"facts-{facts.rank}.npz", sketches=facts.sketches)
    rest = {name: value for name, value in asdict(facts).items() if name != "sketches"}
    text = json.dumps({"version": VERSION, **rest}, separators=(",", ":"))
    part = folder / f"facts-{facts.rank}.part"
    part.write_text(text)
    part.replace(folder / f"facts-{facts.rank}.json")


def read_facts(folder: Path, rank: int) -> RankFacts:
    """Read the files of one rank.

    Raises:
        OSError: A file does not exist.
        ValueError: It is of another version or damaged.
    """
    path, arrays_path = (folder / f"facts-{rank}.{kind}" for kind in ("json", "npz"))
    try:
        loaded = json.loads(read_regular(path, MAX_FACTS_MIB << 20))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(loaded, dict) or loaded.pop("version", None) != VERSION:
        raise ValueError(f"{path} is not a file of this version of paceline verify")
    try:
        with np.load(arrays_path, allow_pickle=False) as arrays:
            sketches = arrays["sketches"]
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{arrays_path} is damaged: {error}") from None
    try:
        return msgspec.convert(
            loaded | {"sketches": sketches}, RankFacts, dec_hook=lambda kind, value: value
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
