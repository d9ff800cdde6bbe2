"""Rank identity from the environment variables of launchers.

Recorded environments are in envs/: real starts on hosts named host1 and host2, with mpirun and srun
called on host0. The other environments are from documentation.
"""

import json
from pathlib import Path

import pytest

from paceline.cluster.rank_identity import (
    RankIdentity,
    job_key,
    launched_by,
    rank_0_hosts,
    rank_identity,
)

ENVS = Path(__file__).parent / "envs"
ALONE = RankIdentity(0, 1, 0, 1, "alone", alone=True)
HOSTS = ["host1", "host2"]
MPIRUN = ["host1", "host2", "host0", "10.77.0.100"]  # mpirun's own host has no rank, so it is last


def recorded(name):
    """Return (host, environment) of each process."""
    files = [json.loads(path.read_text()) for path in sorted(ENVS.rglob(f"{name}.*.json"))]
    return [(file["host"], file["env"]) for file in files]


@pytest.mark.parametrize(
    ("name", "source", "hosts", "key"),
    [
        ("mpirun-ssh", "Open MPI", MPIRUN, "1224671233 1224671232.0;tcp://10.77.0.100:34481"),
        ("mpirun-in-salloc", "Open MPI", MPIRUN, "1222246401 1222246400.0;tcp://10.77.0.100:46033"),
        ("mpich-hydra-ssh", "PMI", [], ""),
        ("slurm-srun", "Slurm", HOSTS, "1.0"),
        ("slurm-pmi2", "PMI", HOSTS, "3.0"),
        ("slurm-pmix", "PMIx", HOSTS, "slurm.pmix.4.0 4.0"),
        ("ssh-launcher", "torchrun", ["host1"], "host1 29500"),
    ],
)
def test_rank_identity_under_each_launcher(name, source, hosts, key):
    processes = recorded(name)
    places = sorted((rank_identity(env) for _, env in processes), key=lambda found: found.rank)
    assert places == [RankIdentity(rank, 4, rank % 2, 2, source) for rank in range(4)]
    for host, env in processes:
        found = rank_identity(env)
        assert HOSTS.index(host) == found.rank // 2
        assert rank_0_hosts(env, found) == hosts
        assert job_key(env, found) == key
        assert launched_by(env) == (None if source == "torchrun" else found)


def test_horovodrun_in_a_job_step():
    """Its ranks inherit the variables of the step in which horovodrun runs."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    numbers = {f"HOROVOD_{name}": str(n) for name, n in zip(names, (3, 4, 1, 2), strict=True)}
    rendezvous = {
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1",
        "HOROVOD_GLOO_RENDEZVOUS_PORT": "7001",
    }
    step = recorded("slurm-srun")[0][1]
    found = rank_identity(step | numbers | rendezvous)
    assert found == RankIdentity(3, 4, 1, 2, "horovodrun")
    assert job_key(step | numbers | rendezvous, found) == "10.0.0.1 7001"
    assert rank_identity(numbers) == ALONE  # of paceline run, which sets RANK as well


def test_torchrun_overrides_slurm_step():
    for rank, (_, env) in enumerate(recorded("torchrun-in-srun")):
        found = rank_identity(env)
        assert found == RankIdentity(rank, 2, rank, 2, "torchrun")
        assert rank_0_hosts(env, found) == ["host1"]
        assert job_key(env, found) == "5bf97280-445e-4694-a4e5-273a0ff3efb6 host1 35037"
        assert launched_by(env) is None  # the step has one task


def test_batch_script_is_not_a_rank():
    [(_, env)] = recorded("slurm-sbatch")
    assert (env["SLURM_PROCID"], env["SLURM_NTASKS"]) == ("0", "4")
    for more in ({}, {"SLURM_STEP_ID": "4294967290"}, {"SLURM_STEP_ID": "batch"}):
        assert rank_identity(env | more) == ALONE
        assert launched_by(env | more) is None
    assert rank_0_hosts(env, ALONE) == []
    assert job_key(env, ALONE) == ""
    assert rank_identity({}) == ALONE


def step(rank=0, size=4, **more):
    env = {"SLURM_JOB_ID": "9", "SLURM_STEP_ID": "2", "SLURM_PROCID": str(rank)}
    env |= {"SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_NODELIST": "n[1-2]"}
    env |= {"SLURM_LOCALID": "0", "SLURM_NODEID": str(rank // 3)}
    return env | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NTASKS": str(size), **more}


def test_local_size_with_uneven_ranks_per_host():
    assert rank_identity(step(0)).local_size == 3
    assert rank_identity(step(3)) == RankIdentity(3, 4, 0, 1, "Slurm")


def test_slurm_step_with_one_task_is_alone():
    env = step(0, 1, SLURM_STEP_TASKS_PER_NODE="1")
    assert rank_identity(env) == RankIdentity(0, 1, 0, 1, "Slurm", alone=True)
    assert launched_by(env) is None


JSRUN = {"JSM_NAMESPACE_RANK": "5", "JSM_NAMESPACE_SIZE": "12", "JSM_NAMESPACE_LOCAL_RANK": "5"}
JSRUN |= {"JSM_NAMESPACE_LOCAL_SIZE": "6", "LSB_JOBID": "77", "LSB_JOBINDEX": "0"}
JSRUN |= {"CSM_ALLOCATION_ID": "1", "LSB_MCPU_HOSTS": "batch1 1 a01 42 a02 42"}
SPECTRUM = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "12", "PMIX_RANK": "5"}
SPECTRUM |= {"OMPI_COMM_WORLD_LOCAL_RANK": "5", "OMPI_COMM_WORLD_LOCAL_SIZE": "6"}


@pytest.mark.parametrize(
    ("env", "source", "key"),
    [
        (JSRUN, "jsrun", "77 0"),
        (JSRUN | {"PMIX_RANK": "5", "PMIX_NAMESPACE": "3"}, "PMIx", "3 77 0"),
        (JSRUN | SPECTRUM | {"PMIX_NAMESPACE": "3"}, "Open MPI", "3 77 0"),
    ],
)
def test_jsrun_with_and_without_pmix_and_spectrum_mpi(env, source, key):
    assert rank_identity(env) == RankIdentity(5, 12, 5, 6, source)
    assert rank_0_hosts(env, rank_identity(env)) == ["a01", "a02"]
    assert job_key(env, rank_identity(env)) == key


@pytest.fixture
def pals(tmp_path):
    (tmp_path / "nodes").write_text("x1\nx1\nx2\nx2\n")
    env = {"PALS_RANKID": "5", "PALS_LOCAL_RANKID": "1", "PALS_LOCAL_SIZE": "4"}
    return env | {"PALS_APID": "ab-12", "PBS_NODEFILE": str(tmp_path / "nodes")}


def test_pals_world_size_is_derived(pals):
    for env, source in ((pals, "PALS"), (pals | {"PMIX_RANK": "5", "PMIX_NAMESPACE": "a"}, "PMIx")):
        assert rank_identity(env) == RankIdentity(5, 8, 1, 4, source)
        assert rank_0_hosts(env, rank_identity(env)) == ["x1", "x2"]
        assert "ab-12" in job_key(env, rank_identity(env))
        assert (
            rank_identity(env | {"WORLD_SIZE": "7"}).size == 7
        )  # the user sets an uneven number of ranks
    cray = {"PMI_RANK": "5", "PMI_SIZE": "7", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "4"}
    assert rank_identity(pals | cray) == RankIdentity(5, 7, 1, 4, "PMI")
    with pytest.raises(ValueError, match="PALS_RANKID=8 is not below PALS_LOCAL_SIZE=4 on 2 nodes"):
        rank_identity(pals | {"PALS_RANKID": "8"})
    for gone in ("", "/gone"):  # the file need not exist on the job's other hosts
        with pytest.raises(ValueError, match=r"PALS_RANKID=5.*HINT: export WORLD_SIZE"):
            rank_identity(pals | {"PBS_NODEFILE": gone})


def test_pals_variables_under_slurm_on_cray():
    env = step(3, SLURMD_NODENAME="n2", PALS_RANKID="3", PALS_LOCAL_RANKID="0", PALS_APID="9.2")
    assert rank_identity(env) == RankIdentity(3, 4, 0, 1, "PALS")
    env |= {"PMI_RANK": "3", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "1"}
    env["PMI_JOBID"] = "9"
    assert rank_identity(env) == RankIdentity(3, 4, 0, 1, "PMI")
    assert rank_0_hosts(env, rank_identity(env)) == ["n1", "n2"]
    assert job_key(env, rank_identity(env)) == "9 9.2"


FLUX = {"FLUX_JOB_ID": "f1", "FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "2", "FLUX_TASK_LOCAL_ID": "0"}


@pytest.mark.parametrize(
    ("more", "source"),
    [({}, "Flux"), ({"PMI_RANK": "2", "PMI_SIZE": "4"}, "PMI"), ({"PMIX_RANK": "2"}, "PMIx")],
)
def test_rank_identity_under_flux(more, source):
    env = FLUX | more
    assert rank_identity(env) == RankIdentity(2, 4, 0, None, source)
    assert rank_0_hosts(env, rank_identity(env)) == []
    assert job_key(env, rank_identity(env)) == "f1"


def test_rank_identity_under_mvapich_and_cobalt():
    env = {"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}
    env |= {"MV2_COMM_WORLD_LOCAL_RANK": "0", "MV2_COMM_WORLD_LOCAL_SIZE": "1"}
    assert rank_identity(env) == RankIdentity(1, 2, 0, 1, "MVAPICH")
    assert (
        rank_identity({"COBALT_JOBID": "5", "COBALT_JOBSIZE": "4"}) == ALONE
    )  # Cobalt starts no ranks


def test_pmix_without_world_size_is_rejected():
    env = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-n1-77@1"}
    with pytest.raises(ValueError, match=r"PMIX_RANK=1.*HINT: export WORLD_SIZE"):
        rank_identity(env)
    assert rank_identity(env | {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}) == RankIdentity(
        1, 2, 0, None, "PMIx"
    )


@pytest.mark.parametrize(
    "left_over",
    [
        {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.9.2"},
        {"PMI_JOBID": "9.2"},
        {"PALS_RANKID": "0", "PALS_APID": "9.2", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "1"},
    ],
)
def test_mpiexec_inside_srun_shell_overrides_slurm_step(left_over):
    """MPICH and Intel MPI inside `srun --pty bash`, with Slurm's MPI plugin as the default."""
    hydra = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    env = step(0, 1) | left_over | hydra
    assert rank_identity(env) == RankIdentity(1, 2, 1, 2, "PMI")
    assert job_key(env, rank_identity(env)) == ""


def test_variables_of_different_step_are_ignored():
    old = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.9.0", "PALS_RANKID": "0"}
    assert rank_identity(step(3, **old, PALS_APID="9.0")) == RankIdentity(3, 4, 0, 1, "Slurm")
    assert rank_identity(FLUX | old | {"SLURM_JOB_ID": "9", "PALS_APID": "9.0"}).source == "Flux"


def test_hosts_of_rank_on_different_host_than_rank_0():
    env = step(1, SLURM_LOCALID="1", SLURMD_NODENAME="n2")  # srun --distribution=arbitrary
    assert rank_0_hosts(env, rank_identity(env)) == ["n2", "n1"]


@pytest.mark.parametrize(
    ("regex", "hosts"),
    [
        ("host[1:0-2]@0(3)", "host0 host1 host2"),
        ("n[3:1-2],m[3:5]@0(3)", "n001 n002 m005"),
        ("login,c[2:9-10,7]-ib@0(4)", "login c09-ib c10-ib c07-ib"),
        ("head,node@0(2)", "head node"),
        ("[4:12]@0", "0012"),
        ("a[1:1-4]@0(2),4294967295(2)", "a1 a2"),  # hosts of the allocation that are not used
        ("a[1:1-2", ""),
        ("", ""),
    ],
)
def test_hosts_from_open_mpi_node_regex(regex, hosts):
    env = SPECTRUM | {"OMPI_MCA_orte_node_regex": regex, "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert rank_0_hosts(env, rank_identity(env)) == hosts.split()
    env["OMPI_MCA_orte_hnp_uri"] = "1.0;tcp://10.0.0.1,192.168.0.1:99;tcp6://[fd00::2]:98"
    more = ["10.0.0.1", "192.168.0.1", "fd00::2"]
    assert rank_0_hosts(env, rank_identity(env)) == hosts.split() + more


def test_explicit_world_size_must_match_slurm_step():
    env = step(3, MASTER_ADDR="n1", MASTER_PORT="29500")
    assert rank_identity(env | {"WORLD_SIZE": "4"}) == RankIdentity(3, 4, 0, 1, "Slurm")
    with pytest.raises(ValueError, match=r"WORLD_SIZE=8 beside SLURM_STEP_NUM_TASKS=4.*HINT"):
        rank_identity(env | {"WORLD_SIZE": "8"})
    assert launched_by(env | {"WORLD_SIZE": "8"}).size == 4


def test_explicit_rank_must_match_launcher():
    env = step(3, RANK="3", WORLD_SIZE="4")
    assert rank_identity(env) == RankIdentity(
        3, 4, 0, 1, "torchrun"
    )  # the step sets the local rank
    assert rank_0_hosts(env, rank_identity(env)) == ["n1", "n2"]
    assert job_key(env, rank_identity(env)) == "9.2"
    assert rank_identity(env | {"LOCAL_RANK": "2"}).local_rank == 2
    assert rank_identity(env | {"RANK": "1", "WORLD_SIZE": "2"}) == RankIdentity(
        1, 2, 1, None, "torchrun"
    )
    del env["WORLD_SIZE"]
    assert rank_identity(env) == RankIdentity(3, 4, 0, 1, "Slurm")
    with pytest.raises(ValueError, match="RANK=2 beside SLURM_PROCID=3"):
        rank_identity(env | {"RANK": "2"})


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"RANK": "1"}, "paceline.init: WORLD_SIZE=nothing RANK=1 HINT"),
        ({"WORLD_SIZE": "4"}, "RANK=nothing WORLD_SIZE=4 HINT"),
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK=x"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": ""}, "LOCAL_RANK=nothing"),
        ({"RANK": "3", "WORLD_SIZE": "2"}, "RANK=3 is not below WORLD_SIZE=2"),
        (
            JSRUN | SPECTRUM | {"OMPI_COMM_WORLD_SIZE": "6"},
            "JSM_NAMESPACE_SIZE=12 OMPI_COMM_WORLD_SIZE=6",
        ),
        (
            JSRUN | SPECTRUM | {"OMPI_COMM_WORLD_RANK": "4"},
            "JSM_NAMESPACE_RANK=5 OMPI_COMM_WORLD_RANK=4",
        ),
        (FLUX | {"PMI_RANK": "2", "PMI_SIZE": "8"}, "FLUX_JOB_SIZE=4 PMI_SIZE=8"),
        (
            step(2, PMI_JOBID="9.2", PMI_RANK="2", PMI_SIZE="8"),
            "SLURM_STEP_NUM_TASKS=4 PMI_SIZE=8",
        ),
        (
            step(2, PMIX_NAMESPACE="slurm.pmix.9.2", PMIX_RANK="1"),
            "SLURM_PROCID=2 PMIX_RANK=1",
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2", "PALS_RANKID": "1", "PALS_LOCAL_SIZE": "4"},
            "PMI_SIZE=2 PALS_LOCAL_SIZE=4",
        ),
        ({"PMI_RANK": "4", "PMI_SIZE": "4"}, "PMI_RANK=4 is not below PMI_SIZE=4"),
        ({"PMI_RANK": "one", "PMI_SIZE": "4"}, "PMI_RANK='one' not a number"),
        ({"PMI_RANK": "1", "PMI_SIZE": ""}, "PMI_SIZE='' not a number"),
        (step(0, WORLD_SIZE="four"), "WORLD_SIZE='four' not a number"),
    ],
)
def test_inconsistent_rank_variables_are_reported(env, words):
    with pytest.raises(ValueError, match="HINT") as said:
        rank_identity(env)
    assert all(word in str(said.value) for word in words.split())
