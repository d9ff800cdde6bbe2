"""Another user of the node, or another host, tries to become a rank of a job.

The attacker (join_as_rank.py) attacks before rank 1 joins, which waits for that.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import ranks
import users
from users import ATTACKER

ATTACK = Path(__file__).with_name("join_as_rank.py")
VICTIM = 300_000 + os.getpid() % 100_000  # differs between test processes
TRAIN = """
    import os, sys, time
    from pathlib import Path

    import torch.distributed as dist
    import paceline

    tried = Path(sys.argv[1], "tried")
    if os.environ["RANK"] == "1":
        deadline = time.monotonic() + 60
        while not tried.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
    begin = time.monotonic()
    world = paceline.init()
    names = [None] * world.size
    dist.all_gather_object(names, f"rank {world.rank}")
    print(names, tried.exists(), flush=True)
    if world.rank == 1:
        Path(sys.argv[1], "seconds").write_text(str(time.monotonic() - begin))
    """
EXPECTED = "['rank 0', 'rank 1'] True\n"


@pytest.fixture
def place():
    """Create a folder that all users can write to, as /tmp is."""
    folder = Path(tempfile.mkdtemp(prefix="paceline-users-", dir="/tmp"))
    folder.chmod(0o1777)
    ranks.write(folder, TRAIN, "train.py")
    yield folder
    shutil.rmtree(folder)


def attack(place, kind, times):
    """Attack jobs of the victim; return the seconds that each of them needed to join."""
    words = [sys.executable, ATTACK, kind, place, VICTIM]
    attacker = users.start(ATTACKER, *words, cwd=place, stdin=-1)
    seconds = []
    try:
        assert attacker.stdout.readline() == "ready\n"
        for _ in range(times):
            (place / "tried").unlink(missing_ok=True)
            (place / "seconds").unlink(missing_ok=True)
            words = [sys.executable, "-m", "paceline", "run", "-n", "2", place / "train.py", place]
            done = users.run(VICTIM, *words, cwd=place, timeout=180)
            assert (done.returncode, done.stdout) == (0, EXPECTED), done.stderr
            refused = f"paceline: user {ATTACKER} of this node connected to the store"
            assert done.stderr.count(refused) == 1
            seconds.append(float((place / "seconds").read_text()))
    finally:
        said, _ = attacker.communicate("")
    assert "joined" not in said
    assert not list(place.glob("executed-*"))
    return seconds


@pytest.mark.long
def test_other_user_of_the_node_does_not_become_a_rank(place):
    attack(place, "store", 1)


@pytest.mark.soak
@pytest.mark.alone
def test_no_job_is_stopped_or_delayed_by_20_attacks(place):
    assert sorted(attack(place, "store", 20))[-2] < 2.0


@pytest.mark.soak
def test_jobs_connect_although_another_user_occupies_places_of_gloo(place):
    attack(place, "gloo", 5)


@pytest.mark.long
@pytest.mark.parametrize("host", ["host2", "host3"], ids=["node-of-the-job", "other-host"])
def test_other_host_does_not_become_a_rank(hosts, shared_folder, host):
    """Attack from a node of the job as another user, and from a host outside of it as the same."""
    ranks.write(shared_folder, TRAIN, "train.py")
    shared_folder.chmod(0o1777)
    port = ranks.free_port()
    words = [sys.executable, ATTACK, "store", shared_folder, 0, hosts.address("host1"), port]
    if host == "host2":
        words = users.command(ATTACKER, words)
    options = ["--launcher", "ssh", "-H", "host1:1,host2:1", "--port", port]
    job = hosts.start(
        "host0",
        *[ranks.PACELINE, "run", *options, shared_folder / "train.py", shared_folder],
        cwd=shared_folder,
    )
    attacker = hosts.start(host, *words, cwd=shared_folder, stdin=-1)
    out, err = job.communicate(timeout=180)
    said, _ = attacker.communicate("", timeout=60)
    assert (job.returncode, ranks.untagged(out)) == (0, {EXPECTED.strip()}), out + err
    assert "joined" not in said
    assert "refused" in err
    assert not list(shared_folder.glob("executed-*"))
