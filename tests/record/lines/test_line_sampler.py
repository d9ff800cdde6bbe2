"""The line sampler on functions with known shares: what is judged is order and coverage."""

import gc
import random
import sys
import threading
import time
from collections import Counter

import pytest
import torch

from paceline.record.experiments.lines.rank_profile import (
    MEAN_INTERVAL_S,
    ExecutionCounter,
    LineSampler,
)

MATRIX = torch.ones(256, 256)
SECONDS = 3.0


def python(rounds):
    total = 0
    for i in range(rounds):
        total += i
    return total


def holds_the_lock(count):
    return sum(range(count))


def sleeps(seconds):
    time.sleep(seconds)


def operator(rounds):
    for _ in range(rounds):
        torch.mm(MATRIX, MATRIX)


def shares(parts, seconds=SECONDS):
    """Return the measured and the sampled share of each function, and the sampled coverage."""
    took, sampled = Counter(), Counter()

    def take(at, late, described, ran, delayed, garbage):
        function = described[0][0][2] if described[0] else ""
        sampled[function] += MEAN_INTERVAL_S + late / 1e9

    sampler = LineSampler(threading.get_ident(), take)
    sampler.start()
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        for function, argument in parts:
            function(argument)
            took[function.__name__] += time.perf_counter() - start
            start = time.perf_counter()
    sampler.stop()
    names = [function.__name__ for function, _ in parts]
    whole = sum(took.values())
    found = {name: (took[name] / whole, sampled[name] / sum(sampled.values())) for name in names}
    return found, sum(sampled.values()) / whole


def test_sampled_shares_are_those_of_the_functions():
    found, coverage = shares(
        [(python, 60_000), (holds_the_lock, 1_500_000), (sleeps, 0.012), (operator, 5)]
    )
    assert 0.7 < coverage < 1.4
    for name, (measured, sampled) in found.items():
        assert sampled == pytest.approx(measured, abs=0.2), (name, found)
    longest = max(found, key=lambda name: found[name][0])
    assert found[longest][1] > 0.6 * max(sampled for _, sampled in found.values())


def test_call_that_holds_the_lock_gets_its_own_time_and_not_that_before_it():
    found, _ = shares([(holds_the_lock, 800_000), (sleeps, 0.02)])
    for name, (measured, sampled) in found.items():
        assert sampled == pytest.approx(measured, abs=0.2), (name, found)


def test_python_code_before_an_operator_is_not_booked_to_the_operator():
    """With the usual switch interval of 5 ms the operator gets nearly all samples."""
    found, _ = shares([(python, 5_000), (operator, 1)])
    measured, sampled = found["python"]
    assert sampled > 0.35 * measured, found


def test_sampler_leaves_the_interpreter_as_it_was():
    before = (sys.getswitchinterval(), list(gc.callbacks), random.getstate())
    sampler = LineSampler(threading.get_ident(), lambda *sample: None)
    sampler.start()
    python(200_000)
    sampler.stop()
    assert (sys.getswitchinterval(), list(gc.callbacks), random.getstate()) == before


def test_garbage_collection_is_measured():
    collected = []

    def take(at, late, described, ran, delayed, garbage):
        collected.append(garbage)

    kept = [[i] for i in range(200_000)]
    sampler = LineSampler(threading.get_ident(), take)
    sampler.start()
    end = time.perf_counter() + 30
    while sum(collected) < 0.3e9 and time.perf_counter() < end:
        gc.collect()
    sampler.stop()
    assert len(kept) == 200_000
    assert sum(collected) >= 0.3e9


def loop(count):
    total = 0
    for i in range(count):
        total += i
    return total


def test_executions_of_chosen_functions_are_counted():
    counter = ExecutionCounter({(__file__, "loop")})
    counter.start()
    loop(50)
    python(50)
    counter.stop()
    loop(10)
    body = loop.__code__.co_firstlineno + 3
    assert counter.counts[(__file__, body, "loop")] == 50
    assert {function for _, _, function in counter.counts} == {"loop"}
    assert sys.gettrace() is None


def test_counting_ends_after_a_limit(monkeypatch):
    monkeypatch.setattr("paceline.record.experiments.lines.rank_profile.MAX_COUNTED", 100)
    counter = ExecutionCounter({(__file__, "loop")})
    counter.start()
    loop(10_000)
    assert sum(counter.counts.values()) == 100
    assert sys.gettrace() is None
