"""Studies in the terminal: a line for each size, and progress."""

import io
import os
import pty
import re
import subprocess
import sys
from dataclasses import replace

from paceline.analyze.scaling.derived import scaling
from paceline.analyze.scaling.forecast import analyse_kind
from paceline.analyze.scaling.study_events import Progress
from paceline.analyze.scaling.study_model import STRONG, WEAK, Setup, StudyRun
from paceline.report.console import PlainConsole
from paceline.report.scaling import findings as module
from paceline.report.scaling.findings import CheckedPrediction, Findings, Fit, findings_of
from paceline.report.scaling.study_document import fit_sentence, prediction_sentence, study_document
from paceline.report.terminal.draw import draw_panel
from paceline.report.terminal.live_studies import StudyDisplay, run_sentence
from studies import make_study, predicted, reach


def printed(study, findings=None, width=100, running=()):
    console = PlainConsole(file=io.StringIO(), width=width)
    console.print(draw_panel(study_document(study, findings or Findings(), width, running)))
    return console.file.getvalue()


def lines_with(text, first):
    return [line for line in text.splitlines() if line.strip("│ ").startswith(first)]


def test_each_size_has_a_line():
    study = make_study(failed={4}, spread=0.0, notes=["The clock varied."])
    text = printed(study, running=[Setup(8, 64)])
    assert "Strong scaling: the same global batch" in text
    for ranks, samples, efficiency in ((1, "1,000", "1.00"), (2, "1,901", "0.95")):
        (strong, weak) = lines_with(text, f"{ranks} ")
        for line in (strong, weak):
            assert samples in line
            assert f" {efficiency} " in line
    assert "failed" in lines_with(text, "4 ")[0]
    assert "4 ranks: RuntimeError: <b>no memory</b>" in text
    assert lines_with(text, "▸8 ")  # runs now
    assert "~0.0000" not in text
    assert "The clock varied." in text
    assert "…" not in text  # nothing is cut at 100 columns


def test_wide_terminals_show_more_factors():
    assert "LB" not in printed(make_study())
    assert "LB" in printed(make_study(), width=140)


def test_predictions_and_fits_are_sentences():
    one = CheckedPrediction(predicted(STRONG, 8, 5000.0), None)
    text = printed(make_study((1, 2)), Findings(predictions=[one]), width=140)
    assert "predicted for 8 ranks: 5,000 samples/s (4,750 to 5,250), USL; not measured yet" in text
    unlimited = CheckedPrediction(replace(one.prediction, high=1e12), None)
    assert "(4,750 to no upper limit)" in prediction_sentence(unlimited)
    few = fit_sentence(Fit(WEAK, "law"))
    assert few.endswith("fewer than four sizes: the fit cannot be tested")


def test_reasons_name_the_efficiencies_of_the_table():
    study = make_study(
        (1, 2), (STRONG,), serial=1.0, spread=0.35, runs=6
    )  # means and medians differ
    text = printed(study, findings_of(study), width=200)
    size = next(one for one in scaling(study, STRONG) if one.point.ranks == 2)
    assert f"falls from 1.00 to {size.efficiency.value:.2f}:" in text
    (bend,) = analyse_kind(study, STRONG).bends
    assert abs(bend.after - size.efficiency.value) > 0.01
    assert "shorter" not in text


def test_shares_beyond_the_whole_are_explained(monkeypatch):
    study = make_study((1, 2), (STRONG,), serial=1.0, spread=0.0)
    analysis = analyse_kind(study, STRONG)
    (bend,) = analysis.bends
    first = bend.losses[0]
    shares = [replace(first, share=1.3), replace(first, share=-0.3)]
    changed = replace(analysis, bends=[replace(bend, losses=shares)])
    monkeypatch.setattr(module, "analyse_kind", lambda *_: changed)
    text = printed(study, findings_of(study), width=300)
    assert "(130.0 % of the loss); other parts of a step are shorter (-30.0 %)." in text


def test_law_that_cannot_describe_the_sizes_is_told():
    study = make_study((1, 2), (STRONG,), serial=2.0, rate=30_000.0, spread=0.001)
    text = printed(study, findings_of(study), width=240)
    (line,) = lines_with(text, "Amdahl's law: X(1) = ")
    assert re.search(r"X\(1\) = (29,9|30,0)\d\d samples/s", line)
    assert "s above 1: more ranks are slower, which this law does not describe" in line
    assert "s above 1" not in printed(make_study(), findings_of(make_study()), width=240)


def test_target_has_a_table_and_the_soonest_size():
    ends = [reach(10_000), reach(10_000), reach(20_000, reached=False, best=0.91)]
    study = make_study((1, 2), (STRONG,), until="accuracy>=0.97", targets=ends)
    text = printed(study, width=120)
    assert "2 of 3" in text
    assert "No size reaches accuracy>=0.97 with every seed." in text
    assert "With 2 ranks, 2 of 3 seeds reached accuracy>=0.97; the best value is 0.98" in text


def test_progress_without_a_terminal_is_a_line_a_run(capsys):
    study = make_study((1, 2), (STRONG,), spread=0.0)
    failed = StudyRun("runs/x", Setup(2, 64), 1, None, "OSError: \x1b[2Jno\nmore")
    with StudyDisplay() as display:
        display.study_started(study, Progress(left_s=90.0))
        display.run_started(Setup(1, 64), 0, 3.0, Progress())
        display.run_ended(study.runs[0], study, Progress(runs_done=1, left_s=80.0))
        display.run_ended(failed, study, Progress(runs_done=2))
        display.study_ended(study, Progress())
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "paceline: 2 configurations; batch: {per_rank} in the arguments (90 s left)",
        "paceline: run 1: 1 rank, global batch 64: 1,000 samples/s, 64 ms a step (80 s left)",
        "paceline: run 2: 2 ranks, global batch 64: failed: OSError: \\x1b[2Jno",
    ]


def test_run_to_a_target_says_whether_it_was_reached():
    study = make_study((1,), (STRONG,), until="accuracy>=0.97", targets=[reach(9_000)] * 3)
    assert "accuracy>=0.97 reached after 9,000 samples, best value 0.98" in run_sentence(
        study.runs[0]
    )
    missed = replace(study.runs[0].figures, to_target=reach(9_000, False, None))
    assert "accuracy>=0.97 not reached after 9,000 samples" in run_sentence(
        replace(study.runs[0], figures=missed)
    )


LIVE = """
import time
from studies import make_study
from paceline.analyze.scaling.study_events import Progress
from paceline.report.terminal.live_studies import StudyDisplay
study = make_study((1, 2), ("strong",))
with StudyDisplay() as display:
    display.study_started(study, Progress(left_s=60.0))
    display.run_started(study.points[1].setup, 2, 3.0, Progress(left_s=50.0, runs_left=4))
    display.message("something happened")
    display.run_ended(study.runs[-1], study, Progress(runs_done=1))
    display.study_ended(study, Progress())
"""


def test_progress_on_a_terminal_is_a_table_without_colours_under_no_color():
    """The table is drawn on stderr, and says what runs and what follows."""
    parent, child = pty.openpty()
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "110"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    words = [sys.executable, "-c", LIVE]
    process = subprocess.Popen(words, stderr=child, stdout=subprocess.PIPE, env=environment)
    os.close(child)
    text = b""
    while True:
        try:
            part = os.read(parent, 1 << 16)
        except OSError:  # the terminal was closed
            break
        if not part:
            break
        text += part
    out, _ = process.communicate()
    os.close(parent)
    assert (process.returncode, out) == (0, b"")
    shown = text.decode()
    assert "Paceline: scaling study" in shown
    assert "3rd run of 2 ranks, global batch 64: 0.0 s of about 3.0 s" in shown
    assert "then about 4 runs; 50 s left" in shown
    assert "paceline: something happened" in shown
    assert "\x1b[32m" not in shown  # green
