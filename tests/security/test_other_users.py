"""Files prepared by another user of the node have no effect.

The tests use two real user IDs, a victim's and an attacker's, in the real /dev/shm.
"""

import json
import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import ranks
import users
from records import Rank
from users import ATTACKER

from paceline.launch import job_folder

SHM = Path("/dev/shm")
VICTIM = 200_000 + os.getpid() % 100_000  # differs between test processes
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
SCRIPT = "import time, sys; print('trained'); time.sleep(float(sys.argv[1]))"


@pytest.fixture
def place():
    """Create a folder that all users can write to, as /tmp is."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-users-", dir="/tmp"))
    folder.chmod(0o1777)
    (folder / "train.py").write_text(SCRIPT)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def bait():
    """Return a function that makes a job folder of the attacker's with the victim's name."""
    made = []

    def make(**files):
        path = SHM / f"paceline-job-{VICTIM}-{secrets.token_hex(4)}"
        path.mkdir()
        os.chown(path, ATTACKER, ATTACKER)
        path.chmod(0o777)
        for name, content in files.items():
            file = path / name.replace("_", ".")
            if isinstance(content, Path):
                file.symlink_to(content)
            elif content is None:
                os.mkfifo(file)
            else:
                file.write_text(content)
            os.chown(file, ATTACKER, ATTACKER, follow_symlinks=False)
            if not file.is_symlink():
                file.chmod(0o666)
        made.append(path)
        return path

    yield make
    for path in made:
        shutil.rmtree(path, ignore_errors=True)


def paceline(*words):
    return [sys.executable, "-m", "paceline", *words]


def secret_of(user, place, text="private"):
    """Create a folder of the user's with a file that only this user can read."""
    folder = users.folder(place / f"home-{user}", user)
    (folder / "thesis").write_text(text)
    os.chown(folder / "thesis", user, user)
    (folder / "thesis").chmod(0o600)
    return folder


def test_start_ignores_folders_and_locks_of_another_user(place, bait):
    home, loot = secret_of(VICTIM, place), users.folder(place / "loot", ATTACKER, 0o777)
    said_sent = json.dumps({"target": str(home), "sent": True})
    baits = [
        bait(lock="", keep_json=said_sent),  # asks to remove what it names
        bait(lock="", keep_json=json.dumps({"target": str(loot)}), x_ring=home / "thesis"),
        bait(lock="", keep_json=None),  # a FIFO
        bait(lock=None),
        bait(lock=home / "made-by-a-link"),
    ]
    link = SHM / f"paceline-job-{VICTIM}-link"  # to a folder owned by the victim
    link.symlink_to(home)
    try:
        done = users.run(
            VICTIM, *paceline("run", "-n", "1", place / "train.py", 0), cwd=place, timeout=60
        )
    finally:
        link.unlink()
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert (home / "thesis").read_text() == "private"
    assert os.listdir(home) == ["thesis"]
    assert os.listdir(loot) == []
    for path in baits:
        assert path.exists()
        said = f"{path} belongs to user {ATTACKER}: Paceline does not use or remove it"
        assert done.stderr.count(said) == 1
    assert done.stderr.count(f"{link} is a symbolic link and no folder") == 1


def test_top_ignores_fake_job_of_another_user(place, bait):
    about = {"run": f"r{ESCAPE}", "command": [f"x{ESCAPE}"], "started": 1.0, "host": "h"}
    fake = bait(lock="", run_json=json.dumps(about), keep_json=json.dumps({"target": "/tmp"}))
    waits = bait(lock=None)
    hold = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX)"
    hold += "; print(flush=True); sys.stdin.read()"
    # Binds a launcher's name in the abstract namespace and accepts no connections.
    squat = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind('\\0' + sys.argv[1])"
    squat += "; s.listen(0); c = [socket.socket(socket.AF_UNIX) for _ in range(2)]"
    squat += "; [x.setblocking(False) for x in c]; [x.connect_ex('\\0' + sys.argv[1]) for x in c]"
    squat += "; print(flush=True); sys.stdin.read()"
    started = [
        users.start(ATTACKER, sys.executable, "-c", hold, fake / "lock", stdin=-1),
        users.start(ATTACKER, sys.executable, "-c", squat, f"paceline-live-{VICTIM}-x", stdin=-1),
    ]
    try:
        for process in started:
            process.stdout.readline()
        done = users.run(VICTIM, *paceline("top", "--once"), timeout=60)
    finally:
        for process in started:
            process.communicate("")
    assert done.returncode == 2
    assert "you have no running job on this node" in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    for path in (fake, waits):
        assert f"{path} belongs to user {ATTACKER}" in done.stderr
    assert (
        "socket of job x accepts no connection, and is ignored: it may belong to another user"
        in done.stderr
    )


def test_record_does_not_follow_links_in_its_folder(place):
    """The folder is writable for other users."""
    home = secret_of(VICTIM, place)
    record = place / "record"
    record.mkdir()
    record.chmod(0o777)
    for name in ("run.json", "rank-0.ring.part"):
        (record / name).symlink_to(home / "thesis")
    words = paceline("run", "-n", "1", "--record", record, place / "train.py", 0)
    done = users.run(VICTIM, *words, cwd=place, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (home / "thesis").read_text() == "private"
    assert json.loads((record / "run.json").read_text())["command"][-1] == "0"
    assert (record / "run.json").stat().st_uid == VICTIM


def test_running_job_is_unreadable_for_other_users(place):
    words = paceline("run", "-n", "1", place / "train.py", 60)
    job = users.start(VICTIM, *words, cwd=place)
    try:
        ranks.wait_until(lambda: list(SHM.glob(f"paceline-job-{VICTIM}-*/*.ring")) or _stacks())
        (folder,) = SHM.glob(f"paceline-job-{VICTIM}-*")
        assert folder.stat().st_mode & 0o777 == 0o700
        assert users.run(ATTACKER, "ls", folder).returncode != 0
    finally:
        job.terminate()
        job.communicate()
    ranks.wait_until(lambda: not list(SHM.glob(f"paceline-job-{VICTIM}-*")))


def _stacks():
    return list(SHM.glob(f"paceline-job-{VICTIM}-*/*.stack"))


def test_temporary_folder_without_sticky_bit_is_rejected(tmp_path, monkeypatch):
    tmp_path.chmod(0o777)
    monkeypatch.setattr(job_folder, "_PLACES", (tmp_path,))
    with pytest.raises(
        ValueError,
        match=r"HINT: set TMPDIR to a folder that only you can write "
        "to",
    ):
        job_folder.job_folder()
    tmp_path.chmod(0o770)
    os.chown(tmp_path, -1, users.GROUP)
    with pytest.raises(ValueError, match="HINT: set TMPDIR"):
        job_folder.job_folder()
    tmp_path.chmod(0o1777)
    folder = job_folder.job_folder()
    assert folder.parent == tmp_path
    job_folder.remove(folder)


def test_job_starts_in_user_namespace_without_root(place):
    """As in an unprivileged user's container, where /dev/shm appears to be owned by nobody."""
    words = ["unshare", "-U", "--map-current-user"]
    if users.run(VICTIM, *words, "true").returncode:
        pytest.skip("no user namespaces here")
    words += paceline("run", "-n", "1", place / "train.py", 0)
    done = users.run(VICTIM, *words, cwd=place, timeout=60)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr


def test_records_of_earlier_attempts_do_not_follow_links(tmp_path):
    folder, target = tmp_path / "job", tmp_path / "record"
    job_folder.make(folder)
    target.mkdir()
    (tmp_path / "outside").mkdir()
    (target / "attempt-0").symlink_to(tmp_path / "outside")
    Rank(folder, 0, 1, attempt=0).step(0, 1)
    job_folder.write_attempt(folder, 1)
    job_folder.write_destination(folder, target, ["script.py"], "run")
    assert not job_folder.clear(folder)
    assert os.listdir(tmp_path / "outside") == []
    assert list(folder.glob("*.ring"))


def test_leftovers_of_killed_job_are_cleared_and_not_running(tmp_path, monkeypatch):
    monkeypatch.setattr(job_folder, "_PLACES", (tmp_path,))
    half = tmp_path / f"paceline-new-{os.getuid()}-abc"
    job_folder.make(half)
    os.utime(half, (1, 1))
    orphan = tmp_path / f"paceline-job-{os.getuid()}-abc"
    job_folder.make(orphan)
    Rank(orphan, 0, 1).step(0, 1)
    (tmp_path / "gone").write_text("a file where the folder was")
    (orphan / job_folder.DESTINATION_FILE).write_text(
        json.dumps({"target": str(tmp_path / "gone" / "x")})
    )
    descriptors = len(os.listdir("/proc/self/fd"))
    job_folder.clear_orphans()
    assert not half.exists()
    assert orphan.exists()
    assert job_folder.running() == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_folder_renamed_by_another_user_is_not_cleared(place):
    """TMPDIR is the scratch of a group: its members may rename all folders there."""
    scratch = users.folder(place / "scratch", 0, 0o770, users.GROUP)
    names = [f"paceline-{kind}-{VICTIM}-{secrets.token_hex(4)}" for kind in ("job", "new")]
    for name in names:
        private = users.folder(scratch / f"private-{name}", VICTIM)
        for file in ("thesis", "lock", "manifest.json"):
            (private / file).write_text("private")
            os.chown(private / file, VICTIM, VICTIM)
        os.utime(private, (1, 1))
        code = f"import os; os.rename({str(private)!r}, {str(scratch / name)!r})"
        users.python(ATTACKER, code, groups=[users.GROUP])
    words = paceline("run", "-n", "1", place / "train.py", 0)
    environment = {**os.environ, "TMPDIR": str(scratch), "HOME": "/"}
    done = users.run(VICTIM, *words, cwd=place, groups=[users.GROUP], env=environment, timeout=60)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    for name in names:
        assert sorted(os.listdir(scratch / name)) == ["lock", "manifest.json", "thesis"]
        assert done.stderr.count(f"{scratch / name} was not created by Paceline") == 1
