"""Determine the rank of this process and the world size, from the launcher's environment variables.

RANK and WORLD_SIZE (torchrun's) come first, then the launchers of launcher_variables.py. Variables
of the same start must agree.
"""

import os
from dataclasses import dataclass

from .launcher_variables import Source, is_hydras, start
from .schedulers import lsf, nodefile, openmpi, slurm
from .schedulers.env_numbers import Environment, is_number, number
from .schedulers.hostlist import counts, expand


@dataclass(frozen=True)
class Place:
    """The rank of this process. ``alone``: it is the only process of the job."""

    rank: int
    size: int
    local_rank: int
    local_size: int | None
    source: str
    alone: bool = False


def place(environment: Environment) -> Place:
    """From RANK and WORLD_SIZE (torchrun's), else from the launcher; a process without either is
    a world of one. Of a PALS start without PMI the size is the ranks of this host times the hosts
    of PBS_NODEFILE: that another host has more, or none, can't be seen here, and WORLD_SIZE says
    it then."""
    try:
        if "RANK" in environment and "WORLD_SIZE" in environment:
            return _given(environment)
        found = _launcher(environment)
        if found is None:
            if "RANK" not in environment and "WORLD_SIZE" not in environment:
                return Place(0, 1, 0, 1, "alone", alone=True)
            return _given(environment)  # which says what is missing
        sources = start(environment)
        _agree(environment, "WORLD_SIZE", *_size(environment, sources))
        _agree(environment, "RANK", found.rank, sources[0].rank)
        return found
    except ValueError as mistake:
        raise ValueError(f"paceline.init: {mistake}") from None


def launched_by(environment: Environment) -> Place | None:
    """Return the rank that a launcher other than torchrun assigned, where it started several
    ranks.
    """
    found = _launcher(environment)
    return None if found is None or found.alone else found


def tell_others(place: Place) -> None:
    """Set torchrun's environment variables where they are missing: other libraries read them."""
    if place.alone:
        return
    numbers = {"RANK": place.rank, "WORLD_SIZE": place.size, "LOCAL_RANK": place.local_rank}
    if place.local_size is not None:
        numbers["LOCAL_WORLD_SIZE"] = place.local_size
    for name, value in numbers.items():
        os.environ.setdefault(name, str(value))


def hosts_of(environment: Environment, place: Place) -> list[str]:
    """Return names and addresses of hosts that rank 0 may be on, the likeliest first.

    Empty where the launcher does not report any.
    """
    if place.alone:
        return []
    if place.source == "torchrun" and environment.get("MASTER_ADDR"):
        return [environment["MASTER_ADDR"]]
    try:
        hosts = _hosts(environment, [source.name for source in _start_of(environment, place)])
    except ValueError:  # a file that is on other hosts only
        return []
    own = environment.get("PMIX_HOSTNAME") or environment.get("SLURMD_NODENAME")
    if hosts and own and place.rank == place.local_rank:  # all ranks below it are on its host
        hosts = [own, *hosts]
    return list(dict.fromkeys(hosts))


def job_key(environment: Environment, place: Place) -> str:
    """Return a key that all ranks of this start share and no other start on these hosts has.

    Empty where there is none.
    """
    if place.alone:
        return ""
    values: list[str] = []
    if place.source == "torchrun":
        names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
        values = [environment.get(name, "") for name in names]
    for source in () if any(values) else _start_of(environment, place):
        if source.name == "Slurm":
            values.append(slurm.step(environment) or "")
        if source.name == "PMI" and is_hydras(environment):
            continue  # a PMI_JOBID is that of the step around
        for name in source.key:
            # Open MPI's second part is its first address and port; the rest may differ by host
            values.append(";".join(environment.get(name, "").split(";")[:2]))
    return " ".join(value for value in dict.fromkeys(values) if value)


def _given(environment: Environment) -> Place:
    """RANK and its fellows, from torchrun or set by hand in a launcher's words."""
    words = {name: environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    launcher = None
    if "LOCAL_RANK" not in environment:
        launcher = _same(environment)
        words["LOCAL_RANK"] = str(launcher.local_rank) if launcher else words["RANK"]
    for name, text in words.items():
        if not is_number(text):
            raise ValueError(
                f"the environment has {name}={text or 'nothing'} beside "
                f"RANK={environment.get('RANK')} and WORLD_SIZE={environment.get('WORLD_SIZE')}. "
                "HINT: start with `paceline run` or torchrun, or unset them to run alone"
            )
    rank, size, local_rank = (int(text) for text in words.values())
    _below(rank, size, "RANK", "WORLD_SIZE")
    local_size = number(environment, "LOCAL_WORLD_SIZE")
    if local_size is None and launcher is not None:
        local_size = launcher.local_size
    return Place(rank, size, local_rank, local_size, "torchrun")


def _same(environment: Environment) -> Place | None:
    """The launcher's place where RANK and WORLD_SIZE are its own, set by hand."""
    try:
        found = _launcher(environment)
    except ValueError:  # of another start, around torchrun
        return None
    if found is None:
        return None
    words = (environment.get("RANK"), environment.get("WORLD_SIZE"))
    return found if words == (str(found.rank), str(found.size)) else None


def _launcher(environment: Environment) -> Place | None:
    sources = start(environment)
    if not sources:
        return None
    first, *others = sources
    rank = number(environment, first.rank)
    assert rank is not None
    for other in others:
        _agree(environment, other.rank, rank, first.rank)
    size, size_name = _size(environment, sources)
    _below(rank, size, first.rank, size_name)
    local_rank = _first(environment, [name for s in sources for name in s.local_rank])
    if local_rank is None:
        local_rank = number(environment, "LOCAL_RANK")
    local_size = _first(environment, [name for s in sources for name in s.local_size])
    if local_size is None and sources[-1].name == "Slurm":
        local_size = _slurm_local_size(environment)
    return Place(
        rank,
        size,
        rank if local_rank is None else local_rank,
        1 if local_size is None and size == 1 else local_size,
        first.name,
        alone=size == 1,
    )


def _start_of(environment: Environment, place: Place) -> list[Source]:
    if place.source == "torchrun" and _same(environment) is None:
        return []
    return start(environment)


def _size(environment: Environment, sources: list[Source]) -> tuple[int, str]:
    """The size of this start and the variable that says so."""
    said: tuple[int, str] | None = None
    for source in sources:
        if source.size is None or source.size not in environment:
            continue
        if said is None:
            said = number(environment, source.size) or 0, source.size
        _agree(environment, source.size, *said)
    on_this_host = number(environment, "PALS_LOCAL_SIZE")
    pals = any(source.name == "PALS" for source in sources)
    if said is not None:
        if pals and on_this_host is not None and said[0] < on_this_host:
            raise ValueError(
                f"the environment has {said[1]}={said[0]} beside PALS_LOCAL_SIZE={on_this_host}. "
                "HINT: unset the one that was set by hand"
            )
        return said
    by_hand = number(environment, "WORLD_SIZE")
    if by_hand is not None:
        return by_hand, "WORLD_SIZE"
    if pals and on_this_host is not None and environment.get("PBS_NODEFILE"):
        try:
            hosts = len(nodefile.read(environment, "PBS_NODEFILE"))
            return on_this_host * hosts, f"PALS_LOCAL_SIZE={on_this_host} on {hosts} hosts"
        except ValueError:  # where only the job's first host has the file
            pass
    first = sources[0]
    raise ValueError(
        f"the environment has {first.rank}={environment[first.rank]} and nothing that says how "
        "many ranks there are. HINT: export WORLD_SIZE, or start with `paceline run`"
    )


def _slurm_local_size(environment: Environment) -> int | None:
    node = number(environment, "SLURM_NODEID")
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE")
    if node is None or tasks is None:
        return None
    each = counts(tasks)
    return each[node] if node < len(each) else None


def _hosts(environment: Environment, sources: list[str]) -> list[str]:
    if "Open MPI" in sources and "jsrun" not in sources:
        return openmpi.hosts(environment)
    if "Slurm" in sources:
        return expand(environment.get("SLURM_STEP_NODELIST", ""))
    if "jsrun" in sources:
        found = lsf.allocation(environment)
        return [host.name for host in found.hosts] if found else []
    if "PALS" in sources and environment.get("PBS_NODEFILE"):
        return list(nodefile.read(environment, "PBS_NODEFILE"))
    return []


def _first(environment: Environment, names: list[str]) -> int | None:
    return next((number(environment, name) for name in names if name in environment), None)


def _agree(environment: Environment, name: str, expected: int, other: str) -> None:
    """Raise ValueError where the environment variable is set to another value than expected."""
    if number(environment, name) in (None, expected):
        return
    raise ValueError(
        f"the environment has {name}={environment[name]} beside {other}={expected}, which tell of "
        "the same start. HINT: unset the one that was set by hand"
    )


def _below(rank: int, size: int, rank_name: str, size_name: str) -> None:
    if rank >= size:
        total = size_name if "=" in size_name else f"{size_name}={size}"
        raise ValueError(f"{rank_name}={rank} is not below {total}. HINT: ranks count from 0")
