"""Hosts that a discovery script names while the job runs."""

import subprocess
import threading
from types import SimpleNamespace

import pytest
import ranks

from paceline.cluster.schedulers.hostfile import Host
from paceline.launch.recovery import discovery, rejoin
from paceline.launch.recovery.rejoin import JoiningHosts
from paceline.launch.recovery.shrink import RemainingHosts
from paceline.security.processes import python_command


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


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("./no.sh", "there is no such file. HINT: use the absolute path of the script"),
        ("no.sh", "there is no such file, on PATH or in the working directory. HINT: use the abs"),
        ("./folder", "it is a directory. HINT: use the path of the script"),
        ("./plain.sh", r"it is not executable. HINT: chmod \+x ./plain.sh"),
        ("plain.sh", "it is not on PATH. HINT: ./plain.sh"),
        ("./empty.sh", "Exec format error. HINT: the first line of a script .*: #!/bin/sh"),
        ("./interpreter.sh", "No such file .*. HINT: the first line of a script .*: #!/bin/sh"),
    ],
)
def test_hint_of_a_script_that_cannot_be_started(tmp_path, monkeypatch, script, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name, text, mode in (
        ("plain", "#!/bin/sh\necho a\n", 0o600),
        ("empty", "echo a\n", 0o700),
        ("interpreter", "#!/no/sh\necho a\n", 0o700),
    ):
        (tmp_path / f"{name}.sh").write_text(text)
        (tmp_path / f"{name}.sh").chmod(mode)
    with pytest.raises(ValueError, match=f"{script} can't be started: {message}"):
        discovery.discover_hosts(script)


def test_script_reads_no_input_and_its_output_is_limited(tmp_path, monkeypatch):
    asks = script_of(tmp_path, "read -r name && echo $name || echo a")
    module = "paceline.launch.recovery.discovery"
    text = f"from {module} import discover_hosts; print(discover_hosts({asks!r}))"
    done = subprocess.run(python_command("-c", text), input=b"b\n", stdout=subprocess.PIPE)
    assert b"name='a'" in done.stdout
    with pytest.raises(ValueError, match=r"printed more than 1 MiB\. HINT: it prints"):
        discovery.discover_hosts(script_of(tmp_path, "while :; do echo aaaaaaaaaaaaaaaa; done"))
    monkeypatch.setattr(discovery, "SCRIPT_TIMEOUT_S", 0.1)
    with pytest.raises(ValueError, match=r"did not end within 0\.1 s"):
        discovery.discover_hosts(script_of(tmp_path, "echo a; exec sleep 60"))


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


def remaining(names, count, most, least=1):
    about = {}
    found = RemainingHosts(
        [host(name) for name in names], [count] * len(names), least, about, max_ranks=most
    )
    found.joining_hosts = Watcher()
    return found, about


def layout(hosts):
    return dict(zip([one.name for one in hosts.hosts], hosts.ranks_per_host, strict=True))


def test_ranks_of_new_hosts_are_limited():
    hosts, about = remaining(["a"], 4, 10)
    hosts.joining_hosts.hosts = {1: host("b", 4), 2: host("c", 4)}
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
    hosts.joining_hosts.hosts = {3: host("d", 4)}
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


def test_job_goes_on_while_it_has_as_many_hosts_as_at_the_start():
    hosts, _ = remaining(["a"], 4, None, least=None)
    hosts.joining_hosts.hosts = {1: host("b", 4), 2: host("c", 4)}
    assert hosts.readmit_returned()
    hosts.hosts[1].failure = hosts.hosts[0].failure = "lost"
    assert hosts.drop_lost()
    assert layout(hosts) == {"c": 4}
    hosts.hosts[0].failure = "lost"
    with pytest.raises(ValueError, match="c is lost, and no other node is left"):
        hosts.drop_lost()


@pytest.mark.parametrize("least", [None, 2, 3])
def test_job_goes_on_without_a_host_that_has_no_ranks(least):
    hosts, _ = remaining(["a", "b", "c"], 4, 8, least)
    hosts._all_hosts[2].failure = "lost"
    assert hosts.drop_lost()
    assert layout(hosts) == {"a": 4, "b": 4}
    hosts.hosts[0].failure = "lost"
    with pytest.raises(ValueError, match=f"1 of {3 if least else 2} nodes is left"):
        hosts.drop_lost()


def joining_hosts(peers):
    joining = JoiningHosts(
        *(SimpleNamespace(), SimpleNamespace(), [host("a")], [2], [("eth0", "10.0.0.1")], {}),
        peers=lambda: peers,
    )
    joining.wait_for = lambda host_index: None
    return joining


class AnsweringHost:
    """A host of the job, whose next answer goes to whoever waits for one."""

    name = "a"

    def __init__(self):
        self.answers = []
        self.changed = threading.Condition()

    def send(self, reach):
        ((request, offer),) = reach.items()
        with self.changed:
            self.answers.append({request: {link[1]: "" for link in offer["links"]}})
            self.changed.notify_all()

    def wait_for_answer(self, key, seconds):
        with self.changed:
            self.changed.wait_for(lambda: len(self.answers) > 1, 0.2)  # another request meanwhile
            return {key: self.answers.pop(0)}


def new_host(name, address):
    offer = {"listening": {"token": "", "links": [["eth0", address, 100, 1]]}}
    return SimpleNamespace(
        name=name, send=lambda listen: None, wait_for_answer=lambda key, seconds: offer
    )


def test_hosts_that_join_at_the_same_time_get_their_own_addresses(monkeypatch):
    for name, found in (("version_mismatch", ""), ("check_hosts", {}), ("start_rank_servers", 0)):
        monkeypatch.setattr(rejoin, name, lambda *args, found=found: found)
    peer = AnsweringHost()
    joining = joining_hosts([peer])
    threads = []
    for number, name in enumerate("bc", start=1):
        joining.add(Host(name, 2))
        args = (number, new_host(name, f"10.0.0.{number + 1}"))
        threads.append(threading.Thread(target=joining._prepare, args=args))
        threads[-1].start()
    for thread in threads:
        thread.join()
    assert joining._interfaces[1:] == [("eth0", "10.0.0.2"), ("eth0", "10.0.0.3")]


def test_late_answer_to_another_request_is_not_used():
    peer = AnsweringHost()
    late = {"0": {"10.0.0.2": "refused"}, "6": {"10.0.0.2": "refused"}}
    peer.answers.append(late)
    chosen = rejoin._choose_address(new_host("b", "10.0.0.2"), [peer], "7")
    assert chosen == ("eth0", "10.0.0.2")


def test_new_host_that_cannot_be_used_is_reported_once(capsys):
    joining = joining_hosts([])
    joining.add(Host("b", 2))
    for host_index in (0, 1, 1):
        joining._report(host_index, "b: ssh can't reach it. HINT: ssh b")
    said = capsys.readouterr().err
    assert said.count("b, a new host, can't have ranks: b: ssh can't reach it. HINT: ssh b") == 1
    assert said.count("paceline: warning: ") == 1
