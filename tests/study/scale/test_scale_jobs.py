"""``paceline scale --submit``: the jobs of a study, their cost, and what --continue does."""

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ranks
from test_scale_study import FakeRuns

from paceline.analyze.scaling.study_folder import read_stored, read_study, write_run
from paceline.analyze.scaling.study_model import KNOB, STRONG, WEAK, Setup, StudyRequest, StudyRun
from paceline.launch.submit.schedulers import SCHEDULERS
from paceline.launch.submit.submit import is_active
from paceline.study.scale.jobs import (
    JobOptions,
    begin_jobs,
    continue_jobs,
    has_jobs,
    read_jobs,
    show_jobs,
)
from paceline.study.scale.run_study import new_study, plan_study
from paceline.study.study_folder import new_run_folder

TRAIN = """
    import time, torch, paceline
    from torch.utils.data import DataLoader, TensorDataset

    world = paceline.init(seed=0)
    data = TensorDataset(torch.randn(640, 4))
    loader = world.shard(DataLoader(data, 16, shuffle=True))
    model = torch.nn.Linear(4, 1)
    model, optimizer = world.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in world.epochs(50):
        for x, in world.batches(loader):
            world.backward(model(x).square().mean())
            time.sleep(0.02)  # so that the throughput of three runs hardly differs
            world.step(optimizer)
    """


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Return a request for sizes 2 and 4, in a folder with a fake Slurm.

    ``submitted`` has the jobs' scripts; a job is active while its number is in ``active``.
    """
    monkeypatch.chdir(tmp_path)
    ranks.write(tmp_path, TRAIN, "train.py")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tmp_path / "active").mkdir()
    (tmp_path / "submitted").mkdir()
    sbatch = (
        f"cd {tmp_path}; n=$(ls submitted | wc -l); cat > submitted/$n; touch active/$n; echo $n"
    )
    squeue = (
        f'for last; do :; done; n="${{last#--jobs=}}"; cd {tmp_path}\n'
        'if [ -e down ]; then echo "slurm_load_jobs error: no controller" >&2; exit 1; fi\n'
        "if [ -e active/$n ]; then echo RUNNING; exit; fi\n"
        'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1'
    )
    for name, text in (("sbatch", sbatch), ("squeue", squeue)):
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:/usr/bin:/bin")
    return StudyRequest(
        "train.py",
        [],
        str(tmp_path),
        [STRONG, WEAK],
        [2, 4],
        global_batch=64,
        minutes=7,
        ranks_per_host=2,
    )


def submitted(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted((folder / "submitted").iterdir())]


def finish(folder, number, setups, repeats=3, failure=""):
    """Write the runs of a job that ended."""
    (folder.parent / "active" / number).unlink(missing_ok=True)
    for setup in setups:
        for _ in range(repeats):
            path, repeat = new_run_folder(folder, setup)
            figures = FakeRuns().figures(setup, setup.global_batch, 1.0)[0] if not failure else None
            how = "" if failure else KNOB
            write_run(
                folder,
                StudyRun(
                    *(f"runs/{path.name}", setup, repeat, figures, failure),
                    *(1, 9.0, time.time(), how),
                ),
            )


def test_a_job_is_submitted_for_each_size_after_its_cost_is_said(tmp_path, study):
    folder, said = tmp_path / "study", []
    new_study(folder, study)
    begin_jobs(folder, JobOptions("slurm", ranks_per_node=2, queue="batch"), said.append)
    small, large = submitted(tmp_path)
    for line in ("--nodes=1", "--ntasks-per-node=2", "--time=00:10:00", "--partition=batch"):
        assert f"#SBATCH {line}" in small
    assert "#SBATCH --nodes=2" in large
    assert re.search(rf"exec \S+paceline scale --continue {folder} --only 4\n", large)
    assert said[:3] == [
        "2 ranks on 1 node, global batch 64: at most 00:10:00, 0.17 node-hours",
        "4 ranks on 2 nodes, global batch 64, 128: at most 00:10:00, 0.33 node-hours",
        "together at most 0.50 node-hours in 2 jobs; a job ends as soon as its size is known",
    ]
    assert has_jobs(folder)
    assert [job.number for job in read_jobs(folder).jobs] == ["0", "1"]


def test_only_jobs_that_ended_too_early_are_submitted_again(tmp_path, study):
    folder, said = tmp_path / "study", []
    new_study(folder, study)
    begin_jobs(folder, JobOptions("slurm", ranks_per_node=2), said.append)
    finish(folder, "0", [Setup(2, 64)])
    said.clear()
    assert [job.number for job in continue_jobs(folder, said.append)] == ["1"]
    assert said == ["4 ranks: job 1 waits or runs"]
    assert read_study(folder).batch.how == KNOB
    assert any("in a job of its own" in note for note in read_study(folder).notes)
    finish(folder, "1", [Setup(4, 64)], repeats=1)  # killed
    (folder / "jobs/n4-1.out").write_text("slurmstepd: error: *** JOB 1 CANCELLED ***\n")
    said.clear()
    assert [job.number for job in continue_jobs(folder, said.append)] == ["2"]
    assert "4 ranks: job 1 ended before the size was measured" in said[0]
    assert "JOB 1 CANCELLED" in said[0]
    assert len(submitted(tmp_path)) == 3
    finish(folder, "2", [Setup(4, 64), Setup(4, 128)])
    assert continue_jobs(folder, said.append) == []
    assert len(submitted(tmp_path)) == 3


def test_a_size_whose_script_fails_is_not_submitted_again(tmp_path, study):
    folder = tmp_path / "study"
    new_study(folder, study)
    begin_jobs(folder, JobOptions("slurm"), lambda said: None)
    finish(folder, "0", [Setup(2, 64)])
    finish(folder, "1", [Setup(4, 64), Setup(4, 128)], 1, "RuntimeError: no memory")
    assert continue_jobs(folder, lambda said: None) == []
    assert read_study(folder).of_kind(STRONG)[1].failure == "RuntimeError: no memory"


def test_unknown_states_submit_nothing(tmp_path, study):
    folder = tmp_path / "study"
    new_study(folder, study)
    begin_jobs(folder, JobOptions("slurm"), lambda said: None)
    (tmp_path / "down").touch()
    with pytest.raises(ValueError, match=r"state of job 0 is not known.*no controller.*HINT"):
        continue_jobs(folder, lambda said: None)
    assert len(submitted(tmp_path)) == 2


def test_jobs_beyond_the_node_hours_are_not_submitted(tmp_path, study):
    folder = tmp_path / "study"
    new_study(folder, study)
    with pytest.raises(ValueError, match=r"may need 0.50 node-hours. HINT: --minutes 5 for each"):
        begin_jobs(folder, JobOptions("slurm", 2, node_hours=0.45), lambda said: None)
    assert not submitted(tmp_path)
    fits = replace(study, minutes=5)
    new_study(tmp_path / "second", fits)
    begin_jobs(tmp_path / "second", JobOptions("slurm", 2, node_hours=0.45), lambda said: None)
    assert len(submitted(tmp_path)) == 2


def test_node_hours_count_jobs_that_wait_or_run_with_their_whole_limit(tmp_path, study):
    folder, said = tmp_path / "study", []
    new_study(folder, study)
    options = JobOptions("slurm", ranks_per_node=2, node_hours=0.5)
    begin_jobs(folder, options, said.append)  # 0.17 and 0.33 node-hours
    (tmp_path / "active/0").unlink()  # killed at once
    finish(folder, "1", [Setup(4, 64)], repeats=1)
    (tmp_path / "active/1").touch()  # its one run is part of its limit
    refused = r"may need 0.17 node-hours; jobs that wait or run may use 0.33. HINT.*-hours 0.5,"
    with pytest.raises(ValueError, match=refused):
        continue_jobs(folder, said.append, node_hours=0.49)
    assert len(submitted(tmp_path)) == 2
    continue_jobs(folder, said.append, minutes=4, node_hours=0.5)
    assert "--time=00:07:00" in submitted(tmp_path)[2]
    assert read_stored(folder).request.minutes == 4


def test_scripts_are_printed_for_each_scheduler(tmp_path, study):
    for name in SCHEDULERS:
        said = []
        show_jobs(tmp_path / "study", plan_study(study), JobOptions(name, 2), said.append)
        assert sum("scale --continue" in text for text in said) == 2
    assert not (tmp_path / "study").exists()


@pytest.mark.parametrize(
    ("kind", "tool", "told", "active"),
    [
        ("slurm", "squeue", "PENDING", True),
        ("slurm", "squeue", "CANCELLED", False),
        ("lsf", "bjobs", "PEND", True),
        ("lsf", "bjobs", "EXIT", False),
        ("pbs", "qstat", "Job Id: 1.a\n    job_state = Q", True),
        ("pbs", "qstat", "Job Id: 1.a\n    job_state = F", False),
        ("torque", "qstat", "    job_state = R", True),
        ("torque", "qstat", "    job_state = C", False),
    ],
)
def test_state_of_a_job_is_read_from_each_scheduler(
    tmp_path, monkeypatch, kind, tool, told, active
):
    (tmp_path / tool).write_text(f"#!/bin/sh\ncat <<'X'\n{told}\nX\n")
    (tmp_path / tool).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert is_active(SCHEDULERS[kind], "1") is active


@pytest.mark.long
def test_a_killed_job_on_slurm_is_continued(slurm, shared_folder):
    """Measure three sizes on up to three nodes; the job of the largest one is killed in a run."""
    script = ranks.write(shared_folder, TRAIN, "train.py")
    folder = shared_folder / "study"
    options = ("--minutes", "4", "--precision", "100%", "--steps", "10", "--ranks-per-node", "1")
    words = (ranks.PACELINE, "scale", "-n", "1,2,3", "--strong", "--submit", "--global-batch", "24")
    words += options
    said = slurm.run(*words, "--output", folder, script, cwd=shared_folder).stderr
    *small, large = re.findall(r"submitted to Slurm as job (\d+)", said)
    first = folder / "runs/n3-b24-0/figures.json"
    ranks.wait_until(first.exists, 240)
    slurm.cancel(large)
    assert slurm.wait(large, 60) == "CANCELLED"
    assert 1 <= len(list(folder.glob("runs/n3-*/figures.json"))) < 3
    told = lambda: "\n".join(path.read_text() for path in folder.glob("jobs/*.out"))  # noqa: E731
    assert [slurm.wait(job, 240) for job in small] == ["COMPLETED", "COMPLETED"], told()
    gather = (ranks.PACELINE, "scale", "--continue", folder)
    said = slurm.run(*gather, cwd="/").stderr
    (again,) = re.findall(r"submitted to Slurm as job (\d+)", said)
    assert f"3 ranks: job {large} ended before the size was measured" in said
    assert slurm.wait(again, 240) == "COMPLETED"
    done = slurm.run(*gather, cwd="/")
    assert "submitted" not in done.stderr
    points = read_study(folder).points
    assert [(p.kind, p.ranks, p.hosts, len(p.runs)) for p in points] == [
        (STRONG, 1, 1, 3),
        (STRONG, 2, 2, 3),
        (STRONG, 3, 3, 3),
    ]
    assert all(len({one.host for one in p.figures[0].placement}) == p.hosts for p in points)
    # the ranks that srun has started are told from other load
    machines = [one.machine for p in points for one in p.figures]
    assert all(one.other_cores is not None for one in machines), machines
    assert not list(folder.glob("runs/*/scratch"))
