"""The report of a script that fails says so, and how long the start-up took."""

import pytest
import ranks

from paceline.analyze.figures.report import analyse
from paceline.analyze.records.load_run import load_run
from paceline.record.hooks import error_messages
from paceline.record.hooks.error_messages import explain_error, format_error, summarize_error
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


class WrappedError(Exception):
    """An error of another library, with a text of many lines."""


@pytest.mark.parametrize(
    ("text", "summary"),
    [
        ("ranks disagree about 'x'", "RuntimeError: ranks disagree about 'x'"),
        ("'x' can't continue: rank 1 has died", "'x' can't continue: rank 1 has died, in "),
    ],
)
def test_summary_is_that_of_the_error_which_another_library_has_wrapped(monkeypatch, text, summary):
    cause = RuntimeError(text)
    find = {WrappedError: cause}
    monkeypatch.setattr(error_messages, "causes", [lambda error: find.get(type(error))])
    with pytest.raises(WrappedError) as caught:
        raise WrappedError("Graph execution error:\n\n...")
    assert summarize_error(caught.value).startswith(summary)
    place, last = format_error(caught.value).split("error: ")
    assert "test_failed_script.py" in place
    assert last == f"{text}\n"
    assert summarize_error(KeyError("a")) == "KeyError: 'a'"
