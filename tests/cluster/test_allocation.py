"""Allocations of every scheduler.

The environment variables of Slurm are from a real system (22.05); those of LSF, PBS, Flux and
Cobalt are from the documentation.
"""

import json
from pathlib import Path

import pytest

from paceline.cluster.schedulers.detect import find_allocation, flux_allocation
from paceline.cluster.schedulers.hostfile import Host

ENVS = Path(__file__).parent / "envs"


def recorded(name):
    return json.loads(next(ENVS.rglob(f"{name}.json")).read_text())["env"]


def lines(path, text):
    path.write_text(text.replace(" ", "\n") + "\n")
    return str(path)


SALLOC = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}


def slots(**more):
    return [host.slots for host in find_allocation(SALLOC | more).hosts]


def test_no_allocation_without_scheduler():
    assert find_allocation({}) is None
    assert find_allocation(recorded("mpirun-ssh.0")) is None
    assert (
        find_allocation(
            {"SLURM_JOB_ID": "5", "PBS_JOBID": "3", "LSB_JOBID": "1", "COBALT_JOBID": "1"}
        )
        is None
    )


def test_slurm_batch_job_hosts_tasks_gpus_and_cpus():
    found = find_allocation(recorded("slurm-sbatch.0"))
    assert (found.scheduler, found.job, found.tool) == ("Slurm", "2", "srun")
    assert found.hosts == (Host("host1", 2, 2, 2), Host("host2", 2, 2, 2))
    assert found.ends_at is None
    assert find_allocation(SALLOC | {"SLURM_JOB_END_TIME": "1700000000"}).ends_at == 1.7e9


@pytest.mark.parametrize("name", ["slurm-srun.1", "mpirun-in-salloc.0", "slurm-pmix.2"])
def test_slurm_step_reports_allocation_of_job(name):
    assert [host.name for host in find_allocation(recorded(name)).hosts] == ["host1", "host2"]


def test_left_out_components_of_heterogeneous_slurm_job_are_named():
    components = {
        "SLURM_HET_SIZE": "3",
        "SLURM_JOB_NODELIST_HET_GROUP_0": "n[1-2]",
        "SLURM_JOB_NODELIST_HET_GROUP_1": "big1",
        "SLURM_JOB_NODELIST_HET_GROUP_2": "gpu[3-4]",
    }
    found = find_allocation(SALLOC | components)
    assert [host.name for host in found.hosts] == ["n1", "n2"]
    assert "of its 3 components, only the nodes of one (n1,n2) are used" in found.note
    assert "big1,gpu3,gpu4 left out. HINT: -H n1,n2,big1,gpu3,gpu4" in found.note
    assert find_allocation(SALLOC).note == ""
    step = SALLOC | components | {"SLURM_JOB_NODELIST": "n[1-2],big1,gpu[3-4]"}
    del step["SLURM_JOB_NUM_NODES"]
    assert find_allocation(step).note == ""  # srun --het-group=0-2
    assert "the others left out" in find_allocation(SALLOC | {"SLURM_HET_SIZE": "2"}).note


def test_slurm_tasks_are_slots_only_if_requested():
    assert slots(SLURM_TASKS_PER_NODE="4(x2)") == [None, None]  # salloc -N2 --exclusive: CPUs
    assert slots(SLURM_TASKS_PER_NODE="2,1", SLURM_NTASKS="3") == [2, 1]
    step = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"}
    assert slots(**step, SLURM_NTASKS_PER_NODE="2") == [2, 2]  # srun -N1 -n1 within the job
    assert slots(**step) == [None, None]


@pytest.mark.parametrize(
    ("variables", "devices"),
    [
        ({}, None),
        ({"SLURM_GPUS_ON_NODE": "0"}, 0),
        ({"SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_GPUS": "0,1"}, 4),
        ({"SLURM_JOB_GPUS": "0-2,5"}, 4),
        ({"SLURM_GPUS_PER_NODE": "2"}, 2),
        ({"SLURM_GPUS_PER_NODE": "a100:2,v100:1"}, 3),
    ],
)
def test_slurm_gpu_variables(variables, devices):
    assert [host.devices for host in find_allocation(SALLOC | variables).hosts] == [
        devices,
        devices,
    ]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        (
            {"SLURM_NTASKS": "5", "SLURM_NTASKS_PER_NODE": "2"},
            "SLURM_NTASKS=5 SLURM_NTASKS_PER_NODE=2",
        ),
        ({"SLURM_JOB_NUM_NODES": "3"}, "SLURM_JOB_NUM_NODES=3 SLURM_JOB_NODELIST=n[1-2]"),
        ({"SLURM_NTASKS": "many"}, "SLURM_NTASKS='many'"),
        ({"SLURM_GPUS_PER_NODE": "a100:x"}, "SLURM_GPUS_PER_NODE='a100:x'"),
        ({"SLURM_JOB_CPUS_PER_NODE": "2("}, "SLURM_JOB_CPUS_PER_NODE"),
        ({"SLURM_JOB_NODELIST": "n[1-2"}, "'n[1-2'"),
    ],
)
def test_inconsistent_slurm_variables_are_reported(variables, words):
    with pytest.raises(ValueError, match=r"HINT|counts") as said:
        find_allocation(SALLOC | variables)
    assert all(word in str(said.value) for word in words.split())


def test_fewer_slurm_tasks_than_slots_are_accepted():
    more = {"SLURM_NTASKS": "3", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}
    assert slots(**more) == [2, 2]  # as sbatch -N2 -n3 --ntasks-per-node=2 sets them


def test_lsf_hosts_from_each_variable(tmp_path):
    job = {"LSB_JOBID": "10", "LSB_JOBINDEX": "0", "LSB_HOSTS": "g1 g1 g5 g3"}
    found = find_allocation(job)
    assert (found.scheduler, found.job, found.tool) == ("LSF", "10", "blaunch")
    assert found.hosts == (Host("g1", 2), Host("g5", 1), Host("g3", 1))
    job |= {"LSB_MCPU_HOSTS": "g3 1 g1 2", "LSB_JOBINDEX": "4"}
    assert find_allocation(job).hosts == (Host("g3", 1), Host("g1", 2))
    assert find_allocation(job).job == "10[4]"
    job["LSB_DJOB_HOSTFILE"] = lines(tmp_path / "hosts", "g7 g7 g8")
    assert find_allocation(job).hosts == (Host("g7", 2), Host("g8", 1))
    job["LSB_DJOB_HOSTFILE"] = str(tmp_path / "gone")  # not on this host
    assert find_allocation(job).hosts == (Host("g3", 1), Host("g1", 2))
    with pytest.raises(ValueError, match=r"LSB_MCPU_HOSTS='g1 2 g2'.*HINT"):
        find_allocation(job | {"LSB_MCPU_HOSTS": "g1 2 g2"})


def test_coral_launch_node_is_not_a_compute_node(tmp_path):
    hosts = lines(tmp_path / "hosts", "batch1" + " a01" * 42 + " a02" * 42)
    job = {"LSB_JOBID": "10", "LSB_DJOB_HOSTFILE": hosts}
    for more in ({"CSM_ALLOCATION_ID": "99"}, {"JSM_ROOT": "/opt/jsm"}):
        found = find_allocation(job | more)
        assert found.tool == "jsrun"
        assert found.hosts == (Host("a01", cpus=42), Host("a02", cpus=42))
    assert find_allocation(job).tool == "blaunch"
    assert len(find_allocation(job).hosts) == 3


def test_pbs_pro_slots_only_if_processes_are_requested(tmp_path):
    job = {"PBS_JOBID": "3089.server", "NCPUS": "64", "PATH": str(tmp_path)}
    job["PBS_NODEFILE"] = lines(tmp_path / "nodes", "x1 x2")
    found = find_allocation(job)
    assert (found.scheduler, found.job, found.tool) == ("PBS", "3089.server", "ssh")
    assert found.hosts == (Host("x1", cpus=64), Host("x2", cpus=64))
    assert [host.slots for host in find_allocation(job | {"PBS_NP": "2"}).hosts] == [1, 1]
    lines(tmp_path / "nodes", "x1 x1 x2 x2")
    assert [host.slots for host in find_allocation(job).hosts] == [2, 2]


def test_torque_gpus_from_gpufile(tmp_path):
    job = {"PBS_JOBID": "3.server", "PBS_NP": "4", "PBS_NUM_PPN": "2"}
    job["PBS_NODEFILE"] = lines(tmp_path / "nodes", "x-gpu1 x-gpu1 x2 x2")
    job["PBS_GPUFILE"] = lines(tmp_path / "gpus", "x-gpu1-gpu0 x-gpu1-gpu1 x2-gpu0")
    assert find_allocation(job).hosts == (Host("x-gpu1", 2, 2, 2), Host("x2", 2, 1, 2))


def test_palsrun_is_used_if_available(tmp_path):
    job = {"PBS_JOBID": "3.server", "PBS_NODEFILE": lines(tmp_path / "nodes", "x1 x2")}
    assert find_allocation(job | {"CRAY_PALS_VERSION": "1.2"}).tool == "palsrun"
    tool = tmp_path / "palsrun"
    tool.touch()
    assert (
        find_allocation(job | {"PATH": f"/nowhere:{tmp_path}"}).tool == "ssh"
    )  # palsrun does not exist
    tool.chmod(0o755)
    assert find_allocation(job | {"PATH": f"/nowhere:{tmp_path}"}).tool == "palsrun"


def test_missing_or_empty_pbs_nodefile_is_reported(tmp_path):
    job = {"PBS_JOBID": "3.server", "PBS_NODEFILE": str(tmp_path / "gone")}
    with pytest.raises(ValueError, match=r"PBS_NODEFILE=.*gone.*HINT: if the allocation has ended"):
        find_allocation(job)
    lines(tmp_path / "empty", "")
    with pytest.raises(ValueError, match=r"PBS_NODEFILE=.*names no host"):
        find_allocation(job | {"PBS_NODEFILE": str(tmp_path / "empty")})


def test_flux_hosts_from_hostlist_command():
    script = {"FLUX_URI": "local:///run/flux/local", "FLUX_ENCLOSING_ID": "f12"}
    found = find_allocation(script)
    assert (found.scheduler, found.job, found.tool, found.hosts) == ("Flux", "f12", "flux", ())
    hosts = flux_allocation(script, "tuolumne[1001-1002],tuolumne1001").hosts
    assert hosts == (Host("tuolumne1001"), Host("tuolumne1002"))
    assert flux_allocation({}, "a") is None


def test_cobalt_hosts_from_nodefile_or_node_numbers(tmp_path):
    job = {"COBALT_JOBID": "5", "COBALT_PARTNAME": "3-5,8", "COBALT_JOBSIZE": "4"}
    found = find_allocation(job)
    assert (found.scheduler, found.tool) == ("Cobalt", "ssh")
    assert [host.name for host in found.hosts] == ["nid00003", "nid00004", "nid00005", "nid00008"]
    with pytest.raises(ValueError, match="COBALT_JOBSIZE=2 beside COBALT_PARTNAME=3-5,8"):
        find_allocation(job | {"COBALT_JOBSIZE": "2"})
    job |= {"COBALT_NODEFILE": lines(tmp_path / "nodes", "cc1 cc2"), "COBALT_JOBSIZE": "2"}
    assert find_allocation(job).hosts == (Host("cc1"), Host("cc2"))
