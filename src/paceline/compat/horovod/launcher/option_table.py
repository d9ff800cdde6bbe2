"""Options of horovodrun (Horovod 0.28) and ddlrun (PowerAI DDL), and what each becomes here.

``read_config`` returns the options that the YAML file of ``horovodrun --config-file`` stands for.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....security.files import InvalidFileError, read_regular


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


MAX_BYTES, MAX_DEPTH = 64 << 10, 8
_EXAMPLE = "params: {cycle_time_ms: 3}"
# The options of horovodrun for the values of each section; a switch has an option for true and one
# for false.
SECTIONS: dict[str, dict[str, str | tuple[str, str]]] = {
    "params": {
        "fusion_threshold_mb": "--fusion-threshold-mb",
        "cycle_time_ms": "--cycle-time-ms",
        "cache_capacity": "--cache-capacity",
        "hierarchical_allreduce": ("--hierarchical-allreduce", "--no-hierarchical-allreduce"),
        "hierarchical_allgather": ("--hierarchical-allgather", "--no-hierarchical-allgather"),
    },
    "autotune": {
        "enabled": ("--autotune", "--no-autotune"),
        "log_file": "--autotune-log-file",
        "warmup_samples": "--autotune-warmup-samples",
        "steps_per_sample": "--autotune-steps-per-sample",
        "bayes_opt_max_samples": "--autotune-bayes-opt-max-samples",
        "gaussian_process_noise": "--autotune-gaussian-process-noise",
    },
    "timeline": {
        "filename": "--timeline-filename",
        "mark_cycles": ("--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    },
    "stall_check": {
        "enabled": ("--stall-check", "--no-stall-check"),
        "warning_time_seconds": "--stall-check-warning-time-seconds",
        "shutdown_time_seconds": "--stall-check-shutdown-time-seconds",
    },
    "library_options": {
        "mpi_threads_disable": ("--mpi-threads-disable", "--no-mpi-threads-disable"),
        "num_nccl_streams": "--num-nccl-streams",
        "thread_affinity": "--thread-affinity",
        "gloo_timeout_seconds": "--gloo-timeout-seconds",
    },
    "logging": {
        "level": "--log-level",
        "with_timestamp": ("--log-with-timestamp", "--log-without-timestamp"),
    },
}


def read_config(path: Path) -> list[tuple[str, list[str]]]:
    """Return the options of horovodrun in a configuration file, with their values.

    Raises:
        ValueError: The file can't be read, or contains something unknown.
    """
    try:
        text = read_regular(path, MAX_BYTES)
    except (OSError, InvalidFileError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(
            f"--config-file {path} can't be read: {reason}. HINT: name a YAML file"
        ) from None
    return list(_options(path, _parsed(path, text)))


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    try:
        yaml: Any = importlib.import_module("yaml")
    except ImportError:
        raise ValueError(
            f"--config-file {path} needs a YAML parser. HINT: pip install pyyaml, or write the "
            "values as options"
        ) from None
    try:
        flaw = _flaw_of_structure(yaml.parse(text), yaml)
        tree = None if flaw else yaml.safe_load(text)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where is not None else ""
        raise ValueError(f"{path}{line} is not YAML. HINT: correct this line") from None
    except ValueError as error:  # a date or a number that does not exist
        raise ValueError(
            f"{path} contains an invalid value: {error!s:.80}. HINT: {_EXAMPLE}"
        ) from None
    if flaw:
        raise ValueError(f"{path} {flaw}. HINT: write single values, as in {_EXAMPLE}")
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ValueError(f"{path} has no sections. HINT: {', '.join(SECTIONS)}")
    return tree


def _flaw_of_structure(events: Iterable[Any], yaml: Any) -> str:
    """Return why a file may need far more memory than its text, or ""."""
    depth = 0
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            return "contains an alias"
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            return f"has more than {MAX_DEPTH} levels"
    return ""


def _text(path: Path, name: str, value: Any) -> str:
    """Return a value as an option has it."""
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError(
        f"{path}: {name} is a {type(value).__name__}, and not a single value. HINT: {_EXAMPLE}"
    )


def _options(path: Path, tree: dict[str, Any]) -> Iterator[tuple[str, list[str]]]:
    controller = tree.pop("controller", None)
    if controller is not None:
        is_mpi = _text(path, "controller", controller).lower() == "mpi"
        yield ("--mpi" if is_mpi else "--gloo"), []
    for section, values in tree.items():
        known = SECTIONS.get(section)
        if known is None or not isinstance(values, dict):
            raise ValueError(
                f"{path}: unknown section {section!s:.40}. HINT: {', '.join(SECTIONS)}"
            )
        for name, value in values.items():
            option = known.get(name)
            if option is None:
                raise ValueError(f"{path}: {section} has no {name!s:.40}. HINT: {', '.join(known)}")
            if isinstance(option, tuple):
                yield option[0 if value else 1], []
            elif value is not None:
                yield option, [_text(path, name, value)]
