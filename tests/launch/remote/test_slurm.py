"""``paceline run`` under Slurm: use of the allocation, ways to end a job, and cleanup.

Scripts run without torch in new interpreters where only the launcher is tested.
"""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import ranks

SHOW = """
    import json, os
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES", "HELLO")
    found = {name: os.environ.get(name) for name in names}
    found |= {"host": os.uname().nodename, "cores": len(os.sched_getaffinity(0))}
    json.dump(found, open(f"out-{os.environ['RANK']}", "w"))
    """
# Each rank starts a child process and a worker in another session; all of them must end.
WAIT = """
    import os, subprocess, time
    subprocess.Popen(["sleep", "300"])
    if os.fork() == 0:
        os.setsid()
        time.sleep(300)
    open(f"up-{os.environ['RANK']}", "w")
    time.sleep(300)
    """
RUN = f"{ranks.PACELINE} run --fresh"


def batch(slurm, folder, text, *options):
    """Submit a batch script and wait; return the job's final state and its output."""
    job = slurm.batch(f"#!/bin/sh\n{text}\n", *options, cwd=folder)
    return slurm.wait(job), (folder / f"slurm-{job}.out").read_text()


def shown(folder):
    """Return the values that each rank wrote, in rank order."""
    number = len(list(folder.glob("out-*")))
    return [json.loads((folder / f"out-{rank}").read_text()) for rank in range(number)]


def up(folder, number):
    ranks.wait_until(lambda: len(list(folder.glob("up-*"))) == number, 40)


def over(slurm, seconds=8):
    """Assert that within ``seconds`` the allocation and all processes of the job have ended."""
    ranks.wait_until(lambda: not any(x.startswith("job ") for x in slurm.left_over(0)), seconds)
    assert slurm.left_over(seconds) == []


@pytest.mark.parametrize(
    ("options", "each", "cores", "gpus"),
    [
        (["-n4", "--ntasks-per-node=2"], 2, 1, None),  # each rank is bound to one core
        pytest.param(  # srun doesn't inherit -c from the job
            *(["--ntasks-per-node=1", "-c2"], 1, 2, None), marks=pytest.mark.long
        ),
        (["--gres=gpu:2", "--exclusive"], 2, 1, "0,1"),
    ],
)
def test_batch_script_uses_whole_allocation(slurm, shared_folder, options, each, cores, gpus):
    script = ranks.write(shared_folder, SHOW)
    state, said = batch(slurm, shared_folder, f"exec {RUN} {script}", "-N2", *options)
    assert state == "COMPLETED", said
    found = shown(shared_folder)
    assert [one["host"] for one in found] == ["host1"] * each + ["host2"] * each
    assert [one["LOCAL_RANK"] for one in found] == [str(rank) for rank in range(each)] * 2
    assert {one["LOCAL_WORLD_SIZE"] for one in found} == {str(each)}
    assert {one["WORLD_SIZE"] for one in found} == {str(2 * each)}
    assert {one["cores"] for one in found} == {cores}
    assert {one["CUDA_VISIBLE_DEVICES"] for one in found} == {gpus}
    assert f"paceline: {2 * each} ranks on 2 nodes over srun, network eth0 (host1: 0" in said
    assert slurm.left_over() == []


def test_salloc_on_login_node_uses_nodes_and_forwards_environment(slurm, shared_folder):
    script = ranks.write(shared_folder, SHOW)
    words = ["salloc", "-N2", "-n3", *RUN.split(), "-n", "3", script]
    slurm.run(*words, cwd=shared_folder, env={"HELLO": "there"})
    found = shown(shared_folder)
    assert [one["host"] for one in found] == ["host1", "host1", "host2"]
    assert {one["HELLO"] for one in found} == {"there"}
    assert slurm.left_over() == []


ALONE = """
    import os, paceline
    assert os.environ["SLURM_NTASKS"] == "2"
    print("a world of", paceline.init(progress=False).size)
    """


def test_host_slots_are_kept_if_srun_sorts_nodes(slurm, shared_folder):
    ranks.write(shared_folder, "import os; print(os.environ['RANK'], os.uname().nodename)", "s.py")
    words = [*RUN.split(), "--fresh", "--launcher", "srun", "-H", "host2:2,host1:1", "s.py"]
    said = slurm.run("salloc", "-N2", "-w", "host1,host2", *words, cwd=shared_folder).stdout
    assert ranks.untagged(said) == {"0 host2", "1 host2", "2 host1"}


def test_batch_script_on_single_node_needs_no_srun(slurm, shared_folder):
    script = ranks.write(shared_folder, SHOW)
    state, said = batch(slurm, shared_folder, f"exec {RUN} {script}", "-N1", "-n2")
    assert (state, "over srun" in said) == ("COMPLETED", False)
    assert [one["host"] for one in shown(shared_folder)] == ["host1"] * 2
    assert slurm.left_over() == []


def test_script_without_launcher_in_batch_job_has_world_size_one(slurm, shared_folder):
    script = ranks.write(shared_folder, ALONE)
    text = f"exec {sys.executable} {script}"
    state, said = batch(slurm, shared_folder, text, "-N1", "-n2")
    assert (state, said) == ("COMPLETED", "a world of 1\n")


def test_show_prints_command_and_starts_nothing(slurm, shared_folder):
    ranks.write(shared_folder, SHOW)
    words = ["salloc", "-N2", "-n4", "--ntasks-per-node=2", ranks.PACELINE, "run", "--show"]
    said = slurm.run(*words, "script.py", "--epochs", "3", cwd=shared_folder).stdout
    assert "2 nodes over srun\n  4 ranks: host1: 0-1, host2: 2-3\n" in said
    assert "  starts: srun --overlap --nodes=2 --ntasks=2 --ntasks-per-node=1" in said
    assert "  script: script.py --epochs 3\n" in said
    assert shown(shared_folder) == []


HETEROGENEOUS = """
    import os, paceline, torch
    world = paceline.init(progress=False)
    total = torch.ones(1)
    torch.distributed.all_reduce(total)
    print("rank", world.rank, "of", world.size, "on", os.uname().nodename, int(total))
    """


@pytest.mark.long
def test_heterogeneous_job_is_reported_and_srun_makes_one_world(slurm, shared_folder):
    script = ranks.write(shared_folder, HETEROGENEOUS)
    python = f"srun --het-group=0,1 {sys.executable} {script}"
    text = f"{ranks.PACELINE} run --show {script}\n{python}"
    state, said = batch(slurm, shared_folder, text, "-n1", "-t5", ":", "-n1")
    assert state == "COMPLETED", said
    assert "of its 2 components, only the nodes of one (host1) are used, and host2 left out" in said
    assert "rank 0 of 2 on host1 2" in said
    assert "rank 1 of 2 on host2 2" in said


def test_several_launchers_under_srun_are_rejected(slurm, shared_folder):
    script = ranks.write(shared_folder, SHOW)
    done = slurm.run("srun", "-n2", *RUN.split(), script, cwd=shared_folder, check=False)
    assert done.returncode == 2
    assert "Slurm has started 2 copies of `paceline run`" in done.stderr
    assert "HINT: one `paceline run SCRIPT` in the allocation" in done.stderr
    assert shown(shared_folder) == []


def test_expired_allocation_is_reported_with_srun_error(slurm, shared_folder):
    script = ranks.write(shared_folder, SHOW)
    said = slurm.run("salloc", "-N2", "-n2", "env").stdout
    kept = dict(line.split("=", 1) for line in said.splitlines() if line.startswith("SLURM"))
    begun = time.monotonic()
    done = slurm.run(*RUN.split(), script, cwd=shared_folder, env=kept, check=False)
    assert done.returncode == 2
    assert "paceline: srun has ended: " in done.stderr
    assert "Expired or invalid job" in done.stderr
    assert time.monotonic() - begun < 10


# A sitecustomize.py in the job's folder that ends the agent of host2 when it starts.
ENDS = """
    import os, signal, sys
    if "paceline.launch.host_agent" in sys.orig_argv and os.environ["SLURMD_NODENAME"] == "host2":
        {how}
    """


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "host2: task 1: Killed"),
        ("sys.stderr.write('no disk\\n'); os._exit(3)", "host2: task 1: Exited with exit code 3"),
    ],
)
def test_agent_that_ends_at_start_is_reported_immediately(slurm, shared_folder, how, told):
    """srun keeps the other agents running: without its message, the launcher waits for minutes."""
    script = ranks.write(shared_folder, SHOW)
    ranks.write(shared_folder, ENDS.format(how=how), "sitecustomize.py")
    begun = time.monotonic()
    words = ["salloc", "-N2", "-w", "host1,host2", "env", "PYTHONPATH=.", *RUN.split(), script]
    done = slurm.run(*words, cwd=shared_folder, check=False)
    assert time.monotonic() - begun < 20
    assert done.returncode == 2
    assert "paceline: the agent of host2 ended before it connected: " in done.stderr
    assert f"srun: error: {told}" in done.stderr
    assert ("no disk" in done.stderr) == ("disk" in how)
    assert shown(shared_folder) == []
    assert slurm.left_over() == []


def test_slurm_job_has_exit_code_of_failed_rank(slurm, shared_folder):
    text = """
        import os, subprocess, sys, time
        subprocess.Popen(["sleep", "300"])
        if os.environ["RANK"] == "3":
            print("last words")
            sys.exit(7)
        time.sleep(300)
        """
    script = ranks.write(shared_folder, text)
    job = slurm.batch(f"#!/bin/sh\nexec {RUN} -n 4 {script}\n", "-N2", cwd=shared_folder)
    assert slurm.wait(job) == "FAILED"
    assert "ExitCode=7:0" in slurm.run("scontrol", "show", "job", job).stdout
    said = (shared_folder / f"slurm-{job}.out").read_text()
    assert "paceline: rank 3 on host2 failed: exit code 7" in said
    assert "    last words" in said
    assert slurm.left_over() == []


def test_scancel_ends_all_ranks(slurm, shared_folder):
    script = ranks.write(shared_folder, WAIT)
    job = slurm.batch(f"#!/bin/sh\nexec {RUN} -n 4 {script}\n", "-N2", cwd=shared_folder)
    up(shared_folder, 4)
    slurm.cancel(job)
    assert slurm.wait(job) == "CANCELLED"
    said = (shared_folder / f"slurm-{job}.out").read_text()
    assert "paceline: SIGTERM: Paceline ended all ranks" in said
    over(slurm)


def test_ctrl_c_in_terminal_ends_all_ranks(slurm, shared_folder):
    """Ctrl-C reaches salloc's command, which is the foreground process of the terminal."""
    script = ranks.write(shared_folder, WAIT)
    terminal = ["script", "-qec", f"salloc -N2 {RUN} -n 4 {script}", "/dev/null"]
    process = slurm.start(*terminal, cwd=shared_folder, stdin=subprocess.PIPE)
    up(shared_folder, 4)
    process.stdin.write("\x03")
    process.stdin.flush()
    ranks.wait_until(lambda: process.poll() is not None)  # stdin stays open, to avoid a SIGHUP
    said, _ = process.communicate()
    assert process.returncode == 130
    assert "paceline: interrupted: Paceline ended all ranks" in said
    over(slurm)


@pytest.mark.parametrize(
    "kind", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.long)]
)
def test_released_allocation_ends_all_ranks(slurm, shared_folder, kind):
    """Signal salloc, which then releases the allocation."""
    script = ranks.write(shared_folder, WAIT)
    words = ["salloc", "-N2", *RUN.split(), "-n", "4", script]
    process = slurm.start(*words, cwd=shared_folder)
    up(shared_folder, 4)
    os.killpg(process.pid, kind)
    _, said = process.communicate(timeout=30)
    assert process.returncode
    assert "Paceline ended" in said
    over(slurm)


@pytest.mark.long
def test_killed_launcher_ends_all_ranks(slurm, shared_folder):
    """The batch script continues, so that Slurm does not end the ranks."""
    script = ranks.write(shared_folder, WAIT)
    text = f"{RUN} -n 4 {script} & echo $! > launcher; wait; exec sleep 77"
    job = slurm.batch(f"#!/bin/sh\n{text}\n", "-N2", cwd=shared_folder)
    up(shared_folder, 4)
    launcher = (shared_folder / "launcher").read_text().strip()
    slurm.hosts.run("host1", "kill", "-9", launcher)
    ranks.wait_until(lambda: len(slurm.left_over(0)) == 3, 10)
    words = [line.split()[-1] for line in slurm.left_over(0)]
    assert words == [job, f"[{job}.batch]", "77"]


def test_warning_signal_is_forwarded_and_kills_no_rank(slurm, shared_folder):
    text = """
        import os, signal, sys, time
        rank = os.environ["RANK"]
        if rank in "03":
            signal.signal(signal.SIGUSR1, lambda *_: open(f"warned-{rank}", "w"))
        open(f"up-{rank}", "w")
        while not os.path.exists("enough"):
            time.sleep(0.05)
        print("ended well")
        """
    script = ranks.write(shared_folder, text)
    job = slurm.batch(f"#!/bin/sh\nexec {RUN} -n 4 {script}\n", "-N2", cwd=shared_folder)
    up(shared_folder, 4)
    slurm.cancel(job, "-s", "USR1", "--batch")
    ranks.wait_until(lambda: len(list(shared_folder.glob("warned-*"))) == 2)
    slurm.cancel(job, "-s", "USR1", "--full")  # also signals the agents
    (shared_folder / "enough").touch()
    assert slurm.wait(job) == "COMPLETED"
    said = (shared_folder / f"slurm-{job}.out").read_text()
    assert "paceline: SIGUSR1 is forwarded to the ranks\n" in said
    assert ranks.untagged(said) >= {"ended well"}
    assert slurm.left_over() == []


RECORDED = """
    import time, torch, torch.distributed as dist
    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(20):
        model(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    """


@pytest.mark.long  # `make test` has the same test over ssh
def test_record_contains_ranks_of_all_hosts(slurm, shared_folder):
    """Record into a folder that all hosts share, and into a local folder of the launcher's host."""
    script = ranks.write(shared_folder, RECORDED)
    jobs = {}
    for name, record in (("shared", "record"), ("own", "/tmp/record")):
        text = f"""#!/bin/sh
            export TORCHINDUCTOR_CACHE_DIR={shared_folder}/torch  # PyTorch's own, else in /tmp
            {ranks.PACELINE} run -n 4 --record {record} {script} || exit
            exec {ranks.PACELINE} report {record} --json > {name}.json
            """
        jobs[name] = slurm.batch(text, "-N2", cwd=shared_folder)
    for name, job in jobs.items():
        state, said = slurm.wait(job), (shared_folder / f"slurm-{job}.out").read_text()
        assert (state, "Paceline: 4 ranks on 2 nodes, 20 steps" in said) == ("COMPLETED", True), (
            said
        )
        assert "record. HINT: paceline report" in said
        report = json.loads((shared_folder / f"{name}.json").read_text())
        assert report["ranks"] == [0, 1, 2, 3]
        assert report["steps"] == 20
        assert report["missing_ranks"] == report["refused"] == []
        assert len(set(report["hosts"])) == 2
    left = slurm.left_over(0.5)
    assert [line.partition(" ")[2] for line in left] == ["/tmp/record"]
