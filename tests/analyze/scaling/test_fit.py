"""Fits, reasons and predictions on studies whose figures are computed from a known law."""

import dataclasses
import math
import random
import statistics
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from paceline.analyze.figures.losses import Loss
from paceline.analyze.scaling.bends import Bend
from paceline.analyze.scaling.cost_model import PlacedSize, exchange_terms, fit_terms, placed_size
from paceline.analyze.scaling.costs import costs_of_points, normal_max, quantile_max, size_costs
from paceline.analyze.scaling.figures_of_run import MAX_WAITS, _waits
from paceline.analyze.scaling.forecast import (
    COST_MODEL,
    KindAnalysis,
    analyse_kind,
    next_sizes,
    predict_next,
)
from paceline.analyze.scaling.laws import AMDAHL, GUSTAFSON, UNIVERSAL, fit_laws
from paceline.analyze.scaling.study_model import (
    STRONG,
    WEAK,
    CollectiveLoad,
    HostPlacement,
    RunFigures,
    ScalingStudy,
    Setup,
    SizePoint,
    Spread,
    StateSeconds,
    StudyRequest,
    StudyRun,
    WaitCause,
)
from paceline.cost.collectives import collective_terms

MS = 1e-3


@dataclass(frozen=True)
class Law:
    """Seconds that a step of a planted script takes; see ``figures``."""

    sample: float = MS
    fixed: float = 0.0
    shared: float = 0.0  # of computing, per sample and other rank of the node
    slow: float = 0.0  # that rank 1 computes longer
    jitter: float = 0.0  # standard deviation
    all_input: float = 0.0  # of reading, per sample of all ranks
    validation: float = 0.0  # on rank 0
    script: float = 0.0
    latency: float = 0.0
    per_byte: float = 0.0
    call: float = 0.0  # of each collective, in a group of any size
    calls: float = 1.0
    nbytes: float = 4.0
    overlap: float = 0.0  # of the exchange that fits under computing
    noise: float = 0.01
    cores: int = 64
    hosts: int = 1
    in_use: float = 0.0  # further latencies, in the share of messages that find a core in use
    in_turn: float = 0.0  # further latencies for each other rank of a core


def figures(law: Law, ranks: int, batch: float, rng: random.Random) -> RunFigures:
    """Return what one run of the law measures, with noise in each part."""

    def noisy(seconds: float) -> float:
        return seconds * max(rng.gauss(1, law.noise), 0.1)

    last = (ranks - 1) / ranks
    computing = noisy(law.fixed + law.sample * batch + law.shared * batch * (ranks - 1))
    own = [computing + (law.slow if rank == 1 else 0) for rank in range(ranks)]
    waits = []
    if ranks > 1 and law.slow:
        waits.append(WaitCause(1, "useful", law.slow * last))
    if law.jitter:
        late = noisy(law.jitter * normal_max(ranks)) / ranks
        waits += [WaitCause(rank, "useful", late) for rank in range(ranks)]
    validation = noisy(law.validation)
    if ranks > 1 and validation:
        waits.append(WaitCause(0, "validation", validation * last))
    terms = collective_terms("all-reduce", ranks)
    sharing = max(ranks / law.hosts / law.cores, 1.0)
    latencies = terms.latencies * (1 + law.in_use * (1 - 1 / sharing) + law.in_turn * (sharing - 1))
    whole = noisy(
        law.calls * (latencies * law.latency + (ranks > 1) * law.call)
        + law.nbytes * terms.vectors * law.per_byte
    )
    hidden = min(law.overlap * computing, whole)
    states = StateSeconds(
        useful=statistics.fmean(own),
        input=noisy(law.all_input * batch * ranks),
        validation=validation / ranks,
        other=noisy(law.script),
        wait=sum(one.seconds for one in waits),
        transfer=whole - hidden,
    )
    step = sum(dataclasses.asdict(states).values())
    load = CollectiveLoad(
        "0", ranks, "all-reduce", law.calls, law.nbytes, 0.0, whole - hidden, hidden
    )
    per_host = math.ceil(ranks / law.hosts)
    placement = [
        HostPlacement(f"h{host}", f"{host * per_host}-{host * per_host + per_host - 1}", "0-63")
        for host in range(min(law.hosts, ranks))
    ]
    placement = [dataclasses.replace(one, cores=f"0-{law.cores - 1}") for one in placement]
    return RunFigures(
        first_step=5,
        warm_up=4,
        steady=True,
        step_s=[step] * 64,
        samples_per_step=batch * ranks,
        usual_samples=batch * ranks,
        seconds=states,
        pop={},
        spread=Spread(own, own, law.jitter, max(own)),
        collectives=[load] if ranks > 1 and (law.latency or law.per_byte or law.call) else [],
        waits=waits,
        placement=placement,
    )


def point(law: Law, kind: str, ranks: int, batch: int = 64, seed: int = 0) -> SizePoint:
    """Return a size with one run. batch: global of strong, per rank of weak scaling."""
    setup = Setup(ranks, batch if kind == STRONG else batch * ranks)
    rng = random.Random(seed + ranks)
    run = StudyRun("run", setup, 0, figures(law, ranks, setup.global_batch / ranks, rng))
    return SizePoint(kind, setup, [dataclasses.replace(run, hosts=min(law.hosts, ranks))])


def study(
    law: Law, kind: str, sizes: tuple[int, ...] = (1, 2, 4), batch: int = 64, seed: int = 0
) -> ScalingStudy:
    request = StudyRequest("train.py", [], "/", [kind], list(sizes))
    points = [point(law, kind, one, batch, seed) for one in sizes]
    return ScalingStudy("folder", request, None, points)


def analysed(
    law: Law, kind: str, sizes: tuple[int, ...] = (1, 2, 4), seed: int = 0
) -> KindAnalysis:
    found = analyse_kind(study(law, kind, sizes, seed=seed), kind)
    assert found is not None
    return found


def whole(found: KindAnalysis) -> Bend:
    assert found.whole is not None
    return found.whole


LAWS = {
    "fixed-cost": (STRONG, Law(fixed=16 * MS), "compute: a step", 16 * MS),
    "shared-machine": (WEAK, Law(shared=0.1 * MS), "compute: a sample and rank of the node", 1e-4),
    "slow-rank": (WEAK, Law(slow=15 * MS), "slow-rank: one late rank", 15 * MS),
    "jitter": (STRONG, Law(jitter=8 * MS), "jitter: lateness", 8 * MS),
    "input": (WEAK, Law(all_input=0.2 * MS), "input: a sample of all ranks", 0.2 * MS),
    "validation-on-one-rank": (STRONG, Law(validation=12 * MS), "validation: a step", 12 * MS),
    "script": (STRONG, Law(script=12 * MS), "script: a step", 12 * MS),
    "exchange-latency": (WEAK, Law(latency=0.4 * MS, calls=8), "exchange: latency", 0.4 * MS),
    "exchange-bandwidth": (WEAK, Law(per_byte=2e-9, nbytes=1 << 23), "exchange: bytes", 2e-9),
}


@pytest.mark.parametrize("cause", LAWS)
def test_the_planted_loss_is_the_reason_and_its_parameter_is_in_the_interval(cause: str) -> None:
    kind, law, name, planted = LAWS[cause]
    inside = 0
    for seed in range(10):
        found = analysed(law, kind, seed=1000 * seed)
        main = whole(found).main
        assert main is not None
        assert main.cause == cause
        fitted = {one.name: one for one in found.model.parameters()}[name]
        inside += fitted.low <= planted <= fitted.high
    assert inside >= 9


@pytest.mark.parametrize("cause", LAWS)
def test_the_next_size_is_predicted_within_its_band(cause: str) -> None:
    kind, law, _, _ = LAWS[cause]
    inside, errors = 0, []
    for seed in range(10):
        past = study(law, kind, seed=1000 * seed)
        (predicted,) = (one for one in predict_next(past, kind, [8]) if one.model == COST_MODEL)
        costs = size_costs(point(law, kind, 8, seed=1000 * seed + 77))
        assert costs is not None
        measured = costs.throughput
        inside += predicted.low <= measured <= predicted.high
        errors.append(abs(predicted.throughput / measured - 1))
        assert predicted.global_batch == (64 if kind == STRONG else 512)
    assert inside >= 9
    assert statistics.median(errors) < 0.05


def test_shares_add_up_to_the_lost_efficiency() -> None:
    law = Law(fixed=6 * MS, slow=5 * MS, jitter=3 * MS, latency=0.2 * MS, calls=4, script=2 * MS)
    for bend in analysed(law, STRONG, (1, 2, 4, 8)).bends:
        assert sum(one.share for one in bend.losses) == pytest.approx(1)
        assert sum(one.efficiency for one in bend.losses) == pytest.approx(bend.lost)


def test_the_parts_of_a_size_add_up_to_its_step() -> None:
    law = Law(slow=5 * MS, jitter=3 * MS, validation=4 * MS, latency=0.2 * MS)
    for ranks in (1, 2, 5):
        one = point(law, WEAK, ranks)
        costs = size_costs(one)
        assert costs is not None
        assert sum(costs.parts.values()) == pytest.approx(one.figures[0].mean_step_s)
        assert costs.step_s == pytest.approx(one.figures[0].mean_step_s)


def test_a_loss_within_the_noise_is_no_reason() -> None:
    assert whole(analysed(Law(), WEAK)).main is None


def test_the_rank_that_others_wait_for_is_named() -> None:
    main = whole(analysed(Law(slow=15 * MS), WEAK)).main
    assert main is not None
    assert main.rank == 1
    assert "ranks wait" in main.sentence
    assert "rank 1, which computes longer" in main.sentence
    assert whole(analysed(Law(jitter=15 * MS), WEAK)).main.rank is None  # type: ignore[union-attr]


def test_gain_is_what_the_larger_size_had_without_the_growth() -> None:
    found = analysed(Law(fixed=0, slow=16 * MS, noise=1e-9), WEAK, (1, 4))
    main = whole(found).main
    assert main is not None
    assert main.gain == pytest.approx(16 / 64, rel=1e-3)  # 80 ms instead of 64


def test_exchange_under_computing_costs_nothing_until_it_is_longer() -> None:
    law = Law(per_byte=4e-9, nbytes=1 << 23, overlap=0.4)
    past = study(law, STRONG, (2, 4, 8), batch=128)
    (predicted,) = (one for one in predict_next(past, STRONG, [16]) if one.model == COST_MODEL)
    costs = size_costs(point(law, STRONG, 16, batch=128))
    assert costs is not None
    assert predicted.throughput == pytest.approx(costs.throughput, rel=0.06)


def test_levels_of_the_network_have_their_own_parameters() -> None:
    """Two nodes share a slower network than the ranks of one."""
    one_node, two = Law(per_byte=1e-10, nbytes=1 << 24), Law(per_byte=4e-9, nbytes=1 << 24, hosts=2)
    request = StudyRequest("train.py", [], "/", [WEAK], [1, 2, 4, 8])
    points = [point(one_node, WEAK, n) for n in (1, 2)] + [point(two, WEAK, n) for n in (4, 8)]
    found = analyse_kind(ScalingStudy("folder", request, None, points), WEAK)
    assert found is not None
    for costs in found.costs:
        assert found.model.throughput(placed_size(costs)).value == pytest.approx(
            costs.throughput, rel=0.05
        )
    names = [one.name for one in found.model.parameters() if one.name.startswith("exchange: bytes")]
    assert len(names) == 2


@pytest.mark.parametrize("added", [{"in_use": 2.0}, {"in_turn": 1.0}])
def test_exchange_of_ranks_that_share_cores_is_predicted_between_two_laws(added) -> None:
    """Measured with gloo on two cores: 0.78, 6.4, 17.6, 51 ms on 2, 4, 8, 16 ranks, if all begin at
    the same time (1 - 1 / m); 1.2, 4.8, 19 ms if one rank is late (m - 1).
    """
    law = Law(latency=0.6 * MS, cores=2, **added)
    (predicted,) = (
        one for one in predict_next(study(law, STRONG), STRONG, [8]) if one.model == COST_MODEL
    )
    costs = size_costs(point(law, STRONG, 8))
    assert costs is not None
    assert predicted.low < costs.throughput < predicted.high
    assert predicted.throughput == pytest.approx(costs.throughput, rel=0.25)


def test_what_every_call_takes_is_no_latency_of_its_messages() -> None:
    law = Law(latency=1 * MS, call=6 * MS)
    past = study(law, WEAK, (1, 2, 4))
    (predicted,) = (one for one in predict_next(past, WEAK, [8]) if one.model == COST_MODEL)
    costs = size_costs(point(law, WEAK, 8))
    assert costs is not None
    assert predicted.throughput == pytest.approx(costs.throughput, rel=0.05)
    fitted = {one.name: one for one in analysed(law, WEAK).model.parameters()}
    assert fitted["exchange: latency"].low <= 1 * MS <= fitted["exchange: latency"].high
    assert fitted["exchange: calls"].low <= 6 * MS <= fitted["exchange: calls"].high


def test_data_parallel_groups_grow_and_tensor_parallel_ones_keep_their_size() -> None:
    points = []
    for ranks in (2, 4, 8):
        one = point(Law(latency=1e-3), WEAK, ranks)
        (load,) = one.figures[0].collectives
        pairs = [
            dataclasses.replace(load, group=f"pair {i}", size=2, kind="all-gather")
            for i in range(ranks // 2)
        ]
        data = [dataclasses.replace(load, group=f"data {i}", size=ranks // 2) for i in range(2)]
        loads = pairs + (data if ranks > 2 else [])
        run = dataclasses.replace(one.figures[0], collectives=loads)
        points.append(
            dataclasses.replace(one, runs=[dataclasses.replace(one.runs[0], figures=run)])
        )
    costs = costs_of_points(points)[-1]
    by_kind = {load.kind: load for load in costs.exchanges}
    assert by_kind["all-reduce"].grows
    assert not by_kind["all-gather"].grows
    assert sum(one.calls for one in costs.exchanges if one.kind == "all-gather") == 1
    larger = exchange_terms(costs, PlacedSize(16, 1, 16, 64), None)
    assert larger["latency"] == pytest.approx(2 * (8 - 1) + 1)


def test_both_kinds_of_scaling_tell_a_fixed_cost_from_a_shared_node() -> None:
    law = Law(fixed=10 * MS, shared=0.05 * MS)
    points = [point(law, kind, n) for kind in (STRONG, WEAK) for n in (1, 2, 4)]
    request = StudyRequest("train.py", [], "/", [STRONG, WEAK], [1, 2, 4])
    found = analyse_kind(ScalingStudy("folder", request, None, points), STRONG)
    assert found is not None
    fitted = {one.name: one for one in found.model.parameters()}
    assert fitted["compute: a step"].value == pytest.approx(10 * MS, rel=0.2)
    shared = fitted["compute: a sample and rank of the node"]
    assert shared.value == pytest.approx(0.05 * MS, rel=0.35)
    shares = {one.cause: one.share for one in whole(found).losses}
    assert shares["fixed-cost"] > shares["shared-machine"] > 0


@pytest.mark.parametrize(("s", "k"), [(0.0, 0.0), (0.05, 0.0), (0.03, 0.004)])
def test_the_universal_law_recovers_its_parameters(s: float, k: float) -> None:
    points = []
    for ranks in (1, 2, 4, 8, 16):
        costs = size_costs(point(Law(noise=1e-9), WEAK, ranks))
        assert costs is not None
        step = 64 * MS * (1 + s * (ranks - 1) + k * ranks * (ranks - 1))
        points.append(dataclasses.replace(costs, step_s=step, error=0.01 * step))
    law = next(one for one in fit_laws(points, STRONG) if one.law == UNIVERSAL)
    values = {one.name: one for one in law.parameters}
    assert values["X(1)"].value == pytest.approx(1000, rel=1e-6)
    for name, planted in (("s", s), ("k", k)):
        assert values[name].value == pytest.approx(planted, abs=1e-9)
        assert values[name].low <= planted <= values[name].high
    x32 = 1000 * 32 / (1 + s * 31 + k * 32 * 31)
    band = law.throughput(32)
    assert band.value == pytest.approx(x32)
    assert band.low < x32 <= band.high
    assert [one.law for one in fit_laws(points, STRONG)] == [UNIVERSAL, AMDAHL]
    assert [one.law for one in fit_laws(points, WEAK)] == [UNIVERSAL, GUSTAFSON]


def test_gustafson_has_the_serial_share_of_weak_scaling() -> None:
    points = []
    for ranks in (1, 2, 4):
        costs = size_costs(point(Law(noise=1e-9), WEAK, ranks))
        assert costs is not None
        rate = 1000 * (ranks - 0.1 * (ranks - 1))
        step = costs.ranks * costs.batch / rate
        points.append(dataclasses.replace(costs, step_s=step, error=0.01 * step))
    law = fit_laws(points, WEAK)[-1]
    assert law.parameters[1].value == pytest.approx(0.1)
    assert law.throughput(8).value == pytest.approx(7300)


def test_errors_of_sizes_that_were_left_out_need_four_sizes() -> None:
    three = analysed(Law(fixed=8 * MS), STRONG)
    assert not three.left_out
    assert "measure 4 sizes" in three.notes[0]
    four = analysed(Law(fixed=8 * MS), STRONG, (1, 2, 4, 8))
    assert not four.notes
    errors = [abs(one.error) for one in four.left_out if one.model == COST_MODEL]
    assert len(errors) == 4
    assert statistics.median(errors) < 0.05


def test_the_knee_is_where_the_efficiency_falls_below_its_limit() -> None:
    """64 ms of a global batch and 4 ms of each step: 0.8 is reached at P = 1 + 0.25 x 68 / 4."""
    found = analysed(Law(fixed=4 * MS, noise=1e-4), STRONG)
    assert found.knee is not None
    assert found.knee.ranks == pytest.approx(5, abs=1)
    assert found.knee.low <= found.knee.ranks <= found.knee.high
    without = analysed(Law(noise=1e-4), STRONG).knee
    assert without is not None
    assert without.beyond
    assert without.ranks == 64  # one sample per rank


def test_the_next_sizes_continue_the_last_ratio_and_leave_each_rank_a_sample() -> None:
    assert next_sizes([1, 2, 4]) == [8, 16]
    assert next_sizes([2, 6]) == [18, 54]
    assert next_sizes([3]) == [6, 12]
    found = predict_next(study(Law(), STRONG, (1, 2, 4), batch=8), STRONG)
    assert {one.ranks for one in found} == {8}
    assert {one.model for one in found} == {COST_MODEL, UNIVERSAL}
    assert all(one.sizes == [1, 2, 4] for one in found)


def test_candidates_that_no_point_tells_apart_count_once() -> None:
    columns = {"one": [1.0, 1.0], "two": [2.0, 2.0], "three": [1.0, 3.0]}
    fit = fit_terms([4.0, 4.0], [0.1, 0.1], columns, [("one",), ("two",), ("three",)])
    assert [one.names for one in fit.fits] == [("one",)]
    assert fit.predict({"one": 1.0, "two": 2.0, "three": 9.0})[0] == pytest.approx(4)


def test_negative_coefficients_are_no_explanation() -> None:
    columns = {"a": [1.0, 1.0, 1.0], "b": [1.0, 2.0, 3.0]}
    fit = fit_terms([3.0, 2.0, 1.0], [0.01] * 3, columns, [("a",), ("a", "b")])
    assert all((one.values >= 0).all() for one in fit.fits)


def test_the_longest_of_some_draws() -> None:
    assert normal_max(1) == 0
    assert normal_max(2) == pytest.approx(1 / math.sqrt(math.pi), rel=2e-3)
    assert normal_max(4) == pytest.approx(1.0294, rel=2e-3)
    uniform = [i / 20 for i in range(21)]
    assert quantile_max(uniform, 3) == pytest.approx(3 / 4 - 1 / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "latencies", "vectors"),
    [
        ("all-reduce", 6, 1.5),
        ("all-gather", 3, 0.75),
        ("reduce-scatter", 3, 0.75),
        ("broadcast", 2, 2),
        ("barrier", 4, 0),
    ],
)
def test_terms_of_collectives(kind: str, latencies: float, vectors: float) -> None:
    terms = collective_terms(kind, 4)
    assert (terms.latencies, terms.vectors) == (latencies, vectors)
    assert collective_terms(kind, 1).seconds(1.0, 1.0, 100) == 0
    assert terms.seconds(2.0, 0.5, 8) == latencies * 2 + vectors * 4


def test_waits_for_a_hundred_ranks_are_those_for_their_computing():
    ranks = 100
    law = Law(jitter=9 * MS, noise=0.0)
    measured = point(law, STRONG, ranks, batch=6400).figures[0]
    whole_s = sum(one.seconds for one in measured.waits)
    losses = [Loss("wait", one.seconds, one.rank, "h", one.doing) for one in measured.waits]
    waits = _waits(SimpleNamespace(losses=losses), 1, 1.0)
    assert len(waits) == MAX_WAITS + 1
    assert waits[-1].rank is None
    assert sum(one.seconds for one in waits) == pytest.approx(whole_s)
    setup = Setup(ranks, 6400)
    run = StudyRun("run", setup, 0, dataclasses.replace(measured, waits=waits))
    costs = size_costs(SizePoint(STRONG, setup, [run]))
    assert costs.parts["jitter"] == pytest.approx(whole_s)
    assert costs.parts["exchange"] == pytest.approx(0, abs=1e-9)
    assert costs.late["jitter"][1] == pytest.approx(1 / ranks)
