"""The negotiation without processes: ranks meet in one thread, or in threads over shared memory."""

import random
import threading
import time

import pytest

from paceline.comm.hosts import schedules
from paceline.compat.horovod.core.coordinator import Coordinator
from paceline.compat.horovod.core.errors import HorovodInternalError
from paceline.compat.horovod.core.negotiation import Negotiator
from paceline.compat.horovod.core.notices import Notices, describe_stall
from paceline.compat.horovod.core.requests import Kind, Operation, ReduceOp, Request
from paceline.compat.horovod.environment import HorovodSettings


def request(name, shape=(3,), **more):
    return Request(name, Kind.ALLREDUCE, (tuple(shape),), ("float32",), **more)


def negotiators(size, capacity=100):
    return [Negotiator(rank, range(size), capacity) for rank in range(size)]


def meet(every):
    """Run one meeting; return the decision, and whether messages were exchanged."""
    vectors = [one.vector() for one in every]
    smallest = bytearray(min(column) for column in zip(*vectors, strict=True))
    messages = None if smallest[0] else [one.message() for one in every]
    decisions = [one.decide(smallest, messages) for one in every]
    assert all(one == decisions[0] for one in decisions[1:])  # the same on all ranks
    return decisions[0], messages is not None


def ready(every):
    return [one.name for one in meet(every)[0].ready]


def test_second_step_needs_no_messages():
    every = negotiators(3)
    for step in range(3):
        for one in every:
            for name in "abc":
                one.submit(request(name))
        decision, had_messages = meet(every)
        assert [one.name for one in decision.ready] == ["a", "b", "c"]
        assert had_messages == (step == 0)


def test_operation_is_ready_when_the_last_rank_has_submitted_it():
    every = negotiators(2)
    every[0].submit(request("a"))
    every[1].submit(request("b"))
    assert ready(every) == []
    every[0].submit(request("b"))
    assert ready(every) == ["b"]
    every[1].submit(request("a"))
    assert ready(every) == ["a"]
    assert not any(one.pending or one.table for one in every)


@pytest.mark.parametrize("capacity", [0, 1, 3, 100])
def test_any_order_and_any_subset_of_submissions(capacity):
    """With caches that are too small, and names whose shape changes."""
    draw = random.Random(0)
    every = negotiators(4, capacity)
    for step in range(30):
        shapes = {f"op {at}": (draw.choice([3, 3, 3, 5]),) for at in range(6)}
        waiting = [draw.sample(sorted(shapes), 6) for _ in every]
        executed = []
        for _ in range(200):
            for one, names in zip(every, waiting, strict=True):
                for _ in range(draw.randrange(3)):
                    if names:
                        name = names.pop()
                        one.submit(request(name, shapes[name], is_named=name != "op 0"))
            decision, _ = meet(every)
            assert not decision.errors
            executed += [one.name for one in decision.ready]
            if len(executed) == 6:
                break
        assert sorted(executed) == sorted(shapes), step


def test_mismatch_of_an_operation_that_is_in_the_cache_on_some_ranks():
    every = negotiators(3)
    for one in every:
        one.submit(request("x"))
    assert ready(every) == ["x"]
    for rank, one in enumerate(every):
        one.submit(request("x", (3 + (rank == 2),)))
    assert ready(every) == []  # rank 2 has announced another shape, and the cache forgets x
    decision, _ = meet(every)
    assert "ranks 0-1 have [3], rank 2 has [4]" in decision.errors["x"]
    for one in every:
        one.submit(request("x"))
    assert ready(every) == ["x"]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"op": ReduceOp.MAX}, "mismatched reductions: ranks 0-1 have Sum, rank 2 has Max"),
        ({"prescale": 2.0}, "mismatched scale factors"),
        ({"device": "cuda"}, "mismatched devices"),
    ],
)
def test_mismatches(more, text):
    every = negotiators(3)
    for rank, one in enumerate(every):
        one.submit(request("x", **(more if rank == 2 else {})))
    assert text in meet(every)[0].errors["x"]


def test_cache_forgets_the_operation_that_was_used_longest_ago():
    every = negotiators(2, capacity=2)

    def had_messages(name):
        for one in every:
            one.submit(request(name))
        decision, exchanged = meet(every)
        assert [one.name for one in decision.ready] == [name]
        return exchanged

    assert [had_messages(name) for name in "abacab"] == [True, True, False, True, False, True]


def test_joined_ranks_need_not_submit():
    every = negotiators(3)
    for one in every[:2]:
        one.submit(request("x"))
    every[2].wants_join = True
    assert ready(every) == ["x"]  # new, and from the cache
    for one in every[:2]:
        one.submit(request("x"))
    assert ready(every) == ["x"]
    every[0].wants_join = every[1].wants_join = True
    assert meet(every)[0].last_joined == 1
    for one in every:
        one.submit(request("x"))
    assert ready(every) == ["x"]


def test_rank_joins_after_its_own_operations():
    every = negotiators(2)
    every[0].submit(request("x"))
    every[0].wants_join = every[1].wants_join = True
    decision, _ = meet(every)
    assert decision.last_joined is None
    assert [one.name for one in decision.ready] == ["x"]
    assert meet(every)[0].last_joined == 0


def test_stall_names_at_most_some_operations():
    names = [f"op {at:02}" for at in range(20)]
    text = describe_stall(names, {0: names, 1: []}, 60)
    assert "'op 00' by rank 0, not by rank 1" in text
    assert "and 12 more" in text


# Messages between hosts


@pytest.mark.parametrize("size", [2, 3, 8, 16, 17, 64])
def test_messages_of_a_rank_in_a_meeting(size):
    """A meeting after the first step is one all-reduce of the vector; 150 operations here."""
    limit = 2 * max((size - 1).bit_length(), 1)
    link = schedules.LinkModel()
    name = schedules.cheapest_algorithm(1 + 150, size, link)
    for me in range(size):
        steps = list(schedules.all_reduce(name, 1 + 150, me, size))
        sent = sum(len([m for m in step.sends if m[2]]) for step in steps)
        received = sum(len([m for m in step.receives if m[2]]) for step in steps)
        assert max(sent, received) <= limit, (name, me, sent)


# Threads


class ThreadMeetings:
    """Meetings of ranks that are threads of this process."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size)
        self.given = [None] * size
        self.counts = {"minimum": 0, "gather": 0}

    def of(self, rank):
        return RankMeetings(self, rank)


class RankMeetings:
    def __init__(self, shared, rank):
        self.shared, self.rank = shared, rank

    def _exchange(self, value, kind):
        self.shared.given[self.rank] = value
        if self.shared.barrier.wait() == 0:
            self.shared.counts[kind] += 1
        found = list(self.shared.given)
        self.shared.barrier.wait()
        return found

    def minimum(self, vector):
        found = self._exchange(bytes(vector), "minimum")
        vector[:] = bytes(min(column) for column in zip(*found, strict=True))

    def gather(self, message):
        return self._exchange(message, "gather")

    def limit(self, seconds):
        pass

    def abort(self):
        self.shared.barrier.abort()


class Recorder:
    """Executes nothing, and notes what was ready."""

    def __init__(self):
        self.ready, self.exchange = [], self

    def __call__(self, ready):
        self.ready += [one.name for one, _ in ready]

    def prepare(self, operations):
        pass

    def follow(self, operations):
        pass

    def all_left(self, since_ns):
        pass

    def begin_wait(self):
        pass

    def end_wait(self):
        pass


def coordinators(size, **settings):
    meetings = ThreadMeetings(size)
    executors = [Recorder() for _ in range(size)]
    made = [
        Coordinator(
            rank,
            range(size),
            meetings.of(rank),
            executors[rank],
            HorovodSettings(**settings),
            Notices(None, rank, range(size)),
        )
        for rank in range(size)
    ]
    return made, executors, meetings


def together(functions):
    threads = [threading.Thread(target=one, daemon=True) for one in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads), "a rank waits for ever"


@pytest.mark.parametrize("waits", [True, False])
def test_threads_that_submit_in_any_order(waits):
    """Each rank submits in an order of its own and waits in another, from two threads."""
    size, count = 3, 40
    made, executors, _ = coordinators(size)

    def rank_thread(rank, half):
        draw = random.Random(10 * rank + half)
        names = [f"{half}/{at}" for at in range(count)]
        for step in range(5):
            operations = [Operation(request(name)) for name in draw.sample(names, count)]
            for one in operations:
                made[rank].submit([one])
                if waits and draw.random() < 0.1:
                    time.sleep(0)
            for one in draw.sample(operations, count) if waits else operations:
                if waits:
                    made[rank].wait([one])
                while not one.is_done:
                    time.sleep(0.001)
            assert step >= 0

    # A wait for one name in the middle of submissions could deadlock by the script's own fault;
    # here all are submitted before the first wait.
    together([lambda r=r, h=h: rank_thread(r, h) for r in range(size) for h in range(2)])
    assert executors[0].ready == executors[1].ready == executors[2].ready
    assert len(executors[0].ready) == 5 * 2 * count
    together([one.close for one in made])


def test_idle_ranks_do_not_meet():
    made, _, meetings = coordinators(2)
    operations = [Operation(request("x")) for _ in made]
    for one, operation in zip(made, operations, strict=True):
        one.submit([operation])
    together([lambda a=a, b=b: a.wait([b]) for a, b in zip(made, operations, strict=True)])
    before = dict(meetings.counts)
    time.sleep(0.1)
    assert meetings.counts == before
    together([one.close for one in made])


def test_closed_coordinator_fails_operations_of_others():
    made, _, _ = coordinators(2)
    failed = []

    def other():
        operation = Operation(request("x"))
        made[1].submit([operation])
        try:
            made[1].wait([operation])
        except HorovodInternalError as error:
            failed.append(str(error))

    together([made[0].close, other])
    assert "rank 0 has called hvd.shutdown() or ended" in failed[0]
    with pytest.raises(HorovodInternalError, match="has been shut down"):
        made[1].submit([Operation(request("y"))])
