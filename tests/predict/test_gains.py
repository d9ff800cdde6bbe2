"""Predicted gains of remedies, each checked against a calculation by hand."""

import dataclasses
import re
from types import SimpleNamespace

import pytest
from rungs import STEP, rung

from paceline.analyze.diagnosis.causes import Cause
from paceline.analyze.diagnosis.evidence import Evidence
from paceline.analyze.diagnosis.exchanged_calls import GradientSync
from paceline.analyze.diagnosis.rungs import Interval, waterfall
from paceline.analyze.diagnosis.table import CAUSES
from paceline.predict.gains import GAINS, HANDOVER_SHARE
from paceline.predict.remedies import gain_after, gain_of, remedies


def evidence(cached=STEP, alone=STEP, cores=4, gradients=None, loader=None, facts=None, **rungs):
    """Return figures of two ranks on one host; ``rungs`` replace those measured by default."""
    climbed = {
        "alone": rung(alone, ranks=1), "silent": rung(alone),
        "cached": rung(cached, process=0.5),
        "everything": rung(), **rungs,
    }  # fmt: skip
    fall = waterfall(*(climbed[name] for name in ("alone", "silent", "cached", "everything")))
    report = SimpleNamespace(
        losses=[], groups=[], hosts=["a", "a"], size=2, mesh={},
        states=[{"useful": 0.6, "starved": 0.0, "other": 0.0}] * 2,
    )  # fmt: skip
    return Evidence(
        fall, report, loader, 1, cores, 2, 10, climbed, facts or [{}, {}], gradients=gradients
    )


def cause(name="some", share=0.4, **more):
    return Cause(name, share, (share - 0.02, share + 0.02), "", more)


def loading(busy, workers=0):
    return {"ranks": 2, "batches": 20, "seconds": 2.0, "busy_s": busy, "workers": 2 * workers}


def test_loader_workers_overlap_waiting_with_training():
    # 60 of 100 ms are input. W workers share the 60 ms and overlap with 40 ms of training.
    found = GAINS["loader-workers"](evidence(0.04, 0.04, loader=loading(0.02)), cause())
    assert found.value == 3  # 60 / 3 is half of 40
    assert found.saves.mean == pytest.approx(0.6 - HANDOVER_SHARE, abs=0.01)
    assert found.saves.low < 0.6 - HANDOVER_SHARE < 0.59 < found.saves.high
    assert found.source == "a formula"
    # A step takes 43 ms instead of 100.
    assert gain_of(found.saves).mean == pytest.approx(1 / 0.43 - 1, abs=0.05)


def test_loader_workers_that_compute_need_free_cores():
    busy = loading(2.0)
    # One core per rank: training uses half of it (20 of 40 ms), loading needs 60 ms.
    full = GAINS["loader-workers"](evidence(0.04, 0.04, cores=2, loader=busy), cause())
    assert full.saves.mean == pytest.approx(0.2 - HANDOVER_SHARE, abs=0.01)
    free = GAINS["loader-workers"](evidence(0.04, 0.04, cores=8, loader=busy), cause())
    assert free.saves.mean == pytest.approx(0.6 - HANDOVER_SHARE, abs=0.01)


def test_more_loader_workers_are_proposed_if_too_few():
    found = GAINS["loader-workers"](evidence(0.04, 0.04, loader=loading(0.02, workers=2)), cause())
    assert found.value == 10  # each of two workers takes 200 ms; with 10 workers that is half of 40
    assert found.saves.mean == pytest.approx(0.6 - HANDOVER_SHARE, abs=0.01)


def test_accumulate_locally_leaves_one_synchronization():
    g = GradientSync(4, 4, 8, 1 << 20, 0, 0)
    found = GAINS["accumulate-locally"](evidence(gradients=g), cause(share=0.4))
    assert found.saves.mean == pytest.approx(0.3)
    assert (found.saves.low, found.saves.high) == pytest.approx((0.285, 0.315))
    once = dataclasses.replace(g, exchanging=1)
    assert GAINS["accumulate-locally"](evidence(gradients=once), cause()) is None


def test_threads_gain_uses_measured_value():
    found = GAINS["threads"](evidence(**{"one thread": rung(0.07)}), cause())
    assert found.value == 1
    assert found.saves.mean == pytest.approx(0.3, abs=0.01)
    assert GAINS["threads"](evidence(), cause()) is None


def test_keep_memory_saves_page_faults_and_frees():
    e = evidence(silent=rung(0.08, system=0.5))
    # 30 % of a step are first touches; the kernel takes 40 % in all (half of 80 of 100 ms).
    found = GAINS["keep-memory"](e, cause(share=0.3))
    assert (found.saves.mean, found.saves.low) == pytest.approx((0.35, 0.3), abs=0.001)
    assert found.saves.high == pytest.approx(0.4, abs=0.001)


def test_own_binding_off_only_if_script_set_binding():
    both = [{"mask": "1", "mask_at_start": "3"}] * 2
    assert GAINS["own-binding-off"](evidence(facts=both), cause()).saves.mean == 0.4
    launchers = [{"mask": "1", "mask_at_start": "1"}] * 2
    assert GAINS["own-binding-off"](evidence(facts=launchers), cause()) is None


def test_leave_host_out_gain_includes_lost_throughput():
    e = evidence()
    assert GAINS["leave-host-out"](e, cause()) is None
    e.report.hosts = ["a", "b"]
    # Half of the ranks with a step that is 60 % shorter: 1.25 times the throughput.
    found = GAINS["leave-host-out"](e, cause(share=0.6))
    assert gain_of(found.saves).mean == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("hosts", "saved"),
    [("aabb", 1 / 3), ("abab", 2 / 3), ("ab", 0.0), ("aaab", 1 / 3), ("aabbccdd", 1 / 7)],
)
def test_hierarchical_exchange_gain_by_host_layout(hosts, saved):
    """The exchange is 1.5 and 3 times as fast on two nodes of two ranks, 1.17 times on four."""
    e = evidence()
    e.report.hosts = list(hosts)
    found = GAINS["exchange"](e, cause("exchange-bandwidth", share=0.6))
    assert found.value == "paceline"
    assert found.saves.mean == pytest.approx(0.6 * saved)
    assert GAINS["exchange"](e, cause("exchange-latency")).saves is None  # needs a measurement
    already = evidence(facts=[{"exchange": "paceline"}] * 2)
    assert GAINS["exchange"](already, cause("exchange-bandwidth")) is None


def test_combined_gains_do_not_count_time_twice():
    half = gain_of(Interval(0.5, 0.45, 0.55))
    assert (half.mean, half.low) == pytest.approx((1.0, 0.8182), abs=1e-3)
    # A tenth of the step is a fifth when the step is half as long.
    tenth = gain_of(Interval(0.1, 0.1, 0.1))
    assert gain_after(tenth, 2.0).mean == pytest.approx(0.25)
    assert gain_after(tenth, 1.0).mean == pytest.approx(tenth.mean)


SCRIPT = """import torch
# loader = DataLoader(old)
loader = DataLoader(data, 4)
model = model.double()
"""


def test_remedies_include_script_line_and_list_knobs_first():
    e = evidence(0.04, 0.04, loader=loading(0.02))
    lines = [{"line": 7, "code": "loss.item()"}]
    causes = [
        cause("precision", 0.5),
        cause("input-waiting"),
        cause("synchronisation", 0.1, lines=lines),
    ]
    found = remedies(e, causes, SCRIPT, {})
    assert [one.knob for one in found] == ["loader-workers", "float32", "no-synchronisation"]
    workers, float32, none = found
    assert (workers.line, workers.code) == (3, "loader = DataLoader(data, 4)")
    assert workers.edit == "DataLoader(num_workers=3, persistent_workers=True)"
    assert (float32.line, float32.code) == (4, "model = model.double()")
    assert (none.line, none.code) == (7, "loss.item()")
    # A knob that is already set is not proposed again.
    assert remedies(e, causes, SCRIPT, {"loader-workers": 3})[0].knob == "float32"


# A call, an assignment or option, a command, or a verb in the imperative.
ACTION = re.compile(
    r"\w\(|\w=|--\w|\bpaceline [a-z]|^(call|do|double|evaluate|execute|end|give|measure|read|"
    r"reduce|remove|run|save|set|start|use)\b"
)


@pytest.mark.parametrize("name", CAUSES)
def test_every_cause_has_a_remedy_with_an_action_and_a_prediction(name):
    used = {"one thread": rung(0.07), "everything": rung(starting=0.4)}
    g, loader = GradientSync(4, 4, 8, 1 << 20, 0, 0), loading(0.02, workers=2)
    e = evidence(0.04, gradients=g, loader=loader, **used)
    found = remedies(e, [cause(name)], "", {})
    assert found
    assert all(ACTION.search(one.edit) for one in found), [one.edit for one in found]
    predicted = [one for one in found if one.gain is not None or one.settable]
    assert predicted == found  # an edit cannot be measured by --try


def test_script_without_a_loader_is_told_to_read_ahead():
    found = {one.knob: one for one in remedies(evidence(), [cause("input", 0.3)], "", {})}
    assert "persistent-workers" not in found
    # A step takes 70 ms instead of 100, and 3 ms to receive a batch.
    assert found["read-ahead"].gain.mean == pytest.approx(1 / 0.73 - 1, abs=0.01)
    with_loader = remedies(evidence(loader=loading(0.02)), [cause("input", 0.3)], "", {})
    assert "read-ahead" not in [one.knob for one in with_loader]


def test_slow_rank_on_one_node_is_not_left_out():
    found = remedies(evidence(), [cause("slow-rank", 0.6)], "if rank == 1:\n    work()", {})
    assert [(one.knob, one.line) for one in found] == [("same-work", 1)]
    e = evidence()
    e.report.hosts = ["a", "b"]
    found = remedies(e, [cause("slow-rank", 0.6)], "", {})
    assert {one.knob for one in found} == {"same-work", "leave-rank-out"}


def test_faster_computing_is_not_proposed_for_what_it_cannot_help():
    facts = {
        "ddp": {},
        "product_s": {"float32": 1.0, "bfloat16": 0.4},
        "parameters": {"float32": 9},
    }
    knobs = {"autocast-bf16", "compile"}

    def proposed(*causes, states=0.9, **rungs):
        e = evidence(facts=[facts] * 2, **rungs)
        e.report.states = [{"useful": states, "starved": 0.0, "other": 0.0}] * 2
        return {one.knob for one in remedies(e, causes, "", {})} & knobs

    assert proposed() == knobs
    assert proposed(cause("exchange-latency", 0.1)) == knobs
    assert proposed(cause("input", 0.4)) == set()  # first the batches
    assert proposed(cause("interpreter", 0.19), states=0.6) == set()
    # The useful time is sleep.
    assert proposed(silent=rung(process=0.2)) == set()
    sizes = {"elements": {"mean": 10.0, "spread": 3.0, "slope": 1.0, "correlation": 0.9}}
    assert proposed(everything=rung(**sizes)) == {"autocast-bf16"}


@pytest.mark.parametrize(
    ("doing", "thread"),
    [("python", False), ("library", True), ("torch", True), ("file", True), ("wait", True)],
)
def test_other_work_in_python_is_not_moved_to_a_thread(doing, thread):
    """A thread that computes in Python holds the interpreter lock, and the training waits."""
    work = cause("script", 0.4, doing=doing)
    (remedy,) = (one for one in remedies(evidence(), [work], "", {}) if one.cause == "script")
    assert remedy.edit.startswith("do this work less often, or in ")
    assert ("in a thread" in remedy.edit) == thread
    assert ("multiprocessing" in remedy.edit) == (not thread)


def test_larger_batch_names_the_line_of_the_loader_not_that_of_the_wait():
    e = evidence(facts=[{"ddp": {}}] * 2)
    waits = [{"line": 6, "code": "loss.backward()"}]
    found = remedies(e, [cause("exchange-bandwidth", 0.4, lines=waits)], SCRIPT, {})
    lines = {one.knob: (one.line, one.code) for one in found}
    assert lines["larger-batch"] == (3, "loader = DataLoader(data, 4)")


def test_few_remedies_of_a_cause_the_easiest_first():
    e = evidence(facts=[{"ddp": {}}] * 2)
    e.report.hosts = ["a", "b"]
    found = remedies(e, [cause("exchange-bandwidth", 0.4)], "", {})
    settable = [one for one in found if one.settable]
    assert len(settable) <= 4
    edits = remedies(evidence(), [cause("validation-on-one-rank", 0.4)], "", {})
    # Half as often is one number; a part for each rank saves as much, and is more work.
    assert [one.knob for one in edits] == ["rarer-validation", "validate-on-all"]
