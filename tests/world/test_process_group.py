"""``paceline.init()`` under other launchers (srun, mpirun, mpiexec, torchrun) on two hosts.

Some tests add networks that reach no host.
"""

import re
import sys
import time
from types import SimpleNamespace

import pytest
import ranks

import bed
from paceline.world import process_group

SHOW = """
    import os, torch, torch.distributed as dist, paceline
    world = paceline.init(progress=False)
    x = torch.tensor([float(world.rank + 1)])
    dist.all_reduce(x)
    words = [world.rank, world.size, os.environ["LOCAL_RANK"], os.uname().nodename,
             os.environ.get("GLOO_SOCKET_IFNAME"), int(x)]
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # whole, whoever writes meanwhile
    """
EVEN = ["0 2 0 host1 eth0 3", "1 2 0 host2 eth0 3"]


@pytest.fixture
def started(hosts, slurm, mpi, shared_folder):
    """Return a function that runs the script under a launcher; it returns result and seconds."""
    script = ranks.write(shared_folder, SHOW)
    of_torch = {"TORCHINDUCTOR_CACHE_DIR": str(shared_folder / "torch")}  # default: /tmp

    def run(*launcher, python=(sys.executable,), check=True, **variables):
        begun = time.monotonic()
        result = hosts.run(
            "host0",
            *launcher,
            *python,
            script,
            cwd=shared_folder,
            env={**slurm.variables, **mpi, **of_torch, **variables},
            timeout=40,
            check=check,
        )
        seconds = time.monotonic() - begun
        ranks.wait_until(lambda: not any(x.startswith("job ") for x in slurm.left_over(0)), 5)
        # Open MPI's daemon does not remove its folder if Slurm ends it first.
        assert [one for one in slurm.left_over() if "/tmp/ompi." not in one] == []
        return result, seconds

    return run


def joined(result):
    return sorted(line for line in result.stdout.splitlines() if line)


def test_init_under_srun_with_uneven_ranks_per_node(started):
    result, _ = started("srun", "-N2", "-n3")
    assert joined(result) == ["0 3 0 host1 eth0 6", "1 3 1 host1 eth0 6", "2 3 0 host2 eth0 6"]
    assert "3 ranks (Slurm), network eth0 10.77.0.1\n" in result.stderr


@pytest.mark.long
def test_init_under_srun_with_explicit_master_addr(started):
    result, _ = started("srun", "-N2", "-n2", MASTER_ADDR="host1", MASTER_PORT="29511")
    assert joined(result) == EVEN


@pytest.mark.long
@pytest.mark.parametrize(
    "launcher", [bed.mpirun, pytest.param(bed.mpiexec, marks=pytest.mark.long)]
)
def test_init_under_mpi_on_two_hosts_over_ssh(started, launcher):
    result, _ = started(*launcher("host1,host2:2"))
    assert joined(result) == ["0 3 0 host1 eth0 6", "1 3 0 host2 eth0 6", "2 3 1 host2 eth0 6"]


@pytest.mark.long
def test_init_under_mpirun_in_slurm_allocation(started):
    result, _ = started("salloc", "-N2", "-n2", bed.MPIRUN, "--bind-to", "none")
    assert joined(result) == EVEN
    assert "2 ranks (Open MPI), network eth0" in result.stderr


def test_world_size_that_contradicts_launcher_is_rejected_immediately(started):
    result, seconds = started("srun", "-N2", "-n2", check=False, WORLD_SIZE="3")
    assert result.returncode == 1
    mistake = "has WORLD_SIZE=3 beside SLURM_STEP_NUM_TASKS=2, which describe the same start. HINT"
    assert result.stderr.count(mistake) == 2
    assert seconds < 15


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["srun", "mpiexec"])
def test_unreachable_second_network_is_ignored(started, hosts, launcher):
    hosts.second_network("host1", "host2")
    words = ["srun", "-N2", "-n2"] if launcher == "srun" else bed.mpiexec("host1,host2")
    result, _ = started(*words)
    assert joined(result) == EVEN


@pytest.mark.long  # waits for what does not answer
def test_host_names_on_unreachable_network_are_reported_on_all_ranks(started, hosts):
    """Without Paceline, gloo waits for half an hour."""
    hosts.second_network("host1", "host2", listed_in=["host1", "host2"])
    # --kill-on-bad-exit=0: each rank has to detect the error itself.
    result, seconds = started("srun", "-N2", "-n2", "--kill-on-bad-exit=0", check=False)
    assert result.returncode
    assert "rank 1 on host2 did not find rank 0 in" in result.stderr
    assert "    host1 = 10.78.0.1: no answer in 2 s" in result.stderr
    assert (
        "rank 1 did not connect to rank 0 on host1, which can't reach the other hosts"
        in result.stderr
    )
    assert "    host2 = 10.78.0.2: no answer in 2 s" in result.stderr
    assert result.stderr.count("set MASTER_ADDR=ADDRESS and MASTER_PORT=PORT") == 2
    assert seconds < 25


@pytest.mark.long  # waits for what does not answer
def test_explicit_master_addr_works_when_host_names_are_unreachable(started, hosts):
    """gloo and all other connections then use the network that works."""
    hosts.second_network("host1", "host2", listed_in=["host1", "host2"])
    result, _ = started("srun", "-N2", "-n2", MASTER_ADDR="10.77.0.1", MASTER_PORT="29511")
    assert joined(result) == EVEN


@pytest.mark.long
def test_unreachable_hosts_are_reported_on_all_ranks(started, hosts):
    """The ranks meet at rank 0's address, but the user selects the interface without a network."""
    hosts.second_network("host1", "host2")
    result, seconds = started(
        *("srun", "-N2", "-n2", "--kill-on-bad-exit=0"),
        check=False,
        GLOO_SOCKET_IFNAME="eth1",
    )
    assert result.returncode
    unreached = re.findall(r"host(\d) can't be reached by the other hosts. Tried:", result.stderr)
    assert len(unreached) == 2  # one line from each rank
    assert f" eth1 10.78.0.{unreached[0]}: no answer in 3 s" in result.stderr
    assert seconds < 25


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("PMI_FD=5: no answer. HINT: wait", "wait"),
        ("no port", "start with `paceline run` or torchrun"),
    ],
)
def test_error_before_the_process_group_has_one_hint(monkeypatch, error, hint):
    def fail(*_):
        raise ValueError(error)

    monkeypatch.setattr(process_group, "_store", fail)
    monkeypatch.setattr(process_group, "set_torchrun_variables", lambda _: None)
    monkeypatch.setattr(process_group.backend, "record", lambda _: None)
    identity = SimpleNamespace(alone=False)
    with pytest.raises(ValueError, match=rf"^paceline.init: {error.partition('.')[0]}") as raised:
        process_group.join_process_group(identity, None, 1.0)
    assert str(raised.value).split(" HINT: ")[1:] == [hint]
