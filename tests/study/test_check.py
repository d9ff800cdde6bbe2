"""`paceline check` end to end: measurements, outliers, and unreachable or slow nodes."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import ranks

from paceline.cost.machine.machine_file import load, save

pytestmark = pytest.mark.alone


def check(folder, *words):
    return subprocess.run(
        [ranks.PACELINE, "check", *map(str, words)],
        cwd=folder,
        env=ranks.environment(NO_COLOR="1"),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_check_measures_saves_and_compares_one_machine(tmp_path):
    done = check(tmp_path, "--quick", "--json", "--data", tmp_path, "--out", "a.toml")
    assert done.returncode == 0, done.stderr
    assert "paceline check: arithmetic ..." in done.stderr
    told = json.loads(done.stdout)
    machine = load(tmp_path / "a.toml")
    (host,) = machine.hosts
    assert told["machine"]["hosts"][0]["name"] == host.name == os.uname().nodename
    assert (
        {"capability", "blas"}
        <= set(host.torch_build)
        == set(told["machine"]["hosts"][0]["torch_build"])
    )
    assert {one.precision for one in host.arithmetic} >= {"float32", "float64", "bfloat16"}
    assert all(one.rate.low > 0 for one in host.arithmetic)
    assert host.storage[0].small_create.median > 0
    (reduce,) = [one for one in machine.collectives if one.operation == "all-reduce"]
    assert (reduce.group, reduce.ranks) == ("in host", 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.toml"]

    for name, factor in (("a.toml", 1.0), ("b.toml", 0.5)):
        rates = [replace(one, rate=steady(one.rate, factor)) for one in host.arithmetic]
        save(replace(machine, hosts=(replace(host, arithmetic=tuple(rates)),)), tmp_path / name)
    said = " ".join(check(tmp_path, "--compare", "a.toml", "b.toml").stdout.split())
    assert "float32 matrix product" in said
    assert "-50" in said
    missing = check(tmp_path, "--compare", "a.toml", "c.toml")
    assert missing.returncode == 2
    assert "HINT" in missing.stderr


def steady(figure, factor):
    """Return the figure with the spread of an idle machine."""
    values = (factor * spread * figure.median for spread in (1, 0.98, 1.02))
    return type(figure)(*values, figure.n, figure.unit)


def test_invalid_arguments_are_reported_before_measuring(tmp_path):
    done = check(tmp_path, "--data", tmp_path / "none")
    assert done.returncode == 2
    assert "is not a folder. HINT: give one that all hosts see" in done.stderr


CPU = Path("/sys/fs/cgroup/cpu")


@pytest.mark.long
@pytest.mark.skipif(
    not os.access(CPU / "cpu.cfs_quota_us", os.R_OK) and not (CPU / "cgroup.procs").exists(),
    reason="needs control groups of version 1",
)
def test_slow_hosts_missing_hosts_and_slow_links_are_reported(hosts, shared_folder):
    group = CPU / f"paceline-test-{os.getpid()}"
    group.mkdir()
    try:
        (group / "cpu.cfs_period_us").write_text("10000")
        (group / "cpu.cfs_quota_us").write_text("4000")  # 0.4 cores instead of two
        (group / "cgroup.procs").write_text(str(machine_pid(hosts, "host2", "sshd")))
        rate = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", "200mbit"]
        hosts.run("host3", *rate, "burst", "100kb", "latency", "50ms")
        names = "host1,host2,host3,host9"
        done = hosts.run(
            "host0", ranks.PACELINE, "check", "--quick", "-H", names,
            cwd=shared_folder, check=False, timeout=200,
        )  # fmt: skip
        assert done.returncode == 1, done.stderr
        text = " ".join(done.stdout.split())
        assert "host2 is slow: " in text
        assert "all links of host3 are slow: bandwidth is" in text
        assert "host9 can't be reached: host9: its name does not resolve" in text
        assert set(load(shared_folder / "machine.toml").unreachable) == {"host9"}
    finally:
        hosts.run("host3", "tc", "qdisc", "del", "dev", "eth0", "root", check=False)
        for pid in (group / "cgroup.procs").read_text().split():
            (CPU / "cgroup.procs").write_text(pid)
        group.rmdir()


def machine_pid(hosts, name, command):
    """Return the PID of a host's process in the machine's own PID namespace."""
    space = os.readlink(f"/proc/{hosts.first(name)}/ns/pid")
    for entry in Path("/proc").iterdir():
        try:
            found = entry.name.isdigit() and os.readlink(entry / "ns/pid") == space
            if found and (entry / "comm").read_text().strip() == command:
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError(f"no {command} on {name}")
