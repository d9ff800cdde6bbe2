"""Allocation of a Slurm job, from the environment of a batch script, salloc or a job step."""

from itertools import zip_longest

from ...plurals import counted
from .allocation import Allocation
from .env_numbers import Environment, is_number, number
from .hostfile import Host
from .hostlist import expand_counts, expand_hostlist, expand_numbers

# Slurm reserves step numbers from this one on: for the batch script, the shell of salloc, and
# adopted processes.
FIRST_RESERVED_STEP = 0xFFFFFFF0


def allocation(environment: Environment) -> Allocation | None:
    job = environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID")
    nodes = environment.get("SLURM_JOB_NODELIST") or environment.get("SLURM_NODELIST")
    if not job or not nodes:
        return None
    names = expand_hostlist(nodes)
    _check(environment, len(names))
    devices = _devices(environment)
    cpus = _each(environment, "SLURM_JOB_CPUS_PER_NODE", len(names))
    hosts = [
        Host(name, slots, devices, cores)
        for name, slots, cores in zip_longest(names, _slots(environment, len(names)), cpus)
    ]
    end = number(environment, "SLURM_JOB_END_TIME")
    return Allocation(
        "Slurm",
        job,
        tuple(hosts),
        "srun",
        ends_at=float(end) if end else None,
        note=_left_out_components(environment, job, names),
    )


def _left_out_components(environment: Environment, job: str, used: list[str]) -> str:
    """Return the warning for a heterogeneous job, whose components are allocations of their own.

    SLURM_JOB_NODELIST and the other environment variables describe one component, except in a
    step over several components. Those of each component have the suffix _HET_GROUP_n.
    """
    count = number(environment, "SLURM_HET_SIZE") or 1
    if count < 2:
        return ""
    host_lists = [environment.get(f"SLURM_JOB_NODELIST_HET_GROUP_{n}", "") for n in range(count)]
    hosts = dict.fromkeys(name for text in host_lists if text for name in expand_hostlist(text))
    others = [name for name in hosts if name not in used]
    if hosts and not others:
        return ""
    rest = ",".join(others[:8]) + (",..." if len(others) > 8 else "") if others else "the others"
    host_names = ",".join([*used, *others]) if others and len(hosts) <= 8 else "HOST1,HOST2,..."
    return (
        f"Slurm job {job} is heterogeneous: of its {count} components, only the nodes of one "
        f"({','.join(used[:8])}{',...' if len(used) > 8 else ''}) are used, and {rest} "
        f"left out. HINT: -H {host_names} starts ranks on all of them over ssh, and `srun "
        f"--het-group=0-{count - 1} python SCRIPT` those of a script with paceline.init()"
    )


def step(environment: Environment) -> str | None:
    """Return "JOB.STEP" for a task that srun started, else None.

    A batch script and the shell of salloc also have SLURM_PROCID=0 and the job's number of tasks,
    but are a single process.
    """
    name = environment.get("SLURM_STEP_ID", environment.get("SLURM_STEPID", ""))
    if not is_number(name) or int(name) >= FIRST_RESERVED_STEP:
        return None
    return f"{environment.get('SLURM_JOB_ID', environment.get('SLURM_JOBID', ''))}.{name}"


def _check(environment: Environment, hosts: int) -> None:
    nodes = number(environment, "SLURM_JOB_NUM_NODES")
    if nodes is not None and nodes != hosts:
        raise ValueError(
            f"the environment has SLURM_JOB_NUM_NODES={nodes} beside SLURM_JOB_NODELIST="
            f"{environment.get('SLURM_JOB_NODELIST')}, which are {counted(hosts, 'host')}. "
            "HINT: unset the one that was set by hand"
        )
    if step(environment) is not None:
        return  # in a step, SLURM_NTASKS is the step's, but SLURM_NTASKS_PER_NODE may be the job's
    tasks = number(environment, "SLURM_NTASKS")
    limit = number(environment, "SLURM_NTASKS_PER_NODE")
    if tasks is not None and limit is not None and tasks > limit * hosts:
        raise ValueError(
            f"the environment has SLURM_NTASKS={tasks} beside SLURM_NTASKS_PER_NODE={limit} on "
            f"{counted(hosts, 'host')}, which is at most {limit * hosts} tasks. "
            "HINT: unset the one that was set by hand"
        )


def _slots(environment: Environment, hosts: int) -> list[int | None]:
    """Return the tasks of each host, or None for each if the user did not request tasks.

    SLURM_TASKS_PER_NODE then describes CPUs.
    """
    if "SLURM_NTASKS" not in environment and "SLURM_NTASKS_PER_NODE" not in environment:
        return [None] * hosts
    tasks = _each(environment, "SLURM_TASKS_PER_NODE", hosts)
    if None in tasks:  # the counts are those of a step on fewer hosts
        return [number(environment, "SLURM_NTASKS_PER_NODE")] * hosts
    return tasks


def _each(environment: Environment, name: str, hosts: int) -> list[int | None]:
    """Return one number per host, or None for each host if they are unknown."""
    if name not in environment:
        return [None] * hosts
    try:
        found: list[int | None] = [*expand_counts(environment[name])]
    except ValueError as mistake:
        raise ValueError(f"the environment has {name}: {mistake}") from None
    return found if len(found) == hosts else [None] * hosts


def _devices(environment: Environment) -> int | None:
    """Return the number of GPUs per host, or None if unknown.

    Slurm reports those of this host only; all other hosts are assumed to have as many.
    """
    on_this_node = number(environment, "SLURM_GPUS_ON_NODE")
    if on_this_node is not None:
        return on_this_node
    if environment.get("SLURM_JOB_GPUS"):
        try:
            return len(expand_numbers(environment["SLURM_JOB_GPUS"]))
        except ValueError as mistake:
            raise ValueError(
                f"the environment has SLURM_JOB_GPUS: {mistake}. HINT: write it as in 0-3"
            ) from None
    per_node = environment.get("SLURM_GPUS_PER_NODE")  # "2", "a100:2" or "a100:2,v100:1"
    if not per_node:
        return None
    parts = [part.rpartition(":")[2] for part in per_node.split(",")]
    if not all(is_number(part) for part in parts):
        raise ValueError(
            f"the environment has SLURM_GPUS_PER_NODE={per_node!r}, which is not a number of GPUs. "
            "HINT: write it as 2 or a100:2"
        )
    return sum(int(part) for part in parts)
