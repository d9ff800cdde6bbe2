"""`paceline check --pack-env` on a small environment.

Its torch consists of some hundred small modules. The command leaves its output file or nothing.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ranks
from needs import need

import paceline
from paceline.study.environment.check_packed import CannotMountError, choose_format, mount_file
from paceline.study.environment.check_packed import pack as packed
from paceline.study.environment.find_environment import Environment
from paceline.study.probe.measure.import_time import import_torch, timed

MODULES = 200
TORCH = f"""
import importlib, os, time
if os.environ.get("SLEEP_IN", "nowhere") in __file__:
    print("some words", flush=True)
    time.sleep(float(os.environ["SLEEP"]))
for number in range({MODULES}):
    importlib.import_module(f"torch.m{{number}}")
"""
SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Create an environment that gets Paceline and its dependencies from the tests' environment."""
    folder = tmp_path_factory.mktemp("environment") / "small"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    package = folder / SITE / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(TORCH)
    for number in range(MODULES):
        (package / f"m{number}.py").write_text(f"def f{number}():\n    return {number}\n" * 20)
    source = Path(paceline.__file__).parent.parent
    libraries = Path(pytest.__file__).parent.parent
    (folder / SITE / "others.pth").write_text(f"{source}\n{libraries}\n")
    return folder


@pytest.fixture(scope="module")
def squashfs():
    tools = {"mksquashfs": "squashfs-tools", "squashfuse": "squashfuse"}
    missing = [f"{tool} ({package})" for tool, package in tools.items() if not shutil.which(tool)]
    need(missing, "make test-packages")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        need(["/dev/fuse, or root"])


def tools_of(folder, *names):
    """Return a PATH with only these tools."""
    tools = folder / "only"
    tools.mkdir()
    for name in names:
        (tools / name).symlink_to(shutil.which(name))
    return str(tools)


def words(environment, *more):
    return [environment / "bin/python", "-P", "-m", "paceline", "check", "--pack-env", *more]


def around(temporary, **variables):
    temporary.mkdir(exist_ok=True)
    own = {"TMPDIR": str(temporary), "NO_COLOR": "1", "COLUMNS": "200"}
    return ranks.environment(**own, PYTHONDONTWRITEBYTECODE="", **variables)


def pack(environment, folder, *more, **variables):
    """Run the command in a folder; check that nothing is left in the temporary folder."""
    temporary = folder.parent / f"{folder.name}-temporary"
    done = subprocess.run(
        list(map(str, words(environment, *more))),
        cwd=folder,
        env=around(temporary, **variables),
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )
    nothing_left(temporary)
    return done


def nothing_left(temporary):
    assert list(temporary.iterdir()) == []
    assert str(temporary) not in Path("/proc/self/mountinfo").read_text()


def test_environment_is_packed_mounted_and_compared(environment, tmp_path, squashfs):
    done = pack(environment, tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    assert "packing" in done.stderr
    found = json.loads(done.stdout)
    file = tmp_path / "env.squashfs"
    assert [one.name for one in tmp_path.iterdir()] == [file.name]
    assert found["file"] == str(file)
    assert found["file_bytes"] == file.stat().st_size < found["bytes"]
    assert found["files"] > 2 * MODULES  # __pycache__ is packed as well
    assert found["how"].startswith("mounted by")
    assert found["calls"] > MODULES
    for load in (found["as_it_is"], found["load"]):
        for figure in (load["first"], load["repeated"], load["busy"]):
            assert 0.005 < figure["low"] <= figure["median"] <= figure["high"] < 10
            assert figure["n"] == 3
    assert 0 < found["place"]["median"] < 5
    seconds = found["place"]["median"] + found["load"]["first"]["median"]
    assert found["faster"] == pytest.approx(found["as_it_is"]["first"]["median"] / seconds)
    assert ("not worth it" in found["sentence"]) is not found["worth_it"]
    base, others = found["outside"]
    assert sys.base_prefix in base
    assert str(Path(paceline.__file__).parent.parent) in others

    before = file.read_bytes()
    again = pack(environment, tmp_path)
    assert again.returncode == 2
    assert "the file exists, and is never overwritten. HINT" in again.stderr
    assert file.read_bytes() == before


def test_tar_is_unpacked_and_node_commands_are_printed(environment, tmp_path):
    done = pack(environment, tmp_path, "--packed", "my env.tar", PYTHONPATH="/nowhere")
    assert done.returncode == 0, done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["my env.tar"]
    for said in ("unpacked by tar", "to unpack", "repeated", "file system", "The first import"):
        assert said in done.stdout
    assert f"tar -xf '{tmp_path}/my env.tar' -C /tmp/env" in done.stdout
    assert "/tmp/env/bin/python -P -m paceline run" in done.stdout
    assert "folders of PYTHONPATH: /nowhere" in done.stdout
    (tmp_path / "there").mkdir()
    subprocess.run(["tar", "-xf", "my env.tar", "-C", "there"], cwd=tmp_path, check=True)
    interpreter = str(tmp_path / "there/bin/python")
    assert import_torch(1, interpreter, count=False).file.startswith(str(tmp_path / "there"))


@pytest.mark.long
def test_squashfs_is_unpacked_or_only_written_if_mount_is_impossible(
    environment, tmp_path, squashfs
):
    tools = tools_of(tmp_path, "mksquashfs", "unsquashfs")
    (tmp_path / "here").mkdir()
    done = pack(environment, tmp_path / "here", "--packed", "a.sqsh", PATH=tools)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "a.sqsh can't be mounted on this host: squashfuse is not installed; mount" in said
    assert "It was unpacked instead" in said
    assert "unpacked by unsquashfs" in said

    Path(tools, "unsquashfs").unlink()
    done = pack(environment, tmp_path / "here", "--packed", "b.sqsh", PATH=tools)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "b.sqsh can't be unpacked on this host: unsquashfs is not installed. It was not" in said
    assert "its effect can't be measured on this machine" in said
    assert {one.name for one in (tmp_path / "here").iterdir()} == {"a.sqsh", "b.sqsh"}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_root_mounts_without_squashfuse(tmp_path, squashfs, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/file").write_text("words")
    make = ["mksquashfs", str(tmp_path / "folder"), str(tmp_path / "a.sqsh"), "-quiet"]
    subprocess.run([*make, "-no-progress"], check=True)
    monkeypatch.setenv("PATH", tools_of(tmp_path, "mount", "umount"))
    try:
        with mount_file(tmp_path / "a.sqsh") as place:
            assert place.how == "mounted by the kernel"
            assert (place.folder / "file").read_text() == "words"
    except CannotMountError as why:
        pytest.skip(f"this container may not mount: {why}")
    assert not place.folder.exists()


MAKES = """#!/bin/sh
[ "$1" = -help ] && exit 0
echo some bytes > "$2"
"""


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (
            "echo 'FATAL ERROR: bad disk' >&2; exit 1",
            "ended with exit code 1: FATAL ERROR: bad disk. HINT",
        ),
        ("kill -9 $$", "was killed by signal 9: no output. HINT"),
    ],
)
def test_failing_mksquashfs_leaves_no_file(environment, tmp_path, monkeypatch, then, said):
    tools, here = tmp_path / "tools", tmp_path / "here"
    tools.mkdir()
    here.mkdir()
    (tools / "mksquashfs").write_text(MAKES + then)
    (tools / "mksquashfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    with pytest.raises(ValueError, match=rf"env\.sqsh can't be written: mksquashfs {said}"):
        packed(Environment(environment, 400, 1 << 20, ()), here / "env.sqsh", lambda part: None)
    assert list(here.iterdir()) == []


@pytest.mark.long
def test_signal_leaves_no_mount_and_no_partial_file(environment, tmp_path, squashfs):
    tools, temporary = tmp_path / "tools", tmp_path / "temporary"
    tools.mkdir()
    temporary.mkdir()
    (tools / "mksquashfs").write_text(MAKES + "exec sleep 60")
    (tools / "mksquashfs").chmod(0o755)
    packing = {"PATH": f"{tools}:{os.environ['PATH']}"}
    importing = {"SLEEP_IN": "paceline-pack-", "SLEEP": "60"}
    for step, number, variables, left in (
        ("packing", signal.SIGTERM, packing, []),
        ("mounted", signal.SIGINT, importing, ["env.sqsh"]),
    ):
        here = tmp_path / step
        here.mkdir()
        process = subprocess.Popen(
            list(map(str, words(environment, "--packed", "env.sqsh"))),
            cwd=here,
            env=around(temporary, **variables),
            stderr=subprocess.DEVNULL,
        )

        def begun(step=step, here=here):
            if step == "packing":
                return list(here.glob(".env.sqsh.*.part"))
            return str(temporary) in Path("/proc/self/mountinfo").read_text()

        try:
            ranks.wait_until(begun)
            process.send_signal(number)
            assert process.wait(timeout=20) == 128 + number
        finally:
            process.kill()
        assert [one.name for one in here.iterdir()] == left
        nothing_left(temporary)


def test_unsupported_environments_are_rejected_with_hint(environment, tmp_path):
    libraries = Path(pytest.__file__).parent.parent
    folders = f"{Path(paceline.__file__).parent.parent}:{libraries}"
    done = pack(Path(sys.base_prefix), tmp_path, PYTHONPATH=folders)
    assert done.returncode == 2
    assert "is not in a virtual environment" in done.stderr
    assert "HINT: python -m venv" in done.stderr

    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").touch()
    done = pack(environment, tmp_path, "--packed", "a.tar", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert f"torch is imported from {tmp_path}/torch/__init__.py, outside of" in done.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["torch"]

    inside = environment / "env.tar"
    done = pack(environment, tmp_path, "--packed", inside)
    assert "is inside the environment to pack. HINT" in done.stderr
    done = pack(environment, tmp_path, "--packed", "none/env.tar")
    assert "none is not a folder. HINT" in done.stderr
    done = pack(environment, tmp_path, "--packed", "env.zip")
    assert "must end in .squashfs, .sqsh or .tar; this is 'env.zip'. HINT" in done.stderr


def test_default_format_without_mksquashfs_is_tar(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert choose_format(None) == Path.cwd() / "env.tar"
    with pytest.raises(ValueError, match=r"mksquashfs is not installed\. HINT: .*env\.tar"):
        choose_format(Path("env.sqsh"))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_read_only_and_full_folder_are_reported(environment, tmp_path):
    @contextlib.contextmanager
    def tmpfs(options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tmp_path)]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("this container may not mount")
        try:
            yield
        finally:
            subprocess.run(["umount", str(tmp_path)], check=True)

    with tmpfs("ro"):
        done = pack(environment, tmp_path, "--packed", "env.tar")
        assert done.returncode == 2
        assert "can't be written: Read-only file system. HINT: choose a folder" in done.stderr
    with tmpfs("size=200k"):
        done = pack(environment, tmp_path, "--packed", "env.tar")
        assert done.returncode == 2
        assert " MB free, and the environment has " in done.stderr
        assert "HINT: make room" in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_import_wait_time_is_not_cpu_time(environment, monkeypatch):
    interpreter = str(environment / "bin/python")
    monkeypatch.setenv("SLEEP_IN", str(environment))
    monkeypatch.setenv("SLEEP", "0.5")
    found = timed(interpreter)
    assert found.file == str(environment / SITE / "torch/__init__.py")
    assert found.seconds > 0.5
    assert 0 < found.busy_s < found.seconds - 0.45
    assert found.opened > MODULES
