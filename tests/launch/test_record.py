"""``paceline run --record`` and ``paceline record``: records that survive faults."""

import fcntl
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
from records import Rank

from paceline.analyze.figures.report import analyse
from paceline.analyze.records.load_run import load_run
from paceline.launch import job_folder
from paceline.security import run_lock

TRAIN = """
    import os, signal, sys, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kill_at, attempt = int(sys.argv[1]), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    for step in range(int(sys.argv[2])):
        model(torch.randn(64, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == kill_at and rank == 1 and attempt == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 20 and rank == 0:
            print("step 20", flush=True)
    dist.destroy_process_group()
"""


def test_record_of_killed_rank_is_complete(tmp_path):
    script = ranks.write(tmp_path, TRAIN)
    record = tmp_path / "record"
    result = ranks.run(script, 30, 1000, launcher=f"paceline --record {record}", check=False)
    assert result.returncode == 128 + signal.SIGKILL
    report = analyse(load_run(record))
    assert report.ranks == [0, 1]
    assert report.steps in (30, 31)
    assert not ranks.in_memory(tmp_path)


def test_each_attempt_has_its_own_record(tmp_path):
    script = ranks.write(tmp_path, TRAIN)
    record = tmp_path / "record"
    ranks.run(script, 25, 40, launcher=f"paceline --max-restarts 1 --record {record}")
    assert analyse(load_run(record)).steps == 40
    assert analyse(load_run(record / "attempt-0")).steps in (25, 26)


@pytest.mark.parametrize("victim", ["launcher", "everybody"])
def test_record_is_kept_after_launcher_sigkill(tmp_path, victim):
    script = ranks.write(tmp_path, TRAIN)
    record = tmp_path / "record"
    command = ranks.command(script, -1, 10**6, launcher=f"paceline --record {record}")
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, env=ranks.environment(), start_new_session=True
    )
    try:
        assert b"step 20" in running.stdout.readline()
        labels = [job_folder.read_label(folder).command for folder in job_folder.running()]
        assert str(script) in [words[0] for words in labels if words]  # see ranks.in_memory
        family = ranks.family(running.pid)
        for pid in family if victim == "everybody" else [running.pid]:
            os.kill(pid, signal.SIGKILL)
        running.wait()
        ranks.wait_until(lambda: not ranks.alive(str(script)))
    finally:
        running.kill()
    if victim == "everybody":  # the next run on this host saves the record
        ranks.run(ranks.write(tmp_path, "print('hello')", "other.py"), ranks=1)
    ranks.wait_until(lambda: list(record.glob("*.ring")))
    ranks.wait_until(lambda: not ranks.in_memory(tmp_path))
    report = analyse(load_run(record))
    assert report.ranks == [0, 1]
    assert report.steps >= 20


def test_existing_record_is_never_overwritten(tmp_path):
    script = ranks.write(tmp_path, TRAIN)
    record = tmp_path / "record"
    ranks.run(script, -1, 5, launcher=f"paceline --record {record}")
    kept = {path.name: path.read_bytes() for path in record.iterdir()}
    result = ranks.run(script, -1, 5, launcher=f"paceline --record {record}", check=False)
    assert result.returncode == 2
    assert "already contains a record. HINT" in result.stderr
    assert kept == {path.name: path.read_bytes() for path in record.iterdir()}


def test_two_runs_do_not_record_into_one_folder(tmp_path):
    script, record = ranks.write(tmp_path, "print('started')"), tmp_path / "record"
    record.mkdir()
    other = job_folder.lock_record(record, "other")
    result = ranks.run(script, launcher=f"paceline --record {record}", check=False)
    assert result.returncode == 2
    assert f"{record} is in use by run other (process {os.getpid()} on" in result.stderr
    assert "started" not in result.stdout
    other.release()
    assert list(record.iterdir()) == []
    ranks.run(script, launcher=f"paceline --record {record}")
    assert not (record / run_lock.NAME).exists()


def test_ranks_of_another_launcher_do_not_record_into_the_folder_of_a_run(tmp_path):
    script = ranks.write(
        tmp_path, "import os, sys; print('started'); print(os.listdir(sys.argv[1]))"
    )
    record = tmp_path / "record"
    record.mkdir()
    other = job_folder.lock_record(record, "other")
    words = [ranks.PACELINE, "record", record, script, record]

    def start(rank):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_PORT": "1"}
        environment = ranks.environment(MASTER_ADDR="127.0.0.1", **place)
        return ranks.run_command(words, tmp_path, environment)

    for rank in ("0", "1"):
        result = start(rank)
        assert result.returncode == 2
        assert f"{record} is in use by run other (process {os.getpid()} on" in result.stderr
        assert "started" not in result.stdout
    other.release()
    result = start("0")
    assert "started" in result.stdout, result.stderr
    assert run_lock.NAME in result.stdout
    assert not (record / run_lock.NAME).exists()


def test_record_of_a_killed_job_is_not_overwritten_by_the_next(tmp_path, monkeypatch):
    record, places = tmp_path / "record", tmp_path / "places"
    monkeypatch.setattr(job_folder, "_PLACES", (places,))
    places.mkdir()
    record.mkdir()
    with job_folder.make(places / f"{job_folder._prefix()}killed") as killed:
        Rank(killed.path, 0, 1).step(0, 1)
        job_folder.write_destination(killed.path, record, ["script.py"], "run")
    with pytest.raises(ValueError, match="already contains a record"):
        job_folder.check(record)


def test_folder_of_another_version_is_reported_unless_its_job_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(job_folder, "_PLACES", (tmp_path,))
    monkeypatch.setattr(job_folder, "_reported", set())
    running, left = (tmp_path / f"{job_folder._prefix()}{name}" for name in ("running", "left"))
    for folder in (running, left):
        folder.mkdir(mode=0o700)
        (folder / job_folder.LOCK).touch()
    with (running / job_folder.LOCK).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for _ in range(2):
            job_folder.clear_orphans()
    said = capsys.readouterr().err
    assert said.count("was not created by Paceline: Paceline does not use or remove it") == 1
    assert f"HINT: if no other program needs it: rm -r {left}\n" in said
    assert running.exists()
    assert left.exists()


def test_unwritable_record_folder_is_rejected_before_ranks_start(tmp_path):
    script = ranks.write(tmp_path, "print('started')")
    (tmp_path / "file").write_text("")
    result = ranks.run(script, launcher=f"paceline --record {tmp_path}/file/x", check=False)
    assert result.returncode == 2
    assert "HINT: choose a folder that you can write to" in result.stderr
    assert "started" not in result.stdout


def test_script_without_training_is_recorded_with_zero_steps(tmp_path):
    script = ranks.write(tmp_path, "print('hello')")
    record = tmp_path / "record"
    assert "hello" in ranks.run(script, launcher=f"paceline --record {record}").stdout
    report = analyse(load_run(record))
    assert (report.ranks, report.steps, report.window_s) == ([0, 1], 0, None)


def test_script_with_init_is_recorded_once_and_prints_summary(tmp_path):
    script = ranks.write(
        tmp_path,
        """
        import paceline, torch
        world = paceline.init(progress=False)
        model, optimizer = torch.nn.Linear(64, 64), None
        model, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
        data = torch.utils.data.TensorDataset(torch.randn(640, 64))
        loader = world.shard(torch.utils.data.DataLoader(data, batch_size=16))
        for epoch in world.epochs(2):
            for (x,) in world.batches(loader):
                world.backward(model(x).square().mean())
                world.step(optimizer)
        """,
    )
    record = tmp_path / "record"
    result = ranks.run(script, launcher=f"paceline --record {record}")
    assert "Paceline: 2 ranks, 40 steps" in result.stderr
    report = analyse(load_run(record))
    assert report.steps == 40
    assert report.samples == 16 * 2 * 39


@pytest.mark.long
def test_paceline_record_under_torchrun(tmp_path):
    script = ranks.write(tmp_path, TRAIN)
    record = tmp_path / "record"
    command = [str(ranks.BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "--no-python"]
    command += [ranks.PACELINE, "record", str(record), str(script), "-1", "30"]
    subprocess.run(command, check=True, env=ranks.environment(), timeout=120)
    report = analyse(load_run(record))
    assert (report.ranks, report.steps, report.confidence) == ([0, 1], 30, 1.0)
    again = subprocess.run(command, capture_output=True, env=ranks.environment(), timeout=120)
    assert again.returncode != 0
    assert b"already contains a record. HINT" in again.stderr
    assert json.loads((record / "run.json").read_text())["command"][0] == str(script)
    assert not ranks.in_memory(tmp_path)


@pytest.mark.long
def test_record_of_killed_torchrun_rank_is_saved_by_later_run(tmp_path):
    script = ranks.write(tmp_path, TRAIN)
    record = tmp_path / "record"
    command = [str(ranks.BIN / "torchrun"), "--standalone", "--nproc-per-node", "2", "--no-python"]
    command += [ranks.PACELINE, "record", str(record), str(script), "30", "1000"]
    result = subprocess.run(command, capture_output=True, env=ranks.environment(), timeout=120)
    assert result.returncode != 0
    ranks.run(ranks.write(tmp_path, "print('hello')", "other.py"), ranks=1)
    assert analyse(load_run(record)).ranks == [0, 1]
    assert not ranks.in_memory(tmp_path)


@pytest.mark.long
def test_record_with_fresh_interpreters(tmp_path):
    script = ranks.write(tmp_path, TRAIN)
    record = tmp_path / "record"
    ranks.run(script, -1, 30, launcher=f"paceline --fresh --record {record}")
    report = analyse(load_run(record))
    assert (report.ranks, report.steps, report.confidence) == ([0, 1], 30, 1.0)


def test_child_processes_of_ranks_are_not_recorded(tmp_path):
    script = ranks.write(
        tmp_path,
        """
        import multiprocessing, sys

        def child():
            print("the child has torch:", "torch" in sys.modules, flush=True)

        if __name__ == "__main__":
            process = multiprocessing.get_context("spawn").Process(target=child)
            process.start()
            process.join()
        """,
    )
    record = tmp_path / "record"
    result = ranks.run(script, ranks=1, launcher=f"paceline --record {record}")
    assert "the child has torch: False" in result.stdout
    assert len(list(record.glob("*.ring"))) == 1


def test_training_in_child_processes_is_reported(tmp_path):
    """Hogwild: processes that share the parameters, without a process group."""
    script = ranks.write(
        tmp_path,
        """
        import torch, torch.multiprocessing as mp

        def train(model):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(5):
                optimizer.zero_grad()
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()

        if __name__ == "__main__":
            model = torch.nn.Linear(8, 1).share_memory()
            context = mp.get_context("fork")
            processes = [context.Process(target=train, args=(model,)) for _ in range(3)]
            [one.start() for one in processes]
            [one.join() for one in processes]
        """,
    )
    record = tmp_path / "record"
    ranks.run(script, ranks=1, launcher=f"paceline --record {record}")
    report = analyse(load_run(record))
    assert report.steps == 0
    assert report.doubts[0].startswith(
        "training went on in 3 child processes of rank 0 that are not ranks: their 15 optimizer "
        "steps are not recorded. HINT: start the script with paceline run -n 3"
    )


def test_json_summary_of_recorded_run_is_report(tmp_path):
    script = ranks.write(tmp_path, TRAIN)
    record, summary = tmp_path / "record", tmp_path / "summary.json"
    given = "--env A=1 --env api_key=secret-1"
    launcher = f"paceline --record {record} --json {summary} {given}"
    result = ranks.run(script, -1, 20, launcher=launcher)
    assert json.loads((record / "run.json").read_text())["env"] == ["A=1", "api_key=..."]
    assert json.loads(summary.read_text())["env"] == ["A=1", "api_key=..."]
    assert f"the record is in {record}" in result.stderr
    assert "parallel efficiency" in result.stderr
    data = json.loads(summary.read_text())
    assert (data["format"], data["steps"]) == ("paceline-report", 20)


def test_paceline_record_rejects_missing_script(tmp_path):
    record = tmp_path / "record"
    result = subprocess.run(
        [ranks.PACELINE, "record", str(record), str(tmp_path / "nothing.py")],
        capture_output=True,
        text=True,
        env=ranks.environment(),
    )
    assert result.returncode == 2
    assert "nothing.py does not exist. HINT" in result.stderr
    assert not list(record.glob("*.ring"))


def test_record_is_saved_if_record_folder_was_deleted(tmp_path):
    record = tmp_path / "record"
    script = ranks.write(
        tmp_path, TRAIN + f"    __import__('shutil').rmtree({str(record)!r}, True)"
    )
    ranks.run(script, -1, 20, launcher=f"paceline --record {record}")
    assert analyse(load_run(record)).steps == 20


def test_record_that_cannot_be_copied_is_kept_and_reported(tmp_path, capsys):
    folder, target = tmp_path / "job", tmp_path / "gone" / "record"
    job_folder.make(folder)
    target.mkdir(parents=True)
    job_folder.write_destination(folder, target, ["script.py"], "run")
    shutil.rmtree(target.parent)
    target.parent.write_text("a file where the folder was")
    assert not job_folder.clear(folder)
    assert (folder / job_folder.DESTINATION_FILE).exists()
    said = capsys.readouterr().err
    assert str(folder) in said
    # The launcher calls it after the rank server: the warning is not repeated.
    assert not job_folder.clear(folder)
    assert capsys.readouterr().err == ""
    target.parent.unlink()
    assert job_folder.clear(folder, orphan=True)  # the next run tries again
    assert not folder.exists()


def test_earlier_attempt_is_not_copied_as_last_attempt(tmp_path):
    folder, target = tmp_path / "job", tmp_path / "record"
    job_folder.make(folder)
    target.mkdir()
    Rank(folder, 1, 2, attempt=0).step(0, 1)
    job_folder.write_attempt(folder, 1)
    job_folder.write_destination(folder, target, ["script.py"], "run")
    job_folder.clear(folder)
    assert [str(p.relative_to(target)) for p in target.rglob("*.ring")] == ["attempt-0/rank-1.ring"]
    assert not folder.exists()


def test_returning_host_does_not_overwrite_later_record(tmp_path):
    """The host did not take part in attempt 1, which had one rank less."""
    folder, target = tmp_path / "job", tmp_path / "record"
    job_folder.make(folder)
    target.mkdir()
    for rank in (0, 1):
        Rank(target, rank, 2, attempt=1).step(0, 1)
    later = {path: path.read_bytes() for path in target.iterdir()}
    for rank in (1, 2):
        Rank(folder, rank, 3, attempt=0).step(0, 1)
    job_folder.write_attempt(folder, 0)
    job_folder.copy_on_clear(folder, target)
    job_folder.clear(folder)
    assert {path: path.read_bytes() for path in later} == later
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*.ring")) == [
        "attempt-0/rank-1.ring",
        "attempt-0/rank-2.ring",
        "rank-0.ring",
        "rank-1.ring",
    ]
    assert not folder.exists()


def test_concurrent_jobs_do_not_delete_job_folders_of_others():
    code = "from paceline.launch import job_folder as j; f = j.job_folder(); "
    code += "print(f, flush=True); input(); assert (f / 'lock').exists(); j.clear(f)"
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(12)
    ]
    folders = [Path(process.stdout.readline().decode().strip()) for process in started]
    assert all(folder.is_dir() for folder in folders)
    for process in started:
        process.communicate(b"go\n", timeout=60)
    assert [process.returncode for process in started] == [0] * 12
    assert not any(folder.exists() for folder in folders)


@pytest.fixture
def small_disk(tmp_path):
    """Mount a 64 KiB file system."""
    need(["root"] if os.geteuid() else [])
    disk = tmp_path / "small"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], check=True)
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_record_on_full_disk_is_reported_once_without_partial_files(tmp_path, small_disk):
    script = ranks.write(tmp_path, TRAIN)
    record = small_disk / "record"
    done = ranks.run(script, -1, 400, launcher=f"paceline --record {record}", check=False)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if line.startswith("paceline: ")]
    (line,) = [one for one in said if "record" in one]
    assert "the record could not be saved ([Errno 28] No space left on device" in line
    folder = Path(line.partition("It is in ")[2].partition(";")[0])
    try:
        assert {path.name for path in record.iterdir()} <= {"run.json", "rank-0.ring"}
        assert len(list(folder.glob("*.ring"))) >= 2
        subprocess.run(["mount", "-o", "remount,size=8m", small_disk], check=True)
        again = ranks.run(script, -1, 2, launcher="paceline", check=False)
        assert again.returncode == 0, again.stderr
        assert analyse(load_run(record)).steps == 400
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert not ranks.in_memory(tmp_path)


def test_record_folder_name_with_control_characters(tmp_path):
    folder, target = tmp_path / "job", tmp_path / "re\x1bcord"
    job_folder.make(folder)
    target.mkdir()
    Rank(folder, 0, 1).step(0, 1)
    job_folder.write_destination(folder, target, ["script.py"], "run")
    assert job_folder.clear(folder)
    assert (target / "rank-0.ring").exists()
