"""Files in folders that other users can write to are opened through ``paceline.security``.

The tests search the source for modules that use such folders, and these modules for calls that
trust a path; and all modules for calls that remove what does not prove to be Paceline's.
"""

import ast
import functools
import os
import re
from pathlib import Path

import pytest
from imports import texts

import paceline
from paceline.security.files import UnsafeFileError
from paceline.security.removal import (
    MARK,
    TemporaryFolder,
    remove_from_marked,
    remove_marked,
    write_mark,
)

SOURCE = Path(paceline.__file__).parent
# How a module reaches /dev/shm, /tmp, node-local storage, or the job folder in one of them.
PLACES = {"/dev/shm", "/tmp", "PACELINE_RECORD", "PACELINE_STAGE", "paceline-stage"}
MAKERS = {"gettempdir", "mkdtemp"}
# Modules that get such a folder from one of those modules.
HANDED = {
    "data/shards.py",
    "data/staging/fetch_shards.py",
    "data/staging/peer_transfer.py",
    "data/staging/shard_server.py",
    "launch/host_agent.py",
    "launch/monitor/live_records.py",
    "launch/monitor/running_jobs.py",
    "launch/monitor/progress.py",
    "launch/ranks/fork_server.py",
    "launch/job_folder.py",
    "record/ring/recorder.py",
    "record/ring/ring.py",
    "record/ring/stack_sampler.py",
    "record/ring/tail.py",
}
# Calls that are safe, by module, with the reason.
RIGHT = {
    "compat/horovod/torch/elastic/commits.py": {
        "open(new.fd, 'wb', closefd=False)": "a descriptor of security's",
        "open(self._folder.open_file(name), 'rb')": "a descriptor of security's",
    },
    "data/staging/shard_server.py": {
        "open(self._folder.open_file(shard.file), 'rb')": "a descriptor of security's",
    },
    "data/staging/peer_transfer.py": {"file.truncate()": "of an open file"},
    "data/staging/fetch_shards.py": {
        "open(new.fd, 'wb', buffering=0, closefd=False)": "a descriptor of security's",
    },
    "data/shards.py": {
        "open(_open(path), 'rb')": "the origin, whoever owns it; regular files only",
    },
    "data/staging/stage.py": {"touch(folder)": "its own function"},
    "data/staging/staged_sets.py": {
        "touch(folder)": "its own function",
        "root.mkdir(parents=True, exist_ok=True)": "what leads to the folder, not the folder",
    },
    "knobs/model.py": {"folder.mkdir(448)": "PyTorch's cache, which is checked afterwards"},
    "launch/job.py": {"path.read_bytes()": "the script"},
    "launch/ranks/fork_server.py": {
        "open(os.memfd_create('paceline-rank'), 'wb+')": "a file without a name",
        "open(parameters, 'rb')": "its descriptor",
    },
    "launch/single_node.py": {
        "job.summary.write_text(report.to_json())": "the user's file, of --json"
    },
    "launch/monitor/live_records.py": {"UNIX_SOCKETS_FILE.open('rb')": "the kernel's"},
    "launch/job_folder.py": {
        "target.mkdir(parents=True, exist_ok=True)": "the user's folder, of --record",
    },
    "launch/host_agent.py": {
        "os.open(os.devnull, os.O_RDWR)": "a device",
        "_UNIX_SOCKETS.open('rb')": "the kernel's",
    },
    "launch/ranks/rank_process.py": {
        "os.open(os.devnull, os.O_RDONLY)": "a device",
        "open(path, 'rb')": "the script",
    },
    "launch/monitor/rank_stacks.py": {
        "path.unlink(missing_ok=True)": "in the job's folder, which is this user's alone",
        "running.remove(reading)": "a list",
    },
    "observe/attach.py": {"note.unlink(missing_ok=True)": "this user's own file, just read"},
    "record/experiments/protected_run.py": {"folder.parent.rmdir()": "only an empty folder"},
    "record/ring/ring.py": {
        "path.unlink(missing_ok=True)": "in the job's folder",
        "self.path.unlink(missing_ok=True)": "its own",
    },
    "record/ring/stack_sampler.py": {"open(fd, 'a')": "a descriptor of security's"},
    "study/environment/check_packed.py": {
        "os.open(device, os.O_RDWR)": "a device",
    },
    "study/trials.py": {
        "self._changes.remove()": "a temporary folder of security's",
        "self._temporary.remove()": "a temporary folder of security's",
    },
}
BELIEVE = {
    "open", "mkdir", "makedirs", "rmtree", "unlink", "rmdir", "remove", "touch", "read_text",
    "read_bytes", "write_text", "write_bytes", "copyfile", "symlink_to", "truncate", "chmod",
}  # fmt: skip
SAFE = (
    *("Folder.", "folder.remove", "opened.remove", "own.remove", "job_folder.remove"),
    *("origin.open", "self._origin.open", "open(origin.open", "open(self._origin.open"),
)
READ_ONLY = ("'/proc", "f'/proc", "'/sys")  # owned by the kernel


def touches(tree: ast.AST) -> bool:
    """Whether a module reaches a shared folder directly."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in PLACES:
            return True
        if isinstance(node, ast.Attribute) and node.attr in MAKERS:
            return True
    return False


def believing(tree: ast.AST) -> list[str]:
    """Return the calls that open, create or remove what a path names."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = name or (node.func.id if isinstance(node.func, ast.Name) else "")
        if name not in BELIEVE:
            continue
        text = ast.unparse(node)
        if not text.startswith(SAFE) and not any(p in text for p in READ_ONLY):
            found.append(text)
    return found


@functools.cache
def modules() -> dict[str, ast.AST]:
    found = {}
    words = re.compile("|".join(PLACES | MAKERS))
    for name, text in texts(SOURCE):
        if name.startswith("security/") or not (name in HANDED or words.search(text)):
            continue
        tree = ast.parse(text)
        if name in HANDED or touches(tree):
            found[name] = tree
    return found


@pytest.mark.parametrize("name", modules())
def test_shared_folders_are_accessed_only_through_security_module(name):
    tree, right = modules()[name], RIGHT.get(name, {})
    if right is not None:
        bare = [text for text in believing(tree) if text not in right]
        assert not bare, f"{name}: {bare}. HINT: paceline.security.files or folders"


def test_unsafe_path_search_finds_known_cases():
    tree = ast.parse("import os, shutil\nx = Path('/dev/shm') / 'job'\nshutil.rmtree(x)\nopen(x)")
    assert touches(tree)
    assert believing(tree) == ["shutil.rmtree(x)", "open(x)"]
    assert not believing(ast.parse("Folder.open(x); open('/proc/self/stat')"))


REMOVERS = {"rmtree", "unlink", "rmdir", "remove", "mkdtemp", "TemporaryDirectory", "removedirs"}
# Calls that remove one file or an empty folder, by module, with the reason.
RIGHT_REMOVALS = {
    "checkpoint/unfinished_folder.py": {"os.unlink", "path.unlink", "path.rmdir"},  # after a proof
    "data/format/shard_format.py": {"path.unlink", "part.unlink"},  # a file that is replaced
    "data/packing/export.py": {"file.unlink", "path.rmdir", "path.unlink"},  # --fresh
    "data/packing/shard_writer.py": {  # files of the work folder
        "self._path.unlink",
        "(self.work / f'shard-{self._completing_number:05}.part').unlink",
        "part.unlink",
    },
    "data/packing/unfinished.py": {"path.unlink", "work.rmdir"},  # after the check of the mark
    "data/sources/folder_source.py": {"(work / LINE_ENDS_FILE).unlink", "part.unlink"},
    "data/sources/formats/lmdbs.py": {"(path / 'lock.mdb').unlink"},  # in a private folder
    "launch/monitor/rank_stacks.py": {"path.unlink"},  # in the job's folder
    "observe/attach.py": {"note.unlink"},  # in the job's folder
    "record/experiments/lines/rank_profile.py": {"path.unlink"},  # in the job's folder
    "record/experiments/protected_run.py": {"folder.parent.rmdir"},  # removes an empty folder only
    "record/ring/ring.py": {"path.unlink", "self.path.unlink"},  # in the job's folder
    "study/environment/check_packed.py": {"part.unlink"},  # a random name
    "study/probe/measure/storage.py": {"file.path.unlink"},  # in its temporary folder
    "study/tune/journal.py": {"os.unlink"},  # the link that is Optuna's lock
    "study/tune/trial_folder.py": {"self.end_file.unlink"},  # in the trial's folder
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
    words = re.compile("|".join(REMOVERS))
    for name, text in texts(SOURCE):
        if name.startswith("security/") or not words.search(text):
            continue
        others = set(removals(ast.parse(text))) - RIGHT_REMOVALS.get(name, set())
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
