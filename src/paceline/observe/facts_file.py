"""The files of ``RankFacts``.

A rank writes ``facts-RANK.json`` and ``facts-RANK.npz`` into the folder of the run. The array
``sketches`` of the latter has one row for each tensor that was observed (``sketch.SketchTable``).
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ..security.files import read_regular
from .facts.events import (
    CollectiveFacts,
    DrawFacts,
    FileFacts,
    MetricFacts,
    OperatorFacts,
    OutputFacts,
    RestoreFacts,
    SeedFacts,
)
from .facts.models import ModelFacts, ParameterFacts, StateFacts
from .facts.ranks import RankFacts
from .facts.samples import BatchFacts, LoaderFacts, PassFacts, Phase
from .facts.steps import BackwardFacts, ClipFacts, OptimizerFacts, ScheduleFacts, StepFacts

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
    path = folder / f"facts-{rank}.json"
    loaded = json.loads(read_regular(path, MAX_FACTS_MIB << 20))
    if not isinstance(loaded, dict) or loaded.pop("version", None) != VERSION:
        raise ValueError(f"{path} is not a file of this version of paceline verify")
    with np.load(folder / f"facts-{rank}.npz", allow_pickle=False) as arrays:
        sketches = arrays["sketches"]
    facts: RankFacts = _build(RankFacts, loaded | {"sketches": sketches})
    return facts


_NESTED: dict[tuple[type, str], type] = {
    (RankFacts, "models"): ModelFacts,
    (ModelFacts, "parameters"): ParameterFacts,
    (RankFacts, "optimizers"): OptimizerFacts,
    (RankFacts, "schedules"): ScheduleFacts,
    (RankFacts, "loaders"): LoaderFacts,
    (LoaderFacts, "passes"): PassFacts,
    (RankFacts, "batches"): BatchFacts,
    (RankFacts, "steps"): StepFacts,
    (StepFacts, "backwards"): BackwardFacts,
    (StepFacts, "clips"): ClipFacts,
    (RankFacts, "draws"): DrawFacts,
    (RankFacts, "collectives"): CollectiveFacts,
    (RankFacts, "outputs"): OutputFacts,
    (RankFacts, "states"): StateFacts,
    (RankFacts, "files"): FileFacts,
    (RankFacts, "seeds"): SeedFacts,
    (RankFacts, "restores"): RestoreFacts,
    (RankFacts, "metrics"): MetricFacts,
    (RankFacts, "operators"): OperatorFacts,
}


def _build(kind: type, values: dict[str, Any]) -> Any:
    """Return an instance of ``kind`` from what JSON holds of it."""
    made = {}
    for name, value in values.items():
        inner = _NESTED.get((kind, name))
        if inner is not None:
            value = [_build(inner, one) for one in value]
        elif name == "phase":
            value = Phase(value)
        made[name] = value
    return kind(**made)
