"""Ranks that do not exit: each is reported once, with what is known about it."""

import socket
import time
from types import SimpleNamespace

import pytest
import ranks

from paceline.launch import supervise
from paceline.launch.guard.guarded_job import GuardedJob
from paceline.launch.layout import Seat
from paceline.launch.monitor.failures import RankStatus
from paceline.launch.ranks import process_groups
from paceline.launch.supervise import ElasticAgent


class Output:
    def __init__(self):
        self.said = []

    def say(self, text):
        self.said.append(text)

    def drain(self, all_of_it=False):
        pass


class UnresponsiveHost:
    """A host whose ranks do not end, whatever signal they get."""

    def __init__(self):
        self.signals = []

    def signal(self, rank, kind):
        self.signals.append((rank, int(kind)))

    def take_exits(self):
        return iter(())

    def wait(self, seconds):
        time.sleep(0.001)


@pytest.fixture
def agent(monkeypatch):
    """Return the agent of two ranks on one host; rank 0 has exited."""
    monkeypatch.setattr(supervise, "EXIT_TIMEOUT_S", 0.0)
    monkeypatch.setattr(process_groups, "KILL_TIMEOUT_S", 0.05)
    agent = object.__new__(ElasticAgent)
    agent.output, agent._hosts = Output(), [UnresponsiveHost()]
    agent._seats = [Seat(0, 0, 2), Seat(0, 1, 2)]
    agent.ranks = [RankStatus(0, exit_code=0), RankStatus(1)]
    agent.guarded = GuardedJob(None)
    return agent


def test_finished_rank_that_does_not_exit_is_reported_and_killed_once(agent):
    agent.ranks[1].finished_code, agent.ranks[1].finished_at = 0, 1.0
    for _ in range(5):
        agent._end_unexited_ranks()
    (said,) = agent.output.said
    assert said.startswith("paceline: rank 1 finished its script but did not exit within 0 s")
    assert "its exit handlers have run" in said
    assert "destructors (__del__) may not have run" in said
    assert "work is done" not in said
    assert agent._hosts[0].signals == [(1, 9)]


def test_the_name_of_the_host_is_not_looked_up(agent, monkeypatch):
    def lookup(*_):
        raise AssertionError("this may wait for a name server")

    monkeypatch.setattr(socket, "getfqdn", lookup)
    agent._record_worker_events(None)
    with agent.record_duration("RENDEZVOUS"):
        pass


def test_job_ends_although_a_finished_rank_can_not_be_killed(agent, monkeypatch):
    """Such a rank waits for a device or file system that does not answer (state D)."""
    for step in ("_collect_exits", "_poll_hosts", "_readmit_hosts", "_forward"):
        monkeypatch.setattr(agent, step, lambda: None)
    agent.bindings = agent.end = None
    agent.interrupt, agent._returned_hosts = SimpleNamespace(check=lambda: None), []
    rank = agent.ranks[1]
    rank.finished_code, rank.finished_at = 0, time.monotonic()
    states = [agent._monitor_workers(None).state]
    ranks.wait_until(
        lambda: states.append(agent._monitor_workers(None).state) or states[-1] != states[0]
    )
    assert (states[0].name, states[-1].name) == ("HEALTHY", "SUCCEEDED")
    assert agent._hosts[0].signals == [(1, 9)]


def test_rank_that_does_not_end_after_sigkill_is_awaited_once(agent, monkeypatch):
    """Its process is printed once, by ``process_groups``, when the job ends."""
    agent.end_ranks(grace=0.0)
    monkeypatch.setattr(process_groups, "KILL_TIMEOUT_S", 3600.0)
    agent.end_ranks(grace=0.0)  # at the end of the job: does not wait again
    assert agent.output.said == []
    assert (1, 9) in agent._hosts[0].signals
