"""CPU binding of ranks, threads and loader workers.

The actual binding is read from the kernel, by the ranks and by --report-bindings.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import ranks

from paceline.cluster.binding_plan import RankBinding
from paceline.launch.affinity import report_bindings
from paceline.launch.affinity.report_bindings import BindingsReport, read_process, report_host
from paceline.launch.layout import Seat
from paceline.launch.monitor.progress import ProgressReport
from paceline.report.terminal.bindings import render

BOTH = {0, 1} <= os.sched_getaffinity(0)
two_cores = pytest.mark.skipif(not BOTH, reason="needs the cores 0 and 1")

TRAIN = """
    import json, os, sys, time
    import torch
    import paceline

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 160
        def __getitem__(self, index):
            return torch.ones(4), torch.tensor(sorted(os.sched_getaffinity(0)) + [-1])[:2]

    world = paceline.init(progress=False)
    model = torch.nn.Linear(4, 1)
    model, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = world.shard(torch.utils.data.DataLoader(Data(), batch_size=4, num_workers=1))
    {more}
    masks = set()
    for _ in world.epochs(1):
        for x, where in world.batches(loader):
            world.backward(model(x).mean())
            world.step(optimizer)
            masks |= {{tuple(pair) for pair in where.tolist()}}
            while "Bindings reported" not in open("stderr").read():  # workers exist until then
                time.sleep(0.05)
    tasks = {{tuple(sorted(os.sched_getaffinity(int(t)))) for t in os.listdir("/proc/self/task")}}
    found = {{"rank": sorted(os.sched_getaffinity(0)), "threads": sorted(tasks),
             "workers": sorted(masks), "torch": torch.get_num_threads(),
             "omp": os.environ["OMP_NUM_THREADS"]}}
    json.dump(found, open(f"out-{{world.rank}}", "w"))
    """


def train(folder, options, *, before=(), number=2, more="pass", **env):
    """Run the script; return the bindings that each rank found, and the launcher's messages."""
    script = ranks.write(folder, TRAIN.format(more=more))
    launcher = f"paceline {options} --report-bindings"
    errors = folder / "stderr"  # a file, because the ranks read it
    with open(errors, "w") as file:
        job = ranks.start(
            [*before, *ranks.command(script, ranks=number, launcher=launcher)],
            cwd=folder,
            env={k: v for k, v in ranks.environment(**env).items() if k in env or k[:4] != "OMP_"},
            stdout=subprocess.DEVNULL,
            stderr=file,
        )
        code = job.wait(120)
    said = errors.read_text()
    assert code == 0, said
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("out-*"))]
    return found, said


def row(said, rank):
    """Return the cells of a rank's row in the last table of bindings."""
    return re.findall(rf"^{rank} .*$", said, re.M)[-1].split()


@two_cores
def test_bind_core_pins_rank_threads_and_loader_workers(tmp_path):
    found, said = train(tmp_path, "--bind core")
    for rank, one in enumerate(found):
        assert one["rank"] == [rank]
        assert one["threads"] == [[rank]]
        assert one["workers"] == [[rank, -1]]
        assert (one["torch"], one["omp"]) == (1, "1")
        cells = row(said, rank)
        assert cells[4] == str(rank)
        assert " ".join(cells).removesuffix(" cores").endswith("1 on same")  # or the next line
    assert re.search(r"socket 0 +NUMA 0 +01\b", said)
    assert "not to the planned cores" not in said


@pytest.mark.long
@two_cores
def test_rank_that_changes_its_affinity_is_reported(tmp_path):
    more = "world.rank == 1 and os.sched_setaffinity(0, {0, 1})"
    _, said = train(tmp_path, "--bind core", more=more)
    text = " ".join(said.split())
    assert "rank 1: is bound to 0-1, not to the planned cores" in text
    assert "ranks 0-1: on the same core (hardware threads 0)" in text


@two_cores
@pytest.mark.long
def test_auto_binding_only_on_cores_granted_to_job(tmp_path):
    found, said = train(tmp_path, "")
    assert [one["rank"] for one in found] == [[0, 1], [0, 1]]
    assert "not bound: no scheduler reserves these cores for this job" in said

    found, said = train(tmp_path, "", before=["taskset", "-c", "1"], number=1)
    assert (found[0]["rank"], found[0]["workers"]) == ([1], [[1, -1]])
    assert "not bound" not in said

    _, said = train(tmp_path, "", before=["taskset", "-c", "1"])
    assert "ranks 0-1: 2 threads on 1 core (1)" in " ".join(said.split())

    found, said = train(tmp_path, "", before=["taskset", "-c", "1"], number=1, OMP_PLACES="cores")
    assert "not bound: OMP_PLACES is set" in said


CPUSETS = Path("/sys/fs/cgroup/cpuset")


@pytest.mark.long
@pytest.mark.skipif(
    not os.access(CPUSETS / "cpuset.cpus", os.R_OK) or os.geteuid() != 0 or not BOTH,
    reason="needs root and control groups of version 1",
)
def test_auto_binding_uses_only_cores_of_cpuset(tmp_path):
    group = CPUSETS / f"paceline-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpuset.cpus").write_text("1")
        (group / "cpuset.mems").write_text("0")
        enter = ["sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh"]
        found, said = train(tmp_path, "", before=enter, number=1)
        assert (found[0]["rank"], found[0]["workers"]) == ([1], [[1, -1]])
        assert re.search(r"socket 0 +NUMA 0 +-0\b", said)
    finally:
        ranks.wait_until(lambda: (group / "cgroup.procs").read_text() == "")
        group.rmdir()


@two_cores
@pytest.mark.long
def test_auto_binding_under_slurm(hosts, slurm, shared_folder):
    ranks.write(shared_folder, TRAIN.format(more="pass"))
    line = f"{ranks.PACELINE} run -n 4 --report-bindings script.py"
    torch = f"export TORCHINDUCTOR_CACHE_DIR={shared_folder}/torch"
    commands = f"#!/bin/sh\n{torch}\nexec {line} 2> stderr\n"
    job = slurm.batch(commands, "-N2", "--exclusive", cwd=shared_folder)
    state, said = slurm.wait(job), (shared_folder / "stderr").read_text()
    assert state == "COMPLETED", said
    found = [json.loads(path.read_text()) for path in sorted(shared_folder.glob("out-*"))]
    assert [one["rank"] for one in found] == [[0], [1], [0], [1]]
    assert [row(said, rank)[1] for rank in range(4)] == ["host1", "host1", "host2", "host2"]
    assert [row(said, rank)[4] for rank in range(4)] == ["0", "1", "0", "1"]


class SlowHost:
    """A host whose ranks have not trained yet."""

    name, stepped = "host1", False

    def progress(self):
        return ProgressReport(has_stepped=self.stepped)

    def bindings(self):
        return report_host([RankBinding(cpus=(), threads=1)], {0: (os.getpid(), 0)})


def test_report_before_the_first_step_is_repeated_after_it(monkeypatch):
    host, said = SlowHost(), []
    report = BindingsReport(said.append)
    monkeypatch.setattr(report_bindings, "POLL_INTERVAL_S", 0.0)
    report.check([host], [Seat(0, 0, 0)])
    assert said == []
    monkeypatch.setattr(report_bindings, "EARLY_REPORT_S", 0.0)
    for _ in range(2):
        report.check([host], [Seat(0, 0, 0)])
    assert ["Bindings before the first step" in text for text in said] == [True]
    host.stepped = True
    for _ in range(2):
        report.check([host], [Seat(0, 0, 0)])
    report.end()
    assert ["Bindings reported by the kernel" in text for text in said] == [False, True]


def test_ended_rank_is_reported_as_missing_from_binding_table():
    ended = subprocess.Popen(["true"])
    ended.wait()
    here = {0: (os.getpid(), 0), 1: (ended.pid, 1)}
    told = report_host([RankBinding(cpus=(), threads=1), RankBinding(cpus=(), threads=1)], here)
    said = render([("host1", told)], 4)
    assert "ranks 1-3 ended before the bindings were read" in " ".join(said.split())
    assert row(said, 0)[1] == "host1"


def test_prefer_sets_numa_memory_policy():
    script = "from paceline.launch.ranks.rank_process import prefer; "
    script += "from paceline.launch.affinity.report_bindings import read_process"
    script += "; import os; print(prefer(0), read_process(os.getpid()).memory)"
    said = subprocess.run([ranks.BIN / "python", "-c", script], capture_output=True, text=True)
    assert said.stdout.startswith("False") or said.stdout == "True prefer:0\n"  # or forbidden


def test_affinity_of_ended_process_is_none():
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert read_process(ended.pid) is None


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--bind moon", "--bind moon is not known. HINT: auto, none, core, numa, socket or device"),
        ("--bind core --cpus-per-rank 90", "HINT: --cpus-per-rank 1|need 180 cores"),
        ("--bind device", "--bind device"),
        ("--bind core --cpus-per-rank 0", "--cpus-per-rank must be 1 or more; this is 0. HINT"),
    ],
)
def test_invalid_binding_options_are_reported_before_ranks_start(tmp_path, options, told):
    script = ranks.write(tmp_path, "open('started', 'w')")
    result = ranks.run(script, launcher=f"paceline --fresh {options}", check=False)
    assert result.returncode == 2
    assert re.search(told, result.stderr)
    assert "HINT" in result.stderr
    assert not (tmp_path / "started").exists()
