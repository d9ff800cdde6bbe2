"""The launcher's view of another host, from the messages of that host's agent."""

import socket
import time

import pytest
import ranks

from paceline.launch.channel import Channel
from paceline.launch.remote.remote_host import RemoteHost

STARTED = {"PACELINE_STARTED_NS": "0"}


class Agent:
    """The agent's end of the connection, controlled by the test."""

    def __init__(self, connection):
        self.channel = Channel(connection.fileno(), connection.fileno())
        self.heard = []

    def hears(self, about):
        """Return the next message that contains ``about``; discard the messages before it."""
        while True:
            while self.heard:
                message = self.heard.pop(0)
                if about in message:
                    return message
            self.heard = [message for message, _ in self.channel.receive()]

    def answers(self, ping, idle_s):
        progress = {
            "idle_s": idle_s,
            "longest_idle_s": 0.0,
            "has_stepped": True,
            "busy_ranks": [],
        }
        self.channel.send({"pong": ping["ping"], "at": time.monotonic(), "progress": progress})


@pytest.fixture
def both():
    ours, others = socket.socketpair()
    agent = Agent(others)
    there = RemoteHost("host1", Channel(ours.fileno(), ours.fileno()), lambda: None)
    yield there, agent
    there.close()
    agent.channel.close()
    ours.detach()
    others.detach()


def test_idle_time_of_hung_attempt_is_reset_at_restart(both):
    there, agent = both
    agent.answers(agent.hears("ping"), 30.0)
    ranks.wait_until(lambda: there.progress().idle_s >= 30.0, 10)
    old = agent.hears("ping")
    there.start(0, 0, STARTED)
    assert there.progress().idle_s < 20.0
    agent.hears("start")
    agent.answers(old, 31.0)  # answers a ping from before the attempt
    agent.channel.send({"fits": True})
    there.wait_for_answer("fits", 10)  # the message before it was received, too
    assert there.progress().idle_s < 20.0
    agent.answers(agent.hears("ping"), 25.0)
    ranks.wait_until(lambda: there.progress().idle_s >= 25.0, 10)
