"""When ``--bind auto`` binds ranks: only to cores that are known to be the job's alone."""

import pytest

from paceline.cluster.topology.topology import Cpu, Topology
from paceline.launch.affinity.bind_ranks import why_unbound
from paceline.launch.job import Job


def host(cores, threads_per_core):
    """Return a host of one socket whose core c has the hardware threads c, c + cores, ..."""
    count = cores * threads_per_core
    return Topology(tuple(Cpu(n, n % cores, 0, 0) for n in range(count)), ())


@pytest.mark.parametrize(
    ("granted", "threads_per_core", "why"),
    [
        (64, 1, ""),
        (63, 1, "granted 63 CPUs of this node's 64 cores, without naming them"),
        (128, 2, ""),
        # Either all cores, or the hardware threads of half of them.
        (64, 2, "granted 64 CPUs of this node's 64 cores and 128 hardware threads, without"),
        (96, 2, "granted 96 CPUs of this node's 64 cores and 128 hardware threads, without"),
        (None, 2, "no scheduler reserves these cores for this job"),
    ],
)
def test_granted_cpus_may_be_hardware_threads(granted, threads_per_core, why):
    machine = host(64, threads_per_core)
    every = {cpu.number for cpu in machine.cpus}
    found = why_unbound(Job("train.py", granted=granted), machine, every, {})
    assert (why in found) if why else found == ""


@pytest.mark.parametrize(("cpus", "cores"), [(128, 64), (96, 48), (65, 32), (64, 64), (8, 8)])
def test_cores_of_cpus_that_are_hardware_threads(cpus, cores):
    assert host(64, 2).cores_of_cpus(cpus) == cores
    assert host(64, 1).cores_of_cpus(min(cpus, 64)) == min(cpus, 64)
