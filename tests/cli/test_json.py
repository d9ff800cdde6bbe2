"""What ``--json`` prints has a format and a version, in every mode of every command."""

import json
from pathlib import Path

import numpy as np
import pytest
import ranks
import torch
from typer.testing import CliRunner

from paceline.cli import app
from paceline.cli.common.command import STDOUT, print_json
from paceline.cost.machine.machine_file import HostFacts, Machine, save


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PACELINE_STAGE", raising=False)
    np.save("x.npy", np.zeros((4, 2)))
    assert CliRunner().invoke(app, ["pack", "x.npy", "packed"]).exit_code == 0
    torch.save({"w": torch.zeros(2)}, "w.pt")
    save(Machine("2026-01-31T12:00:00+00:00", (HostFacts("a"),)), tmp_path / "machine.toml")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["pack", "x.npy", "again"], "paceline-pack"),
        (["pack", "packed", "out.h5", "--to", "hdf5"], "paceline-pack"),
        (["pack", "--check", "packed"], "paceline-pack-check"),
        (["stage", "packed", "disk"], "paceline-stage"),
        (["convert", "w.pt", "w.safetensors"], "paceline-convert"),
        (
            ["check", "--compare", "machine.toml", "machine.toml"],
            "paceline-machine-comparison",
        ),
    ],
)
@pytest.mark.parametrize("option", ["--json", "--json=found.json"])
def test_output_has_format_and_version(inputs, tmp_path, words, name, option):
    done = CliRunner().invoke(app, [words[0], option, *words[1:]])
    assert done.exit_code == 0, done.output
    if option != "--json":
        assert done.stdout == ""
    text = done.stdout if option == "--json" else (tmp_path / "found.json").read_text()
    found = json.loads(text)
    assert (found["format"], found["version"]) == (name, 1)


def test_output_without_a_format_is_an_error_of_the_program():
    with pytest.raises(AssertionError):
        print_json({"x": 1}, STDOUT)


def test_plan_says_what_would_start(tmp_path):
    script = ranks.write(tmp_path, "raise SystemExit(3)")
    words = ["run", "--dry-run", "-n", "3", "-H", "a:2,b", "--launcher", "ssh", "--env", "HELLO=1"]
    for option in ("--json", "--json=found.json"):
        done = ranks.run_command(
            [ranks.PACELINE, *words, option, script, "--lr", "1"], tmp_path, ranks.environment()
        )
        assert done.returncode == 0, done.stderr
        text = done.stdout or (tmp_path / "found.json").read_text()
        check_plan(json.loads(text), str(script))


def check_plan(found, script):
    assert (found["format"], found["version"]) == ("paceline-plan", 1)
    assert (found["hosts"], found["ranks"], found["launcher"]) == (["a", "b"], [2, 1], "ssh")
    assert found["script"] == [script, "--lr", "1"]
    assert found["environment_variables"] == ["HELLO"]
    assert len(found["commands"]) == 2


def test_job_without_figures_says_so(tmp_path):
    words = ["run", "-n", "1", "--json=found.json", ranks.write(tmp_path, "pass")]
    done = ranks.run_command([ranks.PACELINE, *words], tmp_path, ranks.environment())
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["format"], found["version"]) == ("paceline-job", 1)
    assert "HINT: --record DIR" in found["reason"]


@pytest.mark.parametrize(
    "words",
    [
        *(["run", "--json=train.py"], ["verify", "--json=train.py"], ["tune", "--html=train.py"]),
        *(["report", "--html=train.py"], ["report", "--timeline=train.py"]),
        *(["check", "--out=train.py"], ["run", "--json=none/a.json"]),
    ],
)
def test_output_that_cannot_be_written_or_is_a_script_is_refused(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("1\n")
    done = CliRunner().invoke(app, [*words, *["train.py"] * (words[0] != "check")])
    assert done.exit_code == 2
    option, _, file = words[1].partition("=")
    assert done.stderr.startswith(f"paceline: {option} ")
    assert file in done.stderr
    assert "HINT: " in done.stderr
    assert Path("train.py").read_text() == "1\n"
