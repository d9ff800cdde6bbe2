"""Rank of this process and world size, from the launcher's environment variables.

RANK and WORLD_SIZE (set by torchrun) take precedence over the launchers in launcher_variables.py.
Environment variables of the same start must agree.
"""

import os
import re
from dataclasses import dataclass

from ..plurals import counted
from .launcher_variables import Source, is_from_hydra, launch_sources
from .schedulers import lsf, slurm
from .schedulers.allocation import read_nodefile
from .schedulers.env_numbers import Environment, is_number, number
from .schedulers.hostlist import expand_counts, expand_hostlist, expand_numbers, split_hostlist

# The hosts of an Open MPI 4 start, from the environment that its daemons pass to the ranks.

WITHOUT_DAEMON = (
    0xFFFFFFFF  # daemon number on a host of the allocation that this start does not use
)


def hosts(environment: Environment) -> list[str]:
    """Return the names of the hosts, then the addresses of the host that runs mpirun.

    The name of mpirun's host is the last name if no rank runs on it.
    """
    names = in_regex(environment.get("OMPI_MCA_orte_node_regex", ""))
    used = number(environment, "OMPI_MCA_orte_num_nodes")
    if used is not None and used < len(names):
        names = names[1:] + names[:1]
    return list(dict.fromkeys(names + _addresses(environment)))


def in_regex(text: str) -> list[str]:
    """Expand Open MPI's node regex, such as "host[1:0-2],login@0(4)".

    The parts are a prefix, the number of digits and the numbers; after the @, the numbers of the
    daemons in the order of the names. Return an empty list if it cannot be parsed.
    """
    nodes, _, daemons = text.rpartition("@")
    try:
        names = [name for part in split_hostlist(nodes) for name in _names(part)]
    except ValueError:
        return []
    ids = _daemons(daemons)
    if len(ids) != len(names):
        return names
    return [name for name, daemon in zip(names, ids, strict=True) if daemon != WITHOUT_DAEMON]


def _names(part: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)\[(\d+):([^\]]*)\]([^\[\]]*)", part)
    if match is None:
        return [part]
    prefix, digits, which, suffix = match.groups()
    return [f"{prefix}{n.zfill(int(digits))}{suffix}" for n in expand_numbers(which)]


def _daemons(text: str) -> list[int]:
    """Expand daemon numbers such as "0(2),4294967295(1)": the first number and a count."""
    found: list[int] = []
    for first, count in re.findall(r"(\d+)(?:\((\d+)\))?", text):
        if int(first) == WITHOUT_DAEMON:
            found += [WITHOUT_DAEMON] * int(count or 1)
        else:
            found += range(int(first), int(first) + int(count or 1))
    return found


def _addresses(environment: Environment) -> list[str]:
    found: list[str] = []
    for name in ("OMPI_MCA_orte_hnp_uri", "OMPI_MCA_orte_parent_uri"):
        for group in re.findall(r"tcp6?://([^;]+):\d+", environment.get(name, "")):
            found += [address.strip("[]") for address in group.split(",")]
    return [address for address in found if not address.startswith("127.") and address != "::1"]


@dataclass(frozen=True)
class RankIdentity:
    """The rank of this process.

    Attributes:
        size: World size.
        local_size: Number of ranks on this host; None if unknown.
        source: Name of the launcher, "torchrun" or "alone".
        alone: Whether it is the only process of the job.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int | None
    source: str
    alone: bool = False


def rank_identity(environment: Environment) -> RankIdentity:
    """Return the rank of this process, from RANK and WORLD_SIZE, else from the launcher.

    A process without either is a world of size 1. For PALS without PMI, the world size is the
    number of ranks on this host times the number of hosts in PBS_NODEFILE. This host cannot know
    that another host has more ranks, or none: the user must set WORLD_SIZE then.

    Raises:
        ValueError: Environment variables contradict each other, or one is missing or invalid.
    """
    try:
        if "RANK" in environment and "WORLD_SIZE" in environment:
            return _from_torchrun(environment)
        found = _from_launcher(environment)
        if found is None:
            if "RANK" not in environment and "WORLD_SIZE" not in environment:
                return RankIdentity(0, 1, 0, 1, "alone", alone=True)
            return _from_torchrun(environment)  # raises an error that names the missing one
        sources = launch_sources(environment)
        _check_agreement(environment, "WORLD_SIZE", *_size(environment, sources))
        _check_agreement(environment, "RANK", found.rank, sources[0].rank)
        return found
    except ValueError as mistake:
        raise ValueError(f"paceline.init: {mistake}") from None


def launched_by(environment: Environment) -> RankIdentity | None:
    """Return the rank from a launcher other than torchrun, or None if it started only one rank."""
    found = _from_launcher(environment)
    return None if found is None or found.alone else found


def set_torchrun_variables(place: RankIdentity) -> None:
    """Set those of torchrun's environment variables that are missing: other libraries read them."""
    if place.alone:
        return
    numbers = {"RANK": place.rank, "WORLD_SIZE": place.size, "LOCAL_RANK": place.local_rank}
    if place.local_size is not None:
        numbers["LOCAL_WORLD_SIZE"] = place.local_size
    for name, value in numbers.items():
        os.environ.setdefault(name, str(value))


def rank_0_hosts(environment: Environment, place: RankIdentity) -> list[str]:
    """Return names and addresses of hosts that rank 0 may be on, the most likely first.

    Empty if the launcher does not report any.
    """
    if place.alone:
        return []
    if place.source == "torchrun" and environment.get("MASTER_ADDR"):
        return [environment["MASTER_ADDR"]]
    try:
        hosts = _hosts(
            environment, [source.name for source in _sources_of_start(environment, place)]
        )
    except ValueError:  # the file exists only on other hosts
        return []
    own = environment.get("PMIX_HOSTNAME") or environment.get("SLURMD_NODENAME")
    if hosts and own and place.rank == place.local_rank:  # all lower ranks are on this host, too
        hosts = [own, *hosts]
    return list(dict.fromkeys(hosts))


def job_key(environment: Environment, place: RankIdentity) -> str:
    """Return a key that all ranks of this start share and no other start on these hosts has.

    Empty if there is none.
    """
    if place.alone:
        return ""
    values: list[str] = []
    if place.source == "torchrun":
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
        values = [environment.get(name, "") for name in names]
    for source in () if any(values) else _sources_of_start(environment, place):
        if source.name == "Slurm":
            values.append(slurm.step(environment) or "")
        if source.name == "PMI" and is_from_hydra(environment):
            continue  # PMI_JOBID belongs to the enclosing step
        for name in source.key:
            # The second part of Open MPI's value is its first address and port; the rest may
            # differ by host.
            values.append(";".join(environment.get(name, "").split(";")[:2]))
    return " ".join(value for value in dict.fromkeys(values) if value)


def _from_torchrun(environment: Environment) -> RankIdentity:
    """Return the place from RANK, WORLD_SIZE and LOCAL_RANK.

    torchrun has set them, or the user has set them to a launcher's values.
    """
    words = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    launcher = None
    if "LOCAL_RANK" not in environment:
        launcher = _matching_launcher(environment)
        words["LOCAL_RANK"] = str(launcher.local_rank) if launcher else words["RANK"]
    for name, text in words.items():
        if not is_number(text):
            raise ValueError(
                f"the environment has {name}={text or 'nothing'} beside "
                f"RANK={environment.get('RANK')} and WORLD_SIZE={environment.get('WORLD_SIZE')}. "
                "HINT: start with `paceline run` or torchrun, or unset them to run alone"
            )
    rank, size, local_rank = (int(text) for text in words.values())
    _check_below(rank, size, "RANK", "WORLD_SIZE")
    local_size = number(environment, "LOCAL_WORLD_SIZE")
    if local_size is None and launcher is not None:
        local_size = launcher.local_size
    return RankIdentity(rank, size, local_rank, local_size, "torchrun")


def _matching_launcher(environment: Environment) -> RankIdentity | None:
    """Return the launcher's place if the user has set RANK and WORLD_SIZE to its values."""
    try:
        found = _from_launcher(environment)
    except ValueError:  # of another start, which encloses torchrun
        return None
    if found is None:
        return None
    words = (environment.get("RANK"), environment.get("WORLD_SIZE"))
    return found if words == (str(found.rank), str(found.size)) else None


def _from_launcher(environment: Environment) -> RankIdentity | None:
    sources = launch_sources(environment)
    if not sources:
        return None
    first, *others = sources
    rank = number(environment, first.rank)
    assert rank is not None
    for other in others:
        _check_agreement(environment, other.rank, rank, first.rank)
    size, size_name = _size(environment, sources)
    _check_below(rank, size, first.rank, size_name)
    local_rank = _first_host(environment, [name for s in sources for name in s.local_rank])
    if local_rank is None:
        local_rank = number(environment, "LOCAL_RANK")
    local_size = _first_host(environment, [name for s in sources for name in s.local_size])
    if local_size is None and sources[-1].name == "Slurm":
        local_size = _slurm_local_size(environment)
    return RankIdentity(
        rank,
        size,
        rank if local_rank is None else local_rank,
        1 if local_size is None and size == 1 else local_size,
        first.name,
        alone=size == 1,
    )


def _sources_of_start(environment: Environment, place: RankIdentity) -> list[Source]:
    if place.source == "torchrun" and _matching_launcher(environment) is None:
        return []
    return launch_sources(environment)


def _size(environment: Environment, sources: list[Source]) -> tuple[int, str]:
    """Return the world size of this start, and the environment variable that it was read from."""
    stated: tuple[int, str] | None = None
    for source in sources:
        if source.size is None or source.size not in environment:
            continue
        if stated is None:
            stated = number(environment, source.size) or 0, source.size
        _check_agreement(environment, source.size, *stated)
    local_size = number(environment, "PALS_LOCAL_SIZE")
    pals = any(source.name == "PALS" for source in sources)
    if stated is not None:
        if pals and local_size is not None and stated[0] < local_size:
            raise ValueError(
                f"the environment has {stated[1]}={stated[0]} beside PALS_LOCAL_SIZE={local_size}. "
                "HINT: unset the one that was set by hand"
            )
        return stated
    from_torchrun = number(environment, "WORLD_SIZE")
    if from_torchrun is not None:
        return from_torchrun, "WORLD_SIZE"
    if pals and local_size is not None and environment.get("PBS_NODEFILE"):
        try:
            hosts = len(read_nodefile(environment, "PBS_NODEFILE"))
            return (
                local_size * hosts,
                f"PALS_LOCAL_SIZE={local_size} on {counted(hosts, 'node')}",
            )
        except ValueError:  # only the job's first host has the file
            pass
    first = sources[0]
    raise ValueError(
        f"the environment has {first.rank}={environment[first.rank]} but no environment variable "
        "with the number of ranks. HINT: export WORLD_SIZE, or start with `paceline run`"
    )


def _slurm_local_size(environment: Environment) -> int | None:
    node = number(environment, "SLURM_NODEID")
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE")
    if node is None or tasks is None:
        return None
    each = expand_counts(tasks)
    return each[node] if node < len(each) else None


def _hosts(environment: Environment, sources: list[str]) -> list[str]:
    if "Open MPI" in sources and "jsrun" not in sources:
        return hosts(environment)
    if "Slurm" in sources:
        return expand_hostlist(environment.get("SLURM_STEP_NODELIST", ""))
    if "jsrun" in sources:
        found = lsf.allocation(environment)
        return [host.name for host in found.hosts] if found else []
    if "PALS" in sources and environment.get("PBS_NODEFILE"):
        return list(read_nodefile(environment, "PBS_NODEFILE"))
    return []


def _first_host(environment: Environment, names: list[str]) -> int | None:
    return next((number(environment, name) for name in names if name in environment), None)


def _check_agreement(environment: Environment, name: str, expected: int, other: str) -> None:
    """Raise ValueError if the environment variable is set to another value than expected."""
    if number(environment, name) in (None, expected):
        return
    raise ValueError(
        f"the environment has {name}={environment[name]} beside {other}={expected}, which "
        "describe the same start. HINT: unset the one that was set by hand"
    )


def _check_below(rank: int, size: int, rank_name: str, size_name: str) -> None:
    if rank >= size:
        total = size_name if "=" in size_name else f"{size_name}={size}"
        raise ValueError(f"{rank_name}={rank} is not below {total}. HINT: number the ranks from 0")
