"""Parts of a rank that experiments switch off and on: garbage collector, threads, float64."""

import gc
import os
import threading
import time
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import ranks
import torch

from paceline.analyze.diagnosis.descriptions import FirstRun
from paceline.analyze.diagnosis.ladder_results import hypotheses
from paceline.analyze.diagnosis.rungs import EndedError, measure_switched
from paceline.record.experiments import switches
from paceline.record.experiments.rung import NO_BROADCASTS, NO_COLLECTION, THREADS_PAUSED, Rung
from paceline.record.experiments.switches import (
    BufferBroadcasts,
    GarbageCollector,
    ScriptThreads,
)
from paceline.record.ring.states import State


@pytest.fixture
def collector(monkeypatch):
    monkeypatch.setattr(gc, "collect", gc.collect)  # restored after the test
    monkeypatch.setattr(os, "register_at_fork", lambda **_: None)
    switch = GarbageCollector()
    switch.install()
    yield switch
    switch.on()
    gc.callbacks.pop()


def test_garbage_collector_is_off_and_on_again(collector):
    switch = collector
    collected = []
    gc.callbacks.insert(0, lambda phase, _: collected.append(phase))
    try:
        switch.off()
        assert not gc.isenabled()
        assert gc.collect() == 0
        assert gc.collect(generation=1) == 0
        assert not collected
        switch.on()
        assert gc.isenabled()
        assert collected  # garbage of the steps without it is not left to the next ones
    finally:
        gc.callbacks.pop(0)


def test_disabled_garbage_collector_remains_disabled(collector):
    gc.disable()
    try:
        collector.off()
        collector.on()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_collections_are_measured_with_the_line_that_calls_them(collector, monkeypatch):
    monkeypatch.setattr(switches, "MIN_LOCATED_S", 0.0)
    collector.begin()
    gc.collect()
    line = test_collections_are_measured_with_the_line_that_calls_them.__code__.co_firstlineno + 3
    found = collector.results()["collecting"]
    assert found["count"] >= 1
    assert found["seconds"] > 0
    assert (found["file"][-16:], found["line"]) == ("test_switches.py", line)
    collector.begin()
    assert collector.results() == {}


class Counter:
    """Script thread that counts as fast as it can."""

    def __init__(self):
        self.count, self.stopped = 0, False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        while not self.stopped:
            self.count += 1

    def runs(self):
        before = self.count
        time.sleep(0.05)
        return self.count > before


@pytest.fixture
def threads():
    switch = ScriptThreads(threading.get_ident)
    switch.install()
    counter = Counter()
    ranks.wait_until(lambda: counter.count)
    yield switch, counter
    threading.settrace(None)
    counter.stopped = True
    switch.on()
    counter.thread.join()


@pytest.fixture
def training_thread():
    return threading.get_ident()


def test_other_threads_are_paused_and_continue(threads, training_thread):
    switch, counter = threads
    switch._training_thread = lambda: training_thread
    switch.after_step()
    switch.off()
    ranks.wait_until(lambda: switch.results()["paused"])
    assert not counter.runs()
    switch.on()
    ranks.wait_until(counter.runs)
    assert switch.results() == {"paused": 1, "gave_up": False}


def test_paused_threads_continue_if_the_training_waits_for_them(
    threads, training_thread, monkeypatch
):
    monkeypatch.setattr(switches, "MIN_PATIENCE_S", 0.05)
    switch, counter = threads
    switch._training_thread = lambda: training_thread
    switch.after_step()
    switch.off()
    ranks.wait_until(lambda: switch.results()["gave_up"])  # no step ends
    ranks.wait_until(counter.runs)
    switch.on()
    switch.off()
    assert counter.runs()  # the experiment is void


def test_training_thread_and_threads_of_libraries_are_not_paused(threads):
    switch, counter = threads
    switch._training_thread = lambda: counter.thread.ident
    switch.off()
    assert counter.runs()
    assert switch.results()["paused"] == 0


def test_broadcasts_of_buffers_are_off_and_on_again():
    class Model:
        def __init__(self, broadcasts, buffers):
            self.broadcast_buffers, self.modules_buffers = broadcasts, buffers

    models = [Model(True, [1]), Model(False, [1]), Model(True, [])]
    gone = weakref.ref(Model(True, [1]))
    switch = BufferBroadcasts([gone, *map(weakref.ref, models)])
    switch.off()
    assert [one.broadcast_buffers for one in models] == [False, False, True]
    switch.on()
    assert [one.broadcast_buffers for one in models] == [True, False, True]
    assert switch.results() == {"broadcasting": 1}


def test_script_that_computes_in_float64_computes_in_float32():
    class Tensor:
        float = torch.Tensor.float

    names = ("tensor", "as_tensor", "asarray", "from_numpy", "set_default_dtype")
    module = SimpleNamespace(float32=torch.float32, float64=torch.float64, Tensor=Tensor)
    module.nn = SimpleNamespace(Module=type("Module", (), {"float": torch.nn.Module.float}))
    vars(module).update({name: getattr(torch, name) for name in names})
    switches.use_single_precision(module)
    assert module.double == module.float64 == torch.float32
    assert module.from_numpy(np.zeros(2)).dtype == torch.float32
    assert module.tensor([1.0, 2.0], dtype=module.float64).dtype == torch.float32
    assert module.as_tensor(np.arange(3)).dtype == torch.int64
    leaf = module.tensor(np.zeros(2), requires_grad=True)
    assert (leaf.dtype, leaf.requires_grad, leaf.is_leaf) == (torch.float32, True, True)
    module.set_default_dtype(torch.float64)
    assert torch.get_default_dtype() == torch.float32
    assert Tensor.double is Tensor.float


@pytest.mark.parametrize("steps", [3, 4, 7, 10, 33, 64, 400])
def test_switched_blocks_have_as_many_steps_with_the_part_as_without(steps):
    rung = Rung(5, steps, ("everything", NO_COLLECTION))
    pairs = rung.switched_pairs(NO_COLLECTION)
    first = rung.first_measured_step(NO_COLLECTION)
    for on, off in pairs:
        assert on
        assert off
        assert not any(map(rung.is_off, on))
        assert all(map(rung.is_off, off))
    every = [step for pair in pairs for steps in pair for step in steps]
    assert len(every) == len(set(every))
    assert first <= min(every)
    assert max(every) < first + steps
    assert not any(rung.is_off(step) for step in range(first - rung.warm, first))


def recorded(rung, took, pauses=()):
    """Return a run of one rank; ``took`` is the duration of a step in ns by its number."""
    count = rung.first_measured_step(rung.phases[-1]) + rung.steps
    dtype = [("start", "<i8"), ("end", "<i8"), ("step", "<i8"), ("amount", "<i8")]
    steps, at = np.zeros(count, dtype), 0
    for step in range(count):
        steps[step] = (at, at + took(step), step, 8)
        at += took(step)
    events = {State.STEP: steps, State.VALIDATION: steps[list(pauses)]}
    empty = np.zeros(0, dtype)

    def events_in(*states):
        return np.concatenate([events.get(state, empty) for state in states])

    record = SimpleNamespace(events_in=events_in, meta={})
    return SimpleNamespace(records=[record])


def test_saving_does_not_depend_on_a_machine_that_becomes_slower():
    rung = Rung(2, 32, (NO_COLLECTION,))
    run = recorded(rung, lambda step: (60 if rung.is_off(step) else 100) * (1000 + 20 * step))
    found = measure_switched(run, rung, NO_COLLECTION)
    assert sum(found.savings) / len(found.savings) == pytest.approx(0.4, abs=0.01)
    assert len(found.savings) == 4
    assert found.without.step_s / found.reference.step_s == pytest.approx(0.6, abs=0.02)


def test_steps_with_validation_do_not_count_as_the_cost_of_a_part():
    rung, pauses = Rung(2, 32, (NO_COLLECTION,)), (3, 12)
    run = recorded(rung, lambda step: 9000 if step in pauses else 1000, pauses)
    assert measure_switched(run, rung, NO_COLLECTION).savings == [0.0, 0.0]


def test_record_without_the_steps_of_a_phase_is_refused():
    rung = Rung(2, 32, (NO_COLLECTION,))
    run = recorded(rung, lambda step: 1000)
    with pytest.raises(EndedError, match="the script ended after 34 steps"):
        measure_switched(run, Rung(2, 64, (NO_COLLECTION,)), NO_COLLECTION)


def first_run(**used):
    used = {"seconds": 10.0, "faults": 1000.0, "system": 1.0} | used
    return {"used": {"everything": used}, "threads": 1, "fault_s": 2e-6, "parameters": {}}


def test_first_run_decides_which_hypotheses_are_tested():
    assert hypotheses(FirstRun([first_run(), first_run()])) == []
    collecting = first_run(collecting={"seconds": 4.0, "count": 10})
    (found,) = hypotheses(FirstRun([first_run(), collecting]))
    assert (found.experiment.phase, found.expected) == (NO_COLLECTION, 0.4)
    assert not found.experiment.is_separate
    busy = first_run(others={"seconds": 9.0, "name": "monitor"}, faults=5e5) | {
        "parameters": {"float64": 8},
        "product_s": {"float32": 1.0, "float64": 2.0},
    }
    found = hypotheses(FirstRun([busy, busy]))
    assert [one.experiment.phase for one in found] == [
        THREADS_PAUSED,
        "float32",
    ]  # two separate runs
    many_faults = first_run(faults=5e5)
    (found,) = hypotheses(FirstRun([many_faults]))
    assert found.experiment.settings == {"keep-memory": True}
    assert found.expected == pytest.approx(0.1)


def test_broadcasts_of_buffers_are_tested_if_the_first_run_has_many():
    assert hypotheses(FirstRun([first_run()], 0.02)) == []
    (found,) = hypotheses(FirstRun([first_run()], 0.2))
    assert (found.experiment.phase, found.expected) == (NO_BROADCASTS, 0.2)
    assert not found.experiment.is_separate
    used = {"broadcasting": 0}
    run = SimpleNamespace(records=[SimpleNamespace(meta={"rung": {"used": {NO_BROADCASTS: used}}})])
    assert "the script broadcasts the buffers itself" in found.why_void(run)
    used["broadcasting"] = 1
    assert found.why_void(run) == ""


def test_hypothesis_that_could_not_be_tested_says_why():
    (found,) = hypotheses(FirstRun([first_run(others={"seconds": 9.0})]))
    used = {"paused": 1, "gave_up": True}
    run = SimpleNamespace(
        records=[SimpleNamespace(meta={"rung": {"used": {THREADS_PAUSED: used}}})]
    )
    assert "the training waits for another Python thread" in found.why_void(run)
    used |= {"paused": 0, "gave_up": False}
    assert "run no code of the script" in found.why_void(run)
    used["paused"] = 1
    assert found.why_void(run) == ""
    (kept,) = hypotheses(FirstRun([first_run(faults=5e5)]))
    run.records[0].meta["knobs"] = {"keep-memory": {"set": False, "why_not": "no mallopt"}}
    assert kept.why_void(run) == "keep-memory has no effect: no mallopt"
