"""The commands that start one agent on each node: ssh, or the scheduler's tool.

A tool either starts one process per call (ssh, blaunch: the agent uses its standard input and
output), or one process on each of several nodes (srun, mpirun ...: the agents connect to the
launcher). Each agent gets all cores and GPUs of its node; Paceline binds the ranks, not the tool.
"""

import os
import shlex
from dataclasses import dataclass

from ...security.processes import find_program, run_program

SSH_OPTIONS = "PACELINE_SSH_OPTIONS"  # environment variable: further options, of the user


@dataclass(frozen=True)
class LaunchTool:
    """A tool that starts agents.

    Attributes:
        name: Name of the tool, or its program.
        program: The program.
        options: Its options; ``{hosts}`` are the hosts' names, ``{count}`` is their number.
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
    program: str
    options: str
    one_call_per_host: bool = False
    passes_environment: bool = True
    accepts_host_names: bool = True
    by_daemon: bool = False
    removed_variables: tuple[str, ...] = ()
    exit_pattern: str = ""
    source: str = ""

    def command(self, hosts: list[str], agent: list[str]) -> list[str]:
        """Return the command line, given the hosts' names and the agent's command."""
        words = self.options.format(hosts=",".join(hosts), count=len(hosts)).split()
        if self.program != "ssh":
            return [self.program, *words, *agent]
        *words, host = words
        user_options = shlex.split(os.environ.get(SSH_OPTIONS, ""))
        return [self.program, *words, *user_options, host, "exec " + shlex.join(agent)]


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
        LaunchTool(
            "ssh",
            "ssh",  # it must not ask for a password, and both ends must notice a dead connection
            "-T -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=15 "
            "-o ServerAliveCountMax=4 {hosts}",
            one_call_per_host=True,
            passes_environment=False,
        ),
        LaunchTool(
            "blaunch", "blaunch", "{hosts}", one_call_per_host=True, passes_environment=False
        ),
        LaunchTool(
            "srun",
            "srun",
            # Without -c a step has all cores of its nodes, and unbound the agent may use them.
            "--overlap --nodes={count} --ntasks={count} --ntasks-per-node=1 --nodelist={hosts} "
            "--cpu-bind=none --mem=0 --mpi=none --input=none --unbuffered --wait=0 "
            "--kill-on-bad-exit=0 --export=ALL",
            by_daemon=True,
            removed_variables=_SLURM_TASK_VARIABLES,
            exit_pattern=r"srun: error: \S+: tasks? (?P<tasks>[\d,-]+): ",
        ),
        LaunchTool(
            "jsrun",
            "jsrun",
            "-n {count} -r 1 -a 1 -c ALL_CPUS -g ALL_GPUS -b none",
            accepts_host_names=False,
            by_daemon=True,
        ),
        LaunchTool(
            "palsrun",
            "mpiexec",
            "-n {count} --ppn 1 --cpu-bind none --hosts {hosts}",
            by_daemon=True,
        ),
        LaunchTool(
            "flux",
            "flux",
            "run -N {count} -n {count} --exclusive -o cpu-affinity=off -o gpu-affinity=off",
            accepts_host_names=False,
            by_daemon=True,
        ),
    )
}
OPEN_MPI_OPTIONS = "-n {count} --host {hosts} --map-by ppr:1:node --bind-to none -x PACELINE_SECRET"
HYDRA_OPTIONS = "-n {count} -ppn 1 -hosts {hosts} -bind-to none -genvall"


def find_tool(name: str) -> LaunchTool:
    """Return a tool by its name. mpirun and mpiexec (or a path to them) are asked which MPI they
    belong to.

    Raises:
        ValueError: The tool is not known or not installed.
    """
    if name in TOOLS:
        found = TOOLS[name]
        program = found.program
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
        result = run_program(program, "--version", seconds=20.0)
        version = result.stdout + result.stderr
    except OSError as error:
        raise ValueError(f"--launcher {program}: {error}") from None
    if "Open MPI" in version or "OpenRTE" in version or "PRRTE" in version:
        return LaunchTool(program, program, OPEN_MPI_OPTIONS, passes_environment=False)
    if "HYDRA" in version.upper() or "Intel(R) MPI" in version:
        return LaunchTool(program, program, HYDRA_OPTIONS)
    if "PALS" in version.upper():
        return TOOLS["palsrun"]
    first = version.strip().splitlines()[:1]
    raise ValueError(
        f"--launcher {program}: Paceline does not recognize this MPI by its version "
        f"({first or 'no output'}). HINT: --launcher ssh"
    )
