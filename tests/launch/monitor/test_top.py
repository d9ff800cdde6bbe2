"""``paceline top``: views of running jobs, and messages about jobs that it can't show."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import ranks

from paceline.launch import job_folder
from paceline.launch.monitor import live_records, rank_stacks

# Train until the file "end" exists in the script's folder; rank 1 is the slowest rank.
TRAIN = """
    import os, sys, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    end = torch.zeros(1)
    while not end.item():
        model(torch.randn(16, 64)).square().mean().backward()
        time.sleep(0.02 if rank == 1 else 0.005)
        optimizer.step()
        optimizer.zero_grad()
        end[0] = os.path.exists("end")
        dist.all_reduce(end)
    dist.destroy_process_group()
"""


def top(*words, columns=100, **env):
    """Run ``paceline top`` without a terminal and wait for its end."""
    return subprocess.run(
        [ranks.PACELINE, "top", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        env=ranks.environment(COLUMNS=str(columns), **env),
    )


def once(*words):
    result = top("--once", "--json", *words)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@contextmanager
def training(folder, number=3):
    """Yield a recorded job of three ranks after its first 20 steps, and its record."""
    script = ranks.write(folder, TRAIN)
    record = folder / "record"
    command = ranks.command(script, ranks=number, launcher=f"paceline --record {record}")
    job = ranks.start(command, cwd=folder, stderr=subprocess.PIPE)
    try:
        ranks.wait_until(lambda: (record / "run.json").exists())
        ranks.wait_until(lambda: once(record)["step"] > 20, 60)
        yield job, record
    finally:
        (folder / "end").touch()
        try:
            job.communicate(timeout=30)
        finally:
            job.kill()


def on_terminal(*words, columns=80, **env):
    """Start ``paceline top`` on a new pseudo-terminal; return the process and the file to read."""
    outer, inner = os.openpty()
    environment = ranks.environment(COLUMNS=str(columns), LINES="40", TERM="xterm", **env)
    process = subprocess.Popen(
        [ranks.PACELINE, "top", *map(str, words)],
        stdin=inner,
        stdout=inner,
        stderr=inner,
        env=environment,
        start_new_session=True,
    )
    os.close(inner)
    return process, outer


def read_until(outer, what, seconds=20):
    """Return the output of a terminal until it contains ``what``, or until its end."""
    text, deadline = b"", time.monotonic() + seconds
    while what not in text.decode(errors="replace"):
        assert time.monotonic() < deadline, text
        try:
            text += os.read(outer, 1 << 16)
        except OSError:  # the process has closed the terminal
            break
    return text.decode(errors="replace")


@pytest.mark.long
def test_top_shows_running_stopped_and_ended_job(tmp_path):
    with training(tmp_path) as (job, record):
        # The slowest rank, the waits of the other ranks and the speed, with and without DIR.
        view = once(record)
        assert (view["ranks"], view["size"], view["slowest_rank"]) == ([0, 1, 2], 3, 1)
        assert {pair["waited_for"] for pair in view["waited_for"][:2]} == {1}
        assert 5 < view["steps_per_s"] < 50
        assert view["samples_per_s"] == pytest.approx(48 * view["steps_per_s"], rel=0.1)
        assert view["command"] == [str(tmp_path / "script.py")]
        assert [now["process"] for now in view["now"]] == ["running"] * 3
        assert all(abs(sum(states.values()) - 1) < 1e-9 for states in view["states"])
        (name,) = [f.name for f in job_folder.running() if job_folder.read_destination(f) == record]
        assert once("--job", name)["slowest_rank"] == 1
        for columns in (80, 200):
            lines = top("--once", record, columns=columns).stdout.splitlines()
            assert max(map(len, lines)) <= columns
            assert lines[1].startswith("3 ranks on ")
            assert "slowest  rank 1 spends " in "\n".join(lines)
            assert "\x1b" not in "".join(lines)

        # A report of the running job, whose folder does not contain the record yet.
        command = [ranks.PACELINE, "report", "--json", record]
        report = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        assert "the job still runs" in report["doubts"][0]
        assert (report["slowest_rank"], report["missing_ranks"]) == (1, [])
        assert report["steps"] > 20

        # On a terminal: colours unless NO_COLOR is set; Ctrl-C ends ``paceline top`` without a
        # message and restores the screen.
        for env, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
            process, screen = on_terminal(record, "--every", "0.3", **env)
            text = read_until(screen, "now")
            os.killpg(process.pid, signal.SIGINT)
            text += read_until(screen, "nothing more")
            assert process.wait(10) == 130
            os.close(screen)
            assert ("\x1b[32m" in text) == coloured
            assert "Traceback" not in text
            assert "Aborted" not in text
            assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1
            assert text.rfind("\x1b[?25h") > text.rfind("\x1b[?25l")

        # A stopped rank is named; the other ranks wait in a collective.
        victim = next(now for now in _pids(name).items() if now[0] == 2)[1]
        os.kill(victim, signal.SIGSTOP)
        try:
            time.sleep(1.5)
            view = once(record)
            # The ranks may be in two collectives: gloo returns on a rank that has all its data.
            assert {0, 1} <= {rank for one in view["standing"] for rank in one["inside"]}
            assert all(2 in one["inside"] + one["absent"] for one in view["standing"])
            assert all(one["for_s"] > 1 for one in view["standing"])
            assert [now["process"] for now in view["now"]] == ["running", "running", "stopped"]
            said = " ".join(top("--once", record).stdout.split())
            stands = r"blocked Ranks? [\d, -]+ ha(s|ve) waited in all-reduce \d+ for"
            assert re.search(stands, said), said
            assert re.search(
                r"Rank 2[^.]*(has not entered it|is in it)[^.]*stopped by a signal", said
            )
        finally:
            os.kill(victim, signal.SIGCONT)

        # The job ends while ``paceline top`` runs: a pipe gets plain views, and the last view
        # stays on a terminal.
        piped = subprocess.Popen(
            [ranks.PACELINE, "top", str(record), "--json", "--every", "0.2"],
            stdout=subprocess.PIPE,
            text=True,
            env=ranks.environment(),
        )
        process, screen = on_terminal(record, "--every", "0.3")
        read_until(screen, "now")
        assert json.loads(piped.stdout.readline())["format"] == "paceline-live"
        (tmp_path / "end").touch()
        text = read_until(screen, "HINT")
        text += read_until(screen, "nothing more")
        assert process.wait(20) == 0
        os.close(screen)
        assert "3 ranks on " in text.rpartition("\x1b[?1049l")[2]
        assert "the job has ended. HINT: paceline report" in text
        rest, _ = piped.communicate(timeout=20)
        assert piped.returncode == 0
        views = map(json.loads, rest.splitlines())  # without figures while ranks end
        assert all(view.get("size", 3) == 3 for view in views)
    assert job.returncode == 0
    assert json.loads((record / "run.json").read_text())["host"] == os.uname().nodename
    ended = top(record)
    assert ended.returncode == 2
    assert ended.stderr == (
        f"paceline: {record}: the run has ended. HINT: paceline report {record}\n"
    )
    assert not ranks.in_memory(tmp_path)


def _pids(name):
    """Return the PID of each rank of a job."""
    (folder,) = [folder for folder in job_folder.running() if folder.name == name]
    rings = [path.stem.split("-") for path in folder.glob("*.ring")]
    return {int(rank): int(pid) for _, rank, pid in rings}


def test_top_reports_why_job_cannot_be_shown(tmp_path):
    nothing = tmp_path / "nothing"
    assert f"{nothing} is not a folder. HINT: name the folder of paceline run --record" in (
        top(nothing).stderr
    )
    assert f"{tmp_path}: no job records into this folder. HINT" in top(tmp_path).stderr
    about = {"run": "abc", "command": ["train.py"], "started": 1.0, "host": "far-away"}
    (tmp_path / "run.json").write_text(json.dumps(about))
    result = top(tmp_path)
    assert result.returncode == 2
    assert (
        f"{tmp_path}: the job was started on far-away, not on this node ({os.uname().nodename}). "
        f"HINT: ssh far-away paceline top {tmp_path}"
    ) in result.stderr
    (tmp_path / "run.json").write_text(json.dumps({**about, "host": os.uname().nodename}))
    assert "no job on this node" in top(tmp_path).stderr
    assert "--every must be more than 0 seconds; this is 0. HINT" in top("--every", "0").stderr
    assert "--job none: you have no job of this name on this node." in top("--job", "none").stderr


@pytest.mark.long
def test_top_lists_several_jobs_without_taking_locks(tmp_path):
    """Use jobs without a record and without torch, which have no rings; the output says so."""
    text = "import sys, time; open(sys.argv[1], 'w'); time.sleep(60)"
    script, words = ranks.write(tmp_path, text), [tmp_path / "one", tmp_path / "two"]

    def own():
        return [
            f for f in job_folder.running() if job_folder.read_label(f).command[:1] == [str(script)]
        ]

    jobs = [
        subprocess.Popen(
            ranks.command(script, word, ranks=1, launcher="paceline --fresh"),
            env=ranks.environment(),
        )
        for word in words
    ]
    try:
        ranks.wait_until(lambda: all(word.exists() for word in words))
        result = top()
        assert result.returncode == 2
        assert "running jobs on this node. HINT: paceline top DIR, or --job" in result.stderr
        assert len(own()) == 2
        for folder in own():
            assert f"{folder.name}  {script} " in result.stderr
            said = " ".join(top("--once", "--job", folder.name).stdout.split())
            assert "starting: no rank has a record yet" in said
            assert "HINT: a script that does not call paceline.init() has one" in said
    finally:
        for job in jobs:
            job.terminate()
        assert [job.wait(20) for job in jobs] == [143, 143]
    ranks.wait_until(lambda: not own())


@pytest.mark.long
def test_top_shows_all_hosts_and_reports_silent_host(hosts, shared_folder):
    ranks.write(shared_folder, TRAIN)
    words = [ranks.PACELINE, "run", "-H", "host1:2,host2:2", "--record", "record", "script.py"]
    job = hosts.start("host0", *words, cwd=shared_folder)

    def seen(*words, host="host0"):
        text = hosts.run(host, ranks.PACELINE, "top", "--once", *words, cwd=shared_folder).stdout
        return json.loads(text) if "--json" in words else text

    def trains():
        here = hosts.run("host0", *look, cwd=shared_folder, check=False)
        return here.returncode == 0 and json.loads(here.stdout)["step"] > 20

    look = [ranks.PACELINE, "top", "--once", "--json", "record"]
    try:
        ranks.wait_until(trains, 60)
        view = seen("--json")  # the only job started on this host, with all ranks on other hosts
        assert view["hosts"] == ["host1", "host1", "host2", "host2"]
        assert (view["ranks"], view["slowest_rank"]) == ([0, 1, 2, 3], 1)
        assert view["silent_hosts"] == []
        assert "4 ranks on 2 nodes (host1, host2)" in seen("record")
        far = seen("record", host="host1")
        assert (
            "only the ranks of this node are shown: the job was started on host0. HINT: ssh" in far
        )

        # Clients that never read or never send a request do not delay other clients.
        (run,) = [json.loads((shared_folder / "record" / "run.json").read_text())["run"]]
        rude = hosts.start("host0", sys.executable, "-c", RUDE, run, stdin=subprocess.PIPE)
        assert rude.stdout.readline() == "there\n"
        assert seen("--json")["silent_hosts"] == []

        # A host whose agent is stopped is named as silent; the other hosts are shown.
        hosts.run("host2", "pkill", "-STOP", "-f", "-o", "paceline.launch.host_agent")
        started = time.monotonic()
        view = seen("--json", "record")
        assert time.monotonic() - started < 8
        assert (view["silent_hosts"], view["missing_ranks"]) == (["host2"], [2, 3])
        assert view["ranks"] == [0, 1]
        assert "host2 does not answer: its ranks 2-3 are not shown" in seen("record")
        hosts.run("host2", "pkill", "-CONT", "-f", "-o", "paceline.launch.host_agent")
        ranks.wait_until(lambda: seen("--json", "record")["ranks"] == [0, 1, 2, 3])
        rude.kill()
    finally:
        (shared_folder / "end").touch()
        _, said = job.communicate(timeout=60)
    assert job.returncode == 0, said
    result = hosts.run("host0", *look, cwd=shared_folder, check=False)
    assert "the run has ended. HINT: paceline report record" in result.stderr
    assert hosts.left_over() == []


# Three clients that request everything and never read, and three that send no request.
RUDE = """
import socket, sys, os
sys.path.insert(0, ".")
from paceline.launch.monitor.live_records import _address
from paceline.launch.channel import Channel
held = [socket.socket(socket.AF_UNIX) for _ in range(6)]
for i, one in enumerate(held):
    one.connect(_address(sys.argv[1]))
    if i % 2:
        Channel(one.fileno(), one.fileno()).send({"tails": 60000})
print("there", flush=True)
sys.stdin.read()
"""


def test_folder_of_killed_run_is_not_listed_as_running(tmp_path, monkeypatch):
    monkeypatch.setattr(job_folder, "_PLACES", (tmp_path,))
    folder = tmp_path / (job_folder._prefix() + "x")
    job_folder.make(folder)
    assert job_folder.running() == []
    code = "import fcntl, sys; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_EX)"
    code += "; print(flush=True); sys.stdin.read()"
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(folder / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        holder.stdout.readline()
        assert job_folder.running() == [folder]
    finally:
        holder.communicate()
    assert job_folder.running() == []
    assert Path(folder / "lock").exists()


def test_sockets_with_undecodable_names_are_ignored():
    """Any user of the host can create such a socket."""
    names = [
        b"other-\xff\xfe",
        live_records._prefix().encode() + b"a\xff",
        live_records._address("a-Job_1").encode(),
    ]
    held = [socket.socket(socket.AF_UNIX) for _ in names]
    for one, name in zip(held, names, strict=True):
        one.bind(b"\0" + name.removeprefix(b"\0"))
    try:
        found = live_records.running_launchers()
        assert "a-Job_1" in found
        assert all(re.fullmatch("[0-9a-zA-Z_-]+", name) for name in found)
    finally:
        for one in held:
            one.close()


def test_process_with_reused_pid_of_rank_is_not_signalled(tmp_path):
    """The signal that requests stacks would end that process."""
    other = subprocess.Popen(["sleep", "60"])
    try:
        (tmp_path / f"rank-0-{other.pid}.stack").touch()
        assert rank_stacks.pids(tmp_path) == {0: other.pid}
        assert rank_stacks.ask(tmp_path) == {}
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
