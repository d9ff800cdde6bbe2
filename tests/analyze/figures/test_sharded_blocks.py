"""Gathers and reductions of the blocks of sharded models, from synthetic records."""

import json

import pytest
from records import MS, Rank, report_of

from paceline.analyze.figures.report import analyse_with_window
from paceline.analyze.figures.sharded_blocks import describe_blocks, least_free_bytes
from paceline.analyze.records.load_run import Run
from paceline.analyze.records.read_record import parse_record
from paceline.record.ring.states import FIRST_BLOCK_PEER, Memory, Op, State
from paceline.report.page.run_page import single
from paceline.report.terminal.run_report import panel, render

LAYER, MODEL = FIRST_BLOCK_PEER, FIRST_BLOCK_PEER - 1  # labels of the two blocks
NAMES = ["layers.7", ""]


def zero3(folder, blocks=NAMES, steps=3, late=0.0, size=2):
    """Return the records of ranks that gather a block twice in each step of 100 ms.

    The gather in the forward is exposed for 3 ms, that in the backward for 5, the reduction for 2.
    late: ms by which rank 1 launches all of them later.
    """
    ranks = []
    for number in range(size):
        rank = Rank(folder, number, size, blocks=blocks)
        rank.step(0, 10)
        for step in range(steps):
            at, after = 10 + 100 * step, late * (number == 1)
            rank.was(State.FORWARD, at, at + 40)
            # launched ahead, by 6 ms
            rank.collective(at + after, at + 6, at + 9, Op.ALL_GATHER, LAYER, amount=4 << 20)
            rank.collective(at + 20, at + 20, at + 20.5, Op.ALL_GATHER, MODEL, amount=1 << 20)
            rank.was(State.BACKWARD, at + 40, at + 90)
            begin = at + 50 + after
            rank.collective(begin, begin, at + 55, Op.ALL_GATHER, LAYER, amount=4 << 20)
            rank.collective(at + 70, at + 70, at + 72, Op.REDUCE_SCATTER, LAYER, amount=4 << 20)
            rank.collective(at + 91, at + 91, at + 92, amount=8)  # of no block
            rank.step(at, at + 100, samples=4, number=step + 1)
        ranks.append(rank)
    return ranks


def calls_of(report, name):
    (block,) = [block for block in report.blocks if block.name == name]
    return {one.kind: one for one in block.calls}


def test_gathers_and_reductions_by_block_and_phase(tmp_path):
    report = report_of(zero3(tmp_path))
    assert [block.name for block in report.blocks] == ["layers.7", "(root)"]
    calls = calls_of(report, "layers.7")
    assert {kind: one.count for kind, one in calls.items()} == {
        "forward gather": 1, "backward gather": 1, "reduction": 1,
    }  # fmt: skip
    assert {kind: one.late_s for kind, one in calls.items()} == pytest.approx(
        {"forward gather": 0.003, "backward gather": 0.005, "reduction": 0.002}
    )
    assert calls["forward gather"].in_flight_s == pytest.approx(0.009)  # launched ahead
    assert calls["forward gather"].bytes == 4 << 20
    assert set(calls_of(report, "(root)")) == {"forward gather"}


def test_late_rank_makes_the_wait_of_a_gather(tmp_path):
    calls = calls_of(report_of(zero3(tmp_path, late=2.0)), "layers.7")
    # rank 0 waits for 2 ms of the 5, and rank 1 is in the gather for the other 3 only
    assert calls["backward gather"].wait_s == pytest.approx(0.001)
    assert calls["backward gather"].transfer_s == pytest.approx(0.003)


def test_blocks_are_part_of_their_groups_exposed_time(tmp_path):
    report = report_of(zero3(tmp_path))
    (group,) = report.groups
    steps = report.steps - 1
    of_blocks = sum(block.exposed_s() for block in report.blocks) * steps / report.window_s
    others = 0.001 * steps / report.window_s  # the collective of no block
    assert of_blocks + others == pytest.approx(group.wait + group.transfer, rel=1e-6)


def test_sentence_names_the_latest_gather_and_what_helps(tmp_path):
    report = report_of(zero3(tmp_path))
    assert describe_blocks(report.blocks) == (
        "gathers and reductions of 2 sharded blocks are exposed for 10.5 ms of a step; the gather "
        "of layers.7 in the backward comes 5 ms late: prefetch further, or keep it gathered after "
        "the forward"
    )


def test_a_single_block_can_not_be_prefetched(tmp_path):
    report = report_of(zero3(tmp_path))
    assert describe_blocks(report.blocks[1:]).endswith(
        "in the forward comes 0.5 ms late: divide the model into more blocks"
    )


def test_reports_have_a_table_and_json(tmp_path):
    report = report_of(zero3(tmp_path))
    text = " ".join(render(report).split())
    assert "layers.7 in the backward comes 5 ms late" in text.replace("│ ", "").replace(" │", "")
    (layer, _) = json.loads(report.to_json())["blocks"]
    assert layer["name"] == "layers.7"
    assert {one["kind"] for one in layer["calls"]} == {
        "forward gather", "backward gather", "reduction",
    }  # fmt: skip
    assert panel(report, full=True)


def test_page_has_a_row_for_each_block(tmp_path):
    ranks = zero3(tmp_path, blocks=["<b>bold</b>", ""])
    page = single(analyse_with_window(Run("test", [rank.record() for rank in ranks], missing=[])))
    rows = page.partition('<section id="blocks">')[2].partition("</section>")[0]
    assert ">(root)<" in rows
    assert "&lt;b&gt;bold&lt;/b&gt;" in rows
    assert "1 x 5 ms" in rows


def test_script_without_sharding_has_no_blocks(tmp_path):
    rank = Rank(tmp_path, 0, 1)
    for step in range(3):
        rank.step(10 * step, 10 * step + 10, number=step)
    assert report_of([rank]).blocks == []


def test_number_without_a_name_is_listed_as_unnamed(tmp_path):
    """Of a damaged record, or of one whose header had no room for the name."""
    report = report_of(zero3(tmp_path, blocks=["layers.7"]))
    assert {block.name for block in report.blocks} == {"layers.7", "(unnamed)"}


def test_free_memory_is_divided_among_the_ranks_of_a_node(tmp_path):
    records = []
    for number in range(2):
        rank = Rank(tmp_path, number, 2)
        for at, free in ((1000, 8 << 30), (2000, 6 << 30)):
            rank.ring.write(at * MS, at * MS, State.MEMORY, amount=free, peer=Memory.HOST_AVAILABLE)
        records.append(parse_record(rank.ring.snapshot()))
    assert least_free_bytes(records) == 3 << 30
    assert least_free_bytes([*records, Rank(tmp_path, 2, 3).record()]) is None
