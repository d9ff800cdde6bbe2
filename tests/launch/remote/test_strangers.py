"""A job starts despite many unauthorized connections to the ports that it opens."""

import json
import os
import socket
import sys
import threading
import time

import flood
import pytest
import ranks
from channels import accept_channel

import bed
from paceline.cluster.topology.network_interfaces import Link, network_links
from paceline.launch.channel import (
    Channel,
    LauncherNotFoundError,
    connect_channel,
    connect_to_launcher,
    new_secret,
)
from paceline.launch.host_agent import HostAgent
from paceline.launch.remote import start_agents
from paceline.launch.remote.start_agents import AgentConnections, AgentListener, addresses_towards
from paceline.launch.remote.start_commands import LaunchTool

FLOOD = flood.__file__
SECRET = new_secret()
SCRIPT = """
    import json, os
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "GROUP_RANK")
    found = {name: os.environ[name] for name in names} | {"host": os.uname().nodename}
    print(json.dumps(found))
    """
WANTED = [
    {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "GROUP_RANK": "0", "host": "host1"},
    {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "GROUP_RANK": "0", "host": "host1"},
    {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "GROUP_RANK": "1", "host": "host2"},
]


@pytest.mark.long
@pytest.mark.parametrize("program", [pytest.param("srun", marks=pytest.mark.long), bed.mpi.MPIRUN])
def test_job_starts_while_launcher_port_is_flooded(request, hosts, shared_folder, program):
    """Flood the launcher's port from the host of one agent.

    1,000 idle connections are reopened whenever they are dropped. 10,000 garbage connections are
    made before the agents start, and more while they start.
    """
    ranks.write(shared_folder, SCRIPT)
    environment = flood.announced(shared_folder, program)
    words = [ranks.PACELINE, "run", "--fresh", "--launcher", program, "-H", "host1:2,host2:1"]
    if program == "srun":
        slurm = request.getfixturevalue("slurm")
        words = ["salloc", "-N2", "-w", "host1,host2", *words]
        environment |= slurm.variables
    else:
        environment |= request.getfixturevalue("mpi")
    where = shared_folder / "where"
    words_of_flood = [sys.executable, FLOOD, "--where", where, "--ready", shared_folder / "go"]
    strangers = hosts.start("host2", *words_of_flood)
    result = hosts.run(
        "host0", *words, "script.py", cwd=shared_folder, env=environment, timeout=100
    )
    said = {line.partition("] ")[2] or line for line in result.stdout.splitlines()}
    assert sorted((json.loads(line) for line in said), key=lambda one: one["RANK"]) == WANTED
    assert "Traceback" not in result.stderr
    assert "connections that don't know the job's secret came from 10.77.0.2 (" in result.stderr
    assert f"--connect {hosts.address('host0')}," in where.read_text()
    assert ";" not in where.read_text().split("--connect ")[1].split()[0]
    sent, _ = strangers.communicate(timeout=30)  # ends, because the port is closed
    assert int(sent) >= 10_000


def agents_of(number, secret, where):
    """Connect agents to the launcher, each in a thread, same as ``paceline.launch.host_agent``.

    Return their channels, in the order in which the threads sent their greetings, and the threads.
    """

    def agent(place):
        channel = connect_to_launcher(where, secret)
        channel.send({"place": place})
        channel.send({"hello": {}})
        made.append(channel)

    made: list = []
    threads = [threading.Thread(target=agent, args=(place,)) for place in range(number)]
    for thread in threads:
        thread.start()
    return made, threads


def test_agents_are_accepted_among_1000_idle_connections(flooded):
    with AgentListener(["localhost"] * 20) as listener:
        address, port = listener.where.split(",")
        serving = threading.active_count()
        flooded(address, int(port), garbage=2000)
        begun = time.monotonic()
        channels, threads = agents_of(20, listener.secret, listener.where)
        while len(listener.found) < 20 and time.monotonic() - begun < 20.0:
            listener.wait(0.2)
        for thread in threads:
            thread.join(5.0)
        assert time.monotonic() - begun < 20.0
        assert sorted(listener.found) == list(range(20))
        assert threading.active_count() <= serving + 2 * 20  # at most two per agent
        assert listener.many_strangers
        assert listener.strangers().endswith(")")
    for channel in (*channels, *listener.visitors):
        channel.close()


def test_store_does_not_wait_for_an_agent_that_is_busy():
    """The agent waits for the thread of the store's gate when it closes the store."""
    agent = HostAgent(Channel(*os.pipe()))
    many = 1 << 17  # more than a pipe takes

    def ask():
        for number in range(many):
            agent.ask_agents(number, ("10.0.0.5", 4000), ("10.0.0.1", 5000))

    gate = threading.Thread(target=ask, daemon=True)
    gate.start()
    gate.join(30.0)
    assert len(agent.store_messages) == many


def test_agent_with_invalid_index_is_rejected(closing):
    listener = closing.enter_context(AgentListener(["localhost"] * 2))
    address, port = listener.where.split(",")
    for place in (-1, "0", None, 1.5, [], 10**30):
        thread = threading.Thread(target=said, args=(address, int(port), listener.secret, place))
        thread.start()
        deadline = time.monotonic() + 5.0
        while thread.is_alive() and time.monotonic() < deadline:
            listener.wait(0.05)
        thread.join()
    assert listener.found == {}
    assert listener.twice is None
    for host in listener.visitors:
        host.close()


def said(address, port, secret, place):
    channel = connect_channel(address, port, secret, 5.0)
    channel.send({"place": place})
    time.sleep(0.1)
    channel.close()


def test_agent_timeout_reports_unauthorized_connections(tmp_path, monkeypatch, closing):
    monkeypatch.setattr(start_agents, "START_TIMEOUT_S", 1.0)
    tool = ranks.write(
        tmp_path,
        """
        import socket, sys, time
        where = sys.argv[sys.argv.index("--connect") + 1].split(";")[0].split(",")
        for number in range(12):
            with socket.create_connection((where[0], int(where[1]))) as stranger:
                stranger.send(bytes(64))
        time.sleep(3)
        """,
    )
    start = LaunchTool("tool", sys.executable, str(tool))
    made = AgentConnections(start, ["localhost"])
    closing.callback(made.close)
    with pytest.raises(
        ValueError, match=r"no agent of localhost connected to .* within 1 s"
    ) as raised:
        made.start()
    strangers = r"12 connections that don't know the job's secret came from 127.0.0.1 (12)"
    assert f"HINT: {strangers}; end these programs, or use --launcher ssh" in str(raised.value)
    assert "firewall" not in str(raised.value)


def test_dropped_agent_reconnects(closing):
    """A launcher that is busy with unauthorized connections may drop one of its agents."""
    door = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    where = f"127.0.0.1,{door.getsockname()[1]}"
    result = []
    agent = threading.Thread(target=lambda: result.append(connect_to_launcher(where, SECRET)))
    agent.start()
    for said in (b"", bytes(32), bytes(64)):
        with door.accept()[0] as visitor:
            visitor.sendall(said)
    host = accept_channel(door.accept()[0], SECRET)
    agent.join(10.0)
    result[0].send({"place": 0})
    assert host.receive() == [({"place": 0}, b"")]
    host.close()
    result[0].close()


def test_agent_that_is_always_dropped_times_out(closing, monkeypatch):
    monkeypatch.setattr("paceline.launch.channel.CONNECT_PATIENCE_S", 0.5)
    door = closing.enter_context(socket.create_server(("127.0.0.1", 0)))
    agent = threading.Thread(target=drop_all, args=(door,), daemon=True)
    agent.start()
    begun = time.monotonic()
    with pytest.raises(LauncherNotFoundError) as raised:
        connect_to_launcher(f"127.0.0.1,{door.getsockname()[1]}", SECRET)
    assert 0.4 < time.monotonic() - begun < 3.0
    assert raised.value.dropped


def drop_all(door):
    while True:
        try:
            door.accept()[0].close()
        except OSError:
            return


def test_agent_fails_immediately_if_connection_is_refused():
    port = ranks.free_port()
    begun = time.monotonic()
    with pytest.raises(LauncherNotFoundError, match=r"127\.0\.0\.1: Connection refused") as raised:
        connect_to_launcher(f"127.0.0.1,{port};127.0.0.2,{port}", SECRET)
    assert time.monotonic() - begun < 3.0
    assert not raised.value.dropped
    assert set(raised.value.tried) == {"127.0.0.1", "127.0.0.2"}


def test_launcher_listens_only_on_addresses_towards_nodes(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    assert addresses_towards(["localhost", f"me@{socket.gethostname()}"]) == ["127.0.0.1"]
    assert addresses_towards(["localhost", "no-such-host.invalid"]) == []
    assert addresses_towards(["localhost", "x" * 300]) == []  # too long for a host name
    elsewhere = {"far1": "192.0.2.1", "far2": "192.0.2.2", "own": "127.0.0.1"}
    known = socket.getaddrinfo

    def resolved(name, *more, **options):
        return known(elsewhere.get(name, name), *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    if network_links():
        (address,) = addresses_towards(["far1", "own", "far2"])
        assert address in {link.address for link in network_links()}
    monkeypatch.setattr(start_agents, "RESOLVE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: time.sleep(0.5))
    begun = time.monotonic()
    assert addresses_towards(["far1", "far2"]) == []
    assert time.monotonic() - begun < 0.4


def test_launcher_listens_on_interfaces_set_by_user(monkeypatch):
    found = [Link("ib0", "127.0.0.2"), Link("ib1", "127.0.0.3"), Link("eth0", "127.0.0.4")]
    monkeypatch.setattr(start_agents, "network_links", lambda: found)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib")
    assert addresses_towards(["no-such-host.invalid"]) == ["127.0.0.2", "127.0.0.3"]
    with AgentListener(["no-such-host.invalid"]) as listener:
        pairs = [pair.split(",") for pair in listener.where.split(";")]
        assert [address for address, _ in pairs] == ["127.0.0.2", "127.0.0.3"]
        port = int(pairs[0][1])
        socket.create_connection(("127.0.0.2", port), 5.0).close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.4", port), 5.0)
