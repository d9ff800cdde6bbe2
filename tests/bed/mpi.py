"""The two MPI launchers of the bed: they reach the other hosts by ssh from where they start.

Both are Debian's, side by side, so they go by their long names.
"""

MPIRUN = "mpirun.openmpi"
MPIEXEC = "mpiexec.hydra"

# Open MPI refuses to start as root without these; MPICH's hydra needs nothing.
MPI_VARIABLES = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpirun(slots: str, *command: object) -> list[str]:
    """Open MPI: ``slots`` as "host1:2,host2:2", one rank a slot."""
    # Bound to cores, two hosts' ranks would share the machine's first core.
    return [MPIRUN, "--bind-to", "none", "-H", slots, *map(str, command)]


def mpiexec(slots: str, *command: object) -> list[str]:
    """MPICH: ``slots`` as "host1:2,host2:2", one rank a slot."""
    ranks = sum(int(host.partition(":")[2] or 1) for host in slots.split(","))
    return [MPIEXEC, "-hosts", slots, "-n", str(ranks), *map(str, command)]
