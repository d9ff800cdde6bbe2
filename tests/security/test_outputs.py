"""Output files that the user names: devices and pipes are written to, others' links replaced."""

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import ranks
import users
from needs import need
from users import ATTACKER

from paceline.cost.machine.machine_file import HostFacts, Machine
from paceline.cost.machine.machine_file import save as save_machine
from paceline.knobs import settings
from paceline.knobs.settings import Setting
from paceline.report.page.write_page import save
from paceline.security.files import UnsafeFileError
from paceline.security.outputs import open_output, output_target, write_output

WRITERS = {
    "page": lambda path: save("<html>", path),
    "machine": lambda path: save_machine(Machine("2026-01-31", (HostFacts("a"),)), path),
    "settings": lambda path: settings.write_settings(path, {"threads": Setting(2)}, {}),
}
writers = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


def read_in_thread(path):
    """Read a FIFO until its writer closes it."""
    found = []
    thread = threading.Thread(target=lambda: found.append(path.read_bytes()), daemon=True)
    thread.start()
    return found, thread


@writers
def test_output_to_own_fifo(tmp_path, write):
    path = tmp_path / "out"
    os.mkfifo(path)
    found, thread = read_in_thread(path)
    write(path)
    thread.join(10.0)
    assert found
    assert len(found[0]) > 5
    assert path.is_fifo()
    assert list(tmp_path.iterdir()) == [path]


@writers
def test_output_to_device_keeps_the_device(tmp_path, write):
    need(users.missing())
    path = tmp_path / "null"
    os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    write(path)
    assert path.is_char_device()
    assert list(tmp_path.iterdir()) == [path]


@writers
def test_output_follows_own_link(tmp_path, write):
    link, target = tmp_path / "link", tmp_path / "there" / "target"
    target.parent.mkdir()
    link.symlink_to("there/target")
    write(link)
    assert link.is_symlink()
    assert target.stat().st_size > 5
    assert list(target.parent.iterdir()) == [target]


@writers
@pytest.mark.parametrize("through", [False, True], ids=["named", "behind a link"])
def test_output_replaces_link_of_another_user(tmp_path, write, through):
    need(users.missing())
    path, victim = tmp_path / "theirs", tmp_path / "victim"
    victim.write_text("old")
    path.symlink_to(victim)
    os.lchown(path, ATTACKER, ATTACKER)
    own = tmp_path / "own"
    own.symlink_to(path)
    write(own if through else path)
    assert victim.read_text() == "old"
    assert not path.is_symlink()
    assert path.stat().st_size > 5
    assert own.is_symlink()


def test_output_replaces_fifo_of_another_user(tmp_path):
    need(users.missing())
    path = tmp_path / "out"
    os.mkfifo(path)
    os.chown(path, ATTACKER, ATTACKER)
    write_output(path, "text")
    assert path.read_text() == "text"


def test_output_to_terminal():
    outer, inner = os.openpty()
    try:
        write_output(Path(os.ttyname(inner)), "shown")
        assert os.read(outer, 100) == b"shown"
    finally:
        os.close(outer)
        os.close(inner)


STDOUT = """
import sys
from pathlib import Path
from paceline.security.outputs import write_output
print("before", flush=True)
write_output(Path(sys.argv[1]), "output\\n")
print("after", flush=True)
"""


@pytest.mark.parametrize("manner", ["pipe", "file", "socket"])
def test_output_to_dev_stdout_keeps_order(tmp_path, manner):
    link = tmp_path / "stdout"  # as /dev/stdout
    link.symlink_to("/proc/self/fd/1")
    words = [sys.executable, "-c", STDOUT, str(link)]
    if manner == "pipe":
        said = subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout
    elif manner == "file":
        with (tmp_path / "said").open("wb") as file:
            subprocess.run(words, stdout=file, check=True)
        said = (tmp_path / "said").read_bytes()
    else:
        near, far = socket.socketpair()
        with near, far:
            subprocess.run(words, stdout=far, check=True)
            said = near.recv(1000)
    assert said == b"before\noutput\nafter\n"


def test_invalid_output_path_is_rejected_and_unchanged(tmp_path):
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        with pytest.raises(UnsafeFileError, match="is a socket"):
            write_output(path, "text")
        assert path.is_socket()
    with pytest.raises(IsADirectoryError):
        write_output(tmp_path, "text")
    (tmp_path / "one").symlink_to("two")
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        output_target(tmp_path / "one")
    with pytest.raises(OSError, match="Bad file descriptor"):
        write_output(tmp_path / "/proc/self/fd/999999", "text")


def test_failed_write_keeps_old_file_and_permissions(tmp_path):
    path = tmp_path / "out"
    path.write_text("old")
    path.chmod(0o600)

    def fail():
        with open_output(path) as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert path.read_text() == "old"
    write_output(path, "new \udcff")
    assert path.read_text() == "new \\udcff"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


TRAIN = """
    import paceline, torch
    world = paceline.init(progress=False)
    model = torch.nn.Linear(4, 1)
    model, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(5):
        world.backward(model(torch.ones(1, 4)).mean())
        world.step(optimizer)
"""


@pytest.mark.parametrize(
    "launcher", ["paceline --json S", "paceline --json S --record R", "python"]
)
def test_json_summary_replaces_link_of_another_user(tmp_path, launcher):
    need(users.missing())
    summary, victim = tmp_path / "summary.json", tmp_path / "victim"
    victim.write_text("old")
    summary.symlink_to(victim)
    os.lchown(summary, ATTACKER, ATTACKER)
    words = launcher.replace(" S", f" {summary}").replace(" R", f" {tmp_path / 'record'}")
    own = {"PACELINE_SUMMARY": str(summary)} if launcher == "python" else {}
    ranks.run(ranks.write(tmp_path, TRAIN), ranks=1, launcher=words, **own)
    assert victim.read_text() == "old"
    assert json.loads(summary.read_text())["steps"]
