"""Schedulers that can't be installed for tests: LSF, jsrun, PALS and Flux.

Their tools are replaced by small programs that follow the documentation. Each program records its
arguments and starts the command on this machine under the name of each host.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ranks

from paceline.cluster.topology.network_interfaces import network_links
from paceline.launch.remote.start_commands import find_tool

OUTER = ("SLURM", "LSB_", "LSF_", "CSM_", "JSM_", "PBS_", "PALS_", "FLUX_", "COBALT_", "PMI")
PYTHON = [sys.executable, "-P", "-m", "paceline.launch.host_agent"]

# The common first part of the tools. `start` starts a command with additional variables.
RECORD = """#!{python}
import json, os, subprocess, sys
words = sys.argv[1:]
with open("{calls}", "a") as calls:
    secret = os.environ.get("PACELINE_SECRET")
    calls.write(json.dumps([os.getpid(), os.path.basename(sys.argv[0]), words, secret]) + "\\n")
def start(command, variables):
    return subprocess.Popen(command, env={{**os.environ, **variables}})
def end(started):
    sys.exit(max(process.wait() for process in started))
"""

TOOLS = {
    "blaunch": """
        assert words[0] in ("node1", "node2")
        kept = ("PATH", "CUDA_VISIBLE_DEVICES")  # the least that a task may find
        os.execvpe(words[1], words[1:], {name: os.environ[name] for name in kept})
        """,
    "jsrun": """
        count = int(words[words.index("-n") + 1])
        end([start(words[words.index("none") + 1:], {
            "JSM_NAMESPACE_RANK": str(n), "JSM_NAMESPACE_SIZE": str(count),
            "JSM_NAMESPACE_LOCAL_RANK": "0", "JSM_NAMESPACE_LOCAL_SIZE": "1",
            "PMIX_RANK": str(n), "PMIX_NAMESPACE": "1",
            "OMPI_COMM_WORLD_RANK": str(n), "OMPI_COMM_WORLD_SIZE": str(count),
            "OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        }) for n in range(count)])
        """,
    "mpiexec": """
        hosts = words[words.index("--hosts") + 1].split(",")
        end([start(words[words.index("--hosts") + 2:], {
            "PALS_RANKID": str(n), "PALS_LOCAL_RANKID": "0", "PALS_LOCAL_SIZE": "1",
            "PALS_NODEID": str(n), "PALS_DEPTH": "1", "PALS_APID": "an-apid",
            "PALS_PMI": "pmix", "PMIX_RANK": str(n),
        }) for n in range(len(hosts))])
        """,
    "palsrun": "",
    "flux": """
        if words == ["getattr", "hostlist"]:
            print("node[1-2]")
            sys.exit()
        count = int(words[words.index("-n") + 1])
        end([start(words[words.index("gpu-affinity=off") + 1:], {
            "FLUX_JOB_ID": "f2Q", "FLUX_JOB_SIZE": str(count), "FLUX_JOB_NNODES": str(count),
            "FLUX_TASK_RANK": str(n), "FLUX_TASK_LOCAL_ID": "0",
            "PMI_RANK": str(n), "PMI_SIZE": str(count),
        }) for n in range(count)])
        """,
}

SCRIPT = """
    import json, os, sys
    names = ["RANK", "WORLD_SIZE", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    numbers = [int(os.environ[name]) for name in names]
    secret = os.environ.get("PACELINE_SECRET")
    here = os.getcwd()
    json.dump([numbers, os.environ.get("MINE"), secret, here], open(f"rank-{numbers[0]}", "w"))
    """

# By scheduler: variables in a batch script, options, and numbers of ranks on node1 and node2.
JOBS = {
    "LSF": (
        {
            "LSB_JOBID": "901",
            "LSB_JOBINDEX": "0",
            "LSB_HOSTS": "node1 node1 node2 node2",
            "LSB_MCPU_HOSTS": "node1 2 node2 2",
        },
        ["--env", "MINE"],
        (2, 2),
    ),
    "CORAL": (
        {"LSB_JOBID": "902", "CSM_ALLOCATION_ID": "55", "LSB_DJOB_HOSTFILE": "hostfile"},
        ["-n", "3"],
        (2, 1),
    ),
    "PALS": (
        {"PBS_JOBID": "3089.server", "PBS_NODEFILE": "nodefile", "PBS_ENVIRONMENT": "PBS_BATCH"},
        [],
        (1, 2),
    ),
    "Flux": (
        {"FLUX_URI": "local:///run/flux/local", "FLUX_ENCLOSING_ID": "f1Z"},
        ["-n", "4"],
        (2, 2),
    ),
}
INSTALLED = {
    "LSF": ("blaunch",),
    "CORAL": ("jsrun",),
    "PALS": ("palsrun", "mpiexec"),
    "Flux": ("flux",),
}


@pytest.fixture
def job(tmp_path):
    """Return a function that creates a job: its scheduler's tools, its files, its environment."""

    def made(name):
        for program in INSTALLED[name]:
            install(tmp_path, program, TOOLS[program])
        (tmp_path / "hostfile").write_text("batch1\n" + "node1\n" * 42 + "node2\n" * 42)
        (tmp_path / "nodefile").write_text("node1\nnode2\nnode2\n")
        ranks.write(tmp_path, SCRIPT)
        variables = {
            variable: str(tmp_path / value) if "FILE" in variable else value
            for variable, value in JOBS[name][0].items()
        }
        return environment(tmp_path, MINE="travels", CUDA_VISIBLE_DEVICES="", **variables)

    return made


def environment(folder, **variables):
    """Return environment variables without an allocation and with the tools of ``folder``."""
    clean = {k: v for k, v in ranks.environment().items() if not k.startswith(OUTER)}
    return {**clean, "PATH": f"{folder}/bin{os.pathsep}{clean['PATH']}", **variables}


def install(folder, name, does):
    (folder / "bin").mkdir(exist_ok=True)
    head = RECORD.format(python=sys.executable, calls=folder / "calls")
    program = ranks.write(folder / "bin", does, name)
    program.write_text(head + program.read_text())
    program.chmod(0o755)


def calls(folder):
    """Return (PID, tool, arguments, secret) of each call."""
    path = folder / "calls"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def paceline(folder, variables, *words):
    return subprocess.run(
        [ranks.PACELINE, "run", *words],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=100,
        stdin=subprocess.DEVNULL,
    )


def start(folder, job, name):
    """Run the script in the job; return the calls of tools that started a command."""
    if not network_links():
        pytest.skip("this machine has no network interface but loopback")
    _, options, on_each = JOBS[name]
    result = paceline(folder, job(name), "--fresh", *options, folder / "script.py")
    assert result.returncode == 0, result.stdout + result.stderr
    size = sum(on_each)
    seats = [(host, local) for host, count in enumerate(on_each) for local in range(count)]
    for rank, (host, local) in enumerate(seats):
        numbers, mine, secret, here = json.loads((folder / f"rank-{rank}").read_text())
        assert numbers == [rank, size, host, local, on_each[host]]
        assert (mine, secret, here) == ("travels", None, str(folder))
    assert f"{size} ranks on 2 nodes" in result.stderr
    assert not (folder / f"rank-{size}").exists()
    made = [call for call in calls(folder) if call[2] != ["getattr", "hostlist"]]
    for process, _, words, secret in made:
        assert not Path(f"/proc/{process}").exists()
        if secret is not None:
            assert secret not in " ".join(words) + result.stdout + result.stderr
    assert not ranks.in_memory(folder)
    return made


def without_address(words):
    """Return a call's arguments without forwarded variables and the launcher's addresses."""
    *words, option, where = words
    assert option == "--connect"
    for pair in where.split(";"):
        address, port = pair.split(",")
        assert re.fullmatch(r"[\d.]+", address)
        assert int(port) > 0
    return without_path(words)


def without_path(words):
    return [w for w in words if w != "env" and not re.match(r"(PYTHON\w*|LD_LIBRARY_PATH)=", w)]


def test_lsf_job_starts_agents_with_blaunch(tmp_path, job):
    made = start(tmp_path, job, "LSF")
    assert {name for _, name, _, _ in made} == {"blaunch"}
    assert sorted(without_path(words) for _, _, words, _ in made) == [
        ["node1", *PYTHON],
        ["node2", *PYTHON],
    ]
    assert all(secret is None for *_, secret in made)  # blaunch does not need it


@pytest.mark.long
def test_coral_job_starts_agents_with_jsrun_except_on_launch_node(tmp_path, job):
    ((_, name, words, secret),) = start(tmp_path, job, "CORAL")
    assert name == "jsrun"
    assert without_address(words) == [
        *("-n", "2", "-r", "1", "-a", "1", "-c", "ALL_CPUS", "-g", "ALL_GPUS", "-b", "none"),
        *PYTHON,
    ]
    assert len(secret) == 64


def test_pbs_job_with_pals_starts_agents_with_mpiexec(tmp_path, job):
    ((_, name, words, secret),) = start(tmp_path, job, "PALS")
    assert name == "mpiexec"
    assert without_address(words) == [
        *("-n", "2", "--ppn", "1", "--cpu-bind", "none", "--hosts", "node1,node2"),
        *PYTHON,
    ]
    assert len(secret) == 64


@pytest.mark.long
def test_flux_job_starts_agents_with_flux_run(tmp_path, job):
    ((_, name, words, secret),) = start(tmp_path, job, "Flux")
    assert name == "flux"
    assert without_address(words) == [
        *("run", "-N", "2", "-n", "2", "--exclusive"),
        *("-o", "cpu-affinity=off", "-o", "gpu-affinity=off"),
        *PYTHON,
    ]
    assert len(secret) == 64


@pytest.mark.parametrize("name", JOBS)
def test_show_prints_start_command_and_starts_nothing(tmp_path, job, name):
    result = paceline(tmp_path, job(name), *JOBS[name][1], "--show", "script.py", "--epochs", "3")
    assert result.returncode == 0, result.stderr
    program = INSTALLED[name][-1]
    first, last = JOBS[name][2]
    job_of = {
        "LSF": "LSF job 901",
        "CORAL": "LSF job 902",
        "PALS": "PBS job 3089.server",
        "Flux": "Flux job f1Z",
    }
    assert result.stdout.startswith(f"{job_of[name]}: 2 nodes over ")
    node1 = "0" if first == 1 else f"0-{first - 1}"
    node2 = f"{first}" if last == 1 else f"{first}-{first + last - 1}"
    assert f"{first + last} ranks: node1: {node1}, node2: {node2}\n" in result.stdout
    assert f"  starts: {program} " in result.stdout
    assert "  script: script.py --epochs 3\n" in result.stdout
    assert f"  in {tmp_path}, with {sys.executable}\n" in result.stdout
    assert [words for _, _, words, _ in calls(tmp_path)] == (
        [["getattr", "hostlist"]] if name == "Flux" else []
    )
    assert not list(tmp_path.glob("rank-*"))


def test_error_of_failed_start_command_is_reported(tmp_path, job):
    variables = job("CORAL")
    install(tmp_path, "jsrun", "sys.exit('Error: Remote JSM server is not responding')")
    result = paceline(tmp_path, variables, "--fresh", "script.py")
    assert result.returncode == 2
    assert "jsrun has ended: Error: Remote JSM server is not responding" in result.stderr
    assert "Traceback" not in result.stderr
    variables = job("LSF")
    install(tmp_path, "blaunch", "sys.exit('blaunch: node2: Host is not in the job')")
    result = paceline(tmp_path, variables, "--fresh", "script.py")
    assert result.returncode == 2
    assert "node1: blaunch: node2: Host is not in the job" in result.stderr
    variables = job("Flux")
    install(tmp_path, "flux", "sys.exit('flux-getattr: ERROR: Unable to connect to Flux')")
    result = paceline(tmp_path, variables, "--fresh", "script.py")
    assert result.returncode == 2
    assert "Flux job f1Z: flux-getattr: ERROR: Unable to connect to Flux" in result.stderr


def test_missing_scheduler_command_is_rejected(tmp_path, job):
    variables = job("LSF")
    (tmp_path / "bin/blaunch").unlink()
    result = paceline(tmp_path, variables, "--fresh", "script.py")
    assert result.returncode == 2
    assert "blaunch is not installed on this machine. HINT: " in result.stderr
    variables = job("Flux")
    (tmp_path / "bin/flux").unlink()
    result = paceline(tmp_path, variables, "--fresh", "script.py")
    assert result.returncode == 2
    assert "Flux job f1Z: `flux getattr hostlist`: " in result.stderr


def test_unknown_launcher_is_rejected(tmp_path, job):
    result = paceline(tmp_path, job("LSF"), "--launcher", "nonsense", "script.py")
    assert result.returncode == 2
    known = "ssh, blaunch, srun, jsrun, palsrun, flux, mpirun, mpiexec"
    assert f"--launcher nonsense is not known. HINT: one of {known}" in result.stderr
    assert calls(tmp_path) == []


@pytest.mark.parametrize(
    ("says", "first"),
    [
        ("mpirun (Open MPI) 4.1.4", ["--host", "a,b", "--map-by", "ppr:1:node"]),
        ("mpirun (PRRTE) 3.0.2", ["--host", "a,b", "--map-by", "ppr:1:node"]),
        ("HYDRA build details:\\n    Version: 4.0.2", ["-ppn", "1", "-hosts", "a,b"]),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9", ["-ppn", "1", "-hosts", "a,b"]),
        ("PALS version 1.2.12", ["--ppn", "1", "--cpu-bind", "none"]),
    ],
    ids=["Open MPI 4", "Open MPI 5", "MPICH", "Intel MPI", "PALS"],
)
def test_mpi_implementation_is_detected_from_mpirun_version(tmp_path, monkeypatch, says, first):
    install(tmp_path, "mpiexec", f"print('{says}')")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    program, *words = find_tool("mpiexec").command(["a", "b"], ["agent"])
    assert program == "mpiexec"
    assert words[:2] == ["-n", "2"]
    assert words[2:6] == first
    assert words[-1] == "agent"
    assert [words for _, _, words, _ in calls(tmp_path)] == [["--version"]]


def test_unknown_or_missing_mpirun_is_rejected(tmp_path):
    ranks.write(tmp_path, SCRIPT)
    install(tmp_path, "mpirun", "print('LAM 7.1.4/MPI 2 C++/ROMIO')")
    variables = environment(tmp_path)
    result = paceline(tmp_path, variables, "-H", "a,b", "--launcher", "mpirun", "script.py")
    assert result.returncode == 2
    assert (
        "--launcher mpirun: Paceline does not recognize this MPI by its version (" in result.stderr
    )
    assert "LAM 7.1.4/MPI 2 C++/ROMIO" in result.stderr
    assert "HINT: --launcher ssh" in result.stderr
    none = str(tmp_path / "none/mpirun")
    result = paceline(tmp_path, variables, "-H", "a,b", "--launcher", none, "script.py")
    assert result.returncode == 2
    assert "none/mpirun: " in result.stderr
    assert "No such file or directory" in result.stderr
