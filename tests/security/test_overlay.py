"""Folders of the user covered by overlays: nothing that a command does changes them."""

import os
import subprocess
import sys

import pytest
import ranks

from paceline.security.overlay import VARIABLE, Overlay, user_folders
from paceline.security.removal import TemporaryFolder

CHANGES = "echo new > data.txt; rm -r kept; mkdir out; cat data.txt; touch visible/there; ls"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").mkdir()
    (tmp_path / "visible").mkdir()
    (tmp_path / "data.txt").write_text("precious")
    return tmp_path


@pytest.fixture
def overlay(folder):
    found = Overlay.prepare("script.py", [], folder / "visible")
    if found is None:
        pytest.skip("overlays cannot be mounted here")
    return found


def run_covered(request, words):
    code = (
        "import os, sys; from paceline.security.overlay import cover, remove_changes\n"
        "made = cover(sys.argv[1], '3'); os.system(sys.argv[2]); remove_changes(made)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, request, words], capture_output=True, text=True
    )


def test_native_code_and_other_programs_change_nothing(folder, overlay):
    (folder / "visible" / "try").rename(folder / "try")
    (folder / "visible").rmdir()
    temporary = TemporaryFolder("visible", folder)
    temporary.path.rename(folder / "visible")
    temporary.path = folder / "visible"
    changes = folder / "visible" / "changes"
    done = run_covered(overlay.request(changes), CHANGES)
    assert done.stdout.split() == ["new", "data.txt", "out", "try", "visible"], done.stderr
    done = run_covered(overlay.request(changes), "cat data.txt")
    assert done.stdout == "new\n"  # what an earlier command has changed
    assert sorted(os.listdir(folder)) == ["data.txt", "kept", "try", "visible"]
    assert (folder / "data.txt").read_text() == "precious"
    temporary.remove_inside(changes)
    assert sorted(os.listdir(folder / "visible")) == ["there"]
    temporary.remove()
    assert not (folder / "visible").exists()


def test_node_without_the_folder_of_changes_removes_what_it_creates(folder, overlay):
    done = run_covered(overlay.request(folder / "visible/of/another/node"), "touch x; ls")
    assert done.stdout.split() == ["data.txt", "kept", "visible", "x"], done.stderr
    assert sorted(os.listdir(folder / "visible")) == ["try"]


def test_home_folder_is_covered_without_its_caches(folder, monkeypatch):
    (folder / "home" / ".cache").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(folder / "home"))
    monkeypatch.chdir(folder / "kept")
    if (found := Overlay.prepare("x.py", [], folder / "visible")) is None:
        pytest.skip("overlays cannot be mounted here")
    assert found.folders == (str(folder / "home"), str(folder / "kept"))
    words = "touch ~/.cache/stored ~/.settings"
    assert run_covered(found.request(folder / "visible" / "x"), words).returncode == 0
    assert os.listdir(folder / "home") == [".cache"]
    assert os.listdir(folder / "home" / ".cache") == ["stored"]


@pytest.mark.parametrize("launcher", ["paceline", "paceline --fresh"])
def test_ranks_see_the_changes_of_each_other_and_the_user_does_not(folder, overlay, launcher):
    script = ranks.write(
        folder,
        """
        import os, pathlib, torch.distributed as dist
        dist.init_process_group("gloo")
        if dist.get_rank() == 0:
            pathlib.Path("data.txt").write_text("new")
        dist.barrier()
        print(pathlib.Path("data.txt").read_text(), os.environ.get("PACELINE_OVERLAY"))
        """,
    )
    request = overlay.request(folder / "visible" / "changes")
    done = ranks.run(script, launcher=launcher, **{VARIABLE: request})
    assert ranks.untagged(done.stdout) == {"new None"}
    assert (folder / "data.txt").read_text() == "precious"


@pytest.mark.parametrize("has_script", [False, True])
def test_temporary_folder_is_covered_only_around_the_script(folder, monkeypatch, has_script):
    """``TMPDIR=$HOME paceline verify``: the temporary folder contains the script."""
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setenv("HOME", str(folder))
    (folder / "beside").mkdir()
    monkeypatch.chdir(folder / "kept" if has_script else folder.parent)
    if (found := Overlay.prepare("x.py", [], folder / "visible")) is None:
        pytest.skip("overlays cannot be mounted here")
    done = run_covered(found.request(folder / "visible" / "x"), f"touch {folder}/beside/new")
    assert done.returncode == 0, done.stderr
    assert os.listdir(folder / "beside") == ([] if has_script else ["new"])


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
