"""Proof that the connections of a gloo group lead to ranks of the job."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from paceline.comm.members import membership


class Spoiled:
    """A store in which rank 1 finds another key: its connection is of another process."""

    def __init__(self, store, rank):
        self.store, self.rank = store, rank

    def __getattr__(self, name):
        return getattr(self.store, name)

    def get(self, key):
        value = self.store.get(key)
        return b"wrong" if self.rank == 1 and key == "membership" else value


def on_two_ranks(call):
    """Return the results of ``call(store, rank)`` on both ranks; exceptions are results."""
    store, results = dist.HashStore(), [None, None]

    def run(rank):
        try:
            results[rank] = call(store, rank)
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    return results


def make(store, rank):
    return dist.ProcessGroupGloo(store, rank, 2, timeout=timedelta(seconds=10))


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("PACELINE_STORE_PORT", "1")


def test_ranks_prove_membership():
    def prove(store, rank):
        group = make(store, rank)
        membership.prove(group, store, None)
        membership.prove(group, dist.PrefixStore("next", store), None)
        return group

    assert all(isinstance(one, dist.ProcessGroupGloo) for one in on_two_ranks(prove))


def test_wrong_proof_names_the_rank():
    def prove(store, rank):
        membership.prove(make(store, rank), Spoiled(store, rank), None)

    first, second = on_two_ranks(prove)
    assert "another process has taken the place of rank 1 at rank 0" in str(first)
    assert "another process has taken the place of rank 0 at rank 1" in str(second)


def test_silent_process_in_place_of_a_rank():
    def prove(store, rank):
        group = make(store, rank)
        if rank == 0:
            membership.prove(group, store, None)
        return group

    limits = (timedelta(seconds=0.2),)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "PROOF_TIMEOUTS", limits)
        first, _ = on_two_ranks(prove)
    assert "rank 0: no proof of membership" in str(first)


def test_gloo_connects_again_where_a_place_was_taken(monkeypatch, capfd):
    missing_proof, attempts = membership._missing_proof, []

    def fail_once(group, store, timeout):
        if group.rank() == 1:
            attempts.append(timeout)
        spoiled = store if len(attempts) > 1 else Spoiled(store, group.rank())
        return missing_proof(group, spoiled, timeout)

    monkeypatch.setattr(membership, "_missing_proof", fail_once)
    groups = on_two_ranks(
        lambda store, rank: membership.connect_gloo(lambda own: make(own, rank), store, rank, 2)
    )
    assert all(isinstance(one, dist.ProcessGroupGloo) for one in groups), groups
    assert len(attempts) == 2
    said = capfd.readouterr().err
    assert said.count("paceline: gloo connects again: another process has taken the place") == 1
    monkeypatch.setattr(membership, "_missing_proof", lambda *_: "never")
    errors = on_two_ranks(
        lambda store, rank: membership.connect_gloo(lambda own: make(own, rank), store, rank, 2)
    )
    assert [str(one) for one in errors] == ["gloo can't connect the ranks of this job: never"] * 2
