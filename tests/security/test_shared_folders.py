"""Files in folders that other users can write to are opened through ``paceline.security``.

The tests search the source for modules that use such folders, and these modules for calls that
trust a path.
"""

import ast
import functools
from pathlib import Path

import pytest

import paceline

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
    "launch/monitor/partial_record.py",
    "launch/monitor/progress.py",
    "launch/monitor/running_jobs.py",
    "launch/ranks/fork_server.py",
    "launch/records/copy_records.py",
    "launch/records/job_folder.py",
    "record/ring/recorder.py",
    "record/ring/ring.py",
    "record/ring/stack_sampler.py",
    "record/ring/tail.py",
}
# Calls that are safe, by module, with the reason.
RIGHT = {
    "data/staging/shard_server.py": {
        "open(folder.open_file(name), 'rb')": "a descriptor of security's",
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
    "knobs/compute.py": {"folder.mkdir(448)": "PyTorch's cache, which is checked afterwards"},
    "launch/job.py": {"path.read_bytes()": "the script"},
    "launch/ranks/fork_server.py": {
        "open(os.memfd_create('paceline-rank'), 'wb+')": "a file without a name",
        "open(parameters, 'rb')": "its descriptor",
    },
    "launch/single_node.py": {
        "job.summary.write_text(report.to_json())": "the user's file, of --json"
    },
    "launch/monitor/live_records.py": {"UNIX_SOCKETS_FILE.open('rb')": "the kernel's"},
    "launch/records/job_folder.py": {
        "target.mkdir(parents=True, exist_ok=True)": "the user's folder, of --record",
    },
    "launch/host_agent.py": {
        "os.open(os.devnull, os.O_RDWR)": "a device",
    },
    "launch/ranks/rank_process.py": {
        "os.open(os.devnull, os.O_RDONLY)": "a device",
        "open(path, 'rb')": "the script",
    },
    "launch/monitor/rank_stacks.py": {
        "path.unlink(missing_ok=True)": "in the job's folder, which is this user's alone",
    },
    "record/attach.py": {"note.unlink(missing_ok=True)": "this user's own file, just read"},
    "record/experiments/protect_files.py": {"folder.parent.rmdir()": "only an empty folder"},
    "record/ring/ring.py": {
        "path.unlink(missing_ok=True)": "in the job's folder",
        "self.path.unlink(missing_ok=True)": "its own",
    },
    "record/ring/stack_sampler.py": {"open(fd, 'a')": "a descriptor of security's"},
    "study/environment/mount_packed.py": {
        "os.open(device, os.O_RDWR)": "a device",
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
        text = ast.unparse(node)
        if name in BELIEVE and not text.startswith(SAFE) and not any(p in text for p in READ_ONLY):
            found.append(text)
    return found


@functools.cache
def modules() -> dict[str, ast.AST]:
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name, tree = str(path.relative_to(SOURCE)), ast.parse(path.read_text())
        if not name.startswith("security/") and (name in HANDED or touches(tree)):
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
