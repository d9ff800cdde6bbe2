"""Reports of a trial, and the answers that it waits for."""

from paceline.record.trial_reports import (
    CONTINUE,
    STOP,
    Answer,
    LineReader,
    TrialReporter,
    TrialRequest,
)


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
