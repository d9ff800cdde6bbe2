"""Tests of the test cluster: separate hosts, ssh, Slurm, MPI, and the detection of leftovers."""

import os
import signal
import time

import ranks

import bed


def test_hosts_connect_by_ssh_and_have_separate_tmp(hosts):
    hosts.run("host0", "touch", "/tmp/mine")
    there = hosts.run("host0", "ssh", "host1", "hostname; ls /tmp/mine", check=False)
    assert there.stdout.split() == ["host1"]
    assert hosts.run("host2", "ssh", "host0", "ls", "/tmp/mine").stdout.split() == ["/tmp/mine"]


def test_command_gets_cwd_and_environment_and_returns_exit_code(hosts, shared_folder):
    (shared_folder / "here").touch()
    done = hosts.run(
        "host3", "sh", "-c", "ls; echo $HELLO; exit 3",
        cwd=shared_folder, env={"HELLO": "there"}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (3, ["here", "there"])


def test_sigint_reaches_command_on_host(hosts):
    process = hosts.start(
        "host1", "python3", "-c", "print(1, flush=True); import time; time.sleep(60)"
    )
    process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGINT
    assert hosts.left_over() == []


def test_leftover_files_and_processes_on_host_are_detected(hosts):
    hosts.run("host2", "sh", "-c", "sleep 600 >/dev/null 2>&1 & touch /tmp/a /dev/shm/b /run/c")
    left = hosts.left_over(0)
    assert [line.partition(" ")[2] for line in left if "sleep" not in line] == [
        "/dev/shm/b",
        "/run/c",
        "/tmp/a",
    ]
    assert sum("sleep 600" in line for line in left) == 1
    hosts.restore()
    assert hosts.left_over() == []


def test_crashed_host_boots_again(hosts):
    hosts.run("host1", "touch", "/tmp/before")
    hosts.crash("host1")
    assert hosts.run("host0", "ssh", "host1", "true", check=False).returncode == 255
    hosts.boot("host1")
    seen = hosts.run("host0", "ssh", "host1", "ls /tmp/before; hostname", check=False)
    assert seen.stdout.split() == ["host1"]


def test_connection_to_host_without_link_times_out(hosts):
    hosts.link("host1", False)
    cut = "import socket; socket.create_connection(('host1', 22), 0.5)"
    assert "timed out" in hosts.run("host0", "python3", "-c", cut, check=False).stderr
    hosts.link("host1", True)
    hosts.run("host0", "ssh", "host1", "true")


def test_second_network_is_unreachable_and_can_carry_host_name(hosts):
    hosts.second_network("host1", "host2", listed_in=["host1", "host2"])
    where = "import socket; print(socket.gethostbyname('host1'))"
    assert hosts.run("host1", "python3", "-c", where).stdout.strip() == "10.78.0.1"
    assert hosts.run("host0", "python3", "-c", where).stdout.strip() == "10.77.0.1"
    cut = "import socket; socket.create_connection(('host1', 22), 0.5)"
    hosts.run("host1", "python3", "-c", cut)
    assert "timed out" in hosts.run("host2", "python3", "-c", cut, check=False).stderr
    hosts.one_network()
    hosts.run("host2", "python3", "-c", cut)
    assert "eth1" not in hosts.run("host1", "ip", "link").stdout


def test_srun_starts_bound_tasks_on_two_nodes(slurm):
    show = (
        "import os; print(os.uname()[1], len(os.sched_getaffinity(0)),"
        " [n for n in os.environ if n[:4] in ('CUDA', 'PBS_')])"
    )
    lines = slurm.run("srun", "-N2", "--ntasks-per-node=2", "python3", "-c", show).stdout
    assert sorted(lines.splitlines()) == ["host1 1 []"] * 2 + ["host2 1 []"] * 2
    gpus = slurm.run("srun", "--gpus-per-node=2", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES").stdout
    assert gpus.strip() == "0,1"
    assert slurm.left_over() == []


def test_slurm_runs_and_cancels_batch_jobs(slurm, shared_folder):
    job = slurm.batch("#!/bin/sh\nsrun hostname\n", "-N2", cwd=shared_folder)
    endless = slurm.batch("#!/bin/sh\nsleep 600\n", "-N1", cwd=shared_folder)
    assert slurm.wait(job) == "COMPLETED"
    out = (shared_folder / f"slurm-{job}.out").read_text()
    assert sorted(out.split()) == ["host1", "host2"]
    assert f"job {endless}" in slurm.left_over(0)
    slurm.cancel(endless)
    assert slurm.wait(endless) == "CANCELLED"


def test_qsub_submits_to_slurm_with_optional_pbs_variables(slurm, shared_folder):
    script = "#!/bin/sh\necho $PBS_JOBID $SLURM_JOB_ID\n"
    for asked in (False, True):
        slurm.pbs(asked)
        path = shared_folder / "job.sh"
        path.write_text(script)
        job = slurm.run("qsub", path, cwd=shared_folder).stdout.strip()
        assert slurm.wait(job) == "COMPLETED"
        said = "".join(p.read_text() for p in shared_folder.glob(f"*{job}*"))
        assert said.split() == [job] * (1 + asked)
    assert job in slurm.run("qstat", "-f").stdout


def test_slurm_recovers_after_node_crash(slurm):
    slurm.hosts.crash("host2")
    slurm.hosts.restore()
    said = slurm.run("srun", "-N4", "hostname", timeout=20).stdout
    assert sorted(said.split()) == slurm.nodes


def test_mpirun_and_mpiexec_start_ranks_on_two_hosts(hosts, mpi):
    show = "echo $(hostname)-$OMPI_COMM_WORLD_RANK$PMI_RANK-$OMPI_COMM_WORLD_SIZE$PMI_SIZE"
    expected = ["host1-0-4", "host1-1-4", "host2-2-4", "host2-3-4"]
    for launcher in (bed.mpirun, bed.mpiexec):
        done = hosts.run("host0", *launcher("host1:2,host2:2", "sh", "-c", show), env=mpi)
        assert sorted(done.stdout.split()) == expected
    assert hosts.left_over() == []


def test_closing_hosts_ends_processes_and_removes_files(hosts):
    start = time.monotonic()
    some = bed.Hosts(1)
    process = some.start("host1", "sleep", "98765")
    ranks.wait_until(lambda: ranks.alive("sleep 98765"))
    some.close()
    process.communicate()
    assert not ranks.alive(str(some.root))
    assert not some.root.exists()
    assert time.monotonic() - start < 10
