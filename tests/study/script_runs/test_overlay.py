"""Folders of the user covered by overlays: nothing that a command does changes them."""

import os
import subprocess
import sys

import pytest

from paceline.security.removal import TemporaryFolder
from paceline.study.script_runs.overlay import Overlay, user_folders

CHANGES = "echo new > data.txt; rm -r kept; mkdir out; cat data.txt; touch visible/there; ls"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "visible").mkdir()
    (tmp_path / "data.txt").write_text("precious")
    return tmp_path


def test_native_code_and_other_programs_change_nothing(folder):
    (folder / "visible").rmdir()
    temporary = TemporaryFolder("visible", folder)
    temporary.path.rename(folder / "visible")
    temporary.path = folder / "visible"
    overlay = Overlay.prepare("script.py", [], folder / "visible")
    if overlay is None:
        pytest.skip("overlays cannot be mounted here")
    scratch = folder / "visible" / "changes"
    words = overlay.command(scratch, ["/bin/sh", "-c", CHANGES])
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stdout.split() == ["new", "data.txt", "out", "visible"], done.stderr
    assert sorted(os.listdir(folder)) == ["data.txt", "kept", "visible"]
    assert (folder / "data.txt").read_text() == "precious"
    temporary.remove_inside(scratch)
    assert sorted(os.listdir(folder / "visible")) == ["there", "try"]
    temporary.remove()
    assert not (folder / "visible").exists()


def test_folders_that_cannot_be_covered_are_reported(folder):
    overlay = Overlay((str(folder / "missing"),), ())
    words = overlay.command(folder / "visible" / "x", [sys.executable, "-c", "print('ran')"])
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (125, "")
    assert "cannot be covered" in done.stderr


def test_folders_of_script_and_arguments_are_covered(folder, tmp_path_factory):
    data = tmp_path_factory.mktemp("data")
    found = user_folders(
        str(folder / "kept" / "train.py"),
        [
            f"--data={data}",
            "--out",
            f"{data}/new/run1",
            "--epochs",
            "3",
            "/etc/hosts",
            "relative/x",
        ],
    )
    assert found == tuple(sorted(map(str, (folder, data))))
