"""Communication that is no exchange of gradients has causes of its own, with its line."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from test_causes import EXCHANGE, SLOWER, collective, judged

from paceline.analyze.diagnosis import causes, exchanged_calls
from paceline.analyze.diagnosis.exchanged_calls import CallSite, ExchangedCalls, GradientSync
from paceline.analyze.diagnosis.rules.failed_parts import FailedParts
from paceline.analyze.figures.losses import Loss
from paceline.analyze.records.match_collectives import BlockedTime
from paceline.analyze.records.rank_lines import SampledLine
from paceline.record.experiments.lines.sidecar import CollectiveKind
from paceline.record.experiments.rung import NO_BROADCASTS
from paceline.record.ring.states import Op, State

LINES = {
    "buffer": (Op.BROADCAST, 17, "loss = model(x).mean()"),
    "metric": (Op.ALL_REDUCE, 9, "dist.all_reduce(total)"),
    "object": (Op.ALL_GATHER, 13, "dist.all_gather_object(names, name)"),
    "barrier": (Op.BARRIER, 24, "dist.barrier()"),
    "gradient": (Op.ALL_REDUCE, 19, "loss.backward()"),
}
IDS = {
    "buffer": "buffer-broadcast",
    "metric": "metric-collectives",
    "object": "object-collectives",
    "barrier": "synchronisation",
    "gradient": "exchange-bandwidth",
}
GRADIENTS = GradientSync(1, 1, 1, 4e6, 5, 100)


def calls(kind, transfer, calls=5.0, size=8.0, wait=0.0):
    op, line, code = LINES[kind]
    place = SampledLine("train.py", line, "step", code)
    return ExchangedCalls(
        CallSite(CollectiveKind(kind), op, place, "dist"), calls, size, transfer, wait
    )


def found(*exchanged, losses=EXCHANGE, all_reduce=None, savings=None):
    causes = judged(
        losses=losses,
        calls=all_reduce or collective(count=10, size=4_000_000),
        gradients=GRADIENTS,
        exchanged=exchanged,
        savings=savings,
        **SLOWER,
    )
    return {cause.id: cause for cause in causes}


@pytest.mark.parametrize("kind", LINES)
def test_cause_is_named_by_what_the_collectives_carry(kind):
    cause = found(calls(kind, 0.5))[IDS[kind]]
    assert cause.share == pytest.approx(0.5, abs=0.01)
    assert cause.confirmed == "confirmed"
    assert cause.evidence["lines"][0]["line"] == LINES[kind][1]
    if kind != "gradient":
        assert f"line {LINES[kind][1]}: {LINES[kind][2]}" in cause.sentence
        assert cause.evidence["calls_a_step"] == 5


def test_what_the_experiment_saves_is_divided_by_the_record():
    both = found(calls("gradient", 0.3, 1.0, 4e6), calls("metric", 0.2))
    assert both["metric-collectives"].share == pytest.approx(0.2, abs=0.01)
    assert both["exchange-bandwidth"].share == pytest.approx(0.3, abs=0.01)
    assert both["exchange-bandwidth"].evidence["lines"][0]["line"] == 19
    shares = [cause.share for cause in both.values()]
    assert sum(shares) == pytest.approx(0.5, abs=0.01)


def test_metrics_do_not_count_as_calls_of_the_gradients():
    """10 steps with one bucket and 50 calls of 8 bytes each."""
    both = found(
        calls("gradient", 0.3, 1.0, 4e6),
        calls("metric", 0.2, 50.0),
        all_reduce=collective(count=510, size=(10 * 4_000_000 + 500 * 8) / 510),
    )
    assert both["exchange-bandwidth"].evidence["calls_a_step"] == pytest.approx(1)
    assert both["exchange-bandwidth"].evidence["bytes"] == pytest.approx(4e6)


def test_small_part_stays_with_the_exchange():
    assert set(found(calls("gradient", 0.47, 1.0, 4e6), calls("metric", 0.03))) == {
        "exchange-bandwidth"
    }


def test_waits_for_a_late_rank_are_not_the_collectives():
    """Half of a step is waits for rank 1, which computes longer; the metrics take 1 %."""
    late = [Loss("wait", 0.49, rank=1, doing="useful"), Loss("transfer", 0.01)]
    assert "metric-collectives" not in found(calls("metric", 0.01, wait=0.49), losses=late)


def test_objects_of_one_rank_are_never_switched_off_and_keep_their_share_of_the_record():
    sent = calls("object", 0.2)
    sent = ExchangedCalls(sent.site._replace(op=Op.BROADCAST), 2.0, 100.0, 0.2, 0.0)
    both = found(calls("gradient", 0.3, 1.0, 4e6), sent)
    assert both["object-collectives"].confirmed == "not-testable"
    assert both["object-collectives"].share == pytest.approx(0.2)
    assert both["exchange-bandwidth"].evidence["lines"][0]["line"] == 19


# Half of a step is communication. Most of it is waits for rank 0, which broadcasts its buffers.
WAITING = [Loss("transfer", 0.35), Loss("wait", 0.15)]


def test_broadcasts_of_buffers_are_first_by_an_experiment_of_their_own():
    both = [calls("gradient", 0.3, 1.0, 4e6), calls("buffer", 0.05, wait=0.15)]
    assert next(iter(found(*both, losses=WAITING))) == "exchange-bandwidth"
    tested = found(*both, losses=WAITING, savings={NO_BROADCASTS: [0.35, 0.36, 0.34, 0.35]})
    assert list(tested) == ["buffer-broadcast", "exchange-bandwidth"]
    first = tested["buffer-broadcast"]
    assert (first.share, first.confirmed) == (pytest.approx(0.35), "confirmed")
    assert "line 17: loss = model(x).mean()" in first.sentence
    assert tested["exchange-bandwidth"].share == pytest.approx(0.15, abs=0.01)


def test_broadcasts_without_which_steps_are_as_long_are_no_cause():
    refuted = found(
        *(calls("gradient", 0.3, 1.0, 4e6), calls("buffer", 0.2)),
        savings={NO_BROADCASTS: [0.01, -0.01, 0.0, 0.01]},
    )
    assert list(refuted) == ["exchange-bandwidth"]
    assert refuted["exchange-bandwidth"].share == pytest.approx(0.5, abs=0.01)


def test_rule_that_fails_is_named_and_costs_no_other_cause(monkeypatch):
    def broken(_):
        return 1 / 0

    script = replace(causes.INDICATORS["script"], rule=broken)
    monkeypatch.setitem(causes.INDICATORS, "script", script)
    monkeypatch.setattr(causes, "check_no_time_is_named_twice", lambda found, e: broken(e))
    losses = [*EXCHANGE, Loss("other", 0.1)]
    parts = FailedParts()
    found = judged(
        losses=losses, calls=collective(), exchanged=[calls("metric", 0.5)], parts=parts, **SLOWER
    )
    assert [cause.id for cause in found] == ["metric-collectives"]
    first, second = parts.notes
    assert first.startswith("cause 'script': left out, because Paceline failed to compute it (Zero")
    assert second.startswith("sum of causes: left out")


def test_send_and_receive_with_one_number_are_two_calls(monkeypatch):
    events = np.zeros(2, [(name, "i8") for name in ("start", "end", "group", "seq", "op")])
    events["op"], events["seq"] = (Op.SEND, Op.RECV), 7
    steps = np.array([(0, 5)], [("start", "i8"), ("end", "i8")])
    site = SimpleNamespace(stack=0, kind=CollectiveKind.OTHER, bytes_per_call=64)
    profile = SimpleNamespace(
        collectives=np.array([(0, 7, 0)]),
        collective_sites=[site],
        stacks=[SimpleNamespace(lines=[], what="dist.send")],
        lines=[],
    )
    record = SimpleNamespace(
        profile=profile,
        events_in=lambda *states: steps if states == (State.STEP,) else events,
    )
    window = SimpleNamespace(
        records=[record],
        within=SimpleNamespace(start=0, end=10, length=10),
        matched=SimpleNamespace(waits=np.zeros(2, [("record", "i4")])),
        blocked=BlockedTime(np.array([0, 0]), np.array([3, 4]), np.array([0, 0])),
    )
    monkeypatch.setattr(exchanged_calls, "blocking_states", lambda _: (State.BLOCKED,))
    found = exchanged_calls.measure_exchanged_calls(window)
    assert [(one.site.op, one.calls, one.bytes) for one in found] == [
        (Op.RECV, 1, 64),
        (Op.SEND, 1, 64),
    ]
