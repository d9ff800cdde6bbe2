"""Two studies: changes that are larger than the noise, and what they are made of."""

import dataclasses
import io

import pytest

from paceline.analyze.scaling.outcomes.compare_studies import compare_studies
from paceline.analyze.scaling.study_model import STRONG, WEAK
from paceline.report.console import PlainConsole
from paceline.report.scaling.study_comparison import comparison_document, comparison_json
from paceline.report.terminal.draw import draw_panel
from studies import make_study


def printed(found):
    console = PlainConsole(file=io.StringIO(), width=130)
    console.print(draw_panel(comparison_document(found)))
    return console.file.getvalue()


def test_remedy_that_halves_the_serial_share_is_seen_where_it_matters():
    before, after = make_study(serial=0.2), make_study(serial=0.1)
    found = compare_studies(before, after)
    sizes = {(one.kind, one.ranks): one for one in found.changes}
    assert list(sizes) == [(kind, n) for kind in (STRONG, WEAK) for n in (1, 2, 4, 8)]
    assert not sizes[STRONG, 1].is_real
    last = sizes[STRONG, 8]
    assert last.is_real
    assert last.ratio.value == pytest.approx(
        (1 + 0.2 * 7 + 0.056) / (1 + 0.1 * 7 + 0.056), rel=0.03
    )
    assert (last.state, last.state_s < 0) == ("wait", True)
    text = printed(found)
    assert "within the noise" in text
    assert "better: wait -" in text


def test_equal_studies_do_not_differ():
    found = compare_studies(make_study(), make_study())
    assert not any(one.is_real for one in found.changes)
    assert found.differences == []
    assert "better" not in printed(found)


def test_one_run_each_counts_the_assumed_spread_between_runs():
    before = make_study((1, 2), runs=1, spread=0.0)
    after = make_study((1, 2), runs=1, spread=0.0, rate=1030.0)  # 3 % faster
    assert not any(one.is_real for one in compare_studies(before, after).changes)
    faster = make_study((1, 2), runs=1, spread=0.0, rate=1200.0)
    found = compare_studies(before, faster)
    assert all(one.is_real for one in found.changes)
    assert "Sizes with one run" in printed(found)


def test_other_sizes_commands_and_batches_are_named():
    before, after = make_study((1, 2), (STRONG,)), make_study((2, 4), (STRONG,))
    request = dataclasses.replace(after.request, args=["--other"], settings={"threads": 1})
    point = after.points[0]
    point.setup.__dict__["global_batch"] = 128
    found = compare_studies(before, dataclasses.replace(after, request=request))
    assert (found.only_before, found.only_after) == ([(STRONG, 1)], [(STRONG, 4)])
    text = " ".join(found.differences)
    assert "--other after" in text
    assert "Knobs: none before, threads=1 after." in text
    assert "Global batch on 2 ranks (strong scaling): 64 before, 128 after." in text
    tree = comparison_json(found)
    assert [one["ranks"] for one in tree["sizes"]] == [2]
    assert tree["only_after"] == [(STRONG, 4)]


def test_studies_without_a_common_size_are_refused():
    with pytest.raises(ValueError, match=r"no measured size in common\. HINT"):
        compare_studies(make_study((1,), (STRONG,)), make_study((1,), (WEAK,)))
