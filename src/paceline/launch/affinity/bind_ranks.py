"""The places of this host's ranks: the plan of ``cluster.binding.binding_plan`` for what this
host has, what was granted of it, and what the user asked for or has set already."""

import os
from collections.abc import Mapping
from pathlib import Path

from ...cluster.binding.binding_plan import Place, plan
from ...cluster.topology.local_resources import cores, devices
from ...cluster.topology.pci_devices import Card, cards
from ...cluster.topology.topology import Topology, topology
from ..job import AUTO, Job

# Where threads go, by the user's own word: no plan of ours comes on top unless it is asked for.
OWN = ("GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_PLACES")


def places(job: Job, root: Path = Path("/")) -> list[Place]:
    """One for each of the job's ranks here. A place without cpus is not bound.

    Raises ValueError where what was asked for can't be had. What nobody has asked for is left
    out where it can't, with a note.
    """
    found, allowed = topology(root), set(cores())
    if job.bind != AUTO:
        return _plan(job, job.bind, found, allowed, cards(root))
    why = unasked(job, found, allowed, os.environ)
    if not why:
        cards_here = cards(root)
        kinds = ["device"] * (0 < job.ranks <= devices()) + ["core"]
        for kind in kinds:
            try:
                return _plan(job, kind, found, allowed, cards_here)
            except ValueError as mistake:
                why = str(mistake).partition(": ")[2].partition(" HINT")[0]
    return [_noted(place, f"not bound: {why}") for place in _plan(job, "none", found, allowed, [])]


def unasked(job: Job, host: Topology, allowed: set[int], environment: Mapping[str, str]) -> str:
    """Why ranks are not bound where nobody says how, or "": these cores must be ours alone."""
    for name in OWN:
        if name in environment:
            return f"{name} is set"
    online = {cpu.number for cpu in host.cpus}
    if allowed < online:
        return ""  # by a scheduler, a container or taskset: for us
    if job.granted is None:
        return "no scheduler says that these cores are this job's alone"
    if job.granted < len(host.cores(online)):
        return f"the scheduler has granted {job.granted} cores and does not say which"
    return ""


def variables_of_all(job: Job, places: list[Place]) -> list[dict[str, str]]:
    """Each rank's own. This process gets the threads as well, for when it imports torch."""
    found = [variables(job, place, os.environ) for place in places]
    for own in found[:1]:
        os.environ.update({k: v for k, v in own.items() if k == "OMP_NUM_THREADS"})
    return found


def variables(job: Job, place: Place, given: Mapping[str, str]) -> dict[str, str]:
    """What a rank at this place gets, unless the user has set it. Cards only where devices were
    asked for: NCCL finds the nearest by itself."""
    found = {"OMP_NUM_THREADS": str(place.threads)}
    every = {path.name for path in Path("/sys/class/infiniband").glob("*")}
    infiniband = [name for name in place.cards if name in every]
    if job.bind == "device" and 0 < len(infiniband) < len(every):
        found["NCCL_IB_HCA"] = "=" + ",".join(infiniband)
        found["UCX_NET_DEVICES"] = ",".join(f"{name}:1" for name in infiniband)
    kept = {name: value for name, value in found.items() if name not in given}
    if job.threads is not None:
        kept["OMP_NUM_THREADS"] = str(job.threads)
    return kept


def _plan(job: Job, kind: str, host: Topology, allowed: set[int], near: list[Card]) -> list[Place]:
    found = plan(
        host,
        allowed,
        job.ranks,
        bind=kind,
        cpus_per_rank=job.cpus_per_rank,
        threads=job.threads,
        smt=job.smt,
        cards=near,
        visible=visible(os.environ),
    )
    if kind != "none":
        return found
    return [Place((), device=place.device, threads=place.threads) for place in found]


def visible(environment: Mapping[str, str]) -> list[int] | None:
    """The numbers of the GPUs that are devices 0, 1, ...; -1 for one that has a name instead."""
    if not devices():
        return []
    said = environment.get("CUDA_VISIBLE_DEVICES")
    if said is None:
        return None
    names = [name.strip() for name in said.split(",") if name.strip() not in ("", "-1")]
    return [int(name) if name.isdecimal() else -1 for name in names]


def _noted(place: Place, note: str) -> Place:
    return Place((), device=place.device, threads=place.threads, notes=(*place.notes, note))
