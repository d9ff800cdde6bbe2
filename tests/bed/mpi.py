"""The two MPI launchers of the test cluster. They reach other hosts by ssh from the calling host.

Debian's packages of both are installed together, so their unambiguous names are used.
"""

MPIRUN = "mpirun.openmpi"
MPIEXEC = "mpiexec.hydra"

# Open MPI refuses to run as root without these variables; MPICH's hydra needs none.
MPI_VARIABLES = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


def mpirun(slots: str, *command: object) -> list[str]:
    """Return an Open MPI command with one rank per slot. slots: such as "host1:2,host2:2"."""
    # With binding, the ranks of two hosts would be bound to the same core of the machine.
    return [MPIRUN, "--bind-to", "none", "-H", slots, *map(str, command)]


def mpiexec(slots: str, *command: object) -> list[str]:
    """Return an MPICH command with one rank per slot. slots: such as "host1:2,host2:2"."""
    ranks = sum(int(host.partition(":")[2] or 1) for host in slots.split(","))
    return [MPIEXEC, "-hosts", slots, "-n", str(ranks), *map(str, command)]
