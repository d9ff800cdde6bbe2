"""Figures of each axis of a mesh: with a known record, and their sums."""

import io
import re

import pytest
from records import Rank, report_of

from paceline.analyze.figures.report import analyse_with_window
from paceline.analyze.records.load_run import Run
from paceline.record.ring.states import FIRST_BLOCK_PEER, Op, State
from paceline.report.console import PlainConsole
from paceline.report.page.run_page import single
from paceline.report.terminal.run_report import panel

LAYER = FIRST_BLOCK_PEER  # label of the first name of "blocks"


def job(folder):
    """Return ranks of "dp2 x tp2".

    Of each step of 100 ms, a rank computes 50 ms (rank 3: 60 ms) and 8 ms more; it is in
    collectives of its tensor group until 70, of its data group until 90, of all ranks until 92.
    """
    made = []
    for i in range(4):
        data, tensor = divmod(i, 2)
        groups = {f"t{data}": (2, tensor), f"d{tensor}": (2, data), "all": (4, i)}
        labels = {f"t{data}": f"tensor (data {data})", f"d{tensor}": f"data (tensor {tensor})"}
        mesh = {"axes": [["data", 2], ["tensor", 2]], "place": [data, tensor], "groups": labels}
        rank = Rank(folder, i, 4, groups=groups, mesh=mesh, blocks=["mlp.2", "blocks.0"])
        for step in range(11):
            begin = 100 * step
            arrived = begin + (60 if i == 3 else 50)
            rank.was(State.FORWARD, begin, arrived)
            rank.collective(arrived, arrived, begin + 70, amount=1000, group=f"t{data}", peer=LAYER)
            rank.collective(
                *(begin + 70, begin + 70, begin + 90),
                op=Op.REDUCE_SCATTER,
                peer=LAYER - 1,
                amount=500,
                group=f"d{tensor}",
            )
            rank.collective(begin + 90, begin + 90, begin + 92, group="all")
            rank.was(State.BACKWARD, begin + 92, begin + 100)
            rank.step(begin + 99, begin + 100, number=step, samples=4)
        made.append(rank)
    return made


def test_each_axis_has_efficiencies_of_its_own(tmp_path):
    report = report_of(job(tmp_path))
    axes = {axis.name: axis for axis in report.axes}
    assert list(axes) == ["data", "tensor", "all ranks"]  # by what they cost
    assert [(a.extent, a.groups) for a in axes.values()] == [(2, 2), (2, 2), (4, 1)]
    tensor = axes["tensor"]
    assert tensor.wait == pytest.approx(0.025)  # rank 2 for rank 3
    assert tensor.transfer == pytest.approx(0.15)
    assert tensor.wait_efficiency == pytest.approx(0.975)
    assert tensor.transfer_efficiency == pytest.approx(0.825 / 0.975)
    assert tensor.efficiency == pytest.approx(0.825)
    assert tensor.load_balance == pytest.approx((58 * 3 + 68) / (58 * 2 + 68 * 2))
    assert tensor.bytes_per_step == pytest.approx(1000)
    assert axes["data"].transfer == pytest.approx(0.2)
    assert axes["data"].bytes_per_step == pytest.approx(500)
    assert axes["all ranks"].transfer == pytest.approx(0.02)
    blocked = sum(axis.wait + axis.transfer for axis in report.axes)
    assert 1 - blocked == pytest.approx(report.efficiencies.parallel, abs=1e-9)
    assert report.unmatched == 0
    assert report.doubts == []


def test_exchange_of_the_tensor_axis_by_layer(tmp_path):
    report = report_of(job(tmp_path))
    (layer,) = report.layers
    (calls,) = layer.calls
    assert (layer.name, calls.kind, calls.bytes) == ("mlp.2", "forward", 1000)
    assert calls.count == pytest.approx(1)
    axis = next(one for one in report.axes if one.name == "tensor")
    assert layer.exposed_s() == pytest.approx((axis.wait + axis.transfer) * 0.1)
    (block,) = report.blocks
    assert [(block.name, one.kind) for one in block.calls] == [("blocks.0", "reduction")]


def test_the_table_of_axes(tmp_path):
    console = PlainConsole(file=io.StringIO(), width=200)
    console.print(panel(report_of(job(tmp_path)), 200, full=True))
    row = next(line for line in console.file.getvalue().splitlines() if " tensor  " in line)
    cells = row.strip(" │").split()
    assert cells[:3] == ["tensor", "2", "2"]
    assert row.index("2.5") < row.index("15")
    assert "layer of the tensor axis" in console.file.getvalue()
    assert re.search(r"mlp\.2 +1000 B +1 x 17\.5 ms +- +17\.5 ms", console.file.getvalue())
    assert "1000 B" in row


def test_the_table_of_axes_on_the_page(tmp_path):
    run = Run("test", [rank.record() for rank in job(tmp_path)], missing=[])
    page = single(analyse_with_window(run))
    table = page.partition('<table class="axes">')[2].partition("</table>")[0]
    rows = re.findall(r"<tr><th scope=row>([^<]+)</th>(.*?)</tr>", table)
    assert [name for name, _ in rows] == ["data", "tensor", "all ranks"]
    cells = re.findall(r">([^<]+)</td>", rows[1][1])
    assert cells[:4] == ["2", "2", "2.5 %", "15.0 %"]
    assert (
        "<th scope=row>mlp.2</th>"
        in page.partition('<table class="layers">')[2].partition("</table>")[0]
    )


def test_without_other_axes_than_data_there_is_no_table(tmp_path):
    ranks = [Rank(tmp_path, i, 2, mesh={"axes": [["data", 2]], "place": [i]}) for i in range(2)]
    for rank in ranks:
        for step in range(3):
            rank.was(State.FORWARD, 10 * step, 10 * step + 8)
            rank.step(10 * step, 10 * step + 10, number=step)
    assert report_of(ranks).axes == []
