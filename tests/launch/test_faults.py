"""Ranks and launchers that fail or are killed: the cause is named, and all processes end."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import ranks

DIE = """
    import atexit, os, sys, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    print("all is well", flush=True)
    if dist.get_rank() == 1:
        time.sleep(0.1)
        print("last words of rank 1", flush=True)
        exec(sys.argv[1])
    for _ in range(1000):
        time.sleep(0.05)
        dist.all_reduce(x)
    """


def test_one_traceback_is_shown_if_all_ranks_fail(tmp_path):
    script = """
        import os, time
        time.sleep(0.25 * int(os.environ["RANK"]))
        raise KeyError("weights")
        """
    result = ranks.run(ranks.write(tmp_path, script), check=False)
    assert result.returncode == 1
    assert result.stderr.count("Traceback") == 1
    assert result.stderr.count("KeyError: 'weights'") == 2  # and in the launcher's line
    assert "last lines of" not in result.stderr


# Ranks in new interpreters end like forked ranks; only `make test-long` tests both.
FRESH = pytest.param("paceline --fresh", marks=pytest.mark.long)


@pytest.mark.parametrize("launcher", ["paceline", FRESH])
@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("raise RuntimeError('boom')", 1, "rank 1 failed: RuntimeError: boom"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was killed by SIGKILL (signal 9)"),
        ("os.kill(os.getpid(), 11)", 139, "rank 1 was killed by SIGSEGV (signal 11)"),
        # the launcher's signal ends the rank before its exit handlers have finished
        ("atexit.register(time.sleep, 99); sys.exit(7)", 7, "rank 1 failed: exit code 7"),
        ("sys.exit('no way')", 1, "rank 1 failed: exit code 1"),
        ("os._exit(9)", 9, "rank 1 ended with exit code 9"),
        ("time.sleep(0.2); assert False, 'wrong'", 1, "rank 1 failed: AssertionError: wrong"),
    ],
)
def test_first_failed_rank_is_reported_and_sets_exit_code(tmp_path, how, code, words, launcher):
    script = ranks.write(tmp_path, DIE)
    result = ranks.run(script, how, ranks=3, launcher=launcher, check=False)
    assert result.returncode == code, result.stderr
    assert f"paceline: {words}" in result.stderr
    if "failed: " not in words or "exit code" in words:
        assert "    last words of rank 1" in result.stderr  # the last lines of its output
    else:  # its traceback is shown, and not once more
        assert result.stderr.count(words.partition("failed: ")[2]) == 2
    assert "Paceline ended the 2 other ranks." in result.stderr
    assert ranks.alive(str(script)) == []


@pytest.mark.parametrize("how", ["sys.exit(0)", "os._exit(0)"])
def test_rank_that_leaves_the_others_is_named(tmp_path, how):
    result = ranks.run(ranks.write(tmp_path, DIE), how, ranks=3, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith(
        "paceline: rank 1 ended with exit code 0 while other ranks still exchanged data with it\n"
    )
    assert re.search(
        r"\n  rank [02]: another rank has ended \(.*by peer.*\), in .*script.py, line \d+\n",
        result.stderr,
    )
    assert "HINT: all ranks must call the same collectives" in result.stderr
    assert "GLHF" not in result.stderr


def test_ranks_that_lost_a_peer_do_not_hide_the_cause(tmp_path):
    result = ranks.run(ranks.write(tmp_path, DIE), "os._exit(3)", ranks=3, check=False)
    assert result.stderr.startswith("paceline: rank 1 ended with exit code 3\n")
    assert "another rank has ended" not in result.stderr


def test_rank_server_that_is_killed_is_named(tmp_path):
    result = ranks.run(ranks.write(tmp_path, DIE), "os.kill(os.getppid(), 9)", check=False)
    assert result.returncode == 137
    assert re.match(
        r"paceline: rank \d was lost: the rank server \(process \d+\), from which Paceline forks "
        r"the ranks, was killed by SIGKILL \(signal 9\). HINT: ",
        result.stderr,
    )


WORKERS = """
    import os, sys, time, torch
    from torch.utils.data import DataLoader, Dataset
    class Endless(Dataset):
        def __len__(self):
            return 10**9
        def __getitem__(self, i):
            time.sleep(0.005)
            return i
    if os.fork() == 0:  # a daemon of the script's own, in a session of its own
        os.setsid()
        time.sleep(10000)
    for i, batch in enumerate(DataLoader(Endless(), num_workers=2)):
        if i == 3:
            open(f"ready-{os.environ['RANK']}", "w")
    """


@pytest.fixture
def running(tmp_path):
    """Yield a launcher with two ranks, each with two loader workers and one daemon."""
    script = ranks.write(tmp_path, WORKERS)
    launcher = ranks.start(ranks.command(script), cwd=tmp_path, stderr=subprocess.PIPE)
    ranks.wait_until(lambda: all((tmp_path / f"ready-{rank}").exists() for rank in range(2)))
    assert len(ranks.alive(str(script))) >= 10
    yield launcher, str(script)
    launcher.kill()
    launcher.wait()
    launcher.stderr.close()


def test_ranks_end_within_5_seconds_after_launcher_sigkill(running, tmp_path):
    launcher, script = running
    launcher.kill()
    launcher.wait()
    ranks.wait_until(lambda: ranks.alive(script) == [], seconds=5)
    ranks.wait_until(lambda: ranks.in_memory(tmp_path) == set(), seconds=5)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signals_end_all_ranks(running, tmp_path, number, code):
    launcher, script = running
    started = time.monotonic()
    launcher.send_signal(number)
    assert launcher.wait(20) == code
    assert time.monotonic() - started < 15
    ranks.wait_until(lambda: ranks.alive(script) == [], seconds=5)
    assert "Paceline ended all ranks" in launcher.stderr.read()
    assert ranks.in_memory(tmp_path) == set()


def imports_torch(launcher):
    """Return whether a child of the launcher imports torch, i.e. has mapped its library."""
    with contextlib.suppress(OSError):  # the child has ended
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        return any("libtorch" in Path(f"/proc/{child}/maps").read_text() for child in children)
    return False


def test_ctrl_c_before_ranks_start_shows_no_traceback(tmp_path):
    script = ranks.write(tmp_path, "import time; time.sleep(100)")
    launcher = subprocess.Popen(
        ranks.command(script), env=ranks.environment(), stderr=subprocess.PIPE, text=True
    )
    ranks.wait_until(lambda: imports_torch(launcher.pid))
    launcher.send_signal(signal.SIGINT)
    _, said = launcher.communicate(timeout=20)
    assert launcher.returncode == 130
    assert "Traceback" not in said
    ranks.wait_until(lambda: ranks.alive(str(script)) == [])


def started_in(folder, script, **env):
    return subprocess.Popen(
        ranks.command(script),
        env=ranks.environment(**env),
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    )


def test_sigterm_while_script_is_read_is_reported(tmp_path):
    script = tmp_path / "script.py"
    os.mkfifo(script)
    launcher = started_in(tmp_path, script)
    inlet = []

    def is_read():
        with contextlib.suppress(OSError):  # no process has opened the FIFO to read
            inlet.append(os.open(script, os.O_WRONLY | os.O_NONBLOCK))
        return inlet

    def waits():  # the launcher has opened the script and sleeps, i.e. it reads the FIFO
        process = Path(f"/proc/{launcher.pid}")
        opened = [os.readlink(fd) for fd in (process / "fd").iterdir() if os.path.lexists(fd)]
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        return str(script) in opened and state == "S"

    ranks.wait_until(is_read)
    ranks.wait_until(waits)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=20)
    os.close(inlet[0])
    assert (launcher.returncode, said) == (143, "paceline: SIGTERM before the ranks started\n")


SLOW_TORCH = """
    import time
    try:
        open("importing", "w").close()
        time.sleep(100)
    except Exception:
        pass
    """


def test_sigterm_during_import_that_catches_exceptions_is_not_lost(tmp_path):
    slow = tmp_path / "slow" / "torch"
    slow.mkdir(parents=True)
    ranks.write(slow, SLOW_TORCH, "__init__.py")
    script = ranks.write(tmp_path, "pass")
    launcher = started_in(tmp_path, script, PYTHONPATH=str(slow.parent))
    ranks.wait_until((tmp_path / "importing").exists)
    launcher.send_signal(signal.SIGTERM)
    _, said = launcher.communicate(timeout=20)
    assert (launcher.returncode, said) == (143, "paceline: SIGTERM before the ranks started\n")
    ranks.wait_until(lambda: ranks.alive(str(script)) == [])
    assert ranks.in_memory(tmp_path) == set()


def test_killed_rank_server_ends_job(running):
    launcher, script = running
    tasks = Path(f"/proc/{launcher.pid}/task").iterdir()
    children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    os.kill(min(children), signal.SIGKILL)
    assert launcher.wait(20) == 137
    ranks.wait_until(lambda: ranks.alive(script) == [], seconds=8)


RESTART = """
    import json, os, sys, torch, torch.distributed as dist
    attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    x = torch.ones(1)
    for _ in range(5):
        dist.all_reduce(x)
    print(f"attempt {attempt} of {os.environ['TORCHELASTIC_MAX_RESTARTS']}")
    if attempt < int(sys.argv[1]) and rank == attempt % 2:
        os._exit(5)
    dist.barrier()
    json.dump(attempt, open(f"done-{rank}", "w"))
    """


def test_max_restarts_restarts_all_ranks(tmp_path):
    result = ranks.run(ranks.write(tmp_path, RESTART), 2, launcher="paceline --max-restarts 2")
    assert [json.loads((tmp_path / f"done-{rank}").read_text()) for rank in (0, 1)] == [2, 2]
    assert "the job restarts from the last checkpoint (restart 1 of 2)" in result.stderr
    assert "the job restarts from the last checkpoint (restart 2 of 2)" in result.stderr
    assert "Connection refused" not in result.stderr


def test_job_fails_after_max_restarts(tmp_path):
    result = ranks.run(
        ranks.write(tmp_path, RESTART), 9, launcher="paceline --max-restarts 1", check=False
    )
    assert result.returncode == 5
    assert result.stderr.count("ended with exit code 5") == 2


@pytest.mark.long
def test_rank_that_finishes_but_does_not_exit_is_reported(tmp_path):
    script = ranks.write(
        tmp_path,
        """
        import os, time
        class Stuck:
            def __del__(self):  # runs in the interpreter's own end
                while True:
                    time.sleep(1)
        if os.environ["RANK"] == "1":
            stuck = Stuck()
        print("work is done")
        """,
    )
    result = ranks.run(script, PACELINE_TESTS_WHOLE_END="1")
    assert result.stderr.count("rank 1 finished its script but did not exit within 10 s") == 1
    assert result.returncode == 0


def test_crash_during_interpreter_shutdown_is_ignored(tmp_path):
    script = ranks.write(
        tmp_path,
        """
        import os
        class Crash:
            def __del__(self):
                os.abort()
        crash = Crash()
        """,
    )
    ranks.run(script, PACELINE_TESTS_WHOLE_END="1")


@pytest.fixture
def small_group():
    """Return a command prefix that runs a command in a cgroup with 600 MiB of memory."""
    place = Path("/sys/fs/cgroup/memory")
    limit = "memory.limit_in_bytes" if place.is_dir() else "memory.max"
    group = (place if place.is_dir() else Path("/sys/fs/cgroup")) / f"paceline-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(600 << 20))
    except OSError:
        group.is_dir() and group.rmdir()
        pytest.skip("may not make a control group with a limit here")
    yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "in-group"]
    ranks.wait_until(lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def test_rank_killed_by_oom_killer_is_reported(tmp_path, small_group):
    script = ranks.write(
        tmp_path,
        """
        import os, time
        if os.environ["RANK"] == "1":
            held = bytearray(2 << 30)
        time.sleep(30)
        """,
    )
    command = [*small_group, *ranks.command(script, launcher="paceline --fresh")]
    result = subprocess.run(
        command, capture_output=True, text=True, env=ranks.environment(), timeout=60
    )
    assert result.returncode == 128 + signal.SIGKILL
    text = " ".join(result.stderr.split())
    assert "rank 1 was killed by the kernel: out of memory. It had 0." in text
    assert "its control group allows 0.59 GiB for all ranks of this node" in text
    assert "HINT: use fewer ranks per node" in text
