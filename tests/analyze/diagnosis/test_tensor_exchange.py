"""The cause of exchange on the tensor axis of a layout, and its remedies."""

from types import SimpleNamespace

import pytest
from rungs import rung

from paceline.analyze.diagnosis.causes import causes
from paceline.analyze.diagnosis.evidence import Evidence
from paceline.analyze.diagnosis.rungs import waterfall
from paceline.analyze.figures.losses import Loss
from paceline.analyze.figures.process_groups import Collective, Group
from paceline.analyze.figures.sharded_blocks import BlockCalls, ShardedBlock
from paceline.predict.remedies import remedies

RUNGS = {
    "alone": rung(0.05, ranks=1), "silent": rung(0.05),
    "cached": rung(0.1), "everything": rung(0.1),
}  # fmt: skip


LAYERS = [
    ShardedBlock(name, [BlockCalls("forward", 1, 4e6, seconds, 0.0, seconds)])
    for name, seconds in (("mlp.0", 0.01), ("mlp.2", 0.04))
]


def proposed(axis="tensor", extent=4, hosts=1, calls="all-reduce"):
    """Return cause and remedies of ten steps of 100 ms, half of which is communication."""
    collective = Collective(calls, 160, 160 * 4_000_000, 0.0, 0.5, 0.0, 1.0, 1.0)
    members = list(range(extent))
    group = Group("g", extent, members, 0.0, 0.5, 0.0, 1.0, [collective], axis)
    names = [f"node{rank * hosts // extent}" for rank in members]
    report = SimpleNamespace(
        losses=[Loss("transfer", 0.5)], groups=[group], hosts=names, ranks=members, layers=LAYERS,
        states=[{"useful": 0.5, "other": 0.0, "starved": 0.0}] * extent, size=extent,
    )  # fmt: skip
    e = Evidence(
        waterfall=waterfall(*RUNGS.values()), report=report, loader=None, threads=1, cores=4,
        per_host=extent, steps=10, rungs=RUNGS,
        facts=[{"parameters": {"float32": 32_000_000}}, *[{}] * (extent - 1)],
    )  # fmt: skip
    (cause,) = causes(e)
    return cause, {remedy.knob: remedy for remedy in remedies(e, [cause], "", {})}


def test_the_axis_is_named_with_its_ranks_and_calls():
    cause, found = proposed()
    assert cause.id == "tensor-exchange"
    assert cause.sentence.startswith(
        "the 4 ranks of the tensor axis exchange activations in each divided layer: 16 calls of "
        "all-reduce per step with 3.81 MiB each"
    )
    assert cause.sentence.endswith("; most in mlp.2, 40 ms of a step")
    assert cause.evidence["layers"][1] == {"name": "mlp.0", "exposed_s": 0.01}
    assert {"tensor-axis", "sequence-split"} <= found.keys()
    assert found["sequence-split"].gain is None  # it must be tried
    assert found["sequence-split"].settable
    assert "'*norm*': 'sequence'" in found["sequence-split"].edit
    part = 1 - (1 / 2) / (3 / 4)
    saved = 0.5 * part
    assert found["tensor-axis"].gain.mean == pytest.approx(saved / (1 - saved), rel=0.05)
    assert (
        "layout tp2 in place of tp4, with 2 times as many data ranks" in found["tensor-axis"].edit
    )


def test_an_axis_on_several_nodes_gets_the_ranks_of_one():
    cause, found = proposed(extent=4, hosts=4)
    assert "the 4 ranks on 4 nodes of the tensor axis" in cause.sentence
    assert "layout without tp in place of tp4" in found["tensor-axis"].edit


def test_parts_of_the_sequence_are_not_proposed_twice():
    assert "sequence-split" not in proposed(calls="reduce-scatter")[1]


def test_other_axes_are_other_causes():
    assert proposed(axis="data")[0].id == "exchange-bandwidth"
