"""Rules that name the causes of lost time; each fault leaves different figures."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from rungs import rung

from paceline.analyze.diagnosis.causes import causes
from paceline.analyze.diagnosis.evidence import Evidence
from paceline.analyze.diagnosis.exchanged_calls import GradientSync
from paceline.analyze.diagnosis.rungs import waterfall
from paceline.analyze.figures.losses import Loss
from paceline.analyze.figures.process_groups import Collective, Group

FACTS = {
    "threads": 1, "mask": "3", "host_cores": 2, "fault_s": 2e-6,
    "product_s": {"float32": 0.001}, "parameters": {"float32": 4_000_000},
}  # fmt: skip


def judged(
    *,
    losses=(),
    calls=None,
    loader=None,
    facts=(),
    gradients=None,
    late="",
    line_profile=None,
    exchanged=(),
    savings=None,
    parts=None,
    **changed,
):
    """Return the causes for two ranks with these rungs (default: the ideal), losses and facts."""
    rungs = {
        "alone": rung(ranks=1),
        "silent": rung(),
        "cached": rung(),
        "everything": rung(),
    } | changed
    fall = waterfall(*(rungs[name] for name in ("alone", "silent", "cached", "everything")))
    told = [FACTS | one for one in facts] or [FACTS, FACTS]
    group = [Group("0", 2, [0, 1], 0.3, 0.3, 0.0, 1.0, [calls])] if calls else []
    taken = sum(loss.share for loss in losses)
    state = {"useful": 1 - taken, "starved": 0.0, "other": 0.0}
    report = SimpleNamespace(
        losses=list(losses), groups=group, hosts=["a", "b"], states=[state, state], size=2
    )
    together = int(told[0]["mask"], 16) | int(told[1]["mask"], 16)
    e = Evidence(
        waterfall=fall, report=report, loader=loader, threads=told[0]["threads"],
        cores=together.bit_count(), per_host=2, steps=10, rungs=rungs, facts=told,
        gradients=gradients, line_profile=line_profile, describe_lateness=lambda _: late,
        exchanged=list(exchanged), savings=savings or {},
        lines={"transfer": [{"line": 7, "code": "dist.all_reduce(grad)"}]},
    )  # fmt: skip
    return causes(e, parts)


def collective(name="all-reduce", count=10, size=1000, wait=0.0, transfer=0.3):
    return Collective(name, count, count * size, wait, transfer, 0.0, 1.0, 1.0)


SLOWER = {
    "cached": rung(0.1),
    "everything": rung(0.1),
    "silent": rung(0.05),
}
SLOWER["alone"] = rung(0.05, ranks=1)
EXCHANGE = [Loss("transfer", 0.5)]
INPUT = {name: rung(0.05) for name in ("silent", "cached")} | {"alone": rung(0.05, ranks=1)}
WAITS_INPUT = [Loss("input", 0.5)]
LOADER = {"batches": 100, "seconds": 10.0, "busy_s": 1.0, "system_s": 0.5, "workers": 2, "ranks": 2}


def test_no_causes_without_losses():
    assert judged() == []


EXCHANGES = {
    "exchange-latency": (collective(count=100), {}, GradientSync(1, 1, 1, 4e6, 10, 1e4)),
    "exchange-bandwidth": (collective(size=4_000_000), {}, GradientSync(1, 1, 1, 4e6, 0, 0)),
    "no-overlap": (collective(size=4_000_000), {}, GradientSync(1, 0, 0, 0, 1, 4e6)),
    "accumulation-exchange": (collective(size=4_000_000), {}, GradientSync(4, 4, 4, 16e6, 0, 0)),
    "synchronisation": (collective("barrier", count=50, size=0), {}, None),
    "bucket-size": (
        collective(count=160, size=250_000),
        {"ddp": {"bytes": 4_000_000, "bucket_bytes": 250_000}},
        GradientSync(1, 1, 16, 4e6, 0, 0),
    ),
}


@pytest.mark.parametrize(("recorded", "named"), [(0.035, []), (0.06, ["exchange-latency"])])
def test_marginal_loss_needs_confirmation_by_second_witness(recorded, named):
    """Use 5.5 % by experiment: what a plain script shows with an exchange of 5 ms in 100 ms."""
    base = {name: rung(0.1) for name in ("cached", "everything")}
    base |= {"silent": rung(0.0945), "alone": rung(0.0945, ranks=1)}
    found = judged(losses=[Loss("transfer", recorded)], calls=collective(count=100), **base)
    assert [cause.id for cause in found] == named


@pytest.mark.parametrize("name", EXCHANGES)
def test_causes_of_slow_exchange(name):
    calls, facts, gradients = EXCHANGES[name]
    (cause,) = judged(
        losses=EXCHANGE, calls=calls, gradients=gradients, facts=[facts, facts], **SLOWER
    )
    assert cause.id == name, cause.sentence
    assert cause.share == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(
    ("count", "crowded", "named"),
    [
        (10, 0.3, "jitter"),
        (10, 0.05, "exchange-latency"),
        (200, 0.3, "exchange-latency"),
        (1000, 0.3, "exchange-latency"),
    ],
)
def test_few_small_exchanges_waiting_for_a_core_are_jitter(count, crowded, named):
    """Ten steps of 100 ms, half of it exchange: 50, 2.5 or 0.5 ms per call."""
    slower = SLOWER | {name: rung(0.1, crowded=crowded) for name in ("cached", "everything")}
    (cause,) = judged(losses=EXCHANGE, calls=collective(count=count), **slower)
    assert cause.id == named
    assert ("threads wait for a core" in cause.sentence) == (named == "jitter")


def test_gan_with_two_backwards_is_not_gradient_accumulation():
    half = {"parameters": {"float32": 4_000_000}}
    (cause,) = judged(
        losses=EXCHANGE, calls=collective(size=2_000_000), facts=[half, half],
        gradients=GradientSync(2, 2, 2, 4e6, 0, 0), **SLOWER,
    )  # fmt: skip
    assert cause.id == "exchange-bandwidth"


def test_single_bucket_of_large_model_is_bucket_size_cause():
    ddp = {"ddp": {"bytes": 100 << 20, "bucket_bytes": 1 << 30}}
    (cause,) = judged(
        losses=EXCHANGE, calls=collective(size=100 << 20), facts=[ddp, ddp],
        gradients=GradientSync(1, 1, 1, 100 << 20, 0, 0), **SLOWER,
    )  # fmt: skip
    assert cause.id == "bucket-size"
    assert "one bucket of 105 MB" in cause.sentence


INPUTS = {
    "input-waiting": {},
    "input-preprocessing": {"busy_s": 9.5, "system_s": 0.1},
    "input-small-files": {"opened": 6400, "read": 6400 * 4096},
    "input-bandwidth": {"opened": 100, "read": 100 << 24, "busy_s": 9.5, "system_s": 9.0},
}
READING = {"opened": 100, "read": 100 << 24, "busy_s": 1.0, "system_s": 0.9}


@pytest.mark.parametrize(("stored", "name"), [(100 << 24, "input-bandwidth"), (0, "input-waiting")])
def test_cached_files_are_not_an_input_bandwidth_cause(stored, name):
    (cause,) = judged(losses=WAITS_INPUT, loader=LOADER | READING | {"stored": stored}, **INPUT)
    assert cause.id == name, cause.sentence


@pytest.mark.parametrize("name", INPUTS)
def test_causes_of_late_batch(name):
    (cause,) = judged(losses=WAITS_INPUT, loader=LOADER | INPUTS[name], **INPUT)
    assert cause.id == name, cause.sentence


def test_loader_restart_each_epoch_is_reported():
    real = rung(starts=4, starting=0.45)
    (cause,) = judged(losses=WAITS_INPUT, loader=LOADER, everything=real, **INPUT)
    assert (cause.id, cause.evidence["starts"]) == ("loader-start", 24)
    assert "the loader takes 112 ms to start in each epoch" in cause.sentence


UNEVEN = [Loss("wait", 0.25, 1, "b", "useful")]
PRINTS = [{"line": 9, "code": "print(loss)", "share": 1.0}]
PRINTING = [Loss("wait", 0.25, 1, "b", "other"), Loss("other", 0.2, lines=PRINTS)]


def uneven(facts=(), losses=UNEVEN, other=(0.0, 0.0), **used):
    rungs = {name: rung(slow=2.0, **used) for name in ("silent", "cached", "everything")}
    rungs["alone"] = rung(0.05, ranks=1)
    shares = zip((0.5, 1.0), other, strict=True)
    own = [{"useful": useful, "starved": 0.0, "other": one} for useful, one in shares]
    fall = waterfall(*(rungs[name] for name in ("alone", "silent", "cached", "everything")))
    report = SimpleNamespace(losses=losses, groups=[], hosts=["a", "b"], states=own, size=2)
    told = [FACTS | one for one in facts] or [FACTS, FACTS]
    e = Evidence(
        fall,
        report,
        None,
        1,
        2,
        1,
        10,
        rungs,
        told,
        describe_lateness=lambda rank: f"from step {rank} on",
    )
    (cause,) = causes(e)
    return cause


def test_causes_of_uneven_ranks_are_distinguished():
    assert uneven().id == "slow-rank"
    assert "rank 1 on b takes longer for its steps, from step 1 on, and" in uneven().sentence
    host = uneven(facts=[{}, {"product_s": {"float32": 0.002}}])
    assert (host.id, host.evidence["host"]) == ("slow-host", "b")
    assert uneven(delayed=0.3, host=2.0).id == "noisy-machine"
    elements = {"mean": 100.0, "spread": 50.0, "slope": 1e-3, "correlation": 0.95}
    assert uneven(elements=elements).id == "uneven-data"
    elements["correlation"] = 0.1
    assert uneven(elements=elements).id == "slow-rank"
    prints = uneven(losses=PRINTING, other=(0.1, 0.3))
    assert (prints.id, prints.evidence["lines"]) == ("synchronisation", PRINTS)
    assert prints.share > 0.4
    assert uneven(losses=PRINTING[:1], other=(0.0, 0.3)).id == "slow-rank"


def test_causes_of_slow_shared_machine_are_distinguished():
    slowed = {name: rung(0.2) for name in ("silent", "cached", "everything")}
    (cause,) = judged(**slowed)
    assert cause.id == "shared-machine"
    (cause,) = judged(**slowed, alone=rung(ranks=1, batch=20))
    assert cause.id == "fixed-cost"
    assert "has 20 samples on one rank alone, and 10 on each of several ranks" in cause.sentence
    (cause,) = judged(facts=[{"threads": 4}] * 2, **slowed | {"one thread": rung(0.1)})
    assert cause.id == "too-many-threads"
    assert cause.sentence.startswith("2 ranks with 4 threads each share 2 cores")
    (cause,) = judged(facts=[{"mask": "1"}] * 2, **slowed)
    assert cause.id == "binding"
    assert cause.sentence == "2 ranks together may use only 1 of the node's 2 cores"
    (cause,) = judged(**{name: rung(0.2, delayed=0.4, host=2.0) for name in slowed})
    assert cause.id == "noisy-machine"


def test_binding_is_shown_by_waits_for_cores_if_the_rounds_differ():
    """Ranks on one core run in turn, and the experiments differ a lot."""
    waiting = {"everything": rung(0.1, delayed=0.45)}
    (cause,) = judged(facts=[{"mask": "1"}] * 2, **waiting)
    assert (cause.id, cause.confirmed, cause.basis) == ("binding", "not-testable", "record")
    assert cause.share == pytest.approx(0.45)
    assert judged(**waiting) == []
    waits = [Loss("wait", 0.6)]  # for the rank that has no core
    slower = SLOWER | {"everything": rung(0.2, delayed=0.45)}
    (cause,) = judged(facts=[{"mask": "1"}] * 2, losses=waits, calls=collective(), **slower)
    assert cause.id == "binding"


def test_share_of_other_programs_is_at_most_the_wait_for_cores():
    """Ranks lose half of a step together, and wait for other programs a fifth of that."""
    slowed = ("silent", "cached", "everything")
    found = judged(**{name: rung(0.2, delayed=0.1, host=2.0) for name in slowed})
    assert [one.id for one in found] == ["shared-machine", "noisy-machine"]
    assert [one.share for one in found] == pytest.approx([0.4, 0.1], abs=0.01)
    noise = found[1]
    assert (noise.confirmed, noise.basis, noise.measured) == ("not-testable", "record", None)


def test_waits_for_the_threads_of_the_job_are_not_other_programs():
    """Ranks wait 28 % of the time for a core, and other programs use 0.2 cores: the launcher."""
    slowed = {name: rung(0.2, delayed=0.28, host=1.25) for name in ("cached", "everything")}
    slowed |= {"silent": rung(0.2, delayed=0.28), "one thread": rung(0.1)}
    first, *others = judged(facts=[{"threads": 8}] * 2, **slowed)
    assert (first.id, first.confirmed) == ("too-many-threads", "confirmed")
    assert all(one.share <= 0.125 for one in others)  # 0.25 cores for two ranks


def test_few_waits_for_other_programs_do_not_explain_ranks_that_are_late_in_turn():
    late = [Loss("wait", 0.4), Loss("transfer", 0.05)]
    slower = SLOWER | {name: rung(0.1, delayed=0.04, host=2.0) for name in ("cached", "everything")}
    (cause,) = judged(losses=late, calls=collective(wait=0.4), **slower)
    assert cause.id == "jitter"
    assert cause.share == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("kind", ["validation", "checkpoint"])
@pytest.mark.parametrize(("own", "waits", "on_one"), [(0.2, 0.2, True), (0.38, 0.02, False)])
def test_work_of_all_ranks_is_not_that_of_one_which_takes_slightly_longer(kind, own, waits, on_one):
    """Two ranks: alone, rank 0 works as long as the other one waits."""
    free = rung(0.06)
    both = [replace(one, **{f"{kind}_s": [0.04, 0.0 if on_one else 0.038]}) for one in free]
    both = [replace(one, step_s=0.1, together=200.0) for one in both]
    losses = [Loss(kind, own), Loss("wait", waits, 0, "a", kind)]
    rungs = dict.fromkeys(("silent", "cached", "everything"), both)
    (cause,) = judged(losses=losses, alone=rung(0.06, ranks=1), **rungs)
    assert cause.id == (f"{kind}-on-one-rank" if on_one else kind)


def test_sizes_of_batches_that_all_ranks_draw_alike_do_not_make_one_rank_slow():
    """Steps follow the size of the batch, which explains 2 % of the time."""
    elements = {"mean": 100.0, "spread": 10.0, "slope": 2e-4, "correlation": 0.95}
    assert uneven(elements=elements).id == "slow-rank"
    assert uneven(elements=elements | {"spread": 50.0, "slope": 1e-3}).id == "uneven-data"


def test_noisy_machine_that_slows_all_rungs_is_reported():
    """Waits for cores are as long with one rank as with all ranks, so no bar shows them."""
    slowed = {
        "alone": rung(ranks=1, delayed=0.4, host=2.0),
        "everything": rung(delayed=0.4),
    }
    assert judged(**slowed) == []
    slowed["everything"] = rung(delayed=0.4, host=2.5)
    (cause,) = judged(**slowed)
    assert (cause.id, cause.share) == ("noisy-machine", pytest.approx(0.4))
    assert judged(**slowed | {"everything": rung(delayed=0.04, host=2.5)}) == []


INSIDE = {
    "layout": {"alone, channels-last": rung(0.07, ranks=1)},
    "allocator": {"silent": rung(faults=100_000.0, system=0.3)},
    "memory-limit": {"everything": rung(squeezed=0.2)},
    "interpreter": {
        "silent": rung(thread=0.3, others={"seconds": 0.6, "name": "monitor"}),
    },
}


def test_idle_time_inside_a_step_is_script_time():
    still = {"silent": rung(process=0.6)}
    (cause,) = judged(**still)
    assert (cause.id, cause.share) == ("script", pytest.approx(0.4, abs=0.05))
    assert "uses no core in a part of its steps: it sleeps, or waits for a file" in cause.sentence
    assert judged(**still, facts=[{"gpu": True}] * 2) == []
    assert judged(**still, facts=[{"threads": 4}] * 2) == []
    assert judged(silent=rung(process=0.6, delayed=0.35)) == []
    between = judged(**still, losses=[Loss("other", 0.4)])
    assert [one.id for one in between] == ["script"]
    assert "between its steps" in between[0].sentence


@pytest.mark.parametrize("name", INSIDE)
def test_causes_of_slow_computation_on_one_rank(name):
    (cause,) = judged(**INSIDE[name])
    assert cause.id == name
    assert 0.1 < cause.share < 0.7


def test_float64_and_needless_unused_parameter_search_are_causes():
    double = {"parameters": {"float64": 8}, "product_s": {"float32": 0.001, "float64": 0.002}}
    (cause,) = judged(facts=[double, double])
    assert (cause.id, cause.share) == ("precision", pytest.approx(0.5))
    ddp = {"ddp": {"searches": True, "unused_bytes": 0, "bytes": 8, "bucket_bytes": 8}}
    (cause,) = judged(facts=[ddp, ddp], everything=rung(searching=0.1))
    assert cause.id == "unused-parameter-search"
    ddp["ddp"]["unused_bytes"] = 8
    assert judged(facts=[ddp, ddp], everything=rung(searching=0.1)) == []


def test_ideal_without_single_rank_run_is_fastest_rung():
    fall = waterfall([], rung(slow=2.0), rung(), rung())
    assert [bar.id for bar in fall.bars] == ["uneven"]
    assert fall.ideal.mean == pytest.approx(400, rel=0.01)
