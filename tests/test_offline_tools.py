"""Scripts that install Paceline without a network: wrong arguments are named, with the way out."""

import os
import subprocess
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[1] / "tools"


def said(name, *words, **env):
    """Return what a script that fails prints; it has no network and writes nothing."""
    done = subprocess.run(
        [TOOLS / name, *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, **env},
    )
    assert done.returncode == 2
    return done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "no folder. HINT: --dest wheels"),
        (["--dest"], "--dest needs a value. HINT:"),
        (["--dest", "{}", "--pyton", "3.12"], "unknown option --pyton. HINT:"),
        (["--dest", "{}", "--python", "py312"], "--python py312 is not a version. HINT:"),
        (["--dest", "{}", "--limit", "much"], "--limit much is not a number of MiB. HINT:"),
    ],
)
def test_wrong_arguments_of_the_folder_of_wheels(tmp_path, words, expected):
    folder = tmp_path / "wheels"
    assert expected in said("offline_wheels.sh", *(word.format(folder) for word in words))
    assert not folder.exists()


def test_folder_without_paceline_is_refused_before_anything_is_made(tmp_path):
    (tmp_path / "numpy-2.0-py3-none-any.whl").touch()
    text = said("offline_install.sh", tmp_path, tmp_path / "venv")
    assert "has no wheel of Paceline. HINT: tools/offline_wheels.sh" in text
    assert "Usage:" in said("offline_install.sh", tmp_path)
    assert not (tmp_path / "venv").exists()
