"""The page of a study of ``paceline tune``, opened in Chromium; TensorBoard's HParams."""

import sys
import types
from dataclasses import replace

import pytest
from pages import CONTRAST, HOSTILE, drawn, watched

from paceline.report.page.write_page import document_page
from paceline.report.tuning.tuning_charts import tuning_charts
from paceline.report.tuning.tuning_document import tuning_document
from paceline.report.tuning.tuning_files import write_hparams
from paceline.report.tuning.tuning_view import SearchGain, TrialRow, TuningView


def study(**changes):
    """Return a study of 20 trials with rungs at 1 and 3."""
    rows = []
    for number in range(20):
        steps = (1, 3, 9)[number % 3]
        curve = {step: 0.1 * number + step / 10 for step in range(1, steps + 1)}
        is_whole = steps == 9
        rows.append(
            TrialRow(
                number,
                "complete" if is_whole else "stopped",
                {"lr": 10.0 ** -(number % 5), "kind": "ab"[number % 2], "wide": number % 2 == 0},
                (curve[steps],) if is_whole else (),
                curve[steps],
                steps,
                number % 3,
                intermediate=curve,
            )
        )
    view = TuningView(
        "study",
        "study.journal",
        ["score"],
        ["max"],
        rows,
        [17],
        20,
        f"train.py --lr {{lr}} {HOSTILE}",
        search="tpe, promotion",
        importances={"lr": 0.7, "kind": 0.3},
        gain=SearchGain("", 5, 10, 30, 1.0, 2.0, 1.0, 0.5, 1.5, True),
    )
    return replace(view, **changes)


@pytest.fixture
def opened(browser, tmp_path):
    """Return a function that writes and opens the page of a study, without a network."""
    with watched(browser) as show:

        def open_(view, **how):
            path = tmp_path / f"page-{show.count}.html"
            charts = tuning_charts(view)
            document = tuning_document(view, charts)
            path.write_text(document_page(document, {"states": [], "tuning": charts}))
            return show(path, **how)

        yield open_


def test_page_has_the_charts_of_a_study(opened):
    view = study()
    page = opened(view)
    assert "Best score: 2.6, trial 17" in page.inner_text("#lead")
    assert "1 better (95 % interval 0.5 to 1.5)" in page.inner_text("#summary")
    values, best = drawn(page, "tuningHistory")
    assert values["x"] == [2, 5, 8, 11, 14, 17]
    assert best["y"] == pytest.approx([1.1, 1.4, 1.7, 2.0, 2.3, 2.6])
    lines = drawn(page, "tuningParallel")
    assert sum(y is None for trace in lines for y in trace["y"]) == 6 + 1  # and the best one again
    importances = drawn(page, "tuningImportances")[0]
    assert (importances["y"], importances["x"]) == (["lr", "kind"], [0.7, 0.3])
    curves = {trace["name"]: trace for trace in drawn(page, "tuningCurves")}
    assert curves["trial 17"]["x"] == list(range(1, 10))
    assert "trial 0" not in curves  # it has one value only
    shapes = page.evaluate("document.querySelector('[data-chart=tuningCurves]').layout.shapes")
    assert [shape["x0"] for shape in shapes] == [3]
    assert page.locator("#trials tbody tr").count() == 20
    for theme in ("light", "dark"):
        assert opened(view, theme=theme).evaluate(CONTRAST) == []


def test_page_has_the_pareto_front(opened):
    rows = [
        TrialRow(n, "complete", {"lr": 0.1 * n}, (float(n % 4), float(n)), step=1) for n in range(8)
    ]
    view = study(
        metrics=["score", "seconds"],
        goals=["max", "min"],
        rows=rows,
        best=[0, 1, 2, 3],
        importances={},
        gain=None,
    )
    page = opened(view)
    others, front = drawn(page, "tuningPareto")
    assert (front["x"], front["y"]) == ([0, 1, 2, 3], [0, 1, 2, 3])
    assert others["y"] == [4, 5, 6, 7]
    assert "4 trials are on the Pareto front" in page.inner_text("#lead")
    assert page.locator("#history, #curves, #lineage").count() == 0


def test_page_has_the_lineage_of_a_population(opened):
    def member(number, generation, parent, value):
        steps = {2 * generation + 1: value, 2 * generation + 2: value}
        return TrialRow(
            number,
            "complete",
            {"lr": 0.1 * (number + 1)},
            (value,),
            value,
            2 * generation + 2,
            intermediate=steps,
            first_step=2 * generation,
            generation=generation,
            parent=parent,
        )

    rows = [member(0, 0, None, 1.0), member(1, 0, None, 2.0), member(2, 1, 1, 3.0)]
    rows.append(member(3, 1, 1, 4.0))
    page = opened(study(rows=rows, best=[3], importances={}, search="random, population"))
    other, best, points = drawn(page, "tuningLineage")
    assert (other["x"], other["y"]) == ([0, 1, None], [1, 0, None])
    assert (best["x"], best["y"]) == ([0, 1, None], [1, 1, None])
    assert len(points["x"]) == 4
    text = page.inner_text("#lineage")
    assert "steps 1 to 2: trial 1: lr = 0.2: score 2" in text
    assert "steps 3 to 4: trial 3: lr = 0.4: score 4" in text
    curves = {trace["name"]: trace for trace in drawn(page, "tuningCurves")}
    assert curves["trial 3"]["x"] == [2, 3, 4]  # from the end of its parent


def test_names_run_nothing(opened):
    rows = [TrialRow(n, "complete", {HOSTILE: HOSTILE}, (float(n),), float(n), 1) for n in range(3)]
    page = opened(study(rows=rows, best=[2], metrics=[HOSTILE], importances={HOSTILE: 1.0}))
    assert drawn(page, "tuningParallel")
    assert page.evaluate("window.ours") is None


def test_a_study_without_values_has_no_page():
    with pytest.raises(ValueError, match="no trial with a value yet"):
        tuning_charts(study(rows=[TrialRow(0, "failed", {"lr": 0.1})], best=[]))


def test_trials_are_written_for_tensorboard(tmp_path, monkeypatch):
    written = {}

    class Writer:
        def __init__(self, log_dir):
            self.runs = written.setdefault(log_dir.rpartition("/")[2], [])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def add_hparams(self, parameters, metrics, run_name):
            self.runs.append((parameters, metrics))

        def add_scalar(self, name, value, step):
            self.runs.append((name, value, step))

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    said = write_hparams(study(), tmp_path / "board")
    assert said == "20 trials for TensorBoard"
    parameters, metrics = written["trial-00017"][0]
    assert parameters == {"lr": 0.01, "kind": "b", "wide": False}
    assert metrics == {"hparam/score": pytest.approx(2.6)}
    assert written["trial-00017"][-1] == ("score", pytest.approx(2.6), 9)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    with pytest.raises(ValueError, match="is not an empty folder"):
        write_hparams(study(), tmp_path / "full")
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="HINT: pip install tensorboard"):
        write_hparams(study(), tmp_path / "other")
