"""Hosts that a discovery script names while the job runs."""

from types import SimpleNamespace

import pytest
import ranks

from paceline.cluster.schedulers.hostfile import Host
from paceline.launch.recovery import discovery
from paceline.launch.recovery.joining_hosts import JoiningHosts
from paceline.launch.recovery.shrink import RemainingHosts


def script_of(folder, text):
    script = folder / "hosts.sh"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o700)
    return str(script)


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(discovery, "INTERVAL_S", 0.01)


def test_each_new_host_is_added_once(tmp_path, fast):
    names, added = tmp_path / "names", []
    names.write_text("a:2\n")
    script = script_of(tmp_path, f"echo >> {tmp_path}/asked; cat {names}")
    assert discovery.discover_hosts(script) == [Host("a", 2)]
    watched = discovery.HostDiscovery(script, ["a"], added.append)
    try:
        names.write_text("a:2\nb:3\nc\n")
        ranks.wait_until(lambda: len(added) == 2)
        asked = (tmp_path / "asked").stat().st_size
        ranks.wait_until(lambda: (tmp_path / "asked").stat().st_size > asked + 2)
    finally:
        watched.close()
    assert added == [Host("b", 3), Host("c")]


def test_script_that_fails_later_is_reported_once(tmp_path, fast, capsys):
    script = script_of(tmp_path, f"echo >> {tmp_path}/asked; exit 3")
    watched = discovery.HostDiscovery(script, ["a"], lambda host: None)
    ranks.wait_until(
        lambda: (tmp_path / "asked").exists() and (tmp_path / "asked").stat().st_size > 3
    )
    watched.close()
    said = capsys.readouterr().err
    assert said.count("hosts.sh ended with exit code 3. HINT: it prints one host a line") == 1
    assert "the hosts stay the same" in said


def test_script_of_this_folder_needs_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script_of(tmp_path, "echo a:0")
    with pytest.raises(ValueError, match=r"can't be started: .*HINT: \./hosts\.sh"):
        discovery.discover_hosts("hosts.sh")
    with pytest.raises(ValueError, match=r"hosts\.sh printed 'a:0': .*HINT"):
        discovery.discover_hosts("./hosts.sh")


def host(name, count=0):
    return SimpleNamespace(name=name, failure="", ranks=count)


class Watcher:
    """Hosts that are ready, by index."""

    def __init__(self):
        self.hosts = {}

    def ready(self):
        return self.hosts

    def take_ready(self):
        ready, self.hosts = self.hosts, {}
        return ready

    def wait_for(self, host_index):
        pass


def remaining(names, count, most):
    about = {}
    found = RemainingHosts(
        [host(name) for name in names], [count] * len(names), 1, about, max_ranks=most
    )
    found.lost_host_watcher = Watcher()
    return found, about


def layout(hosts):
    return dict(zip([one.name for one in hosts.hosts], hosts.ranks_per_host, strict=True))


def test_ranks_of_new_hosts_are_limited():
    hosts, about = remaining(["a"], 4, 10)
    hosts.lost_host_watcher.hosts = {1: host("b", 4), 2: host("c", 4)}
    said = []
    assert hosts.announce_returned(True, said.append) == ["b", "c"]
    assert said == [
        "paceline: b, c are new: the ranks write a checkpoint, and the job continues with more "
        "ranks\n"
    ]
    assert hosts.readmit_returned()
    assert hosts.take_changes() == ("b, c are new; the job continues on 3 nodes, with 10 ranks,")
    assert layout(hosts) == {"a": 4, "b": 4, "c": 2}
    assert about == {"hosts": ["a", "b", "c"], "on_each": [4, 4, 2]}
    hosts.lost_host_watcher.hosts = {3: host("d", 4)}
    assert hosts.announce_returned(True, said.append) == []  # no room
    assert not hosts.readmit_returned()
    hosts.hosts[1].failure = "lost"  # now there is
    assert hosts.readmit_returned()
    assert hosts.drop_lost()
    assert layout(hosts) == {"a": 4, "c": 4, "d": 2}


def test_hosts_beyond_the_largest_world_size_replace_lost_ones():
    hosts, about = remaining(["a", "b", "c"], 4, 8)
    assert layout(hosts) == {"a": 4, "b": 4}
    assert about["hosts"] == ["a", "b"]
    assert hosts.full_ranks == 8
    hosts.hosts[0].failure = "lost"
    assert hosts.drop_lost()
    assert layout(hosts) == {"b": 4, "c": 4}


def test_new_host_that_cannot_be_used_is_reported_once(capsys):
    joining = JoiningHosts(
        *(SimpleNamespace(), SimpleNamespace(), [host("a")], [2], [("eth0", "10.0.0.1")], {}),
        peers=list,
    )
    joining.watcher.wait_for = lambda host_index: None
    joining.add(Host("b", 2))
    for host_index in (0, 1, 1):
        joining._report(host_index, "b: ssh can't reach it. HINT: ssh b")
    said = capsys.readouterr().err
    assert said.count("b, a new host, can't have ranks: b: ssh can't reach it. HINT: ssh b") == 1
    assert said.count("paceline: warning: ") == 1
