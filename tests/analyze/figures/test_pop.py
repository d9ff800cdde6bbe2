"""POP efficiencies compared with published cases that state the times of each rank."""

import pytest
from records import Rank, report_of

from paceline.analyze.figures.compare_runs import scaling
from paceline.record.ring.states import Op, State

# EPOCH (2D particle in cell), traced with Extrae on 2019-10-09, published with PyPOP by NAG
# (github.com/numericalalgorithmsgroup/pypop, BSD-3-Clause-Clear, NAG-PyPOP 0.3.5,
# pypop/examples/mpi/epoch_example_traces): useful time of each rank and the run's length in ns from
# the traces; efficiencies in per cent from modelfactors.csv (Dimemas, BSC's modelfactors).
EPOCH = {
    1: (21898659139, [21882362819]),
    2: (11528373565, [11429241023, 11484151344]),
    4: (6082352213, [5920461325, 5999910804, 5882590764, 5881705180]),
    8: (
        3513565328,
        [
            *(3421581672, 3341930085, 3371367235, 3403220440),
            *(3378587977, 3330076330, 3335025642, 3320241347),
        ],
    ),
    16: (
        2339560724,
        [
            *(2242564300, 2242981130, 2239025587, 2217850260, 2198190483, 2241205258),
            *(2237085194, 2221504993, 2241399339, 2220662868, 2221583486, 2226585372),
            *(2217669995, 2224743916, 2224817055, 2200046418),
        ],
    ),
}
PUBLISHED = {  # parallel, load balance, communication, computation scalability, global, speed-up
    1: (99.925583, 100.000000, 99.925583, 100.000000, 99.925583, 1.000000),
    2: (99.378252, 99.760930, 99.616405, 95.500319, 94.906548, 1.899545),
    4: (97.349953, 98.687584, 98.644580, 92.390414, 89.942024, 3.600360),
    8: (95.707736, 98.280683, 97.382042, 81.340933, 77.849566, 6.232603),
    16: (95.151184, 99.248259, 95.871892, 61.436394, 58.457456, 9.360158),
}


def epoch(folder, size):
    """Return a report with the case's times: each rank computes, then is in one exchange."""
    length, useful = EPOCH[size]
    folder.mkdir()
    made = [Rank(folder, i, size) for i in range(size)]
    for rank, time in zip(made, useful, strict=True):
        rank.ring.write(0, 1, State.STEP, step=0)
        rank.ring.write(1, 1 + time, State.FORWARD)
        if size > 1:
            fields = {"seq": 1, "group": 1, "op": Op.ALL_REDUCE}
            rank.ring.write(1 + time, 1 + length, State.BLOCKED, **fields)
            rank.ring.write(1 + time, 1 + length, State.COLLECTIVE, **fields)
        elif time < length:  # the MPI time that the trace shows in a run of one rank
            alone = {"seq": 1, "group": 1, "op": Op.BARRIER}
            rank.ring.write(1 + time, 1 + length, State.BLOCKED, **alone)
            rank.ring.write(1 + time, 1 + length, State.COLLECTIVE, **alone)
        rank.ring.write(1, 1 + length, State.STEP, step=1, amount=1000 // size)
    return report_of(made)


def test_efficiencies_match_published_epoch_results(tmp_path):
    reports = [epoch(tmp_path / str(size), size) for size in EPOCH]
    for row in scaling(reports):
        parallel, balance, communication, computation, total, speedup = PUBLISHED[row.ranks]
        assert 100 * row.parallel == pytest.approx(parallel, abs=1e-6)
        assert 100 * row.load_balance == pytest.approx(balance, abs=1e-6)
        assert 100 * row.communication == pytest.approx(communication, abs=1e-6)
        samples = row.ranks * (1000 // row.ranks) / 1000  # 1000 is not divisible by 8 and 16
        assert 100 * row.computation_scalability == pytest.approx(computation * samples, rel=1e-7)
        assert 100 * row.global_efficiency == pytest.approx(total * samples, rel=1e-7)
        assert row.speedup == pytest.approx(speedup * samples, rel=1e-6)


def test_relative_global_efficiency_is_scaling_efficiency(tmp_path):
    rows = scaling([epoch(tmp_path / str(size), size) for size in EPOCH])
    for row in rows:
        relative = row.global_efficiency / rows[0].global_efficiency
        assert relative == pytest.approx(row.scaling_efficiency)


def test_efficiencies_match_talp_test_of_two_waiting_ranks(tmp_path):
    """Reproduce DLB/TALP's functional test (github.com/bsc-pm/dlb, test_mpi.c).

    In tests/functional/talp/mpi/test_mpi.c, rank 0 computes 1.0 s, sends, and receives after 1.0 s.
    Rank 1 computes 0.5 s, waits 0.5 s, computes 1.0 s and sends. Expected there: PE 0.625, CommE
    0.75, LB 0.83.
    """
    one, two = (Rank(tmp_path, i, 2) for i in range(2))
    for rank in (one, two):
        rank.step(0, 1)
    one.was(State.FORWARD, 1, 1001)
    one.message(1001, 1001, 1001, Op.SEND, 1, number=1)
    one.message(1001, 1001, 2001, Op.RECV, 1, number=1)
    two.was(State.FORWARD, 1, 501)
    two.message(501, 501, 1001, Op.RECV, 0, number=1)
    two.was(State.FORWARD, 1001, 2001)
    two.message(2001, 2001, 2001, Op.SEND, 0, number=1)
    for rank in (one, two):
        rank.step(1, 2001)
    e = report_of([one, two]).efficiencies
    assert e.parallel == pytest.approx(0.625)
    assert e.communication == pytest.approx(0.75)
    assert e.load_balance == pytest.approx(1.25 / 1.5)
    assert e.transfer == pytest.approx(1)  # no transfer takes time


def test_pure_imbalance_is_load_balance(tmp_path):
    """Reproduce OTF-CPT's mpi-imbalance.c: 0.1, 0.3, 0.5 and 0.7 s; expected: LB = PE = 4/7."""
    ranks = [Rank(tmp_path, i, 4) for i in range(4)]
    for i, rank in enumerate(ranks):
        rank.step(0, 1)
        done = 1 + 100 * (1 + 2 * i)
        rank.was(State.FORWARD, 1, done)
        rank.collective(done, done, 701)
        rank.step(1, 701)
    e = report_of(ranks).efficiencies
    assert e.parallel == e.load_balance == pytest.approx(4 / 7)
    assert e.serialisation == e.transfer == pytest.approx(1)
