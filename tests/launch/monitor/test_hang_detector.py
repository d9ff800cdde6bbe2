"""Hang detection: a job that hangs is reported and ended, a slow job is not."""

import json
import re
import subprocess
import sys
import time

import pytest
import ranks

from paceline.launch.monitor import failures
from paceline.launch.monitor.failures import HangDetector
from paceline.launch.monitor.live_records import JobSnapshot
from paceline.launch.monitor.progress import ProgressReport

# A training loop with a fault at step 5 of 12.
LOOP = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def batches():
        for step in range(12):
            if step == 5:
                {in_loader}
                pass
            yield torch.randn(4, 8)

    loader = torch.utils.data.DataLoader([torch.randn(8)] * 48, batch_size=4)
    for step, x in enumerate({batches}):
        if step == 5:
            {in_loop}
            pass
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
    print("done", rank)
    dist.destroy_process_group()
"""


def hanging(
    folder, *, in_loop="pass", in_loader="pass", batches="loader", timeout=2, number=3, record=True
):
    """Run the training loop with a hang timeout and return its output and exit code."""
    script = ranks.write(folder, LOOP.format(in_loop=in_loop, in_loader=in_loader, batches=batches))
    recorded = f" --record {folder / 'record'}" if record else ""
    launcher = f"paceline --hang-timeout {timeout}{recorded}"
    command = ranks.command(script, ranks=number, launcher=launcher)
    return ranks.run_command(command, folder, ranks.environment(NO_COLOR="1"), 90)


# Ranks run this until ``finish`` has seen the report.
UNTIL_REPORTED = "time.time() < end and not os.path.exists('reported')"


def finish(job, folder, report):
    """Let the ranks go on once ``report`` was printed; return stdout and stderr on one line."""
    said = ""
    for line in job.stderr:
        said += line
        if report in " ".join(said.split()):
            (folder / "reported").touch()
            break
    out, rest = job.communicate(timeout=60)
    assert job.returncode == 0, said + rest
    return out, " ".join((said + rest).split())


def told(result):
    """Assert that the job was ended because it hung; return the report on one line."""
    assert result.returncode == 124, result.stderr
    assert "Traceback" not in result.stderr
    assert "The job hangs: Paceline ends its ranks." in result.stderr
    return " ".join(result.stderr.split())


def test_stopped_rank_is_reported_with_all_stacks(tmp_path):
    stop = "rank == 2 and os.kill(os.getpid(), signal.SIGSTOP)"
    text = told(hanging(tmp_path, in_loop=stop))
    assert re.search(r"no rank has made progress for \d+\.\d s", text)
    assert re.search(r"Ranks 0-1 have waited in all-reduce \d+ for", text)
    assert "Rank 2 has not entered it: its process is stopped by a signal (SIGSTOP)" in text
    assert re.search(r"rank 0: in all-reduce \d+ for [\d.]+ s; at script\.py:\d+ in", text)
    assert "model(x).square().mean().backward()" in text
    # A stopped rank can't report its stack, so the stack is read from outside the process.
    stands = r"rank 2: stopped by a signal \(SIGSTOP\), .{,60}; at script\.py:\d+ in <module>: "
    assert re.search(stands + re.escape(stop), text)


def test_hang_in_data_loader_is_reported(tmp_path):
    forever = "while rank == 1: time.sleep(0.01)"
    text = told(hanging(tmp_path, in_loader=forever, batches="batches()"))
    assert re.search(r"Ranks 0, 2 have waited in all-reduce \d+ for", text)
    assert "Rank 1 has not entered it" in text
    assert "in batches: while rank == 1: time.sleep(0.01)" in text


@pytest.mark.long
def test_rank_that_misses_collective_is_reported(tmp_path):
    text = told(hanging(tmp_path, in_loop="if rank == 0: time.sleep(1000)"))
    assert re.search(r"Ranks 1-2 have waited in all-reduce \d+ for", text)
    assert "Rank 0 has not entered it" in text
    assert "if rank == 0: time.sleep(1000)" in text


@pytest.mark.long
def test_hang_without_record_reports_stacks_only(tmp_path):
    text = told(hanging(tmp_path, in_loop="if rank == 1: time.sleep(1000)", record=False))
    assert "the script does not call paceline.init() and is not recorded. HINT" in text
    assert re.search(r"rank 0: no record; at script\.py:\d+ in <module>: model\(x\)", text)
    assert re.search(r"rank 1: no record; at .{,30}: if rank == 1: time", text)


@pytest.mark.long
def test_ranks_in_different_collectives_are_reported(tmp_path):
    wrong = "dist.broadcast(torch.zeros(4), 2) if rank == 1 else dist.all_reduce(torch.zeros(4))"
    result = hanging(tmp_path, in_loop=wrong, number=2)
    text = " ".join(result.stderr.split())
    assert result.returncode != 0
    assert "broadcast" in text


@pytest.mark.long
def test_slow_computing_rank_is_reported_but_not_ended(tmp_path):
    compute = "end = time.time() + 30 * (rank == 1)\n"
    compute += 12 * " " + f"while {UNTIL_REPORTED}: sum(range(9999))"
    script = ranks.write(tmp_path, LOOP.format(in_loop=compute, in_loader="pass", batches="loader"))
    launcher = f"paceline --hang-timeout 3 --record {tmp_path / 'record'}"
    job = ranks.start(
        ranks.command(script, ranks=3, launcher=launcher),
        cwd=tmp_path,
        env=ranks.environment(NO_COLOR="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    _, text = finish(job, tmp_path, "Rank 1 computes, so the job may be slow and not hung")
    assert "HINT: increase --hang-timeout" in text


@pytest.mark.long
def test_job_continues_after_brief_stop_which_report_shows(tmp_path):
    stop = (
        "rank == 1 and (os.fork() or (time.sleep(1.0), os.kill(os.getppid(), signal.SIGCONT), "
        "os._exit(0))) and os.kill(os.getpid(), signal.SIGSTOP)"
    )
    result = hanging(tmp_path, in_loop=stop, timeout=3)
    assert result.returncode == 0, result.stderr
    assert "hangs" not in result.stderr
    assert result.stdout.count("done") >= 1
    found = reported(tmp_path / "record")
    (still,) = found["stood_still"]
    assert (still["ranks"], still["whole"], still["step"]) == ([1], False, 5)
    assert still["seconds"] == pytest.approx(1.0, abs=0.2)
    assert still["waited_s"] == pytest.approx(still["seconds"], abs=0.2)
    assert found["stalled"] == []
    (outlier,) = [one for one in found["step_times"]["outliers"] if one["step"] == 5]
    assert (outlier["state"], outlier["rank"]) == ("still", 1)
    assert "Rank 1 stood still for" in " ".join(result.stderr.split())  # in the summary


def reported(record):
    """Return the report of ``paceline report --json``."""
    command = [ranks.PACELINE, "report", "--json", str(record)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


TWO_HOSTS = ["--record", "record", "-H", "host1:1,host2:1", "script.py"]


def over_hosts(hosts, folder, in_loop, timeout=3):
    """Start the training loop on two hosts."""
    ranks.write(folder, LOOP.format(in_loop=in_loop, in_loader="pass", batches="loader"))
    command = [ranks.PACELINE, "run", "--hang-timeout", timeout, *TWO_HOSTS]
    return hosts.start("host0", *command, cwd=folder)


@pytest.mark.long
def test_host_without_network_is_reported_and_job_ends(hosts, shared_folder):
    wait = "open(f'at-5-{rank}', 'w')\n            while not os.path.exists('go'): time.sleep(0.01)"
    process = over_hosts(hosts, shared_folder, wait)
    ranks.wait_until(lambda: len(list(shared_folder.glob("at-5-*"))) == 2, 30)
    hosts.link("host2", False)
    (shared_folder / "go").touch()
    began = time.monotonic()
    _, said = process.communicate(timeout=60)
    took = time.monotonic() - began
    hosts.link("host2", True)
    assert process.returncode == 124, said
    assert "host2 does not answer: it may have lost power or its network connection" in said
    assert "Paceline has no record of rank 1." in said
    assert "rank 0 (host1): in all-reduce" in said
    assert took < 30
    assert hosts.left_over(15) == []


@pytest.mark.long
def test_stopped_rank_on_remote_host_is_reported_with_host(hosts, shared_folder):
    stop = "rank == 1 and os.kill(os.getpid(), signal.SIGSTOP)"
    process = over_hosts(hosts, shared_folder, stop)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 124, said
    text = " ".join(said.split())
    assert (
        "Rank 1 on host2 has not entered it: its process is stopped by a signal (SIGSTOP)" in text
    )
    assert "rank 0 (host1): in all-reduce" in text
    assert re.search(r"rank 1 \(host2\): stopped by a signal [^;]*; at script\.py:\d+ in", text)
    assert hosts.left_over(10) == []


@pytest.mark.long
def test_job_continues_after_short_network_outage_which_report_shows(hosts, shared_folder):
    wait = "open(f'at-5-{rank}', 'w')\n            while not os.path.exists('go'): time.sleep(0.01)"
    process = over_hosts(hosts, shared_folder, wait, timeout=20)
    ranks.wait_until(lambda: len(list(shared_folder.glob("at-5-*"))) == 2, 30)
    hosts.link("host2", False)
    (shared_folder / "go").touch()
    time.sleep(3)
    hosts.link("host2", True)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 0, said
    found = reported(shared_folder / "record")
    assert found["stood_still"] == []
    (stall,) = found["stalled"]
    assert (stall["collective"], stall["step"], stall["hosts"]) == ("all-reduce", 5, 2)
    assert 2.5 < stall["seconds"] < 15  # TCP doubles its retransmission interval
    assert "although all its ranks had arrived" in " ".join(said.split())


# paceline run, with another default of --hang-timeout than 300 s. (The ranks import torch.)
SHORT_DEFAULT = """
    from paceline.cli import main
    from paceline.launch.monitor import failures
    failures.DEFAULT_HANG_TIMEOUT_S = {seconds}
    main()
    """


def start_with_default(folder, script, *options, seconds=0.5):
    """Start a script on two ranks without ``--hang-timeout``, whose default is ``seconds``."""
    launcher = ranks.write(folder, SHORT_DEFAULT.format(seconds=seconds), "launcher.py")
    words = [sys.executable, launcher, "run", "-n", "2", *options, ranks.write(folder, script)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return ranks.start(words, cwd=folder, env=ranks.environment(NO_COLOR="1"), **pipes)


SILENT = f"""
    import os, time
    end = time.time() + 30
    while {UNTIL_REPORTED}:
        time.sleep(0.05)
    print("done")
    """


def test_silent_script_is_reported_but_not_ended_by_default(tmp_path):
    goes_on = "The job continues: no rank is known to wait in a collective that can't complete"
    out, text = finish(start_with_default(tmp_path, SILENT), tmp_path, goes_on)
    assert out == "done\n"
    assert "no rank has made progress for" in text
    assert re.search(r"rank 1: no record; at script.py:\d in <module>: time.sleep", text)
    assert f"{goes_on}. HINT: --hang-timeout 0.5 ends such a job" in text


WAITS_FOR_DOWNLOAD = f"""
    import os, time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    dist.barrier()
    end = time.time() + 30 * (dist.get_rank() == 0)
    while {UNTIL_REPORTED}:
        time.sleep(0.05)
    dist.barrier()
    print("done")
    """


@pytest.mark.long
def test_ranks_that_wait_for_sleeping_rank_are_not_ended_by_default(tmp_path):
    record = ["--record", tmp_path / "record"]
    job = start_with_default(tmp_path, WAITS_FOR_DOWNLOAD, *record, seconds=1.5)
    _, text = finish(job, tmp_path, "The job continues")
    assert "Rank 0 has not entered it" in text


DEADLOCK = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups if dist.get_rank() == 0 else reversed(groups):
        dist.all_reduce(torch.ones(1), group=group)
    """


def test_deadlocked_job_is_ended_by_default(tmp_path):
    record = ["--record", tmp_path / "record"]
    job = start_with_default(tmp_path, DEADLOCK, *record, seconds=2)
    _, said = job.communicate(timeout=60)
    text = told(subprocess.CompletedProcess([], job.returncode, stderr=said))
    for waiting, absent in ((0, 1), (1, 0)):
        waits = rf"Rank {waiting} has waited in all-reduce 1 of group \d+ for [\d.]+ s\. "
        assert re.search(rf"{waits}Rank {absent} has not entered it", text)


class SilentJob:
    """A job without records, whose ranks are silent from time 0 of a clock that the test sets."""

    def __init__(self, monkeypatch, timeout):
        self.now, self.idle_since, self.said = 0.0, 0.0, []
        monkeypatch.setattr(failures.time, "monotonic", lambda: self.now)
        self.detector = HangDetector(timeout, lambda _: JobSnapshot([], [], False, {}))

    def run(self, until):
        """Let time pass second by second. Return when the job was ended, or None."""
        while self.now < until:
            self.now += 1
            progress = ProgressReport(self.now - self.idle_since)
            if self.detector.check(lambda: [progress], self.warn) is not None:  # noqa: B023
                return self.now
        return None

    def warn(self, text):
        self.said.append((self.now, text))


def test_default_timeout_warns_at_growing_intervals(monkeypatch):
    job = SilentJob(monkeypatch, None)
    assert job.run(until=5000) is None
    assert [at for at, _ in job.said] == [300, 1200, 4800]
    job.idle_since = job.now  # the ranks do something, and are silent again
    assert job.run(until=7000) is None
    assert len(job.said) == 3


def test_given_timeout_ends_silent_job(monkeypatch):
    job = SilentJob(monkeypatch, 300.0)
    assert job.run(until=5000) == 300
    assert job.said == []


def test_busy_ranks_without_record_are_reported_once(monkeypatch):
    for timeout, expected in ((300.0, 1), (None, 0)):
        job = SilentJob(monkeypatch, timeout)
        for job.now in range(1, 1000):
            busy = ProgressReport(0.5, has_record=False)
            assert job.detector.check(lambda: [busy], job.warn) is None  # noqa: B023
        assert len(job.said) == expected
        for at, text in job.said:
            assert at == 301
            assert text.startswith("paceline: --hang-timeout 300: the ranks have no record")


def test_time_in_which_job_was_suspended_does_not_count(monkeypatch):
    job = SilentJob(monkeypatch, 300.0)
    assert job.run(until=200) is None
    job.now += 1000  # by the scheduler: all processes are stopped
    assert job.run(until=1400) is None
    assert job.run(until=2000) == 1501


def test_hang_timeout_shorter_than_step_is_reported_once_and_raised():
    said = []
    silence = HangDetector(0.04, lambda most: pytest.fail("nothing hangs"))
    for _ in range(3):
        time.sleep(0.02)
        assert silence.check(lambda: [ProgressReport(0.2, longest_idle_s=5.0)], said.append) is None
    (line,) = said
    assert line.startswith(
        "paceline: --hang-timeout 0.04: the ranks made no progress for 5.0 s and then continued"
    )
    assert "Paceline reports a hang after 15.0 s" in line
