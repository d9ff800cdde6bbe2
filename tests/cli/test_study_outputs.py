"""Files of ``paceline scale``: each is written, and named."""

import json

import pytest

from paceline.analyze.scaling.outcomes.compare_studies import compare_studies
from paceline.cli.common.command import STDOUT
from paceline.cli.common.study_outputs import StudyOutputs, print_comparison
from paceline.report.scaling.findings import Findings
from studies import make_study

OPTIONS = ("html", "csv", "svg", "latex", "extrap", "talp")


def test_every_file_is_written_and_named(tmp_path, capsys):
    paths = {name: tmp_path / f"study.{name}" for name in OPTIONS}
    outputs = StudyOutputs(STDOUT, **paths)
    outputs.check()
    outputs.finish(make_study((1, 2)), Findings())
    out, err = capsys.readouterr()
    assert json.loads(out)["format"] == "paceline-scale"  # nothing else on standard output
    for path in paths.values():
        assert f"{path}: " in err
        assert path.exists()
    assert (paths["talp"] / "strong" / "n2-b64-2.json").exists()


def test_table_is_printed_without_json(capsys):
    StudyOutputs().finish(make_study((1, 2)), Findings())
    out, err = capsys.readouterr()
    assert "Paceline: scaling study" in out
    assert err == ""


def test_comparison_is_printed(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    found = compare_studies(make_study((1, 2)), make_study((1, 2)))
    print_comparison(found, None)
    assert "within the noise" in capsys.readouterr().out
    print_comparison(found, STDOUT)
    assert json.loads(capsys.readouterr().out)["format"] == "paceline-scale-comparison"


def test_files_are_checked_before_the_runs(tmp_path):
    with pytest.raises(ValueError, match=r"--svg .* can't be written: it is a folder"):
        StudyOutputs(svg=tmp_path).check()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"is no folder\. HINT"):
        StudyOutputs(talp=tmp_path / "file").check()
