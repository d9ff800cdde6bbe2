"""Where ``paceline run`` starts the ranks, according to its options and the allocation."""

import json
import os
import socket

import pytest
import ranks

from paceline.cluster.schedulers.hostfile import Host
from paceline.cluster.topology.local_resources import allowed_threads
from paceline.cluster.topology.topology import topology
from paceline.launch import job
from paceline.launch.layout import default_ranks, explain_default_ranks
from paceline.launch.options import NodeOptions
from paceline.launch.target import find_target

OUTER = ("SLURM", "LSB_", "LSF_", "CSM_", "JSM_", "PBS_", "PALS_", "FLUX_", "COBALT_", "PMI")
HERE = socket.gethostname().partition(".")[0]


@pytest.fixture(autouse=True)
def _outside_of_any_allocation(monkeypatch):
    for name in list(os.environ):
        if name.startswith((*OUTER, "PACELINE", "OMPI_", "MPI_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def slurm(nodes, tasks):
    """Return Slurm's environment variables in a batch script."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NTASKS": str(tasks),
        "SLURM_TASKS_PER_NODE": str(tasks),
        "SLURM_PROCID": "0",
    }


def run(folder, *words, **variables):
    command = [ranks.PACELINE, "run", *words]
    return ranks.run_command(command, folder, ranks.environment(**variables))


def test_ranks_are_local_without_hosts_or_allocation():
    found = find_target(NodeOptions())
    assert found.tool is None
    assert [host.devices for host in found.hosts] == [0]
    assert found.hosts[0].numa >= 1


def test_explicit_hosts_override_allocation_and_use_ssh(tmp_path, monkeypatch):
    for name, value in slurm("node[1-4]", 8).items():
        monkeypatch.setenv(name, value)
    hostfile = tmp_path / "hosts.txt"
    hostfile.write_text("# ours\nhost1 slots=2\nhost2:3\n")
    for hosts, path, why in (("host1:2,host2:3", None, "-H"), (None, hostfile, str(hostfile))):
        found = find_target(NodeOptions(hosts, path))
        assert found.hosts == [Host("host1", 2), Host("host2", 3)]
        assert found.tool.name == "ssh"
        assert found.explicit
        assert found.why == why


def test_hosts_and_hostfile_together_are_rejected(tmp_path):
    script = ranks.write(tmp_path, "")
    (tmp_path / "hosts.txt").write_text("host1\n")
    result = run(tmp_path, "-H", "host1", "--hostfile", "hosts.txt", script)
    assert result.returncode == 2
    assert "-H and --hostfile both name the hosts. HINT: leave out one of them" in result.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("host1:2\n\n# more\nhost2:x\n", "line 4: 'host2:x': 'x' slots are not a number above 0"),
        ("host1 slots=0\n", "line 1: 'host1 slots=0': '0' slots are not a number above 0"),
        ("# none\n", "names no host. HINT: write one host per line"),
    ],
    ids=["a word", "zero", "empty"],
)
def test_invalid_hostfile_is_reported_with_line(tmp_path, text, said):
    script = ranks.write(tmp_path, "")
    (tmp_path / "hosts.txt").write_text(text)
    result = run(tmp_path, "--hostfile", "hosts.txt", script)
    assert result.returncode == 2
    assert "hosts.txt" in result.stderr
    assert said in result.stderr.replace("\n", " ")


def test_missing_hostfile_and_empty_host_name_are_rejected(tmp_path):
    with pytest.raises(
        ValueError, match=r"none.txt can't be read: No such file or directory. HINT"
    ):
        find_target(NodeOptions(hostfile=tmp_path / "none.txt"))
    with pytest.raises(ValueError, match=r"a host name is empty. HINT"):
        find_target(NodeOptions("host1,,host2"))
    with pytest.raises(ValueError, match=r"a host name is empty. HINT"):
        find_target(NodeOptions(""))


def test_launcher_option_without_hosts_is_rejected():
    with pytest.raises(
        ValueError,
        match=r"--launcher ssh needs host names outside of an allocation. HINT: -H host1:4,host2:4",
    ):
        find_target(NodeOptions(launcher="ssh"))


@pytest.mark.parametrize(
    ("by", "variables"),
    [
        (
            "Slurm",
            {
                **slurm("node1", 2),
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_NODELIST": "node1",
            },
        ),
        ("Open MPI", {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}),
    ],
    ids=["srun", "mpirun"],
)
def test_run_started_several_times_by_srun_or_mpirun_is_rejected(tmp_path, by, variables):
    script = ranks.write(tmp_path, "open('ran', 'w')")
    for hosts in ([], ["-H", "host1:2"]):
        result = run(tmp_path, *hosts, script, **variables)
        assert result.returncode == 2
        said = " ".join(result.stderr.split())
        assert f"{by} has started 2 copies of `paceline run`, and each would start ranks" in said
        assert "HINT: one `paceline run SCRIPT` in the allocation starts them all" in said
    assert not (tmp_path / "ran").exists()


def test_run_started_as_single_srun_task_is_accepted(monkeypatch):
    variables = {**slurm(HERE, 1), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert find_target(NodeOptions()).tool is None


def test_allocation_of_local_host_needs_no_start_command(tmp_path):
    """The number of tasks is the number of ranks."""
    script = ranks.write(
        tmp_path,
        """
        import json, os
        names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
        rank = os.environ["RANK"]
        json.dump([int(os.environ[n]) for n in names], open(f"rank-{rank}", "w"))
        """,
    )
    result = run(tmp_path, "--fresh", script, **slurm(HERE, 3), PATH="/usr/bin:/bin")
    assert result.returncode == 0, result.stderr
    found = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(3)]
    assert found == [[rank, 3, rank, 3, 0] for rank in range(3)]
    shown = run(tmp_path, "--show", "-n", "5", script, **slurm(HERE, 3))
    assert shown.stdout.startswith("Slurm job 77: ranks on this machine\n")
    assert f"5 ranks: {HERE}: 0-4\n" in shown.stdout
    assert "starts:" not in shown.stdout


def test_variables_of_a_job_on_another_node_are_named(monkeypatch, tmp_path):
    for name, value in slurm("other1", 2).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"are of Slurm job .* on other1, and this") as told:
        find_target(NodeOptions())
    assert "srun is not installed" in str(told.value)
    assert str(told.value).endswith(
        "-H localhost:2; or start the job inside an allocation that has not ended"
    )


def test_limit_of_open_files_is_raised_or_reported(monkeypatch, tmp_path):
    limits = [(24, 4096), (-1, -1), (24, 24)]
    monkeypatch.setattr(job.resource, "getrlimit", lambda _: limits.pop(0))
    wanted = []
    monkeypatch.setattr(job.resource, "setrlimit", lambda _, new: wanted.append(new))
    asked = job.Job(str(ranks.write(tmp_path, "")), ranks=2)
    job.check(asked)
    assert wanted == [(80, 4096)]
    with pytest.raises(ValueError, match=r"limit of open files is 24 .* job needs 80. HINT: "):
        job.check(asked)


def test_limit_of_address_space_is_reported_before_torch_is_imported(monkeypatch, tmp_path):
    limit = (600000 << 10, -1)
    monkeypatch.setattr(job, "_raise_file_limit", lambda _: None)
    monkeypatch.setattr(job.resource, "getrlimit", lambda _: limit)
    with pytest.raises(ValueError, match=r"limited to 600000 KiB \(ulimit -v\).* HINT: ulimit -v"):
        job.check(job.Job(str(ranks.write(tmp_path, "")), ranks=2))


def test_inconsistent_or_expired_allocation_is_rejected(tmp_path):
    script = ranks.write(tmp_path, "")
    result = run(tmp_path, script, **slurm("node[1-2]", 2), SLURM_JOB_NUM_NODES="3")
    assert result.returncode == 2
    assert "SLURM_JOB_NUM_NODES=3 beside SLURM_JOB_NODELIST=node[1-2]" in result.stderr
    gone = str(tmp_path / "3089.server")
    result = run(tmp_path, script, PBS_JOBID="3089.server", PBS_NODEFILE=gone)
    assert result.returncode == 2
    assert f"PBS_NODEFILE={gone}: No such file or directory" in result.stderr
    assert "if the allocation has ended" in result.stderr


def test_env_option_forwards_or_sets_variables(tmp_path):
    script = ranks.write(tmp_path, "import os; print(os.environ['A'], os.environ['B'])")
    words = ["--fresh", "-n", "1", "--env", "A=1=2", "--env", "B", script]
    assert run(tmp_path, *words, B="b").stdout == "1=2 b\n"
    result = run(tmp_path, *words)
    assert result.returncode == 2
    assert "--env B: B is not set in this environment. HINT: --env B=VALUE" in result.stderr
    result = run(tmp_path, "--env", "a b=1", script)
    assert result.returncode == 2
    assert "--env must be NAME or NAME=VALUE; this is 'a b=1'. HINT" in result.stderr


@pytest.mark.long
def test_default_number_of_ranks_is_explained_in_one_line(tmp_path):
    script = ranks.write(tmp_path, "print('here')")
    cores = len(topology().cores(set(allowed_threads())))
    if default_ranks(find_target(NodeOptions()).hosts[0]) >= cores:
        pytest.skip("needs more cores than NUMA domains")
    said = run(tmp_path, script, CUDA_VISIBLE_DEVICES="").stderr
    assert said.count("\n") == 1
    assert f"which has {cores} cores. HINT: -n {cores} starts one rank per core, -n 1 " in said
    for words in (["-n", "1", script], ["-n", "1", "--show", script], ["--show", script]):
        assert run(tmp_path, *words, CUDA_VISIBLE_DEVICES="").stderr == ""
    assert run(tmp_path, script, CUDA_VISIBLE_DEVICES="0").stderr == ""  # its only GPU
    missing = run(tmp_path, tmp_path / "missing.py", CUDA_VISIBLE_DEVICES="")
    assert "which has" not in missing.stderr


def test_default_number_of_ranks_in_allocation_is_not_explained(tmp_path):
    script = ranks.write(tmp_path, "pass")
    job = {"CUDA_VISIBLE_DEVICES": "", **slurm(HERE, 1)}
    assert run(tmp_path, script, **job).stderr == ""


@pytest.mark.parametrize(
    ("host", "cores", "text"),
    [
        (Host("here", devices=0, numa=1), 1, ""),
        (Host("here", devices=4, numa=1), 16, ""),
        (Host("here", devices=0, numa=2), 2, ""),
        (Host("here", devices=0, numa=1), 16, "1 rank is started on this machine, which has 16"),
        (Host("here", devices=0, numa=2), 16, "2 ranks are started, one per NUMA domain, on this"),
    ],
)
def test_explanation_depends_on_what_else_the_host_has(host, cores, text):
    said = explain_default_ranks(host, cores)
    assert said == "" if not text else said.startswith(f"paceline: {text}")


def test_heterogeneous_slurm_job_is_reported_once(monkeypatch, capsys):
    het = {"SLURM_HET_SIZE": "2", "SLURM_JOB_NODELIST_HET_GROUP_1": "gpu[1-2]"}
    for name, value in (slurm(HERE, 2) | het).items():
        monkeypatch.setenv(name, value)
    for _ in range(2):
        assert [host.name for host in find_target(NodeOptions()).hosts] == [HERE]
    assert capsys.readouterr().err.count("job 77 is heterogeneous") == 1


def test_stale_allocation_is_named_with_the_way_out(tmp_path, monkeypatch):
    """srun is installed, and the job of the environment variables has ended."""
    srun = tmp_path / "srun"
    error = "srun: error: Unable to confirm allocation for job 4711: Invalid job id specified"
    srun.write_text(f"#!/bin/sh\necho '{error}' >&2\nexit 1\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    variables = slurm("gone[1-2]", 4) | {"SLURM_TASKS_PER_NODE": "2(x2)"}
    done = run(tmp_path, "-n", "4", ranks.write(tmp_path, ""), **variables)
    assert done.returncode == 2
    message = done.stderr
    assert error in message
    assert "Slurm job 77 on gone1, gone2" in message
    assert f"this node is {socket.gethostname()}" in message
    assert "HINT: to run on this node alone: -H localhost:2" in message
    assert "Traceback" not in message
