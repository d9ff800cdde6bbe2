"""Files of the user stay as they are while a script runs as an experiment.

The script finds what it wrote.
"""

import hashlib
import os
import shutil
import sqlite3
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from paceline.record.experiments.protect_files import _remove_tree

h5py = pytest.importorskip("h5py")

SETUP = """
    import glob, json, os, pathlib, shutil, sqlite3, sys, tempfile
    from pathlib import Path
    from paceline.record.experiments.protect_files import FileProtection
    scratch, covered = sys.argv[1], tuple(sys.argv[2:])

    def stop(why):
        print("stopped:", why)
        sys.stdout.flush()
        os._exit(3)

    FileProtection(Path(scratch), stop, covered).install()
"""
OPERATIONS = {
    "overwrite": """
        open("data.txt", "w").write("new")
        assert open("data.txt").read() == "new"
        """,
    "append": """
        open("data.txt", "a").write(" and more")
        assert Path("data.txt").read_text() == "precious and more"
        """,
    "read and write": """
        with open("data.txt", "r+b") as file:
            file.write(b"P")
        assert open("data.txt").read() == "Precious"
        """,
    "truncate": """
        os.truncate("data.txt", 3)
        assert os.path.getsize("data.txt") == 3
        """,
    "os.open": """
        fd = os.open("data.txt", os.O_RDWR)
        os.write(fd, b"P")
        os.close(fd)
        assert open("data.txt").read() == "Precious"
        """,
    "rename over": """
        Path("data.tmp").write_text("new")
        os.replace("data.tmp", "data.txt")
        assert open("data.txt").read() == "new" and not os.path.exists("data.tmp")
        """,
    "move away": """
        shutil.move("data.txt", "old.txt")
        assert open("old.txt").read() == "precious" and not os.path.exists("data.txt")
        assert sorted(os.listdir(".")) == sorted({"old.txt", *os.listdir(".")})
        assert "data.txt" not in os.listdir(".") and "data.txt" not in glob.glob("*.txt")
        """,
    "remove": """
        os.remove("data.txt")
        assert not Path("data.txt").exists()
        try:
            open("data.txt")
        except FileNotFoundError:
            pass
        else:
            raise AssertionError("it is there")
        open("data.txt", "w").write("anew")
        assert open("data.txt").read() == "anew" and "data.txt" in os.listdir(".")
        """,
    "folders": """
        os.makedirs("out/deep")
        Path("out/deep/a.txt").write_text("a")
        Path("kept/b.txt").write_text("b")
        assert sorted(p.name for p in Path("kept").iterdir()) == ["b.txt", "one.bin"]
        assert [n for n, _, _ in os.walk("out")] == ["out", "out/deep"]
        shutil.rmtree("kept")
        assert not os.path.exists("kept") and not os.path.exists("kept/one.bin")
        shutil.copytree("out", "again")
        assert Path("again/deep/a.txt").read_text() == "a"
        try:
            open("missing/x", "w")
        except FileNotFoundError:
            pass
        else:
            raise AssertionError("its folder is not there")
        try:
            os.mkdir("out")
        except FileExistsError:
            pass
        """,
    "links": """
        Path("new.txt").write_text("new")
        os.symlink("data.txt", "latest")
        assert open("latest").read() == "precious"
        os.unlink("latest")
        os.symlink("new.txt", "latest")
        assert open("latest").read() == "new"
        """,
    "attributes": """
        os.chmod("data.txt", 0o600)
        os.utime("data.txt", (1, 1))
        """,
    "checkpoints": """
        import torch
        for step in range(2):
            torch.save({"step": step}, "model.pt")
            torch.save({"step": step}, Path("new.pt"))
            assert torch.load("model.pt")["step"] == step
            assert torch.load("new.pt", mmap=True)["step"] == step
        """,
    "numpy": """
        import numpy as np
        np.save("array.npy", np.ones(3))
        assert np.load("array.npy").sum() == 3
        where = np.memmap("kept/one.bin", dtype="uint8", mode="r+")
        where[:] = 7
        where.flush()
        assert np.fromfile("kept/one.bin", dtype="uint8").tolist() == [7] * 4
        """,
    "h5py": """
        import h5py
        with h5py.File("table.h5", "a") as file:
            file["x"][0] = 5
            file["y"] = [1]
        with h5py.File("table.h5") as file:
            assert file["x"][0] == 5 and "y" in file
        """,
    "sqlite": """
        base = sqlite3.connect("base.db")
        base.execute("insert into runs values (2)")
        base.commit()
        base.close()
        assert len(sqlite3.connect("base.db").execute("select * from runs").fetchall()) == 2
        """,
}


@pytest.fixture
def folder(tmp_path):
    import torch

    folder = tmp_path / "home"
    (folder / "kept").mkdir(parents=True)
    (folder / "data.txt").write_text("precious")
    (folder / "kept" / "one.bin").write_bytes(b"\x01" * 4)
    np.save(folder / "array.npy", np.zeros(3))
    torch.save({"step": -1}, folder / "model.pt")
    with h5py.File(folder / "table.h5", "w") as file:
        file["x"] = [1, 2]
    base = sqlite3.connect(folder / "base.db")
    base.execute("create table runs (number)")
    base.execute("insert into runs values (1)")
    base.commit()
    base.close()
    return folder


def fingerprint(folder):
    """Return the content, mode and time of every file and folder."""
    return {
        str(path): (
            path.stat().st_mode,
            path.stat().st_mtime_ns,
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
        )
        for path in [folder, *sorted(folder.rglob("*"))]
    }


def run(folder, code, *covered):
    script = folder.parent / "script.py"
    script.write_text(textwrap.dedent(SETUP) + textwrap.dedent(code))
    return subprocess.run(
        [sys.executable, str(script), str(folder.parent / "scratch"), *covered],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"HOME": str(folder.parent)},
    )


@pytest.mark.long
def test_files_stay_as_they_are_and_the_script_finds_what_it_wrote(folder):
    before = fingerprint(folder)
    for name, code in OPERATIONS.items():
        done = run(folder, code)
        assert done.returncode == 0, (name, done.stdout, done.stderr)
        assert fingerprint(folder) == before, name
        subprocess.run(["rm", "-rf", str(folder.parent / "scratch")], check=True)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("os.rename('kept', 'moved')", "the folder {}/kept would have been moved"),
        (
            "sqlite3.connect('file:base.db', uri=True)",
            "{}/base.db would have been opened for writing",
        ),
        (
            "os.unlink('data.txt', dir_fd=os.open('.', os.O_RDONLY))",
            "{}/data.txt would have been changed or removed",
        ),
    ],
)
def test_what_is_not_redirected_stops_the_script(folder, code, said):
    before = fingerprint(folder)
    done = run(folder, code)
    assert done.returncode == 3, done.stderr
    assert done.stdout == f"stopped: {said.format(folder)}\n"
    assert fingerprint(folder) == before


def test_folder_that_no_overlay_covers_is_protected(folder):
    """For example on another node than the one on which the overlay was mounted."""
    done = run(folder, "open('data.txt', 'w').write('new')", str(folder))
    assert done.returncode == 0, done.stderr
    assert (folder / "data.txt").read_text() == "precious"


def test_removing_a_folder_that_another_rank_removes_meanwhile_is_no_error(tmp_path, monkeypatch):
    folder = tmp_path / "scratch"
    folder.mkdir()
    listdir = os.listdir

    def after_the_other_rank(path):
        shutil.rmtree(folder)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", after_the_other_rank)
    _remove_tree(folder, ignore_errors=True)
    assert not folder.exists()
