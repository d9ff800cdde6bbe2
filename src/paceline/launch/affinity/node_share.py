"""The part of each node that a job gets where several jobs run side by side: cores and GPUs."""

import os

from ...cluster.topology.local_resources import allowed_threads
from ...cluster.topology.topology import topology
from ...cluster.topology.visible_gpus import gpu_count
from ...plurals import counted
from ..job import Job

DEVICES = "CUDA_VISIBLE_DEVICES"


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
        visible = os.environ.get(DEVICES)
        names = visible.split(",") if visible else [*map(str, range(gpu_count()))]
        os.environ[DEVICES] = ",".join(names[first_gpu : first_gpu + gpus])
