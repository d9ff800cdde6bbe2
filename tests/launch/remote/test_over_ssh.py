"""``paceline run -H`` over ssh: rank placement, environment, user errors, faults and cleanup.

The scripts run without torch in new interpreters, because only the launcher is tested.
"""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
import ranks

import paceline

SHOW = """
    import json, os, sys
    names = ["RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR",
             "GROUP_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "HELLO", "GIVEN", "OMP_NUM_THREADS"]
    out = {n: os.environ.get(n) for n in names}
    out |= {"host": os.uname().nodename, "cwd": os.getcwd(), "python": sys.executable,
            "argv": sys.argv[1:], "secret": "PACELINE_SECRET" in os.environ}
    json.dump(out, open(f"out-{os.environ['RANK']}", "w"))
    print("all the same")
    """
WAIT = """
    import os, time
    open(f"up-{os.environ['RANK']}", "w")
    time.sleep(300)
    """


def run(hosts, folder, *words, check=True, **env):
    words = [ranks.PACELINE, "run", "--fresh", *words]
    return hosts.run("host0", *words, cwd=folder, env=env, check=check, timeout=60)


def started(hosts, folder, number, *words):
    """Start a launcher and wait until all its ranks run."""
    ranks.write(folder, WAIT)
    process = hosts.start(
        "host0", ranks.PACELINE, "run", "--fresh", *words, "script.py", cwd=folder
    )
    ranks.wait_until(lambda: len(list(folder.glob("up-*"))) == number, 30)
    return process


def test_ranks_are_consecutive_per_host_with_environment_forwarded(hosts, shared_folder):
    ranks.write(shared_folder, SHOW)
    words = ["-H", "host1:2,host2", "-n", "3", "--env", "HELLO", "--env", "GIVEN=x y"]
    result = run(hosts, shared_folder, *words, "script.py", "-n", "7", HELLO="there")
    found = [json.loads((shared_folder / f"out-{rank}").read_text()) for rank in range(3)]
    assert [f["host"] for f in found] == ["host1", "host1", "host2"]
    assert [f["LOCAL_RANK"] for f in found] == ["0", "1", "0"]
    assert [f["LOCAL_WORLD_SIZE"] for f in found] == ["2", "2", "1"]
    assert [f["GROUP_RANK"] for f in found] == ["0", "0", "1"]
    for rank, one in enumerate(found):
        assert (one["RANK"], one["WORLD_SIZE"], one["GROUP_WORLD_SIZE"]) == (str(rank), "3", "2")
        assert one["MASTER_ADDR"] == hosts.address("host1")
        assert one["GLOO_SOCKET_IFNAME"] == "eth0"
        assert (one["HELLO"], one["GIVEN"]) == ("there", "x y")
        assert (one["cwd"], one["python"]) == (str(shared_folder), sys.executable)
        assert one["argv"] == ["-n", "7"]
        assert not one["secret"]
    assert ranks.untagged(result.stdout) == {"all the same"}
    assert "3 ranks on 2 nodes over ssh, network eth0 (host1: 0-1, host2: 2" in result.stderr
    assert hosts.left_over() == []


def test_hostfile_with_local_host_needs_no_local_ssh(hosts, shared_folder):
    ranks.write(shared_folder, SHOW)
    (shared_folder / "hosts").write_text("# ours\nhost0 slots=1\nhost3 slots=1\n")
    (hosts.ssh / "authorized_keys").write_text((hosts.ssh / "id.pub").read_text())
    run(hosts, shared_folder, "--hostfile", "hosts", "script.py")
    found = [json.loads((shared_folder / f"out-{rank}").read_text()) for rank in range(2)]
    assert [f["host"] for f in found] == ["host0", "host3"]
    shown = run(hosts, shared_folder, "--hostfile", "hosts", "--show", "script.py", "--x").stdout
    assert "2 ranks: host0: 0, host3: 1" in shown
    assert shown.count("  starts: ssh ") == 1
    assert "script.py --x" in shown
    assert hosts.left_over() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-H", "host1,host9"], "host9: its name does not resolve. HINT"),
        (
            ["-H", "host1:1,host2:1", "-n", "3"],
            "3 ranks need as many slots, and the nodes have 2 slots (host1:1, host2:1). HINT",
        ),
        (["-H", "host1:x"], "-H 'host1:x': "),
        (["--hostfile", "bad"], "line 2"),
        (["--hostfile", "none"], "none"),
        (
            ["-H", "host1,host2", "--env", "NOPE"],
            "--env NOPE: NOPE is not set in this environment. HINT",
        ),
        (["-H", "host1", "--launcher", "rsh"], "--launcher rsh is not known. HINT"),
        (["--launcher", "ssh"], "needs host names outside of an allocation. HINT"),
    ],
)
def test_invalid_host_options_are_reported_before_ranks_start(hosts, shared_folder, words, message):
    ranks.write(shared_folder, "open('started', 'w')")
    (shared_folder / "bad").write_text("host1 slots=2\nhost2 slots=many\n")
    result = run(hosts, shared_folder, *words, "script.py", check=False)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert not (shared_folder / "started").exists()
    assert hosts.left_over() == []


def test_ssh_errors_are_reported_with_hint(hosts, shared_folder):
    ranks.write(shared_folder, "")
    words = ["-H", "host1:1,host2:1", "script.py"]
    known = (hosts.ssh / "known_hosts").read_text()
    (hosts.ssh / "known_hosts").write_text("")
    said = run(hosts, shared_folder, *words, check=False).stderr
    assert (
        "host1: ssh does not know its host key, or the key has changed. HINT: run `ssh host1`"
        in said
    )
    (hosts.ssh / "known_hosts").write_text(known)
    (hosts.ssh / "authorized_keys").write_text("")
    said = run(hosts, shared_folder, *words, check=False).stderr
    assert (
        "host2: ssh accepts none of your keys. HINT: `ssh host2` must work without a password"
        in said
    )
    nobody = hosts.address("host1").replace("77.0.1", "77.0.77")
    said = run(hosts, shared_folder, "-H", f"{nobody}:1", "script.py", check=False).stderr
    assert re.search(rf"{nobody}: ssh can't reach it .*HINT", said)
    assert hosts.left_over() == []


@pytest.mark.long
def test_host_with_missing_files_or_other_version_is_reported(hosts, shared_folder):
    ranks.write(shared_folder, "")
    words = ["-H", "host1:1,host2:1", "script.py"]
    package = Path(paceline.__file__).parent
    version = package / "version.py"
    (shared_folder / "other.py").write_text(version.read_text().replace('"0.', '"7.'))
    (shared_folder / "empty").mkdir()
    for hidden, stand_in, message in [
        (version, "other.py", f"host2 has Paceline 7.1.0, the launcher has {paceline.__version__}"),
        (package, "empty", "host2: .* has no Paceline. HINT"),
        (Path(sys.prefix), "empty", "host2: it has no .*python.*. HINT"),
        (shared_folder, "empty", "host2: script.py does not exist. HINT"),
    ]:
        hosts.run("host2", "mount", "--bind", shared_folder / stand_in, hidden, cwd=Path("/"))
        try:
            result = run(hosts, shared_folder, *words, check=False)
        finally:
            hosts.run("host2", "umount", hidden, cwd=Path("/"))
        assert result.returncode == 2
        assert re.search(message, result.stderr), result.stderr
    own = hosts.run("host0", "mktemp", "-d", cwd=Path("/")).stdout.strip()
    hosts.run("host0", "cp", shared_folder / "script.py", own)
    result = run(hosts, Path(own), *words, check=False)
    assert (
        f"host1: {own}: No such file or directory. HINT: start the job in a working directory"
        in result.stderr
    )
    hosts.run("host0", "rm", "-r", own)
    assert hosts.left_over() == []


@pytest.mark.long
def test_output_of_login_scripts_is_ignored(hosts, shared_folder):
    ranks.write(shared_folder, SHOW)
    keys = hosts.ssh / "authorized_keys"
    greeting = 'command="echo Welcome to the cluster; eval $SSH_ORIGINAL_COMMAND"'
    keys.write_text(f"{greeting} {keys.read_text()}")
    result = run(hosts, shared_folder, "-H", "host1:1", "script.py")
    assert result.stdout == "all the same\n"


def test_failed_rank_is_reported_with_host_and_job_ends(hosts, shared_folder):
    ranks.write(
        shared_folder,
        """
        import os, sys, time
        if os.environ["RANK"] == "1":
            print("my last words")
            sys.exit(7)
        time.sleep(300)
        """,
    )
    result = run(hosts, shared_folder, "-H", "host1:1,host2:1", "script.py", check=False)
    assert result.returncode == 7
    assert "rank 1 on host2 failed: exit code 7" in result.stderr
    assert "    my last words" in result.stderr
    assert "Paceline ended the other rank." in result.stderr
    assert hosts.left_over() == []


def test_failed_attempt_is_restarted_on_all_hosts(hosts, shared_folder):
    ranks.write(
        shared_folder,
        """
        import os, signal
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        if attempt == "0" and os.environ["RANK"] == "2":
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt == "0":
            import time; time.sleep(300)
        print("attempt", attempt)
        """,
    )
    words = ["-H", "host1:2,host2:2", "--max-restarts", "1", "script.py"]
    result = run(hosts, shared_folder, *words)
    assert "rank 2 on host2 was killed by SIGKILL" in result.stderr
    assert ranks.untagged(result.stdout) == {"attempt 1"}
    assert hosts.left_over() == []


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(one, marks=pytest.mark.long) for one in ("SIGINT", "SIGTERM")), "SIGKILL"],
)
def test_no_leftovers_on_hosts_after_launcher_ends(hosts, shared_folder, name):
    process = started(hosts, shared_folder, 3, "-H", "host1:2,host2:1")
    os.killpg(process.pid, getattr(signal, name))
    _, said = process.communicate(timeout=20)
    if name != "SIGKILL":
        assert process.returncode == 128 + getattr(signal, name)
        assert "Paceline ended all ranks" in said
    assert hosts.left_over(10) == []


def test_killed_agent_ends_its_ranks_and_is_reported(hosts, shared_folder):
    process = started(hosts, shared_folder, 3, "-H", "host1:2,host2:1")
    hosts.run("host2", "pkill", "-KILL", "-f", "-o", "paceline.launch.host_agent", check=False)
    _, said = process.communicate(timeout=20)
    assert "rank 2 on host2 was lost with its node: its agent has ended" in said
    assert process.returncode == 137
    assert hosts.left_over(10) == []


TOGETHER = """
    import os, time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    with open(f"pid-{dist.get_rank()}.part", "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, file.name.removesuffix(".part"))
    while True:
        dist.all_reduce(torch.ones(1))
    """


@pytest.mark.long
def test_delayed_report_of_killed_rank_is_still_root_cause(hosts, shared_folder):
    """The killed rank's host reports late, after the other rank has noticed the lost peer."""
    ranks.write(shared_folder, TOGETHER)
    words = [ranks.PACELINE, "run", "-H", "host1:1,host2:1", "script.py"]
    process = hosts.start("host0", *words, cwd=shared_folder)
    pid = shared_folder / "pid-1"
    ranks.wait_until(lambda: pid.exists() and (shared_folder / "pid-0").exists(), 40)
    hosts.run("host2", "pkill", "-STOP", "-f", "-o", "paceline.launch.host_agent")
    other = (shared_folder / "pid-0").read_text()
    hosts.run("host2", "kill", "-KILL", pid.read_text())
    ranks.wait_until(lambda: not Path(f"/proc/{other}").exists(), 40)
    time.sleep(1)  # delay of the report
    hosts.run("host2", "pkill", "-CONT", "-f", "-o", "paceline.launch.host_agent")
    _, said = process.communicate(timeout=20)
    assert "rank 1 on host2 was killed by SIGKILL" in said
    assert process.returncode == 137
    assert hosts.left_over(10) == []


@pytest.mark.long
def test_rank_start_failure_is_reported_and_ends_job(hosts, shared_folder):
    ranks.write(shared_folder, "import time; time.sleep(300)")
    keys = hosts.ssh / "authorized_keys"  # a quarter of the stack is the limit of an environment
    limited = r'command="ulimit -s 1024; exec sh -c \"$SSH_ORIGINAL_COMMAND\"" '
    keys.write_text(f"{limited}{keys.read_text()}")
    big = [word for name in "ABC" for word in ("--env", f"{name}={'x' * 100_000}")]
    words = ["-H", "host1:1,host2:1", *big, "script.py"]
    result = run(hosts, shared_folder, *words, check=False)
    assert result.returncode == 1
    assert re.search(r"the environment .*A \([\d,]+ bytes\), B", result.stderr)
    assert "Paceline ended the other rank" in result.stderr
    assert hosts.left_over() == []


def test_no_leftovers_if_launcher_ends_while_agents_start(hosts, shared_folder):
    ranks.write(shared_folder, "")
    keys = hosts.ssh / "authorized_keys"
    keys.write_text(f'command="touch {shared_folder}/up-1; cat" {keys.read_text()}')
    process = hosts.start(
        "host0", ranks.PACELINE, "run", "-H", "host1:1,host2:1", "script.py", cwd=shared_folder
    )
    ranks.wait_until(lambda: (shared_folder / "up-1").exists(), 30)
    os.killpg(process.pid, signal.SIGTERM)
    _, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (143, "paceline: SIGTERM before the ranks started\n")
    assert hosts.left_over(10) == []


@pytest.mark.long
@pytest.mark.parametrize("kind", ["TERM", "KILL"])
def test_node_local_records_are_copied_or_removed(hosts, shared_folder, kind):
    own = hosts.run("host0", "mktemp", "-d").stdout.strip()
    process = started(hosts, shared_folder, 2, "-H", "host1:1,host2:1", "--record", f"{own}/record")
    hosts.run("host2", "pkill", f"-{kind}", "-f", "-o", "paceline.launch.host_agent", check=False)
    process.communicate(timeout=30)
    kept = set(hosts.run("host0", "ls", f"{own}/record").stdout.split())
    assert "rank-0.ring" in kept
    assert ("rank-1.ring" in kept) == (kind == "TERM")
    hosts.run("host0", "rm", "-r", own)
    assert hosts.left_over(10) == []


@pytest.mark.long
def test_launchers_of_two_nodes_do_not_record_into_one_folder(hosts, shared_folder):
    record = shared_folder / "record"
    process = started(hosts, shared_folder, 2, "-H", "host1:1,host2:1", "--record", record)
    words = [ranks.PACELINE, "run", "-H", "host1:1,host2:1", "--record", record, "script.py"]
    second = hosts.run("host3", *words, cwd=shared_folder, check=False, timeout=60)
    assert second.returncode == 2, second.stderr
    assert re.search(rf"{record} is in use by run \w+ \(process \d+ on host0\)", second.stderr)
    assert process.poll() is None
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=30)
    assert not (record / ".paceline-run.json").exists()
    assert hosts.left_over(10) == []


def test_crashed_host_is_reported_and_other_ranks_end(hosts, shared_folder):
    process = started(hosts, shared_folder, 3, "-H", "host1:2,host2:1")
    hosts.crash("host2")
    _, said = process.communicate(timeout=20)
    assert "rank 2 on host2 was lost with its node" in said
    assert "Paceline ended the 2 other ranks." in said
    assert hosts.left_over(10) == []


@pytest.mark.long
def test_job_continues_after_short_network_outage(hosts, shared_folder):
    ranks.write(
        shared_folder,
        """
        import os, time
        open(f"up-{os.environ['RANK']}", "w")
        while not os.path.exists("go"):
            time.sleep(0.05)
        print("went on")
        """,
    )
    words = [ranks.PACELINE, "run", "--fresh", "-H", "host1:1,host2:1", "script.py"]
    process = hosts.start("host0", *words, cwd=shared_folder)
    ranks.wait_until(lambda: len(list(shared_folder.glob("up-*"))) == 2, 30)
    hosts.link("host2", False)
    (shared_folder / "go").touch()
    ranks.wait_until(lambda: process.poll() is None, 3)
    hosts.link("host2", True)
    out, said = process.communicate(timeout=30)
    assert (process.returncode, ranks.untagged(out)) == (0, {"went on"}), said
    assert hosts.left_over() == []


@pytest.mark.long
def test_reachable_network_interface_is_selected(hosts, shared_folder):
    ranks.write(shared_folder, SHOW)
    hosts.second_network("host1", "host2", listed_in=["host1", "host2"])
    words = ["-H", "host1:1,host2:1", "script.py"]
    run(hosts, shared_folder, *words)
    found = json.loads((shared_folder / "out-1").read_text())
    assert (found["GLOO_SOCKET_IFNAME"], found["MASTER_ADDR"]) == ("eth0", hosts.address("host1"))
    result = run(hosts, shared_folder, *words, check=False, GLOO_SOCKET_IFNAME="eth1")
    assert result.returncode == 2
    assert re.search(r"host1 can't be reached by the other hosts. Tried:\n", result.stderr)
    dead = re.escape(hosts.dead_address("host1"))
    assert re.search(rf"from host2: eth1 {dead}: no answer in 3 s\n", result.stderr)
    assert hosts.left_over() == []


TRAIN = """
    import torch, torch.distributed as dist
    dist.init_process_group()
    for _ in range(20):
        dist.all_reduce(torch.ones(1000))
    dist.destroy_process_group()
    """


@pytest.mark.long
@pytest.mark.parametrize("shared", [pytest.param(True, marks=pytest.mark.long), False])
def test_records_of_all_hosts_are_copied_to_record_folder(hosts, shared_folder, shared):
    ranks.write(shared_folder, TRAIN)
    record = str(shared_folder / "record")
    if not shared:
        record = hosts.run("host0", "mktemp", "-d").stdout.strip() + "/record"
    words = [ranks.PACELINE, "run", "-H", "host1:1,host2:1", "--record", record, "script.py"]
    said = hosts.run("host0", *words, cwd=shared_folder).stderr
    assert "could not be written" not in said
    text = hosts.run("host0", ranks.PACELINE, "report", "--json", record).stdout
    report = json.loads(text)
    assert report["ranks"] == [0, 1]
    kept = hosts.run("host0", "ls", record).stdout.split()
    assert {"rank-0.ring", "rank-1.ring", "run.json"} <= set(kept)
    if not shared:
        hosts.run("host0", "rm", "-r", Path(record).parent)
    assert hosts.left_over() == []


@pytest.mark.long
def test_records_for_full_disk_are_reported_without_partial_files(hosts, shared_folder):
    ranks.write(shared_folder, TRAIN)
    disk = hosts.run("host0", "mktemp", "-d").stdout.strip()
    script = shared_folder / "full.sh"
    script.write_text(
        f"mount -t tmpfs -o size=12k tmpfs {disk}\n{ranks.PACELINE} run -H host1:1,host2:1 "
        f"--record {disk}/record script.py; echo code $?; ls -A {disk}/record; umount {disk}\n"
    )
    done = hosts.run("host0", "sh", script, cwd=shared_folder, check=False, timeout=90)
    hosts.run("host0", "rmdir", disk)
    _, _, listed = done.stdout.partition("code ")
    assert not [name for name in listed.split() if "part" in name], done.stdout
    for host in ("host1", "host2"):
        said = (
            f"the record of {host} could not be written to {disk}/record (No space left on device)"
        )
        assert done.stderr.count(said) == 1, done.stderr
    assert "has no record" not in done.stderr
    assert "was lost" not in done.stderr
    assert hosts.left_over(5) == []
