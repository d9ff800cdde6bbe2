"""Allocation of an LSF job, from its hostfile or the environment variables with hosts and slots.

On CORAL machines (Summit, Sierra) the first host is the launch node, where no rank can run.
"""

from .allocation import Allocation, count_hosts, read_nodefile
from .env_numbers import Environment, is_number
from .hostfile import Host


def allocation(environment: Environment) -> Allocation | None:
    job = environment.get("LSB_JOBID")
    slots = _slots(environment) if job else None
    if not job or not slots:
        return None
    index = environment.get("LSB_JOBINDEX", "0")
    if index not in ("", "0"):
        job = f"{job}[{index}]"
    launch_node = _launch_node(environment, slots)
    if launch_node is None:
        return Allocation("LSF", job, tuple(Host(*item) for item in slots.items()), "blaunch")
    # On CORAL machines, jobs request whole hosts: slots are cores, not requested ranks.
    hosts = [Host(name, cpus=n) for name, n in slots.items() if name != launch_node]
    return Allocation("LSF", job, tuple(hosts), "jsrun")


def _launch_node(environment: Environment, slots: dict[str, int]) -> str | None:
    first, *others = slots
    if not others:
        return None
    if "CSM_ALLOCATION_ID" in environment:
        return first
    coral = any(name.startswith(("CSM_", "JSM_")) for name in environment)
    return first if coral and slots[first] == 1 and min(slots[n] for n in others) > 1 else None


def _slots(environment: Environment) -> dict[str, int] | None:
    pairs, words = environment.get("LSB_MCPU_HOSTS"), environment.get("LSB_HOSTS")
    if environment.get("LSB_DJOB_HOSTFILE"):
        try:
            return read_nodefile(environment, "LSB_DJOB_HOSTFILE")
        except ValueError:
            if not pairs and not words:
                raise
    if pairs:
        items = pairs.split()
        if len(items) % 2 or not all(is_number(count) for count in items[1::2]):
            raise ValueError(
                f"the environment has LSB_MCPU_HOSTS={pairs!r}, which are not pairs of a host and "
                "a number. HINT: LSF sets it; unset it where it was set by hand"
            )
        slots: dict[str, int] = {}
        for name, count in zip(items[::2], items[1::2], strict=True):
            slots[name] = slots.get(name, 0) + int(count)
        return slots
    return count_hosts(words.split()) if words else None
