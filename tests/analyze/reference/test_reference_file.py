"""Reference files: written and read, joined, and refused with a reason."""

import json

import numpy as np
import pytest
import records

from paceline.analyze.reference.metric import PATTERN, Metric
from paceline.analyze.reference.reference_file import (
    RECORD_FILE,
    merge_references,
    read_reference,
    write_reference,
)
from paceline.analyze.reference.series import Model, Reference
from paceline.security.files import InvalidFileError

MODEL = Model([[3, 4], [3]], 2, 15)


def test_reference_is_read_as_it_was_written(tmp_path):
    known = Reference(
        Metric(PATTERN, r"loss (\S+)"), records.loss_reference().runs, MODEL, ["a.py"]
    )
    write_reference(tmp_path / RECORD_FILE, known)
    for path in (tmp_path / RECORD_FILE, tmp_path):
        found = read_reference(path)
        assert (found.metric, found.model, found.command) == (known.metric, MODEL, ["a.py"])
        assert len(found.runs) == 3
        assert found.axis == "samples"
        assert np.allclose(found.runs[1].values, known.runs[1].values, rtol=1e-8)
        assert np.all(np.isnan(found.runs[1].rates))


def test_other_files_are_refused_with_a_hint(tmp_path):
    with pytest.raises(ValueError, match=r"HINT: paceline run --make-reference"):
        read_reference(tmp_path / "absent.json")
    with pytest.raises(ValueError, match=r"is no record with losses. HINT: record the run"):
        read_reference(tmp_path)
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"format": "x", "version": 1, "metric": {}, "runs": []}))
    with pytest.raises(ValueError, match=r"is no reference .*'x'"):
        read_reference(file)
    file.write_text("[]")
    with pytest.raises(InvalidFileError):
        read_reference(file)


def test_references_of_other_metrics_and_models_are_not_joined():
    known = records.loss_reference()
    assert len(merge_references([known, known]).runs) == 6
    with pytest.raises(ValueError, match="different metrics"):
        merge_references([known, Reference(Metric(PATTERN, "x"), known.runs)])
    one, other = (Reference(Metric(), known.runs, m) for m in (MODEL, Model([[5]], 1, 5)))
    with pytest.raises(ValueError, match=r"different models.*15 parameters in 2 tensors"):
        merge_references([one, other])
