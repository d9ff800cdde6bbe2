"""``paceline.Layout``: its text, what it needs, and bad input."""

import subprocess
import sys

import pytest

import paceline
from paceline.cost.layout import Layout
from paceline.knobs.registry import KNOBS
from paceline.knobs.settings import Setting, settings_for_script, write_settings

TEXTS = [
    *("data", "zero3", "dp2 x tp4", "pp2 x zero1", "d2 x h2 x dp2", "tp", "zero3/host", "zero2/4"),
    "zero3 + recompute",
    "data + recompute=selective + offload=optimizer",
    "pp4 x dp2 x tp2 + schedule=1f1b + micro-batches=8",
    "tp2 + rule:blocks.*.(q|k)=column + rule:head+=row",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_read_and_printed(text):
    layout = paceline.Layout.parse(text)
    assert str(layout) == text
    assert Layout.parse(str(layout)) == layout


def test_order_and_other_signs_do_not_matter():
    assert Layout.parse("tp4xdp2") == Layout.parse("dp2*tp4") == Layout(dp=2, tp=4)
    assert Layout(tp=2, rules={"a": "row"}) == Layout.parse("dp x tp2 + rule:a=row")
    assert len({Layout(rules={"a": "row"}), Layout(rules=(("a", "row"),))}) == 1


def test_open_extent_takes_the_remaining_ranks():
    assert [Layout.parse(text).ranks for text in ("data", "tp4", "dp2 x tp4", "tp")] == [
        *(None, None, 8, None)
    ]
    assert Layout.parse("tp4").over(8) == Layout(dp=2, tp=4)
    assert Layout.parse("dp2 x tp").over(8) == Layout(dp=2, tp=4)
    assert Layout.parse("tp").over(8) == Layout(dp=1, tp=8)
    assert Layout.parse("zero3 + recompute").over(3) == Layout(dp=3, zero=3, recompute="blocks")


@pytest.mark.parametrize(
    ("text", "ranks", "said"),
    [
        ("dp2 x tp4", 6, "needs 8 ranks, and the job has 6. HINT: start 8 ranks, or leave"),
        ("tp4", 6, "needs a multiple of 4 ranks, and the job has 6. HINT: start 4 or 8 ranks"),
        ("tp4", 2, "needs a multiple of 4 ranks, and the job has 2. HINT: start 4 ranks"),
        ("zero3/4", 6, "needs a multiple of 4 ranks"),
    ],
)
def test_number_of_ranks_that_does_not_fit(text, ranks, said):
    with pytest.raises(ValueError, match=said):
        Layout.parse(text).over(ranks)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("zero4", "no sharding level 4. HINT: zero1"),
        ("zero", "zero needs its level. HINT"),
        ("tq2", "'tq2' is no axis; .*HINT"),
        ("", "'' is no axis"),
        ("pp2,dp2", "another separator .*HINT: ' x ' between axes"),
        ("pp2 + micro-batches=4, schedule=gpipe", "another separator .* ' [+] ' before each"),
        ("pp2 + micro-batches=0", "this is 0. HINT: micro-batches=2"),
        ("tp x pp", "one extent open, and pp and tp have none. HINT: pp2"),
        ("dp x tp", "one extent open"),
        ("dp2 x dp4", "dp is given twice"),
        ("dp0", "dp must be a number from 1 to 1,048,576; this is 0"),
        (f"tp{'9' * 400}", "tp must be a number"),
        ("zero3/3 x dp4", "4 data ranks can't be divided into groups of 3. HINT: dp6"),
        ("data + offload=parameters", "needs a layout that shards"),
        ("data + schedule=gpipe", "schedule needs pipeline stages. HINT: pp2"),
        ("zero3 + recompte", "'recompte' is no option of a layout. HINT: .*recompute"),
        ("zero3 + recompute=some", "recompute must be 'blocks' or .*; this is 'some'"),
        ("x" * 5000, "is not a text of a layout"),
        (7, "is not a text of a layout"),
    ],
)
def test_text_that_is_no_layout(text, said):
    with pytest.raises(ValueError, match=said):
        Layout.parse(text)


def test_layout_is_a_setting(tmp_path):
    path = tmp_path / "settings.toml"
    write_settings(path, {"layout": Setting("zero3 + recompute")}, {})
    assert settings_for_script(path, "train.py") == ({"layout": "zero3 + recompute"}, [])
    assert not KNOBS["layout"].value.fits("zero7")


def test_import_needs_no_torch():
    code = "import sys, paceline; paceline.Layout.parse('tp2'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
