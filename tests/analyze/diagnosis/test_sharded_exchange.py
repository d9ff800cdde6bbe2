"""The cause of exposed gathers of sharded models, and its remedies."""

from types import SimpleNamespace

import pytest
from rungs import rung

from paceline.analyze.diagnosis.causes import causes
from paceline.analyze.diagnosis.evidence import Evidence
from paceline.analyze.diagnosis.rungs import waterfall
from paceline.analyze.figures.losses import Loss
from paceline.analyze.figures.process_groups import Collective, Group
from paceline.analyze.figures.sharded_blocks import BlockCalls, ShardedBlock, ShardedModel
from paceline.predict.remedies import remedies

GB = 10**9
RUNGS = {
    "alone": rung(0.05, ranks=1), "silent": rung(0.05),
    "cached": rung(0.1), "everything": rung(0.1),
}  # fmt: skip


def block(name, forward=0.0, backward=0.0, reduction=0.0, size=4_000_000):
    """Return a block whose gathers and reductions are exposed for so many seconds of a step."""
    seconds = {"forward gather": forward, "backward gather": backward, "reduction": reduction}
    calls = [BlockCalls(kind, 1, size, s, 0.0, s) for kind, s in seconds.items() if s]
    return ShardedBlock(name, calls)


ZERO3 = [block(f"layers.{i}", 0.004 + 0.001 * (i == 7), 0.004, 0.002) for i in range(8)]


def evidence(blocks, free=None, calls="all-gather", count=160, size=4_000_000):
    """Return figures of ten steps of two ranks: half of a step of 100 ms is communication."""
    collective = Collective(calls, count, count * size, 0.0, 0.5, 0.0, 1.0, 1.0)
    group = Group("0", 2, [0, 1], 0.0, 0.5, 0.0, 1.0, [collective])
    state = {"useful": 0.5, "other": 0.0, "starved": 0.0}
    report = SimpleNamespace(
        losses=[Loss("transfer", 0.5)], groups=[group], hosts=["a", "a"], states=[state, state],
        size=2,
    )  # fmt: skip
    return Evidence(
        waterfall=waterfall(*RUNGS.values()), report=report, loader=None, threads=1, cores=2,
        per_host=2, steps=10, rungs=RUNGS, facts=[{"parameters": {"float32": 32_000_000}}, {}],
        sharded=ShardedModel(blocks, free) if blocks else None,
    )  # fmt: skip


def proposed(e):
    found = causes(e)
    return found, {remedy.knob: remedy for remedy in remedies(e, found, "", {})}


def test_exposed_gathers_are_named_with_their_blocks():
    ((cause,), _) = proposed(evidence(ZERO3))
    assert cause.id == "sharded-exchange"
    assert "the gather of layers.7 in the forward comes 5 ms late: prefetch further" in (
        cause.sentence
    )
    assert cause.evidence["blocks"][0]["name"] == "layers.7"
    assert cause.evidence["backward_gathers_s"] == pytest.approx(8 * 0.004)
    assert cause.evidence["gathered_bytes"] == 32_000_000


def test_other_collectives_of_a_sharded_model_are_other_causes():
    ((cause,), _) = proposed(evidence(ZERO3, calls="all-to-all"))
    assert cause.id == "exchange-bandwidth"
    ((cause,), _) = proposed(evidence(ZERO3, count=1600))  # of which blocks have a tenth
    assert cause.id == "exchange-bandwidth"
    ((cause,), _) = proposed(evidence([]))
    assert cause.id == "exchange-bandwidth"


def test_remedies_that_need_memory_are_proposed_where_it_is_known_to_suffice():
    for free, expected in ((None, False), (GB // 100, False), (GB, True)):
        _, found = proposed(evidence(ZERO3, free))
        assert "sharded-prefetch" in found
        assert ("sharded-keep-gathered" in found) == expected
        assert ("data-parallel" in found) == expected
    assert found["sharded-prefetch"].gain is None  # measured by a few steps
    part = 0.032 / (0.033 + 0.032 + 0.016)
    saved = 0.5 * part
    gain = found["sharded-keep-gathered"].gain
    assert gain.mean == pytest.approx(saved / (1 - saved), rel=0.05)
    assert "had 1 GB free" in found["data-parallel"].edit


def test_blocks_that_stay_gathered_have_nothing_to_keep():
    _, found = proposed(evidence([block(f"{i}", 0.004, 0.0, 0.004) for i in range(8)], GB))
    assert "sharded-keep-gathered" not in found


@pytest.mark.parametrize(
    ("blocks", "advice"),
    [
        ([block(f"{i}", 0.004, size=10_000) for i in range(8)], "around several of them"),
        ([block("(root)", 0.02)], "inside of the largest block"),
        ([block("a", 0.02), block("b", 0.02, size=40_000_000)], "it has 91 % of the parameters"),
        (ZERO3, None),
    ],
)
def test_block_size_is_proposed_by_what_limits_the_gathers(blocks, advice):
    _, found = proposed(evidence(blocks, count=10 * len(blocks)))
    remedy = found.get("sharded-blocks")
    assert remedy is None if advice is None else advice in remedy.edit
