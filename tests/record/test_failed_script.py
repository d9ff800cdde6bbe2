"""The report of a script that fails says so, and how long the start-up took."""

import ranks

from paceline.analyze.figures.report import analyse
from paceline.analyze.records.load_run import load_run
from paceline.record.hooks.error_messages import explain_error, summarize_error
from paceline.report.terminal.run_report import render

FAILS_EARLY = """
    import time, torch
    time.sleep(0.5)
    raise RuntimeError("no such dataset: /data/images")
"""


def test_failure_before_the_first_step_is_in_the_report(tmp_path):
    folder = tmp_path / "record"
    script = ranks.write(tmp_path, FAILS_EARLY)
    result = ranks.run(script, ranks=1, launcher=f"paceline --record {folder}", check=False)
    assert result.returncode == 1
    report = analyse(load_run(folder))
    assert 0.4 < report.startup_s <= report.wall_s
    (doubt,) = report.doubts
    assert doubt.startswith("rank 0 failed before its first step: RuntimeError: no such dataset")
    text = " ".join(render(report).replace("\u2502", " ").split())
    assert "No optimizer step was recorded" in text
    assert "rank 0 failed before its first step" in text
    assert "start-up 0.0 s" not in text
    assert report.recording_cost < 1


NCCL = """NCCL error in: NCCLUtils.cpp:93, invalid usage (run with NCCL_DEBUG=WARN for details)
ncclInvalidUsage: This usually reflects invalid usage of NCCL library.
Last error:
Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 60"""


def test_two_ranks_on_one_gpu_are_named_with_the_way_out():
    text = explain_error(RuntimeError(NCCL))
    assert "rank 0 and rank 1 both on CUDA device 60" in text
    assert "HINT: start at most one rank for each GPU" in text
    assert summarize_error(RuntimeError(NCCL)).startswith("RuntimeError: NCCL refuses two ranks")
    assert explain_error(RuntimeError("another")) is None
