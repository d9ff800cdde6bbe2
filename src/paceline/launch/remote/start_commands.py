"""The commands that start one agent on each node: ssh, or the scheduler's tool.

A tool either starts one process per call (ssh, blaunch: the agent uses its standard input and
output), or one process on each of several nodes (srun, mpirun ...: the agents connect to the
launcher). Each agent gets all cores and GPUs of its node; Paceline binds the ranks, not the tool.
"""

import os
import shlex
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from ...security.processes import find_program, program_command

# ssh must not ask for a password, and both ends must notice a dead connection.
SSH = (
    *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
)


SSH_OPTIONS = "PACELINE_SSH_OPTIONS"  # environment variable: further options, of the user


@dataclass(frozen=True)
class LaunchTool:
    """A tool that starts agents.

    Attributes:
        name: Name of the tool, or its program.
        command: Returns the command line, given the hosts' names and the agent's command.
        one_call_per_host: Whether each call starts one agent.
        passes_environment: Whether the agents get the launcher's environment.
        accepts_host_names: Whether hosts can be chosen; else it uses the whole allocation.
        by_daemon: Whether a daemon of the scheduler starts the agents, also that of this node.
        removed_variables: The launcher's environment variables that would change what the tool
            does.
        exit_pattern: Matches its message about processes that ended while others run; "tasks" are
            their numbers.
        source: Where the hosts come from and what to do if that is wrong, for messages about agents
            that do not start; empty for hosts that the user has named.
    """

    name: str
    command: Callable[[list[str], list[str]], list[str]]
    one_call_per_host: bool = False
    passes_environment: bool = True
    accepts_host_names: bool = True
    by_daemon: bool = False
    removed_variables: tuple[str, ...] = ()
    exit_pattern: str = ""
    source: str = ""


def _ssh(hosts: list[str], agent: list[str]) -> list[str]:
    own = shlex.split(os.environ.get(SSH_OPTIONS, ""))
    return [*SSH, *own, *hosts, "exec " + shlex.join(agent)]


def _blaunch(hosts: list[str], agent: list[str]) -> list[str]:
    return ["blaunch", *hosts, *agent]


def _srun(hosts: list[str], agent: list[str]) -> list[str]:
    return [
        *("srun", "--overlap", f"--nodes={len(hosts)}", f"--ntasks={len(hosts)}"),
        *("--ntasks-per-node=1", f"--nodelist={','.join(hosts)}"),
        # Without -c a step has all cores of its nodes, and unbound the agent may use them.
        *("--cpu-bind=none", "--mem=0", "--mpi=none", "--input=none", "--unbuffered"),
        *("--wait=0", "--kill-on-bad-exit=0", "--export=ALL", *agent),
    ]


def _jsrun(hosts: list[str], agent: list[str]) -> list[str]:
    every = ("-c", "ALL_CPUS", "-g", "ALL_GPUS", "-b", "none")
    return ["jsrun", "-n", str(len(hosts)), "-r", "1", "-a", "1", *every, *agent]


def _pals(hosts: list[str], agent: list[str]) -> list[str]:
    count = str(len(hosts))
    spread = ("--ppn", "1", "--cpu-bind", "none", "--hosts", ",".join(hosts))
    return ["mpiexec", "-n", count, *spread, *agent]


def _flux(hosts: list[str], agent: list[str]) -> list[str]:
    count = str(len(hosts))
    unbound = ("-o", "cpu-affinity=off", "-o", "gpu-affinity=off")
    return ["flux", "run", "-N", count, "-n", count, "--exclusive", *unbound, *agent]


def _open_mpi(program: str) -> Callable[[list[str], list[str]], list[str]]:
    def command(hosts: list[str], agent: list[str]) -> list[str]:
        spread = ("--host", ",".join(hosts), "--map-by", "ppr:1:node", "--bind-to", "none")
        passed = ("-x", "PACELINE_SECRET")
        return [program, "-n", str(len(hosts)), *spread, *passed, *agent]

    return command


def _hydra(program: str) -> Callable[[list[str], list[str]], list[str]]:
    def command(hosts: list[str], agent: list[str]) -> list[str]:
        spread = ("-ppn", "1", "-hosts", ",".join(hosts), "-bind-to", "none", "-genvall")
        return [program, "-n", str(len(hosts)), *spread, *agent]

    return command


# Task settings of the batch script must not affect the step of the agents.
_SLURM_TASK_VARIABLES = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
    *("SLURM_NTASKS_PER_CORE", "SLURM_NTASKS_PER_SOCKET", "SLURM_NTASKS_PER_GPU"),
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPUS_PER_TASK"),
    *("SLURM_CPU_BIND", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_VERBOSE"),
    *("SLURM_GPU_BIND", "SLURM_DISTRIBUTION", "SLURM_HINT", "SLURM_THREADS_PER_CORE"),
    *("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "SLURM_ARBITRARY"),
    *("SLURM_HOSTFILE", "SLURM_EXCLUSIVE", "SLURM_EXACT", "SLURM_OVERCOMMIT"),
)

TOOLS = {
    tool.name: tool
    for tool in (
        LaunchTool("ssh", _ssh, one_call_per_host=True, passes_environment=False),
        LaunchTool("blaunch", _blaunch, one_call_per_host=True, passes_environment=False),
        LaunchTool(
            "srun",
            _srun,
            by_daemon=True,
            removed_variables=_SLURM_TASK_VARIABLES,
            exit_pattern=r"srun: error: \S+: tasks? (?P<tasks>[\d,-]+): ",
        ),
        LaunchTool("jsrun", _jsrun, accepts_host_names=False, by_daemon=True),
        LaunchTool("palsrun", _pals, by_daemon=True),
        LaunchTool("flux", _flux, accepts_host_names=False, by_daemon=True),
    )
}


def find_tool(name: str) -> LaunchTool:
    """Return a tool by its name. mpirun and mpiexec (or a path to them) are asked which MPI they
    belong to.

    Raises:
        ValueError: The tool is not known or not installed.
    """
    if name in TOOLS:
        found = TOOLS[name]
        program = found.command(["host"], ["agent"])[0]
    elif name.rpartition("/")[2].startswith(("mpirun", "mpiexec")):
        found, program = _mpi_tool(name), name
    else:
        raise ValueError(
            f"--launcher {name} is not known. HINT: one of {', '.join(TOOLS)}, mpirun, mpiexec"
        )
    if find_program(program) is None:
        raise ValueError(
            f"{program} is not installed on this machine. HINT: name another tool with --launcher"
        )
    return found


def _mpi_tool(program: str) -> LaunchTool:
    try:
        asked = subprocess.run(
            program_command(program, "--version"), capture_output=True, text=True, timeout=20
        )
        said = asked.stdout + asked.stderr
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"--launcher {program}: {error}") from None
    if "Open MPI" in said or "OpenRTE" in said or "PRRTE" in said:
        return LaunchTool(program, _open_mpi(program), passes_environment=False)
    if "HYDRA" in said.upper() or "Intel(R) MPI" in said:
        return LaunchTool(program, _hydra(program))
    if "PALS" in said.upper():
        return TOOLS["palsrun"]
    first = said.strip().splitlines()[:1]
    raise ValueError(
        f"--launcher {program}: Paceline does not recognize this MPI by its version "
        f"({first or 'no output'}). HINT: --launcher ssh"
    )
