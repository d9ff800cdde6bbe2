"""Placement of this host's ranks on cores, devices and network cards.

The placement is planned by ``cluster.binding_plan`` from the host's topology, the resources
granted by the scheduler, the user's options, and environment variables that the user has set.
"""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ...cluster.binding_plan import RankBinding, plan
from ...cluster.schedulers.env_numbers import THREAD_VARIABLES, openmp_threads
from ...cluster.topology.local_resources import allowed_threads
from ...cluster.topology.pci_devices import Card, pci_cards
from ...cluster.topology.topology import Topology, topology
from ...cluster.topology.visible_gpus import gpu_count, visible_devices
from ...plurals import counted
from ..job import Job
from ..options import AUTO

# With these variables the user binds threads. Paceline then binds only if an option requests it.
USER_BINDING_VARIABLES = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")


def take_share(job: Job) -> None:
    """Restrict this process, and all that it starts, to the job's share of this node.

    Raises:
        ValueError: This node has fewer cores or GPUs.
    """
    if job.share is None:
        return
    first_core, cores, first_gpu, gpus = job.share
    host, allowed = topology(), allowed_threads()
    own_cores = set(host.cores(allowed)[first_core : first_core + cores])
    if len(own_cores) < cores:
        raise ValueError(
            f"this job was given the cores {first_core} to {first_core + cores - 1} of this node, "
            f"and {counted(len(host.cores(allowed)), 'core')} may be used. HINT: fewer ranks or "
            "cores for each job"
        )
    os.sched_setaffinity(0, {cpu.number for cpu in host.at(allowed) if cpu.core in own_cores})
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [*map(str, range(gpu_count()))]
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[first_gpu : first_gpu + gpus])


def plan_bindings(job: Job) -> list[RankBinding]:
    """Return the place of each of the job's ranks on this host. A place without cpus is not bound.

    With the default ``--bind auto``, ranks that can't be bound are left unbound, with a note.

    Raises:
        ValueError: The requested binding is not possible on this host.
    """
    found, allowed = topology(), set(allowed_threads())
    if job.bind != AUTO:
        return _plan(job, job.bind, found, allowed, pci_cards())
    reason = why_unbound(job, found, allowed, os.environ)
    if not reason:
        cards_here = pci_cards()
        kinds = ["device"] * (0 < job.ranks <= gpu_count()) + ["core"]
        for kind in kinds:
            try:
                return _plan(job, kind, found, allowed, cards_here)
            except ValueError as mistake:
                reason = str(mistake).partition(": ")[2].partition(" HINT")[0]
    return [
        replace(place, notes=(*place.notes, f"not bound: {reason}"))
        for place in _plan(job, "none", found, allowed, [])
    ]


def why_unbound(job: Job, host: Topology, allowed: set[int], environment: Mapping[str, str]) -> str:
    """Return the reason why ``--bind auto`` does not bind the ranks, or "" if it does.

    Ranks are bound only if the cores are reserved for this job.
    """
    for name in USER_BINDING_VARIABLES:
        if name in environment:
            return f"{name} is set"
    online = {cpu.number for cpu in host.cpus}
    if allowed < online:
        return ""  # a scheduler, a container or taskset has reserved these cores for the job
    if job.granted is None:
        return "no scheduler reserves these cores for this job"
    if job.granted >= len(online):
        return ""
    cores = len(host.cores(online))
    if job.granted < cores or cores < len(online):  # schedulers may count hardware threads
        threads = f" and {len(online)} hardware threads" if cores < len(online) else ""
        return (
            f"the scheduler has granted {job.granted} CPUs of this node's {cores} cores{threads}, "
            "without naming them"
        )
    return ""


def variables_of_all(job: Job, places: list[RankBinding]) -> list[dict[str, str]]:
    """Return the environment variables of each rank.

    OMP_NUM_THREADS is set in this process as well, because it takes effect at the import of torch,
    which happens before the fork.
    """
    each = [variables(job, place, os.environ) for place in places]
    if each and "OMP_NUM_THREADS" in each[0]:
        os.environ["OMP_NUM_THREADS"] = each[0]["OMP_NUM_THREADS"]
    return each


def variables(job: Job, place: RankBinding, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables of a rank at this place, except those in ``given``.

    The network cards are set only with ``--bind device``: NCCL selects the nearest automatically.
    CUDA_DEVICE_ORDER makes CUDA number the GPUs as the plan of a bound rank does.
    """
    found = dict.fromkeys(THREAD_VARIABLES, str(openmp_threads(given) or place.threads))
    if place.cpus and place.device is not None:
        found["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    every = {path.name for path in Path("/sys/class/infiniband").glob("*")}
    infiniband = [name for name in place.cards if name in every]
    if job.bind == "device" and 0 < len(infiniband) < len(every):
        found["NCCL_IB_HCA"] = "=" + ",".join(infiniband)
        found["UCX_NET_DEVICES"] = ",".join(f"{name}:1" for name in infiniband)
    kept = {name: value for name, value in found.items() if name not in given}
    if openmp_threads(given) is None:  # OpenMP ignores a value that is not valid
        kept["OMP_NUM_THREADS"] = found["OMP_NUM_THREADS"]
    if job.threads is not None:
        kept |= dict.fromkeys(THREAD_VARIABLES, str(job.threads))
    return kept


def _plan(
    job: Job, kind: str, host: Topology, allowed: set[int], near: list[Card]
) -> list[RankBinding]:
    found = plan(
        host,
        allowed,
        job.ranks,
        bind=kind,
        cpus_per_rank=job.cpus_per_rank,
        threads=job.threads,
        smt=job.smt,
        cards=near,
        visible=visible_devices(os.environ),
    )
    if kind != "none":
        return found
    return [RankBinding((), device=place.device, threads=place.threads) for place in found]
