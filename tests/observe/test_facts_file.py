"""The files of a rank's facts: what is read is what was written, and damage is an error."""

import json
import math

import numpy as np
import pytest

from paceline.observe.facts.ranks import RankFacts, read_facts, write_facts
from paceline.observe.facts.samples import LoaderFacts, PassFacts, Phase
from paceline.observe.facts.steps import BackwardFacts, StepFacts


def facts() -> RankFacts:
    one = PassFacts(0, Phase.TRAINING, "train.py:3", None, 1, [[1, 2]], True, 0)
    loader = LoaderFacts(
        *(0, "train.py:1", "Set", None, 1 << 63, True, None, "Sampler", False, False, 0),
        passes=[one],
    )
    backward = BackwardFacts("train.py:5", 0, [0], math.inf, None, 1.0, True, {"0/w": 0})
    step = StepFacts(0, 0, "train.py:6", [0.5], [backward])
    return RankFacts(1, 2, loaders=[loader], steps=[step], sketches=np.ones((1, 35)))


def test_facts_are_read_as_they_were_written(tmp_path):
    write_facts(tmp_path, facts())
    read, written = read_facts(tmp_path, 1), facts()
    assert np.array_equal(read.sketches, written.sketches)
    read.sketches = written.sketches
    assert (read.loaders, read.steps) == (written.loaders, written.steps)
    assert read.loaders[0].passes[0].phase is Phase.TRAINING


@pytest.mark.parametrize("change", [{"size": "two"}, {"steps": [{"index": 0}]}, {"loaders": None}])
def test_damaged_facts_are_an_error_that_names_the_file(tmp_path, change):
    write_facts(tmp_path, facts())
    path = tmp_path / "facts-1.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=r"facts-1\.json is damaged"):
        read_facts(tmp_path, 1)


@pytest.mark.parametrize("kind", ["json", "npz"])
@pytest.mark.parametrize("keep", [0, 40])
def test_cut_off_facts_are_an_error_that_names_the_file(tmp_path, kind, keep):
    write_facts(tmp_path, facts())
    path = tmp_path / f"facts-1.{kind}"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=rf"facts-1\.{kind} is damaged"):
        read_facts(tmp_path, 1)
