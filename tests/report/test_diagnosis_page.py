"""The page of a diagnosis, opened in Chromium.

Every figure equals that of --json, causes come with their evidence, and names of scripts and hosts
are shown as text.
"""

import dataclasses
import io
import itertools
import json
import re
import subprocess

import pytest
import ranks
from msgspec.structs import replace
from pages import CONTRAST, HOSTILE, agree, drawn, watched
from records import made
from rich.console import Console

from paceline.analyze.diagnosis.causes import Cause
from paceline.analyze.diagnosis.confirmation import Witness
from paceline.analyze.diagnosis.diagnosis import (
    Diagnosis,
    Losses,
    PredictionError,
    Remedy,
    Trial,
    TrialResults,
)
from paceline.analyze.diagnosis.evidence import MIN_SHARE
from paceline.analyze.diagnosis.ladder_results import WORDS, Ladder
from paceline.analyze.diagnosis.line_profile import Doing, Entry, LineProfile, Stack
from paceline.analyze.diagnosis.operator_profile import OperatorProfile, ProfiledOperator
from paceline.analyze.diagnosis.rare_events import RareEvent, Survey
from paceline.analyze.diagnosis.rungs import Interval, RungResult, waterfall
from paceline.analyze.diagnosis.table import INDICATORS
from paceline.analyze.figures.report import analyse
from paceline.analyze.records.load_run import load_run
from paceline.analyze.records.operator_file import MachineLimits, OperatorRow
from paceline.analyze.records.rank_lines import SampledLine
from paceline.report.diagnosis.diagnosis_document import (
    as_json,
    diagnosis_charts,
    diagnosis_document,
)
from paceline.report.page.write_page import document_page
from paceline.report.terminal.draw import draw_document

LINE = {"file": "train.py", "line": 7, "function": "step", "code": "x.item() < 3 & y", "share": 0.8}


def page_of(told):
    """Return the page of a diagnosis."""
    return document_page(diagnosis_document(told), diagnosis_charts(told))


def lines_of(told, width):
    """Return the lines of a diagnosis in a terminal of this width."""
    console = Console(width=width, file=io.StringIO())
    console.print(*draw_document(diagnosis_document(told, width)), sep="\n")
    return console.file.getvalue().splitlines()


@pytest.fixture
def opened(browser, tmp_path):
    """Return a function that writes and opens a page; it fails on any request, error or warning."""
    with watched(browser) as show:

        def open_(found, width=1280, theme="light"):
            path = tmp_path / f"page-{show.count}.html"
            path.write_text(page_of(found), encoding="utf-8")
            return show(path, width, theme)

        yield open_


def rung(*rates, ranks=4, slow=0.0):
    """Return the repetitions of a rung; ``rates`` are the samples/s of all ranks together."""
    return [
        RungResult(
            *(r, 32 / r, [32 / r / (1 + slow), *[32 / r] * (ranks - 1)]),
            *([0.0] * ranks, [0.0] * ranks, ranks, 20, 1, []),
        )
        for r in rates
    ]


RUNGS = {
    "alone": rung(1200, 1210, 1190, ranks=1),
    "alone, loading": rung(700, 690, 710, ranks=1),
    "silent": rung(3590, 3610, 3600, slow=0.01),
    "cached": rung(2800, 2790, 2810),
    "everything": rung(1600, 1590, 1610),
}
CAUSES = [
    Cause(
        *("input-waiting", 0.43, (0.41, 0.47)),
        "the loader takes 14.2 ms per batch and mostly waits (no workers: the training process "
        "loads the batches)",
        {
            "ranks": list(range(60)),
            "cores_busy_a_rank": 0.0531,
            "busy_s": 1.25,
            "batches": 12345,
            "cached": True,
            "device": None,
        },
    ),
    Cause(
        *("exchange-bandwidth", 0.12, (0.08, 0.13)),
        "all-reduce of 2.65 MB is limited by bandwidth, 0.3 GB/s",
        {"busbw_GB_s": 0.2952, "bytes": 2646036.0, "groups": [{"name": "0", "calls": 40}]},
    ),
    Cause(
        *("script", 0.051, (0.051, 0.051)),
        "the script does other work between its steps",
        {"lines": [LINE], "of": {"rank": 3, "steps": (9, 24)}},
        confirmed="not-testable",
        basis="record",
    ),
]


def found(folder, rungs=RUNGS, causes=CAUSES, host="node", command=("train.py", "--x y"), notes=()):
    run = load_run(made(folder, size=4, host=host))
    needed = [rungs[name] for name in ("alone", "silent", "cached", "everything")]
    w = waterfall(*needed) if all(needed) else None
    loader = {"batches": 80, "seconds": 1.136, "busy_s": 0.06, "workers": 0, "ranks": 4}
    ladder = Ladder(5, 20, rungs=dict(rungs), run=run, first=run, loader=loader, seconds=93.4)
    both = [
        *(
            Witness(bar.id, bar.of_step, 0.3 * (bar.id == "uneven"))
            for bar in (w.bars if w else [])
        ),
        *([Witness("script", None, 0.051)] if w else []),
    ]
    return Diagnosis(list(command), ladder, analyse(run), w, both, list(causes), list(notes))


def test_page_figures_match_json_in_charts_and_text(tmp_path, opened):
    told = found(tmp_path / "run", notes=["left out: something"])
    page = opened(told)
    data = json.loads(json.dumps(as_json(told), allow_nan=False))
    assert agree(page, data) > 130
    assert page.inner_text(".lead") == (
        "4 ranks reach 33.3 % of the ideal: 1,600 of 4,800 samples/s. The largest cause, "
        "43.0 % of a step's time: the loader takes 14.2 ms per batch and mostly waits (no workers: "
        "the training process loads the batches)."
    )
    # The causes are in order, the evidence one click away.
    assert page.locator(".losses .share").all_inner_texts() == ["43.0 %", "12.0 %", "5.1 %"]
    first, second, script = page.locator(".losses li").all()
    assert "41.0 % to 47.0 % of a step's time" in first.inner_text()
    assert "Not testable from outside: measured in the record" in script.inner_text()
    for one in (first, second, script):
        assert not one.locator("table").is_visible()
        one.locator("summary").click()
    assert "0, 1, 2" in first.inner_text()
    assert "39, and 20 more (see --json)" in first.inner_text()
    assert "busbw (GB/s)\t0.295" in second.inner_text()
    assert script.locator("code").all_inner_texts() == ["script", LINE["code"]]
    assert "train.py:7 in step, 80.0 % of its stack samples" in script.inner_text()
    # The bars descend from the ideal; each begins where the previous one ends.
    (bars,) = drawn(page, "waterfall")
    names = ["sharing the machine", "slower ranks", "exchange", "input"]
    assert bars["y"] == ["ideal", *names, "measured"]
    assert bars["x"] == pytest.approx([4800, -1164, -36, -800, -1200, 1600])
    assert "lost 1,200 samples/s" in bars["text"][4]
    assert "25.0 % of the ideal" in bars["text"][4]
    # Both measurements of each loss, and whether they differ.
    rows = [row.inner_text() for row in page.locator("#witnesses tbody tr").all()]
    assert ["they differ" in row for row in rows] == [True, True, True, True, False]
    # Every measurement is described in words.
    text = page.inner_text("#rungs")
    assert all(WORDS[name] in text for name in (*RUNGS, "loader"))
    assert "14.2 ms per batch" in text
    assert "left out: something." in page.inner_text("#how")
    assert "paceline run -n 4 --record record train.py '--x y'" in page.inner_text("#summary")


def test_tables_show_their_sums_and_call_noise_so(tmp_path):
    text = words_of(found(tmp_path / "run"))
    column = re.search(r"of a step's time experiment .* sum 100\.0 %", text).group()
    # the experiments alone: the record's figures follow an interval
    shares = re.findall(r"[a-z] (-?[\d.]+) %", column)
    assert sum(map(float, shares)) == pytest.approx(200, abs=0.3), column
    noisy = RUNGS | {"silent": rung(900, 1300, 1000), "cached": rung(990, 800, 1010)}
    text = words_of(found(tmp_path / "noisy", rungs=noisy))
    exchange = re.search(r"- exchange ([\d,.-]+) (.*?) -?[\d.]+ %", text)
    assert exchange[2] == "within the noise", text


def test_single_round_gives_uncertain_causes_and_hatched_bars(tmp_path, opened):
    once = {name: runs[:1] for name, runs in RUNGS.items()}
    told = found(tmp_path / "once", rungs=once, causes=[])
    page = opened(told)
    assert agree(page, json.loads(json.dumps(as_json(told), allow_nan=False))) > 40
    assert "inf" not in page.inner_text("main")
    lead = page.inner_text(".lead")
    assert "No cause is certain: sharing the machine, exchange and input may cost time" in lead
    drawn(page, "waterfall")
    shapes = page.evaluate(
        "document.querySelector('[data-chart=waterfall]').data[0].marker.pattern.shape"
    )
    assert shapes == ["", "/", "/", "/", "/", ""]
    assert "Hatched" in page.inner_text("#waterfall figcaption")
    rows = page.locator("#witnesses tbody tr").all_inner_texts()
    assert ["interval too wide" in row for row in rows] == [True, True, True, True, False]


def test_difference_within_spread_of_rounds_is_not_a_cause(tmp_path):
    noisy = RUNGS | {"cached": rung(2800, 3900, 1700)}
    text = page_of(found(tmp_path / "noisy", rungs=noisy, causes=[]))
    assert "No cause is certain: exchange and input may cost time" in text
    text = page_of(found(tmp_path / "unsure", rungs=noisy))
    assert "Uncertain, and not listed: exchange, input." in text
    faster = RUNGS | {"cached": rung(3700, 3710, 3720)}
    bars = diagnosis_charts(found(tmp_path / "faster", rungs=faster))["waterfall"]
    assert bars["text"][3].startswith("gained 110 samples/s (")
    assert bars["lengths"][3] == pytest.approx(110)
    well = {name: rung(*(4000 for _ in range(3))) for name in RUNGS}
    well["alone"] = rung(1010, 1015, 1005, ranks=1)
    text = page_of(found(tmp_path / "well", rungs=well, causes=[]))
    assert f"No cause takes {100 * MIN_SHARE:.0f} % of a step" in text


def test_missing_rung_omits_waterfall_and_reports_reason(tmp_path, opened):
    why = "left out: all ranks, batches in memory: the run ended with exit code 1:\n    Error: <b>"
    told = found(tmp_path / "missing", rungs=RUNGS | {"cached": []}, causes=[], notes=[why])
    page = opened(told)
    assert agree(page, json.loads(json.dumps(as_json(told), allow_nan=False))) > 20
    assert "Paceline cannot determine the causes" in page.inner_text(".lead")
    assert f"{why}." in page.text_content("#summary .doubt")
    assert "left out" in page.inner_text("#rungs")
    assert page.locator("[data-chart]").count() == 0
    states = page.inner_text("#summary table")
    assert "useful" in states
    assert page.locator("#summary tbody tr").count() == 4
    assert "Where to look" in page.inner_text("#summary .losses")


def test_survey_is_shown(tmp_path, opened):
    event = RareEvent("validation", 0, 0.21, 3, 50, at_epoch_ends=False)
    seen = Survey(150, 12.0, 400, 20.0, [0.1] * 4, [0.0] * 4, [event])
    told = found(tmp_path / "run")
    told = dataclasses.replace(told, ladder=dataclasses.replace(told.ladder, survey=seen))
    page = opened(told, 390, "dark")
    text = page.inner_text("#survey")
    assert "validation 21.0 % (every 50 steps)" in text
    assert "did not reach the end of the first epoch (400 batches)" in text
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(CONTRAST) == []


def test_hostile_names_are_shown_as_text_on_narrow_screen(tmp_path, opened):
    line = LINE | {"code": HOSTILE, "file": HOSTILE, "function": HOSTILE}
    cause = Cause("line", 0.3, (0.2, 0.4), HOSTILE, {HOSTILE: HOSTILE, "lines": [line]})
    told = found(
        tmp_path / "run",
        host=HOSTILE,
        command=(HOSTILE,),
        causes=[cause, *CAUSES],
        notes=[HOSTILE, "x" * 300],
    )
    page = opened(told, 400, "dark")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    drawn(page, "waterfall")
    for summary in page.locator("summary").all():
        summary.click()
    assert page.inner_text("[data-figure='causes.0.id']") == "line"
    assert HOSTILE in page.inner_text(".lead")
    assert page.locator(".evidence").first.locator("code").last.inner_text() == HOSTILE
    assert page.inner_text("[data-figure='report.places.0.host']") == f"{HOSTILE}0"
    assert page.evaluate("window.ours") is None
    assert page.locator("img, script:not(head script, body > script)").count() == 0
    assert page.evaluate(CONTRAST) == []
    beyond = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.evaluate(beyond) == 0
    assert page.locator("[role=img]:not([aria-label]), [role=img][aria-label='']").count() == 0
    assert page.locator("th:not([scope]):not(:empty)").count() == 0
    assert page.locator("dt:not(:has(.term))").count() == 0
    ids = page.eval_on_selector_all("[id]", "all => all.map(one => one.id)")
    assert len(ids) == len(set(ids))
    levels = page.eval_on_selector_all("h1, h2, h3", "all => all.map(one => +one.tagName[1])")
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    page.locator("#theme").click()
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.evaluate(CONTRAST) == []


def test_every_witness_has_a_label(tmp_path):
    told = found(tmp_path / "run")
    every = dataclasses.replace(told, witnesses=[Witness(name, None, 0.1) for name in INDICATORS])
    lines = lines_of(every, 100)
    assert sum(line.rstrip().endswith("10.0 %") for line in lines) == len(INDICATORS)
    assert "other programs" in page_of(every)


def test_rate_is_in_steps_if_samples_are_unknown(tmp_path):
    told = found(tmp_path / "run")
    told = dataclasses.replace(told, report=dataclasses.replace(told.report, samples_per_s=None))
    text = page_of(told)
    assert "1,600 of 4,800 steps/s" in text
    said = words_of(told)
    assert "steps/s of the ideal" in said
    assert "samples/s" not in said


def test_page_repeats_the_options_that_the_user_gave(tmp_path):
    options = ["-H", "a:2,b:2", "-m", "--env", "TOKEN=secret"]
    told = dataclasses.replace(found(tmp_path / "run", command=("train", "x")), options=options)
    page = page_of(told)
    assert "paceline run -H a:2,b:2 -m --env TOKEN --record record train x" in page


def test_unwritable_output_is_reported_before_any_run(tmp_path):
    for path, why in ((tmp_path / "nowhere" / "page.html", "not a folder"), (tmp_path, "a folder")):
        command = [ranks.PACELINE, "diagnose", "-n", "2", "--html", path, "train.py"]
        result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert result.returncode == 2
        assert why in result.stderr
        assert "HINT" in result.stderr
        assert "run 1" not in result.stderr


WORKERS = Remedy(
    *("loader-workers", "input-waiting", 4, Interval(0.81, 0.72, 0.9), "a formula", True),
    *("DataLoader(num_workers=4)", 12, "loader = DataLoader(<data>)"),
)
SHORTER = Remedy(
    *("compress-bf16", "exchange-bandwidth", True, None, "a few steps", True),
    "register_comm_hook(...)",
    numbers=True,
    costs="bits",
)
LESS = Remedy(
    *("script-beside", "script", True, Interval(0.054, 0.054, 0.054), "the record", False),
    *("less often", 7, "x.item()"),
)
OFF = {"a formula": PredictionError(3.1, 41)}


def words_of(told, width=200):
    return " ".join(" ".join(lines_of(told, width)).split())


def test_unconfirmed_causes_are_shown_apart(tmp_path, opened):
    refuted = Cause(
        *("allocator", 0.2, (0.2, 0.2), "pages are touched anew", {}),
        confirmed="not-confirmed",
        measured=Interval(0.004, -0.01, 0.018),
    )
    estimated = dataclasses.replace(CAUSES[2], confirmed="not-testable", basis="estimate")
    unseen = dataclasses.replace(refuted, id="interpreter", measured=None)
    told = dataclasses.replace(
        found(tmp_path / "run", causes=[CAUSES[0], estimated]), unconfirmed=[refuted, unseen]
    )
    page = opened(told)
    assert agree(page, json.loads(json.dumps(as_json(told), allow_nan=False))) > 130
    summary = page.inner_text("#summary")
    assert "Expected, but not confirmed" in summary
    assert "allocator: 20.0 % of a step's time expected, 0.4 % (-1.0 % to 1.8 %)" in summary
    assert "interpreter: 20.0 % of a step's time expected, nothing measured." in summary
    assert "Not testable from outside: estimated" in summary
    text = words_of(told)
    assert "- allocator: 20.0 % of a step's time expected, 0.4 % (-1.0 to 1.8) measured." in text
    assert "between its steps. Estimated; no experiment could test it." in text
    assert "loads the batches). 2." in text


def line_profile():
    """Return the line profile of two ranks, and of their loader workers."""
    main = SampledLine("train.py", 40, "main", "loss = model(x) < 3 & y")
    mix = SampledLine("model.py", 12, "Net.mix", "total += weight(node)")
    read = SampledLine("data.py", 5, "Files.__getitem__", "text = file.read()")
    stacks = [Stack((main,), "torch.mm"), Stack((mix, main), ""), Stack((read,), "a/b.csv")]
    times = {
        Entry(0, 0, "useful", Doing.TORCH): 0.5,
        Entry(1, 0, "useful", Doing.TORCH): 0.5,
        Entry(0, 1, "useful", Doing.PYTHON): 0.3,
        Entry(1, 1, "useful", Doing.PYTHON): 0.1,
        Entry(0, 1, "useful", Doing.GARBAGE): 0.1,
    }
    workers = {(2, Doing.FILE): 0.7}
    return LineProfile([0, 1], samples=400, stacks=stacks, times=times, workers=workers)


def operator_profile():
    numbers = dict.fromkeys(OperatorRow.__struct_fields__, 0.0)
    texts = {"module": "layers.0", "operator": "mm", "phase": "backward", "copy": "", "shapes": "f"}
    product = OperatorRow(**numbers | texts | {"line": 0, "calls": 4.0, "flops": 1e9})
    copy = OperatorRow(
        **numbers | texts | {"line": 0, "operator": "clone", "copy": "layout", "seconds": 0.02}
    )
    return OperatorProfile(
        *(2, 0.1, 1.0, 0.3, 0.9, 1e-6, "cpu", {"float32": 1e6}, MachineLimits(1e11, 1e10, 1e11)),
        operators=[
            ProfiledOperator("/home/train.py", 40, "loss = model(x)", 0.5, 0.8, product),
            ProfiledOperator("/home/train.py", 41, "y = x.clone()", 0.2, None, copy),
        ],
        notes=["a note"],
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_lines_and_operators_are_shown(tmp_path, opened, width):
    told = found(tmp_path / "run")
    told = dataclasses.replace(told, lines=line_profile(), operators=operator_profile())
    page = opened(told, width, "dark" if width == 390 else "light")
    agree(page, json.loads(json.dumps(as_json(told), allow_nan=False)))
    assert not page.evaluate(CONTRAST)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    lines = page.inner_text("#lines")
    assert "train.py:40 main\nloss = model(x) < 3 & y\t50.0 %\t75.0 %" in lines
    assert "python; rank 0 40.0 %, others up to 10.0 %" in lines
    assert "In loader workers" in lines
    assert "file b.csv" in lines
    bars = "[...document.querySelectorAll('#lines .meter')].map((m) => m.children.length)"
    assert page.evaluate(bars) == [1, 2, 1]
    model = page.inner_text("#model")
    assert "copies, at most 20.0 % of a step" in model
    assert "mm\nbackward\t50.0 %\t80.0 %\t4\tlayers.0\ttrain.py:40" in model
    assert "a note." in model


def test_operator_table_fits_narrow_terminal(tmp_path):
    profile = operator_profile()
    first = profile.operators[0]
    long = replace(first.row, module="DistributedDataParallel.module.decoder.block.11")
    profile.operators[0] = dataclasses.replace(first, row=long)
    told = dataclasses.replace(found(tmp_path / "run"), operators=profile)
    lines = lines_of(told, 80)
    (head,) = [line.split() for line in lines if "roofline" in line and "operator" in line]
    assert head == ["operator", "of", "a", "step", "roofline", "calls", "module", "line"]
    (row,) = [line for line in lines if "mm, backward" in line]
    assert "50.0 %" in row
    assert "block.11" in row
    assert "train.py:40" in row


def test_page_without_profiles_has_no_section_for_them(tmp_path):
    page = page_of(found(tmp_path / "run"))
    assert "Time by line" not in page
    assert "Inside the model" not in page


def test_remedies_are_shown_with_predicted_gain(tmp_path, opened):
    remedies = [WORKERS, SHORTER, LESS]
    told = dataclasses.replace(found(tmp_path / "run"), remedies=remedies, off=OFF)
    page = opened(told)
    assert agree(page, json.loads(json.dumps(as_json(told), allow_nan=False))) > 130
    rows = [row.inner_text().split("\t") for row in page.locator("#remedies tbody tr").all()]
    assert rows[0][:3] == ["loader-workers = 4", "+81.0 % (+72.0 % to +90.0 %)", "a formula"]
    assert "--try loader-workers, or line 12: DataLoader(num_workers=4)" in rows[0][3]
    assert "loader = DataLoader(<data>)" in rows[0][3]
    assert rows[1][:3] == ["compress-bf16", "?", "a few steps"]
    assert rows[1][3].endswith("register_comm_hook(...); changes the numbers; may cost bits")
    assert rows[2][3].startswith("line 7: less often")
    assert "a formula were off by 3.1 points (median of 41)" in page.inner_text("#remedies")
    text = words_of(told)
    assert "loader-workers = 4 +81 % (72 to 90) a formula --try loader-workers, or line 12" in text
    assert "Predictions from a formula were off by 3.1 points (median of 41)." in text


def test_trial_results_are_shown_beside_predictions(tmp_path, opened):
    before = found(tmp_path / "before")
    faster = RUNGS | {"everything": rung(2700, 2690, 2710)}
    after = found(tmp_path / "after", rungs=faster, causes=[CAUSES[2]])
    trials = [
        Trial(WORKERS, WORKERS.gain, Interval(0.69, 0.6, 0.78), True, rounds=3),
        Trial(
            *(SHORTER, Interval(0.1, 0.05, 0.15), Interval(0.01, -0.02, 0.04), False),
            *("the gain is within the noise", 6, Losses(0.5, 0.502, 0.001)),
        ),
    ]
    told = dataclasses.replace(
        before,
        remedies=[WORKERS, SHORTER, LESS],
        tried=TrialResults(trials, {"loader-workers": 4}, 1.69),
        after=dataclasses.replace(after, remedies=[LESS]),
    )
    page = opened(told)
    data = json.loads(json.dumps(as_json(told), allow_nan=False))
    assert agree(page, data) > 130
    assert data["tried"][0]["off"] == pytest.approx(-0.12)
    assert data["after"]["waterfall"]["measured"]["mean"] == 2700
    rows = [
        row.inner_text().split("\t")
        for row in page.locator("#remedies table:not(.evidence) tbody tr").all()
    ]
    assert rows[0] == [
        *("loader-workers = 4", "+81.0 % (+72.0 % to +90.0 %)"),
        *("+69.0 % (+60.0 % to +78.0 %)", "kept"),
    ]
    assert rows[1][3] == "the gain is within the noise"
    assert rows[2][0] == "script-beside"
    text = page.inner_text("#remedies")
    assert "compress-bf16 changes the numbers: over the same steps the loss was 0.502" in text
    assert "1,600" in text
    assert "2,700" in text
    assert "The script does other work between its steps." in text
    (bars,) = drawn(page, "after")
    assert bars["x"][-1] == pytest.approx(2700)
    said = words_of(told)
    assert "From 1,600 to 2,700 samples/s: 1.69 times." in said
    again = dataclasses.replace(told.tried, faster=1.61, confirmed=Interval(0.61, 0.55, 0.67))
    said = words_of(dataclasses.replace(told, tried=again))
    assert "measured again in alternation with none of them: +61 % (55 to 67)." in said
    assert "1.69 times" not in said
    assert "loader-workers = 4 +81 % (72 to 90) +69 % (60 to 78) kept" in said
