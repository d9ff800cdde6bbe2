"""The waterfall adds up, and its bars are the causes that the figures show."""

import math
from dataclasses import replace

import numpy as np
import pytest
from records import Rank, report_of

from paceline.analyze.diagnosis.causes import causes, witnesses
from paceline.analyze.diagnosis.evidence import MIN_SHARE, Evidence
from paceline.analyze.diagnosis.rungs import Interval, RungResult, measure_rung, waterfall
from paceline.analyze.records.load_run import Run


def rung(*rates, ranks=2, slow=0.0, validation=0.0):
    """Return repetitions of a rung; ``rates`` are the samples/s of all ranks together."""
    return [
        RungResult(
            together=r,
            step_s=8 / r,
            training_s=[(8 / r - validation) / (1 + slow), 8 / r - validation][-ranks:],
            validation_s=[0.0, validation][-ranks:],
            checkpoint_s=[0.0] * ranks,
            ranks=ranks,
            cached=5,
            silent=1,
            used=[],
        )
        for r in rates
    ]


def made(
    alone=(500, 510, 490), silent=(980, 990, 970), cached=(800, 790, 810), real=(600, 590, 610)
):
    return waterfall(rung(*alone, ranks=1), rung(*silent, slow=0.0), rung(*cached), rung(*real))


def test_waterfall_bars_add_up():
    found = made()
    assert [bar.id for bar in found.bars] == ["sharing", "exchange", "input"]
    assert found.ideal.mean == 1000
    lost = sum(bar.loss.mean for bar in found.bars)
    assert found.ideal.mean - lost == pytest.approx(found.measured.mean, rel=1e-12)
    of_step = sum(bar.of_step.mean for bar in found.bars)
    assert of_step == pytest.approx(1 - 600 / 1000, rel=0.01)
    assert found.bars[-1].loss.mean == pytest.approx(200)
    assert found.of_step("input").mean == pytest.approx(600 * (1 / 600 - 1 / 800), rel=0.01)


def test_shares_fit_to_the_rates_beside_them():
    found = made(alone=(500, 1500, 700), silent=(980, 1200, 970))
    for bar in found.bars:
        assert bar.share.mean == pytest.approx(bar.loss.mean / found.ideal.mean, rel=1e-12)
    for shares in ([bar.share for bar in found.bars], [bar.of_step for bar in found.bars]):
        assert sum(one.mean for one in shares) + found.reached == pytest.approx(1, rel=1e-12)
        assert all(one.low <= one.mean <= one.high for one in shares)


def test_interval_uses_student_t_distribution():
    found = Interval.of([9, 10, 11])
    assert found.mean == 10
    assert found.high - 10 == pytest.approx(2.92 / math.sqrt(3), rel=1e-3)
    assert not Interval.of([5.0]).sure
    assert Interval.of([5.0, 5.1, 5.2]).sure


def trained(folder, compute=(20, 20), load=(0, 0), exchange=5.0, steps=12, size=1 << 20):
    """Return the report of two ranks; arguments give what each rank does in a step, in ms."""
    each = max(a + b for a, b in zip(compute, load, strict=True)) + exchange
    folder.mkdir(exist_ok=True)
    members = []
    for i in range(2):
        rank = Rank(folder, i, 2, host="node")
        rank.step(0, 1)
        for number in range(steps):
            start = 1 + number * each
            if load[i]:
                rank.was(1, start, start + load[i])
            ready = start + load[i] + compute[i]
            rank.was(2, start + load[i], ready)
            rank.collective(ready, ready, start + each, amount=size)
            rank.step(start, start + each, samples=4, number=number + 1)
        members.append(rank)
    return members


def judged(folder, fall, loader=None, threads=1, cores=2, **what):
    report = report_of(trained(folder, **what))
    e = Evidence(fall, report, loader, threads, cores, 2, 12)
    return {one.name: one for one in witnesses(e)}, causes(e)


SAME = (1000, 1001, 999)
ALONE = (500, 500.5, 499.5)


def test_rate_is_that_of_slowest_rank(tmp_path):
    run = Run("test", [rank.record() for rank in trained(tmp_path)], missing=[])
    found = measure_rung(run, 2, 10)
    assert found.together == pytest.approx(8 / 0.025, rel=1e-6)
    assert found.step_s == pytest.approx(0.025)
    with pytest.raises(ValueError, match=r"after 13 steps, and the experiments need 40\. HINT"):
        measure_rung(run, 10, 30)


def test_no_causes_without_losses(tmp_path):
    fall = made(ALONE, SAME, SAME, (990, 991, 989))
    assert judged(tmp_path, fall, exchange=0.2)[1] == []


def test_busy_loader_and_waiting_loader_are_distinguished(tmp_path):
    fall = made(ALONE, SAME, SAME, (500, 505, 495))
    loader = {"batches": 20, "seconds": 1.0, "busy_s": 0.95, "workers": 0, "ranks": 2}
    seen, (cause,) = judged(tmp_path / "a", fall, loader, load=(20, 20), exchange=0.2)
    assert (cause.id, seen["input"].differ) == ("input-preprocessing", False)
    assert cause.sentence.endswith("(no workers: the training process loads the batches)")
    files = {"opened": 15_000, "read": 15_000 * 7_000, "open_s": 1e-5, "system_s": 0.1}
    _, (cause,) = judged(tmp_path / "d", fall, loader | files, load=(20, 20), exchange=0.2)
    assert cause.id == "input-preprocessing"
    assert cause.sentence.endswith("; it opens 750 small files per batch")
    assert cause.share == pytest.approx(0.5, abs=0.01)
    assert "50 ms per batch and is limited by computation (no workers" in cause.sentence
    loader |= {"busy_s": 0.1, "workers": 4}
    (cause,) = judged(tmp_path / "b", fall, loader, load=(20, 20), exchange=0.2)[1]
    assert cause.id == "input-waiting"
    assert "2 workers per rank" in cause.sentence


def test_exchange_bandwidth_and_latency_are_distinguished(tmp_path):
    fall = made(ALONE, SAME, (500, 505, 495), (500, 505, 495))
    (cause,) = judged(tmp_path / "a", fall, exchange=20, size=4 << 20)[1]
    assert cause.id == "exchange-bandwidth"
    assert "all-reduce of 4.19 MB is limited by bandwidth" in cause.sentence
    (cause,) = judged(tmp_path / "b", fall, exchange=20, size=400)[1]
    assert cause.id == "exchange-latency"
    assert "400 bytes each" in cause.sentence


def test_slow_rank_is_reported(tmp_path):
    alone, slowed = rung(*[600] * 3, ranks=1), rung(800, 801, 799, slow=0.5)
    fall = waterfall(alone, slowed, rung(*[800] * 3), rung(*[800] * 3))
    seen, (cause,) = judged(tmp_path, fall, compute=(20, 30), exchange=0.2)
    assert (cause.id, cause.evidence["rank"]) == ("slow-rank", 1)
    assert not seen["uneven"].differ


def test_too_many_threads_and_shared_machine_are_distinguished(tmp_path):
    fall = made(ALONE, *[(700, 702, 698)] * 3)
    (cause,) = judged(tmp_path / "a", fall, threads=2, exchange=0.2)[1]
    assert cause.id == "too-many-threads"
    assert cause.sentence == "2 ranks with 2 threads each share 2 cores"
    (cause,) = judged(tmp_path / "b", fall, threads=1, exchange=0.2)[1]
    assert cause.id == "shared-machine"


def test_unconfirmed_loss_is_shown_but_not_a_cause(tmp_path):
    fall = made(ALONE, SAME, SAME, (500, 505, 495))
    seen, found = judged(tmp_path, fall, load=(0, 0), exchange=0.2)
    assert seen["input"].differ
    assert found == []


def test_validation_on_one_rank_is_not_a_slow_rank():
    free = rung(*[500] * 3, validation=0.008)  # of a step of 16 ms
    fall = waterfall(rung(*[500] * 3, ranks=1), free, rung(*[500] * 3), rung(*[500] * 3))
    assert [bar.id for bar in fall.bars] == ["validation"]
    assert fall.of_step("validation").mean == pytest.approx(0.5)


def drawn(rng, ranks, spread, slow=0.0):
    """Return one round of a rung whose ranks differ by chance, and the first one by ``slow``."""
    times = 0.1 * (1 + rng.normal(0, 0.02)) * (1 + rng.normal(0, spread, ranks))
    times[0] *= 1 + slow
    longest = float(times.max())
    free = [0.0] * ranks
    return RungResult(8 * ranks / longest, longest, times.tolist(), free, free, ranks, 5, 1, [])


def uneven_bars(ranks, slow, cases=200):
    rng, bars = np.random.default_rng(11), []
    for _ in range(cases):
        rounds = [[drawn(rng, ranks, 0.05, slow) for _ in range(3)] for _ in range(3)]
        bars.append(waterfall([], *rounds).of_step("uneven") or Interval(0, 0, 0))
    return bars


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_equal_ranks_are_rarely_uneven(ranks):
    """The slowest of many equal ranks is slower than the mean in each round, but not the same."""
    bars = uneven_bars(ranks, slow=0.0)
    assert abs(np.mean([bar.mean for bar in bars])) < 0.01
    assert np.mean([bar.mean >= MIN_SHARE and bar.low >= MIN_SHARE / 2 for bar in bars]) <= 0.06


@pytest.mark.parametrize("rounds", [2, 3, 4, 5, 9])
def test_ranks_that_are_slow_in_turn_are_not_uneven(rounds):
    """A load moves from core to core, from round to round: no rank is slower all the time."""
    silent = [
        replace(one, training_s=[(0.8, 1.0)[turn % 2], (1.0, 0.8)[turn % 2]], step_s=1.0)
        for turn, one in enumerate(rung(*[8.0] * rounds))
    ]
    fall = waterfall(rung(*[5.0] * rounds, ranks=1), silent, silent, silent)
    bar = fall.of_step("uneven")
    assert bar.high >= 0
    assert bar.low < MIN_SHARE / 2  # no cause
    if rounds % 2 == 0:
        assert bar == Interval(0, 0, 0)
    lost = sum(bar.loss.mean for bar in fall.bars)
    assert fall.ideal.mean - lost == pytest.approx(fall.measured.mean, rel=1e-12)


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_slow_rank_is_uneven(ranks):
    bars = uneven_bars(ranks, slow=0.3, cases=50)
    assert np.mean([bar.mean for bar in bars]) == pytest.approx(0.23, abs=0.02)
    assert np.mean([bar.low >= MIN_SHARE / 2 for bar in bars]) > 0.85
