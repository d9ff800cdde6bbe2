"""The environment variables of each launcher, and which of them describe the same start.

Launchers are nested: mpirun inside salloc, or mpiexec in a shell that srun started. SOURCES is
ordered from the innermost launcher, so the first one with a rank is used, unless its environment
variables were inherited from an enclosing step.
"""

from dataclasses import dataclass

from .schedulers import slurm
from .schedulers.env_numbers import Environment


@dataclass(frozen=True)
class Source:
    """The names of a launcher's environment variables.

    Attributes:
        key: Environment variables that identify one start and are equal on all its ranks.
    """

    name: str
    rank: str
    size: str | None = None  # PMIx and PALS have none
    local_rank: tuple[str, ...] = ()
    local_size: tuple[str, ...] = ()
    key: tuple[str, ...] = ()


HOROVODRUN_PORT = "HOROVOD_GLOO_RENDEZVOUS_PORT"  # only horovodrun sets it
SOURCES = (
    Source(
        "horovodrun",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        ("HOROVOD_LOCAL_RANK",),
        ("HOROVOD_LOCAL_SIZE",),
        ("HOROVOD_GLOO_RENDEZVOUS_ADDR", HOROVODRUN_PORT),
    ),
    Source(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
        ("PMIX_NAMESPACE", "OMPI_MCA_orte_hnp_uri"),
    ),
    Source("PMIx", "PMIX_RANK", key=("PMIX_NAMESPACE",)),
    Source(  # MPICH's hydra, Intel MPI; Cray; Slurm's pmi2; Flux
        "PMI",
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PMI_LOCAL_RANK"),
        ("MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"),
        ("PMI_JOBID",),
    ),
    Source(
        "MVAPICH",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        ("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    Source(
        "PALS", "PALS_RANKID", None, ("PALS_LOCAL_RANKID",), ("PALS_LOCAL_SIZE",), ("PALS_APID",)
    ),
    Source(
        "jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        ("JSM_NAMESPACE_LOCAL_RANK",),
        ("JSM_NAMESPACE_LOCAL_SIZE",),
        ("LSB_JOBID", "LSB_JOBINDEX", "PMIX_NAMESPACE"),
    ),
    Source(
        "Flux", "FLUX_TASK_RANK", "FLUX_JOB_SIZE", ("FLUX_TASK_LOCAL_ID",), (), ("FLUX_JOB_ID",)
    ),
    Source("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", ("SLURM_LOCALID",)),
)

# Pairs of launchers that describe one start if both are present. The environment variables that
# Slurm's plugins set are recognized by the name of the step.
EQUIVALENT_SOURCES = {
    ("Open MPI", "jsrun"),
    ("PMIx", "PMI"),
    ("PMIx", "PALS"),
    ("PMIx", "jsrun"),
    ("PMIx", "Flux"),
    ("PMI", "MVAPICH"),
    ("PMI", "PALS"),
    ("PMI", "Flux"),
}
SLURM_PMIX = "slurm.pmix."


def launch_sources(environment: Environment) -> list[Source]:
    """Return the launcher to use, followed by the others that describe the same start."""
    present = [source for source in SOURCES if _is_present(environment, source)]
    if not present:
        return []
    return [
        present[0],
        *(
            other
            for other in present[1:]
            if _are_equivalent(environment, present[0].name, other.name)
        ),
    ]


def _is_present(environment: Environment, source: Source) -> bool:
    if source.rank not in environment:
        return False
    if source.name == "horovodrun":  # paceline run sets its ranks' numbers as well
        return HOROVODRUN_PORT in environment
    if source.name == "Slurm":
        return slurm.step(environment) is not None
    if _is_from_slurm(environment, source.name):
        # Otherwise a shell of the enclosing step, or hydra, has started this process, and the
        # environment variables are inherited from that step.
        return _is_of_this_step(environment, source.name) and not is_from_hydra(environment)
    return True


def _are_equivalent(environment: Environment, first: str, other: str) -> bool:
    if other == "Slurm":
        return _is_of_this_step(environment, first)
    if first == "PMIx" and _is_from_slurm(environment, first):
        return False
    return (first, other) in EQUIVALENT_SOURCES


def _is_from_slurm(environment: Environment, name: str) -> bool:
    """Return whether Slurm's own plugins set these environment variables, for any step."""
    if name == "PMIx":
        return environment.get("PMIX_NAMESPACE", "").startswith(SLURM_PMIX)
    job = environment.get("SLURM_JOB_ID")
    return (
        name == "PALS"
        and job is not None
        and environment.get("PALS_APID", "").startswith(f"{job}.")
    )


def _is_of_this_step(environment: Environment, name: str) -> bool:
    """Return whether Slurm's plugins set these environment variables for this process's step.

    The plugins pmix and pmi2 name the step. The plugin for Cray names it as PALS names a start.
    """
    step = slurm.step(environment)
    if step is None:
        return False
    if name == "PMIx":
        return environment.get("PMIX_NAMESPACE") == SLURM_PMIX + step
    if name == "PMI" and is_from_hydra(environment):
        return False
    names = {"PMI": ("PMI_JOBID", "PALS_APID"), "PALS": ("PALS_APID",)}.get(name, ())
    return any(environment.get(variable) == step for variable in names)


def is_from_hydra(environment: Environment) -> bool:
    """Return whether MPICH's or Intel MPI's mpiexec (hydra) started this process."""
    return "PMI_RANK" in environment and "MPI_LOCALRANKID" in environment
