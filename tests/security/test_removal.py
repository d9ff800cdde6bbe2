"""Nothing is removed that does not prove to be Paceline's.

The source is searched for calls that remove by path.
"""

import ast
import os
from pathlib import Path

import numpy as np
import pytest

import paceline
from paceline.data import pack
from paceline.data.packing.export import convert
from paceline.security.files import UnsafeFileError
from paceline.security.removal import (
    MARK,
    TemporaryFolder,
    remove_from_marked,
    remove_marked,
    write_mark,
)

SOURCE = Path(paceline.__file__).parent
REMOVERS = {"rmtree", "unlink", "rmdir", "remove", "mkdtemp", "TemporaryDirectory", "removedirs"}
# Calls that remove one file or an empty folder, by module, with the reason.
RIGHT = {
    "checkpoint/old_checkpoints.py": {"os.unlink", "path.unlink", "path.rmdir"},  # after a proof
    "checkpoint/unfinished_folder.py": {"os.unlink"},  # the mark
    "data/format/shard_format.py": {"path.unlink", "part.unlink"},  # a file that is replaced
    "data/packing/background_file.py": {"self._path.unlink"},  # a file of the work folder
    "data/packing/export.py": {"one.unlink", "path.rmdir", "path.unlink"},  # --fresh
    "data/packing/shard_writer.py": {
        "(self.work / f'shard-{self._completing_number:05}.part').unlink",
        "part.unlink",
    },
    "data/packing/unfinished.py": {"path.unlink", "work.rmdir"},  # after the check of the mark
    "data/sources/folder_source.py": {"(work / LINE_ENDS_FILE).unlink", "part.unlink"},
    "data/sources/formats/lmdbs.py": {"(path / 'lock.mdb').unlink"},  # in a private folder
    "launch/monitor/rank_stacks.py": {"path.unlink"},  # in the job's folder
    "record/attach.py": {"note.unlink"},  # in the job's folder
    "record/experiments/lines/worker_profile.py": {"path.unlink"},  # in the job's folder
    "record/experiments/protect_files.py": {"folder.parent.rmdir"},  # removes an empty folder only
    "record/ring/ring.py": {"path.unlink", "self.path.unlink"},  # in the job's folder
    "study/environment/pack_environment.py": {"part.unlink"},  # a random name
    "study/probe/measure/storage.py": {"one.path.unlink"},  # in its temporary folder
}


def removals(tree: ast.AST) -> list[str]:
    """Return the functions called in a module that remove what a path names."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else ""
        name = name or (function.id if isinstance(function, ast.Name) else "")
        if name not in REMOVERS:
            continue
        owner = ast.unparse(function.value) if isinstance(function, ast.Attribute) else ""
        if name != "remove" or owner == "os":  # other objects have methods of that name
            found.append(ast.unparse(function))
    return found


def test_folders_are_removed_only_through_security_module():
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        if name.startswith("security/"):
            continue
        others = set(removals(ast.parse(path.read_text()))) - RIGHT.get(name, set())
        assert not others, f"{name}: {others}. HINT: paceline.security.removal"


def test_search_for_removals_finds_known_cases():
    tree = ast.parse(
        "shutil.rmtree(x)\nos.remove(x)\nx.unlink()\ntempfile.mkdtemp()\nhook.remove()"
    )
    assert removals(tree) == ["shutil.rmtree", "os.remove", "x.unlink", "tempfile.mkdtemp"]


def private(path, **files):
    """Create a folder of the user's with files that must stay."""
    path.mkdir()
    for name in ("thesis", "rank-00000.pt", *files):
        (path / name).write_text("private")
    return path


def content(path):
    return {one.name for one in path.iterdir()}


def swapped(place, name):
    """Let another folder of the user's have a name, as another user can in a shared folder."""
    os.rename(place, place.with_name("moved"))
    return private(place.with_name("private")).rename(place.parent / name)


def test_temporary_folder_that_was_replaced_stays(tmp_path):
    temporary = TemporaryFolder("run-", tmp_path)
    (temporary.path / "found.json").write_text("{}")
    (temporary.path / "record").mkdir()
    other = swapped(temporary.path, temporary.path.name)
    (other / "record").mkdir()
    temporary.remove_inside(temporary.path / "record")
    temporary.remove()
    assert content(other) == {"thesis", "rank-00000.pt", "record"}
    assert content(tmp_path / "moved") == set()  # the content of the temporary one was removed


def test_temporary_folder_with_folders_without_permissions_is_removed(tmp_path):
    with TemporaryFolder("run-", tmp_path) as folder:
        (folder / "work" / "work" / "x").mkdir(parents=True)
        (folder / "work" / "work").chmod(0)
        (folder / "link").symlink_to(tmp_path)
    assert content(tmp_path) == set()


def test_only_a_marked_folder_is_removed(tmp_path):
    other = private(tmp_path / "private")
    with pytest.raises(UnsafeFileError, match="was not created by Paceline"):
        remove_marked(other, "test")
    with pytest.raises(UnsafeFileError, match="was not created by Paceline"):
        remove_from_marked(other / "thesis", "test")
    assert content(other) == {"thesis", "rank-00000.pt"}
    opened = os.open(other, os.O_RDONLY)
    write_mark(opened, "another kind")
    with pytest.raises(UnsafeFileError, match="was not created by Paceline"):
        remove_marked(other, "test")
    write_mark(opened, "test")
    if os.geteuid() == 0:  # everyone can write a mark
        os.chown(other, 54321, 54321)
        with pytest.raises(UnsafeFileError, match="belongs to user 54321"):
            remove_marked(other, "test")
        os.chown(other, 0, 0)
    remove_from_marked(other / "thesis", "test")
    assert content(other) == {MARK, "rank-00000.pt"}
    remove_marked(other, "test")
    os.close(opened)
    assert content(tmp_path) == set()


@pytest.mark.parametrize("name", ["shard-00000.bin", "index.bin", "names.txt"])
@pytest.mark.parametrize("fresh", [False, True])
def test_pack_does_not_remove_files_of_others(tmp_path, name, fresh):
    folder = private(tmp_path / "out", **{name: ""})
    with pytest.raises(ValueError, match=f"contains {name}, which is not of a packed dataset"):
        pack(np.zeros((4, 2)), folder, fresh=fresh)
    assert (folder / name).read_text() == "private"
    assert pack(np.zeros((4, 2)), tmp_path / "other").meta.samples == 4
    assert pack(np.zeros((4, 2)), tmp_path / "other", fresh=True).meta.samples == 4


def test_pack_does_not_use_work_folder_of_others(tmp_path):
    (tmp_path / "out").mkdir()
    other = private(tmp_path / "out" / ".packing", lock="")
    with pytest.raises(ValueError, match="was not created by Paceline"):
        pack(np.zeros((4, 2)), tmp_path / "out")
    assert content(other) == {"thesis", "rank-00000.pt", "lock"}


@pytest.mark.parametrize("name", [".x.part", ".x.packed"])
def test_export_does_not_remove_folders_of_others(tmp_path, name):
    other = private(tmp_path / name)
    with pytest.raises(ValueError, match="was not created by Paceline"):
        convert(np.zeros((4, 2)), tmp_path / "x", "webdataset")
    assert content(other) == {"thesis", "rank-00000.pt"}


def test_export_does_not_replace_folder_with_files_of_others(tmp_path):
    convert(np.zeros((4, 2)), tmp_path / "x", "webdataset")
    convert(np.zeros((4, 2)), tmp_path / "x", "webdataset", fresh=True)
    (tmp_path / "x" / "notes.txt").write_text("private")  # formats ignore it
    with pytest.raises(ValueError, match=r"contains notes\.txt, which is not a file of the format"):
        convert(np.zeros((4, 2)), tmp_path / "x", "webdataset", fresh=True)
    assert (tmp_path / "x" / "notes.txt").read_text() == "private"
