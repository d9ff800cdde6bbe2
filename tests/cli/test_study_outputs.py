"""Files of ``paceline scale``: each is written, and named."""

import json

import pytest
from typer.testing import CliRunner

from paceline.analyze.scaling.outcomes.compare_studies import compare_studies
from paceline.cli import app
from paceline.cli.common.command import STDOUT
from paceline.cli.common.study_outputs import StudyOutputs, print_comparison
from paceline.report.scaling.findings import Findings
from studies import make_study, store

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
    assert "can't be written: it is a folder" in scale("--svg", tmp_path, "train.py").stderr
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"is no folder\. HINT"):
        StudyOutputs(talp=tmp_path / "file").check()


def scale(*words):
    return CliRunner().invoke(app, ["scale", *map(str, words)])


def test_show_prints_a_stored_study_and_runs_nothing(tmp_path):
    folder = store(tmp_path / "study", make_study((1, 2, 4, 8), serial=0.1, spread=0.002))
    done = scale("--show", folder, "--json", "--svg", tmp_path / "a.svg")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert len(found["sizes"]) == 8
    law = next(fit for fit in found["fits"] if fit["model"] == "universal scalability law")
    serial = next(one for one in law["parameters"] if one["name"] == "s")
    assert serial["low"] < 0.1 < serial["high"]
    assert law["error"] < 0.1
    (knee,) = (one for one in found["knees"] if one["kind"] == "strong")
    assert 2 <= knee["ranks"] < 4  # 4 ranks: 0.77
    assert [(one["first"], one["then"]) for one in found["reasons"][:3]] == [(1, 2), (2, 4), (4, 8)]
    assert "<polygon" in (tmp_path / "a.svg").read_text()  # the fit's band


def test_compare_reads_two_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "130")
    before = store(tmp_path / "before", make_study(serial=0.2))
    after = store(tmp_path / "after", make_study(serial=0.05))
    done = scale("--compare", before, after, "--html", tmp_path / "page.html")
    assert done.exit_code == 0, done.output
    assert "better: wait -" in done.stdout
    assert "better: wait" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--show", "study", "-n", "1,2"], "--show runs nothing, and -n is given too"),
        (["--show", "study", "--compare", "a", "b"], "and --compare is given too"),
        (["--show", "study"], "has no study.json"),
        (["--compare", "a", "b", "--csv", "x.csv"], "--compare writes no --csv"),
        (["-n", "1", "--until", "accuracy", "a.py"], "is no comparison"),
        (["--continue", "study", "--steps", "20"], "and --steps is given too"),
        (["--continue", "study", "--node-hours", "2"], "and --node-hours is given too"),
        (["-n", "1", "--only", "1", "a.py"], "--only is for the jobs of --submit"),
        (["-n", "1", "--node-hours", "3", "a.py"], "--node-hours is for jobs of a scheduler"),
        (["-n", "1", "--submit", "-H", "a:1", "a.py"], "-H is given too"),
        (["-n", "1", "--seeds", "2", "a.py"], "--seeds needs a target"),
        (["-n", "1", "--until", "a>1", "--metric", "(", "a.py"], "no regular expression"),
    ],
)
def test_options_that_do_not_fit_are_refused(tmp_path, monkeypatch, words, hint):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "study").mkdir()
    done = scale(*words)
    assert done.exit_code == 2
    assert hint in done.output
