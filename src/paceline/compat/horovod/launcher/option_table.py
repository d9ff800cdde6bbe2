"""Options of horovodrun (Horovod 0.28) and ddlrun (PowerAI DDL), and what each becomes here."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class LaunchOption:
    """One option of horovodrun or ddlrun.

    At most one of ``run``, ``variable``, ``role`` and ``unused`` is given.

    Attributes:
        names: The option's names.
        values: Number of values that follow.
        run: Option of ``paceline run`` that it becomes.
        variable: Environment variable of the ranks that it sets.
        convert: Returns the variable's value from the option's.
        flag: The variable's value if the option has no value.
        role: Name by which ``translate`` handles it.
        unused: Why it has no effect.
    """

    names: tuple[str, ...]
    values: int = 1
    run: str = ""
    variable: str = ""
    convert: Callable[[str], str] = str
    flag: str = "1"
    role: str = ""
    unused: str = ""


def _set(variable: str, *names: str, convert: Callable[[str], str] = str) -> LaunchOption:
    return LaunchOption(names, variable=f"HOROVOD_{variable}", convert=convert)


def _switch(variable: str, on: str, off: str) -> tuple[LaunchOption, LaunchOption]:
    """Return two options without values, which set the variable to 1 and to 0."""
    name = f"HOROVOD_{variable}"
    return (
        LaunchOption((on,), 0, variable=name),
        LaunchOption((off,), 0, variable=name, flag="0"),
    )


def _unused(why: str, *names: str, values: int = 1) -> LaunchOption:
    return LaunchOption(names, values, unused=why)


def _megabytes(text: str) -> str:
    return str(int(float(text) * 2**20))


_HOSTS = "the hosts are checked when the agents start"
_EXCHANGE = "paceline run --exchange selects the backend"
_BINDING = "paceline run --bind binds ranks to cores"
_OUTPUT = "standard output contains the lines of all ranks, each with its rank"

HOROVODRUN = (
    LaunchOption(("-np", "--num-proc"), run="-n"),
    LaunchOption(("-H", "--hosts"), role="hosts"),
    LaunchOption(("-hostfile", "--hostfile"), role="hostfile"),
    LaunchOption(("-v", "--version"), 0, role="version"),
    LaunchOption(("-cb", "--check-build"), 0, role="build"),
    LaunchOption(("--verbose",), 0),  # the command line of paceline run is always printed
    LaunchOption(("-p", "--ssh-port"), role="ssh-port"),
    LaunchOption(("-i", "--ssh-identity-file"), role="ssh-identity"),
    LaunchOption(("--network-interfaces", "--network-interface"), role="interfaces"),
    LaunchOption(("--config-file",), role="config"),
    LaunchOption(("--host-discovery-script",), role="discovery"),
    LaunchOption(("--slots-per-host",), role="slots"),
    LaunchOption(("--min-np", "--min-num-proc"), role="min"),
    LaunchOption(("--max-np", "--max-num-proc"), role="max"),
    LaunchOption(("--reset-limit",), role="restarts"),
    LaunchOption(("--jsrun",), 0, role="jsrun"),
    _set("ELASTIC_TIMEOUT", "--elastic-timeout"),
    _set("FUSION_THRESHOLD", "--fusion-threshold-mb", convert=_megabytes),
    _set("CYCLE_TIME", "--cycle-time-ms"),
    _set("CACHE_CAPACITY", "--cache-capacity"),
    *_switch("HIERARCHICAL_ALLREDUCE", "--hierarchical-allreduce", "--no-hierarchical-allreduce"),
    *_switch("HIERARCHICAL_ALLGATHER", "--hierarchical-allgather", "--no-hierarchical-allgather"),
    *_switch("AUTOTUNE", "--autotune", "--no-autotune"),
    _set("AUTOTUNE_LOG", "--autotune-log-file"),
    _set("AUTOTUNE_WARMUP_SAMPLES", "--autotune-warmup-samples"),
    _set("AUTOTUNE_STEPS_PER_SAMPLE", "--autotune-steps-per-sample"),
    _set("AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "--autotune-bayes-opt-max-samples"),
    _set("AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "--autotune-gaussian-process-noise"),
    _set("TIMELINE", "--timeline-filename"),
    *_switch("TIMELINE_MARK_CYCLES", "--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    *_switch("STALL_CHECK_DISABLE", "--no-stall-check", "--stall-check"),
    _set("STALL_CHECK_TIME_SECONDS", "--stall-check-warning-time-seconds"),
    _set("STALL_SHUTDOWN_TIME_SECONDS", "--stall-check-shutdown-time-seconds"),
    _set("GLOO_TIMEOUT_SECONDS", "--gloo-timeout-seconds"),
    _set("LOG_LEVEL", "--log-level"),
    *_switch("LOG_TIMESTAMP", "--log-with-timestamp", "--log-without-timestamp"),
    *_switch("LOG_TIMESTAMP", "--no-log-hide-timestamp", "--log-hide-timestamp"),
    *_switch("MPI_THREADS_DISABLE", "--mpi-threads-disable", "--no-mpi-threads-disable"),
    _set("NUM_NCCL_STREAMS", "--num-nccl-streams"),
    _set("THREAD_AFFINITY", "--thread-affinity"),
    LaunchOption(("--tcp",), 0, variable="NCCL_IB_DISABLE"),
    _unused(_EXCHANGE, "--gloo", values=0),
    _unused(_EXCHANGE, "--mpi", values=0),
    _unused("Paceline does not use MPI", "--mpi-args"),
    _unused(_BINDING, "--binding-args"),
    _unused(_HOSTS, "--disable-cache", values=0),
    _unused(_HOSTS, "--start-timeout"),
    _unused(_OUTPUT, "--output-filename"),
    _unused(_OUTPUT, "-prefix-timestamp", "--prefix-output-with-timestamp", values=0),
    _unused("hosts that return are used again", "--blacklist-cooldown-range", values=2),
)

_TOPOLOGY = "Paceline finds the topology"
_DDL = "Paceline does not use DDL"

DDLRUN = (
    LaunchOption(("-H", "--H", "-host", "--host"), role="hosts"),
    LaunchOption(("-hostfile", "--hostfile"), role="hostfile"),
    LaunchOption(("-accelerators", "--accelerators"), role="slots"),
    LaunchOption(("-v", "--v", "-verbose", "--verbose"), 0),
    LaunchOption(("-tcp", "--tcp"), 0, variable="NCCL_IB_DISABLE"),
    LaunchOption(("-rf", "--rf", "-rankfile", "--rankfile"), role="rankfile"),
    _unused(_DDL, "-m", "--m", "-mode", "--mode"),
    _unused(_DDL, "-ddlarg", "--ddlarg", "-ddloption", "--ddloption"),
    _unused(_DDL, "-no_ddloptions", "--no_ddloptions", values=0),
    _unused("Paceline does not use MPI", "-mpiarg", "--mpiarg"),
    _unused(_HOSTS, "-skipchecks", "--skipchecks", values=0),
    *(
        _unused(_TOPOLOGY, f"-{name}", f"--{name}")
        for name in ("aisles", "racks", "nodes", "sockets", "cores")
    ),
)


def option_names(table: tuple[LaunchOption, ...]) -> tuple[str, str]:
    """Return the options of a tool, for its help: those that take effect, and the others."""
    longest = [max(one.names, key=len) for one in table if not one.unused]
    others = [max(one.names, key=len) for one in table if one.unused]
    return ", ".join(longest), ", ".join(others)
