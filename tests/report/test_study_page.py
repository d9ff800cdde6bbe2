"""The page of a scaling study, opened in Chromium; its figures are those of --json."""

from dataclasses import replace

import pytest
from pages import CONTRAST, HOSTILE, agree, drawn, watched

from paceline.analyze.scaling.derived import estimate
from paceline.analyze.scaling.laws import Parameter
from paceline.analyze.scaling.outcomes.compare_studies import compare_studies
from paceline.analyze.scaling.study_model import STRONG, WEAK
from paceline.report.page.write_page import document_page
from paceline.report.scaling.findings import (
    CheckedPrediction,
    Curve,
    Findings,
    Fit,
    Knee,
    Reason,
)
from paceline.report.scaling.study_charts import study_charts
from paceline.report.scaling.study_comparison import (
    comparison_charts,
    comparison_document,
    comparison_json,
)
from paceline.report.scaling.study_document import WIDE, study_document
from paceline.report.scaling.study_files import study_json
from studies import make_study, predicted, reach, throughput

RANKS = [1, 2, 4, 8, 16]
X = [throughput(n) for n in RANKS]
FINDINGS = Findings(
    fits=[Fit(STRONG, "law", [Parameter("s", 0.05, 0.04, 0.06)], 0.031, 0.052)],
    curves=[Curve(STRONG, "law", RANKS, X, [0.9 * x for x in X], [1.1 * x for x in X])],
    knees=[Knee(STRONG, "Up to 4 ranks the efficiency is at least 0.8.", 4)],
    reasons=[Reason(STRONG, 4, 8, f"From 4 to 8 ranks waiting grew. {HOSTILE}", 0.2, "Try it.")],
    predictions=[CheckedPrediction(predicted(STRONG, 8, 5500.0), estimate([5600.0, 5650.0]))],
)


@pytest.fixture
def opened(browser, tmp_path):
    """Return a function that writes and opens the page of a study."""
    with watched(browser) as show:

        def open_(study, findings=FINDINGS, **how):
            path = tmp_path / f"page-{show.count}.html"
            document = study_document(study, findings, WIDE)
            path.write_text(document_page(document, study_charts(study, findings)))
            return show(path, **how)

        yield open_


def test_page_has_the_figures_of_json(opened):
    study = make_study(failed={4}, spread=0.02)
    page = opened(study)
    data = study_json(study, FINDINGS)
    assert agree(page, data) > 150
    lead = page.inner_text("#lead")
    assert "Strong scaling: 8 ranks train" in lead
    assert "times as many samples/s as 1 rank" in lead
    text = page.inner_text("#strong")
    assert "From 4 to 8 ranks waiting grew." in text
    assert "4 ranks: RuntimeError: <b>no memory</b>" in text
    assert "law: s = 0.05 (0.04 to 0.06); leave-one-out error 3.1 %" in text
    assert "measured: 5,625, inside the interval, error -2.2 %" in text
    assert "law\ts\t0.05\t0.04 to 0.06" in page.inner_text("#fits")


def test_charts_have_points_bands_and_the_ideal_line(opened):
    study = make_study(spread=0.0)
    page = opened(study)
    traces = {trace["name"]: trace for trace in drawn(page, "studySpeedup") if trace["name"]}
    assert traces["ideal"]["y"] == [1, 8]
    strong = traces["strong scaling"]
    assert strong["x"] == [1, 2, 4, 8]
    assert strong["y"] == pytest.approx([throughput(n) / 1000 for n in (1, 2, 4, 8)])
    assert traces["strong scaling, law"]["x"] == RANKS
    efficiency = {trace["name"]: trace for trace in drawn(page, "studyEfficiency")}
    assert efficiency["strong scaling, law"]["y"] == pytest.approx(
        [x / n / 1000 for x, n in zip(X, RANKS, strict=True)]
    )
    for kind in (STRONG, WEAK):
        bars = drawn(page, f"losses-{kind}")
        heights = [sum(column) for column in zip(*(bar["y"] for bar in bars), strict=True)]
        steps = [point.figures[0].mean_step_s for point in study.of_kind(kind)]
        assert heights == pytest.approx([1e3 * s for s in steps])
    cost = {trace["name"]: trace for trace in drawn(page, "studyCost")}
    assert cost["strong scaling"]["y"][0] == pytest.approx(1e6 / 1000 / 3600)


def test_page_of_a_study_with_a_target_shows_time_and_node_hours(opened):
    ends = [reach(10_000), reach(11_000), reach(12_000)]
    study = make_study((1, 2), (STRONG,), until="accuracy>=0.97", targets=ends, spread=0.0)
    page = opened(study, Findings())
    data = study_json(study, Findings())
    assert agree(page, data) > 50
    assert data["target"]["strong"] == {
        "soonest_ranks": 2,
        "cheapest_ranks": 2,
        "learning_rate_rule": None,
    }
    (line,) = drawn(page, "studyTime")
    assert line["y"] == pytest.approx([11_000 / throughput(n) for n in (1, 2)])
    assert "Soonest to accuracy>=0.97: 2 ranks" in page.inner_text("#strong")
    assert "A fit needs at least two measured sizes." in page.inner_text("#fits")


@pytest.mark.parametrize(("theme", "width"), [("light", 360), ("dark", 1280)])
def test_page_is_readable(opened, theme, width):
    page = opened(make_study(failed={8}), width=width, theme=theme)
    assert page.evaluate(CONTRAST) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize(("theme", "width"), [("light", 360), ("dark", 1280)])
def test_two_studies_are_on_one_page(browser, tmp_path, theme, width):
    before = make_study(serial=0.2, spread=0.002)
    after = make_study((1, 2, 4), serial=0.05, spread=0.002)
    after = replace(after, folder=f"/tmp/{HOSTILE}")
    found = compare_studies(before, after)
    path = tmp_path / "page.html"
    path.write_text(document_page(comparison_document(found), comparison_charts(found)))
    with watched(browser) as show:
        page = show(path, width=width, theme=theme)
        assert agree(page, comparison_json(found)) == 6 * 3
        assert "Strong scaling, 4 ranks: " in page.inner_text("#lead")
        assert "Measured only before: 8 ranks (strong)" in page.inner_text("#summary")
        assert page.inner_text("#summary").count("better") == 4  # not where both have one rank
        lines = {line["name"]: line for line in drawn(page, "studyRate")}
        assert lines["strong scaling, before"]["x"] == [1, 2, 4, 8]
        rates = [throughput(n) for n in (1, 2, 4)]
        assert lines["weak scaling, after"]["y"] == pytest.approx(rates, rel=0.01)
        bars = drawn(page, "losses-strong")
        assert bars[0]["x"][:3] == ["1 rank, before", "1 rank, after", "2 ranks, before"]
        assert page.evaluate(CONTRAST) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_study_without_figures_has_no_page():
    with pytest.raises(ValueError, match=r"no measured size\. HINT"):
        study_charts(make_study((1,), failed={1}), Findings())
