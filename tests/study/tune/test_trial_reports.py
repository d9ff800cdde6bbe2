"""Reports of a trial, and the answers that it waits for."""

import json
import sys

from paceline.record.trial_reports import (
    CONTINUE,
    STOP,
    Answer,
    LineReader,
    TrialReporter,
    TrialRequest,
)
from paceline.study.tune.call_function import MODULE_NAME, main
from paceline.study.tune.trial_outcome import MAX_LINE_BYTES, PatternReader


def test_answers_of_a_long_trial_are_read_once(tmp_path):
    """The file of answers has some 40 bytes for each step."""
    answers = tmp_path / "answers"
    line = '{"step":%d,"decision":"continue"}\n'
    answers.write_text("".join(line % step for step in range(50_000)))
    assert answers.stat().st_size > 1 << 20
    reporter = TrialReporter(TrialRequest(str(tmp_path / "r"), str(answers), "loss", True))
    reporter.report({"loss": 1.0}, 49_999)
    answers.write_text("x" * answers.stat().st_size)  # it must not be read again
    with answers.open("a") as file:
        file.write(line % 50_000)
    reporter.report({"loss": 1.0}, 50_000)


def test_only_complete_lines_are_read(tmp_path):
    answers = tmp_path / "answers"
    reader = LineReader(answers, Answer)
    assert reader.read() == []
    answers.write_text('{"step":1,"decision":"continue"}\n{"step":2,"dec')
    assert reader.read() == [Answer(1, CONTINUE)]
    with answers.open("a") as file:
        file.write('ision":"stop"}\nno JSON\n')
    assert reader.read() == [Answer(2, STOP)]


def test_a_function_keeps_its_default_of_epochs_without_that_of_the_study(tmp_path, monkeypatch):
    (tmp_path / "train.py").write_text(
        "calls = []\ndef train(lr, seed, epochs=10):\n    calls.append((lr, seed, epochs))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, MODULE_NAME, None)
    own = {"checkpoint": "c", "folder": "f", "trial": "0", "seed": "3", "ranks": "1"}
    for epochs in ("", "5"):
        arguments = {"values": {"lr": 0.1}, "own": {**own, "epochs": epochs}}
        main("train.py:train", json.dumps(arguments))
        expected = (0.1, 3, int(epochs or 10))
        assert sys.modules[MODULE_NAME].calls == [expected]


def test_a_line_without_end_takes_little_memory(tmp_path):
    output = tmp_path / "output"
    reader = PatternReader(r"loss=(\d+)", output)
    output.write_text("loss=3 " + "\r 10 %" * MAX_LINE_BYTES)  # a progress bar
    assert reader.read() == []
    assert len(reader._rest) <= MAX_LINE_BYTES
    with output.open("a") as file:
        file.write("\nloss=2\n")
    assert reader.read() == [(1, 3.0), (2, 2.0)]
