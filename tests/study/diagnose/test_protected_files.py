"""Files of the user stay as they are while a script runs as an experiment: it is stopped before it
changes one that no overlay covers.
"""

import hashlib
import os
import sqlite3
import subprocess
import sys
import textwrap

import numpy as np
import pytest

h5py = pytest.importorskip("h5py")

SETUP = """
    import os, shutil, sqlite3, sys, tempfile
    from pathlib import Path
    from paceline.record.experiments.protect_files import FileProtection

    class Stopped(BaseException):
        pass

    def stop(why):
        raise Stopped(why)

    own = sys.argv[1]
    FileProtection(stop, sys.argv[2:], own).install()
    for line in sys.stdin.read().splitlines():
        try:
            exec(line)
            print("ran:", line)
        except Stopped as end:
            print(end)
"""
WRITTEN, CHANGED, CREATED = "written", "changed or removed", "created"
STOPPED = {
    "open('data.txt', 'w')": ("data.txt", WRITTEN),
    "Path('data.txt').open('a')": ("data.txt", WRITTEN),
    "open('data.txt', 'r+b')": ("data.txt", WRITTEN),
    "os.open('data.txt', os.O_RDWR)": ("data.txt", WRITTEN),
    "os.open('one.bin', os.O_RDWR, dir_fd=os.open('kept', os.O_RDONLY))": ("kept/one.bin", WRITTEN),
    "open('new.txt', 'x')": ("new.txt", CREATED),
    "os.truncate('data.txt', 3)": ("data.txt", CHANGED),
    "os.replace(own + '/x', 'data.txt')": ("data.txt", CHANGED),
    "os.replace(own + '/x', 'new.txt')": ("new.txt", CREATED),
    "shutil.move('data.txt', own)": ("data.txt", CHANGED),
    "os.rename('kept', 'moved')": ("kept", CHANGED),
    "os.remove('data.txt')": ("data.txt", CHANGED),
    "os.unlink('one.bin', dir_fd=os.open('kept', os.O_RDONLY))": ("kept/one.bin", CHANGED),
    "shutil.rmtree('kept')": ("kept/one.bin", CHANGED),
    "os.rmdir('empty')": ("empty", CHANGED),
    "os.makedirs('out/deep')": ("out", CREATED),
    "os.symlink('data.txt', 'latest')": ("latest", CREATED),
    "os.link('data.txt', 'again')": ("again", CREATED),
    "os.chmod('data.txt', 0o600)": ("data.txt", CHANGED),
    "os.utime('data.txt', (1, 1))": ("data.txt", CHANGED),
    "import torch; torch.save({}, Path('model.pt'))": ("model.pt", WRITTEN),
    "torch.save({}, f='new.pt')": ("new.pt", CREATED),
    "import numpy as np; np.save('array.npy', np.ones(3))": ("array.npy", WRITTEN),
    "np.memmap('array.npy', mode='r+')": ("array.npy", WRITTEN),
    "import h5py; h5py.File('table.h5', 'a')": ("table.h5", WRITTEN),
    "from safetensors.torch import save_file; save_file({}, 'new.st')": ("new.st", CREATED),
    "sqlite3.connect('base.db')": ("base.db", "opened for writing"),
    "sqlite3.connect('file:base.db', uri=True)": ("base.db", "opened for writing"),
    "open(own + '/link', 'w')": ("{own}/link", WRITTEN),
}
# What changes no file of the user, or fails as it does without protection.
HARMLESS = (
    "assert open('data.txt').read() == 'precious'",
    "assert torch.load('model.pt')['step'] == -1 and np.load('array.npy').sum() == 0",
    "assert h5py.File('table.h5')['x'][0] == 1",
    "sqlite3.connect('file:base.db?mode=ro', uri=True).execute('select * from runs')",
    "sqlite3.connect(':memory:')",
    "os.makedirs('kept', exist_ok=True)",
    "open('/dev/null', 'w').write('x')",
    "tempfile.NamedTemporaryFile().write(b'x')",
    "open(own + '/y', 'w').write('x'); os.remove(own + '/y'); os.mkdir(own + '/z')",
    "os.makedirs(Path.home() / '.cache/mine/of')",
    "import beside",
)


@pytest.fixture
def folder(tmp_path):
    import torch

    folder = tmp_path / "home" / "work"
    (folder / "kept").mkdir(parents=True)
    (folder / "empty").mkdir()
    (folder / "data.txt").write_text("precious")
    (folder / "kept" / "one.bin").write_bytes(b"\x01" * 4)
    np.save(folder / "array.npy", np.zeros(3))
    torch.save({"step": -1}, folder / "model.pt")
    with h5py.File(folder / "table.h5", "w") as file:
        file["x"] = [1, 2]
    base = sqlite3.connect(folder / "base.db")
    base.execute("create table runs (number)")
    base.close()
    own = tmp_path / "own"
    own.mkdir()
    (own / "x").write_text("x")
    (own / "link").symlink_to(folder / "data.txt")
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


def run(folder, lines):
    """Run lines in a process that protects files; return what it prints for each.

    The folder counts as covered, as on a node on which the overlay could not be mounted.
    """
    script = folder.parents[1] / "script" / "script.py"
    script.parent.mkdir()
    (script.parent / "beside.py").write_text("x = 1")
    script.write_text(textwrap.dedent(SETUP))
    done = subprocess.run(
        [sys.executable, str(script), str(folder.parents[1] / "own"), str(folder)],
        input="\n".join(lines),
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"HOME": str(folder.parent), "PYTHONDONTWRITEBYTECODE": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_script_is_stopped_before_it_changes_a_file_or_folder(folder):
    before = fingerprint(folder)
    said = run(folder, [*STOPPED, *HARMLESS])
    own = folder.parents[1] / "own"
    expected = [
        f"{folder / name.format(own=own)} would have been {what}" for name, what in STOPPED.values()
    ]
    assert said == expected + [f"ran: {line}" for line in HARMLESS]
    assert fingerprint(folder) == before
