"""The page, opened in Chromium.

Its figures equal those of --json. It makes no requests, runs nothing from a record, and is usable
with a keyboard or on a phone.
"""

import itertools
import json
import re
import shutil
import subprocess
import sys

import pytest
import ranks
from pages import CONTRAST, HOSTILE, agree, before_and_after, drawn, watched
from records import Rank, made
from records import report_text as told

from paceline.analyze.figures.report import analyse_with_window
from paceline.analyze.records.load_run import load_run
from paceline.cost.machine.machine_file import (
    Arithmetic,
    Figure,
    HostFacts,
    Machine,
    Memory,
    save,
)
from paceline.record.ring.states import State
from paceline.report.definitions import DEFINITIONS
from paceline.report.figure_names import STATE_NAMES
from paceline.report.losses import largest_losses


@pytest.fixture
def opened(browser, tmp_path):
    """Return a function that writes and opens a page; it fails on any request, error or warning."""
    with watched(browser) as show:

        def open_(*folders, width=1280, theme="light", steps=None, machine=None):
            path = tmp_path / f"page-{show.count}.html"
            said = told(list(folders), steps, html=path, machine=machine)
            assert str(path) in said
            assert "HINT" in said
            return show(path, width, theme)

        open_.troubles = show.troubles
        yield open_


def test_page_size_is_limited(tmp_path):
    path = tmp_path / "page.html"
    told([made(tmp_path / "run", size=4)], html=path)
    assert path.stat().st_size < 1.5e6


def test_page_figures_match_json_in_charts_and_text(tmp_path, opened):
    folder = made(tmp_path / "run", size=4)
    page = opened(folder)
    data = json.loads(told([folder], as_json=True))
    assert agree(page, data) > 60
    # Every figure has its definition in its heading, its row or its column.
    assert page.locator("dt:not(:has(.term))").count() == 0
    assert page.locator("#efficiencies tbody th:not(:has(.term))").count() == 0
    traces = {trace["name"]: trace for trace in drawn(page, "states")}
    for state in data["states"][0]:
        assert traces[STATE_NAMES[state]]["y"] == pytest.approx(
            [r[state] for r in data["states"]], abs=1e-5
        )
    (waiting,) = drawn(page, "waiting")
    assert len(waiting["z"]) == 4
    # The last rank computes longer. It never waits, and all others wait in every step.
    assert max(waiting["z"][3]) == 0
    assert min(min(row) for row in waiting["z"][:3]) > 0.1
    late = max(drawn(page, "late"), key=lambda trace: trace["x"])
    assert (late["name"], late["y"][0]) == ("useful", "rank 3")
    (pairs,) = drawn(page, "pairs")
    share = next(p["share"] for p in data["waited_for"] if (p["rank"], p["waited_for"]) == (0, 3))
    assert pairs["z"][0][3] == pytest.approx(share, rel=0.01)
    line = drawn(page, "steps")[0]
    assert sorted(line["y"])[len(line["y"]) // 2] == pytest.approx(
        1e3 * data["step_times"]["median_s"], rel=0.01
    )
    for number_of_moment in range(3):
        (moment,) = drawn(page, f"moment{number_of_moment}")
        assert {word for row in moment["text"] for word in row} >= {"useful", "transfer"}
    # In words: what the largest loss is, why, and where to look.
    losses = page.inner_text(".losses")
    assert "Waiting for rank 3 (node1), which computed longer" in losses
    assert "Rank 3 needed longer to compute the same step." in losses
    assert "the slowest rank determines the step time of all ranks" in losses
    assert "Where to look: other processes on its node" in losses
    assert "4 ranks on 2 nodes trained 41 steps" in page.inner_text(".lead")
    assert "rank 3, 27.4 % more" in page.inner_text("#efficiencies")


def test_counted_step_is_on_the_roofline(tmp_path, opened):
    counted = {"step": 10, "flops": 4e9, "bytes": 1e9, "device": "cpu", "precision": "float32"}
    counted["ops"] = [["mm", 4, 4e9, 2e8, 0.01], ["add", 9, 0.0, 8e8, 0.002]]
    folder = made(tmp_path / "run", work={**counted, "uncounted": ["own::<b>op"]})
    rate, triad = Figure.of([1e12], "FLOP/s"), Figure.of([1e11], "B/s")
    product = Arithmetic("cpu", "matrix product", "float32", rate)
    host = HostFacts("node0", arithmetic=(product,), memory=(Memory("cpu", triad),))
    save(Machine("2026-01-31T12:00:00+00:00", (host,)), tmp_path / "machine.toml")
    page = opened(folder, machine=tmp_path / "machine.toml")
    data = json.loads(told([folder], as_json=True, machine=tmp_path / "machine.toml"))
    assert agree(page, data) > 60
    points = data["roofline"]["points"]
    assert list(points) == ["a step", "its useful time", "mm"]
    roof, measured = drawn(page, "roofline")
    assert (roof["name"], roof["y"][-1], measured["text"]) == ("float32", 1e12, list(points))
    assert measured["y"] == pytest.approx([point["rate"] for point in points.values()])
    text = page.inner_text("#work")
    assert "A step computes 8 GFLOP (float32) and moves 2 GB through memory, 4 FLOP/byte" in text
    assert "Operators with unknown FLOPs: own::<b>op." in text
    assert page.get_by_role("link", name="FLOPs").count() == 1


def test_outlier_steps_are_marked_and_explained(tmp_path, opened):
    folder = tmp_path / "run"
    folder.mkdir()
    for i in range(2):
        rank = Rank(folder, i, 2)
        rank.step(0, 10)
        begin = 10
        for step in range(60):
            saved = 200 if i == 0 and step % 20 == 9 else 0  # the other ranks wait
            rank.was(State.CHECKPOINT, begin, begin + saved)
            rank.was(State.FORWARD, begin + saved, begin + saved + 20)
            end = begin + 25 + (200 if step % 20 == 9 else 0)
            rank.collective(begin + saved + 20, begin + saved + 20, end, amount=1 << 20)
            rank.step(begin, end, samples=8, number=step + 1)
            begin = end
    page = opened(folder)
    text = page.inner_text("#steps")
    assert "3 outliers in 60 steps" in text
    assert "Steps 10, 30, 50: rank 0 saved, about 200 ms longer than usual" in text
    marks = drawn(page, "steps")[-1]
    assert marks["x"] == [10, 30, 50]
    assert marks["text"] == ["rank 0 saved"] * 3
    assert "Rank 0 saved a checkpoint while the other ranks waited for it." in page.inner_text(
        ".losses"
    )


def test_hostile_record_text_is_not_executed(tmp_path, opened):
    folder = made(tmp_path / "run", size=3, host=HOSTILE)
    (folder / "run.json").write_text(json.dumps({"command": [HOSTILE, "--x"], "run": HOSTILE}))
    page = opened(folder)
    assert page.inner_text(".command") == f"{HOSTILE} --x"
    assert page.inner_text("[data-figure='places.0.host']") == f"{HOSTILE}0"
    assert page.evaluate("window.ours") is None
    for name in ("states", "waiting", "late", "pairs"):
        drawn(page, name)
    assert page.locator("img").count() == 0
    # An injected script would not run.
    page.evaluate(
        "() => { const bad = document.createElement('script'); bad.textContent = 'window.ours = 2';"
        "document.body.append(bad); }"
    )
    assert page.evaluate("window.ours") is None
    assert "violates the following Content Security Policy" in opened.troubles.pop()


@pytest.mark.parametrize(("theme", "width"), [("light", 1280), ("dark", 380)])
def test_page_is_accessible(tmp_path, opened, theme, width):
    folder = made(tmp_path / "run", size=4)
    (folder / "rank-2.ring").unlink()  # doubts have their own colors
    page = opened(folder, theme=theme, width=width)
    assert page.evaluate("document.documentElement.dataset.theme") == theme
    assert page.evaluate(CONTRAST) == []
    assert "no record of rank 2" in page.inner_text("#summary")
    assert "1 of 4" in page.inner_text("#trust")
    beyond = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(beyond) == 0
    # Requirements of screen readers.
    assert page.get_attribute("html", "lang") == "en"
    assert page.locator("[role=img]:not([aria-label]), [role=img][aria-label='']").count() == 0
    assert page.locator("th:not([scope]):not(:empty)").count() == 0
    ids = page.eval_on_selector_all("[id]", "all => all.map(one => one.id)")
    assert len(ids) == len(set(ids))
    levels = page.eval_on_selector_all("h1, h2, h3", "all => all.map(one => +one.tagName[1])")
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    # With the keyboard: skip the header, open a definition with focus, close it with Escape.
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    tip = page.locator(".term:focus .tip")
    assert tip.is_visible()
    assert tip.inner_text() == DEFINITIONS["samples/s"]
    box = tip.bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    button = page.locator("#theme")
    button.focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.documentElement.dataset.theme") != theme
    assert page.evaluate(CONTRAST) == []


def test_ranks_are_sorted_by_loss_and_all_charts_are_printed(tmp_path, opened):
    page = opened(made(tmp_path / "run", size=4), theme="dark")
    assert drawn(page, "states")[0]["x"] == ["0", "1", "2", "3"]
    page.get_by_label("lost time").check()
    assert drawn(page, "states")[0]["x"][-1] == "3"  # the rank that never waits
    page.pdf(path=tmp_path / "page.pdf")
    assert undrawn(page) == []
    assert page.locator("[data-chart]").count() >= 8


UNDRAWN = """() => [...document.querySelectorAll("[data-chart]")]
  .filter((plot) => !plot.querySelector(".main-svg")).map((plot) => plot.dataset.chart)"""


def undrawn(page):
    """Return the charts that are not drawn."""
    return page.evaluate(UNDRAWN)


def test_charts_are_drawn_when_the_page_is_loaded(tmp_path, opened):
    """A screenshot of the whole page, taken as soon as it is loaded, has no blank chart."""
    assert undrawn(opened(made(tmp_path / "run", size=4))) == []
    assert undrawn(opened(made(tmp_path / "b"), made(tmp_path / "c", compute=10))) == []


def test_printed_charts_fit_the_paper(tmp_path, opened):
    page = opened(made(tmp_path / "run", size=4), theme="dark")
    widths = """() => [...document.querySelectorAll("[data-chart] .main-svg")]
      .map((one) => one.getBoundingClientRect().width)"""
    on_screen = page.evaluate(widths)
    assert max(on_screen) > 800
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert max(page.evaluate(widths)) <= 700
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.evaluate(widths) == on_screen


@pytest.mark.long
def test_512_ranks_are_aggregated_and_outliers_kept(tmp_path, opened):
    folder = tmp_path / "run"
    folder.mkdir()
    size, steps, late = 512, 25, (300, 17)
    for i in range(size):
        rank = Rank(folder, i, size, host=f"host{i // 4}", clock="one")
        rank.step(0, 10)
        begin = 10
        for step in range(steps):
            longer = 100 if step == late[1] else 0
            mine = longer if i == late[0] else 0
            rank.was(State.FORWARD, begin, begin + 20 + mine)
            rank.collective(begin + 20 + mine, begin + 20 + mine, begin + 22 + longer)
            begin += 22 + longer
            rank.step(begin - 22 - longer, begin, samples=1, number=step + 1)
        rank.path.write_bytes(rank.ring.snapshot())
    page = opened(folder)
    assert (tmp_path / "page-0.html").stat().st_size < 10_000_000
    (waiting,) = drawn(page, "waiting")
    assert len(waiting["z"]) == size
    assert waiting["z"][0][late[1]] == pytest.approx(100 / 122, abs=0.01)
    assert waiting["z"][late[0]][late[1]] == 0
    assert page.locator("[data-chart=waiting]").bounding_box()["height"] > size
    (pairs,) = drawn(page, "pairs")
    assert len(pairs["z"]) == 64  # blocks of 8 ranks
    assert "Each cell is the mean of neighbouring ranks." in page.inner_text("#whom")
    assert "128 nodes" in page.inner_text("#places")
    assert "rank 300 computed, 100 ms longer than usual" in page.inner_text("#steps")
    page.wait_for_function(f"({UNDRAWN})().length === 0")  # also those that nobody scrolls to


def test_pages_of_single_rank_and_too_few_steps(tmp_path, opened):
    page = opened(made(tmp_path / "alone", size=1))
    assert "load balance" not in page.inner_text("main")
    assert agree(page, json.loads(told([tmp_path / "alone"], as_json=True))) > 20
    folder = tmp_path / "short"
    folder.mkdir()
    Rank(folder, 0, 1).was(State.FORWARD, 0, 10)
    assert "too few steps to measure" in opened(folder).inner_text(".lead")


def test_comparison_page_of_two_runs(tmp_path, opened):
    before = made(tmp_path / "before", size=4)
    after = made(tmp_path / "after", size=4, compute=10)
    page = opened(before, after)
    data = json.loads(told([before, after], as_json=True))
    assert agree(page, data) > 15
    assert re.search(
        r'The run "after" is 1\.\d\d times as fast as the run "before"', page.inner_text("#lead")
    )
    assert "better" in page.inner_text("#figures")
    states = page.inner_text("#states")
    assert "It is explained by useful -10 ms" in states
    assert "shorter" in states
    assert len(drawn(page, "courses")) == 2
    bars = {trace["name"]: trace["x"] for trace in drawn(page, "runs")}
    assert bars["useful"][0] - bars["useful"][1] == pytest.approx(10, abs=0.5)


def test_scaling_page_has_speedup_curves_and_main_loss(tmp_path, opened):
    folders = [made(tmp_path / f"n{size}", size=size) for size in (1, 2, 4)]
    page = opened(*folders)
    data = json.loads(told(folders, as_json=True))
    assert agree(page, data) > 25
    measured, ideal = drawn(page, "speedup")
    assert measured["y"] == pytest.approx([row["speedup"] for row in data["rows"]], abs=1e-3)
    assert ideal["y"] == [1, 2, 4]
    assert "From 1 to 2 ranks" in page.inner_text("#summary")
    assert "The factor that decreases most is" in page.inner_text("#summary")


def refusal(folder, path):
    command = [ranks.PACELINE, "report", folder, "--html", path]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert "HINT" in result.stderr
    return result.stderr


def test_unwritable_output_is_reported_and_leaves_no_file(tmp_path):
    folder = made(tmp_path / "run")
    assert "is not a folder" in refusal(folder, tmp_path / "nowhere" / "page.html")
    (tmp_path / "taken").mkdir()
    assert "it is a folder" in refusal(folder, tmp_path / "taken")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "taken"]


@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs util-linux and root")
def test_full_disk_is_reported_and_leaves_no_file(tmp_path):
    folder = made(tmp_path / "run")
    full = tmp_path / "full"
    full.mkdir()
    mount = f"mount -t tmpfs -o size=1m none {full} && "
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount + "true"]).returncode:
        pytest.skip("may not mount here")
    command = f"{mount} {ranks.PACELINE} report {folder} --html {full}/page.html; ls -A {full}"
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command], capture_output=True, text=True
    )
    assert "No space left on device" in result.stderr
    assert "HINT" in result.stderr
    assert result.stdout == ""


def test_run_compared_with_itself_has_no_change(tmp_path):
    run = analyse_with_window(load_run(made(tmp_path / "run", size=4)))
    page = before_and_after(run, run)
    assert "The change is within the noise" in page
    assert re.search(r"One run of each: differences of the step time below [67]\.\d % can", page)


def test_page_modules_do_not_import_torch():
    code = "import sys, paceline.report.page.run_page, paceline.report.run_comparison; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_loss_of_late_rank_includes_wait_of_other_ranks(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for i in range(2):
        rank = Rank(folder, i, 2)
        rank.step(0, 10)
        for step in range(20):
            begin = 10 + 40 * step
            if i == 0:
                rank.was(State.INPUT, begin, begin + 15)
            rank.was(State.FORWARD, begin + (15 if i == 0 else 0), begin + (35 if i == 0 else 20))
            rank.collective(*([begin + (35 if i == 0 else 20)] * 2), begin + 40)
            rank.step(begin, begin + 40, samples=8, number=step + 1)
    report = analyse_with_window(load_run(folder)).report
    own = next(
        one for one in largest_losses(report) if one.what.startswith("Waiting for the next batch")
    )
    assert own.share == pytest.approx(15 / 80, rel=0.01)
    assert own.together == pytest.approx(30 / 80, rel=0.01)
