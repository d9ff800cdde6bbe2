"""Merging of the output of all ranks, in particular at a failure."""

import io

import pytest

from paceline.launch.monitor.output import ERR, MAX_LINES_AFTER, OUT, STATUS, RankOutput

TRACEBACK = b"Traceback\nKeyError: 0\n"


@pytest.fixture
def output():
    made = RankOutput(2, io.BytesIO(), io.BytesIO(), lambda *_: None)
    yield made
    made.close()


def shown(output):
    return output._screen.to[ERR].getvalue()


def test_traceback_that_another_rank_prints_later_is_shown_once(output):
    output.hold_lines()
    output.take(0, ERR, TRACEBACK)
    output.drain(all_of_it=False)
    assert shown(output) == b""
    output.take(1, ERR, TRACEBACK)
    output.drain(all_of_it=False)
    assert shown(output) == TRACEBACK


def test_error_of_a_rank_is_on_the_screen_until_many_lines_follow(output):
    assert not output.shows_error(0)
    output.take(0, ERR, TRACEBACK)
    output.take(1, ERR, b"another\n")
    output.drain()
    assert output.shows_error(0)
    output.take(1, OUT, b"line\n" * MAX_LINES_AFTER)
    output.drain()
    assert not output.shows_error(0)
    output.take(0, ERR, TRACEBACK)
    output.drain()
    assert output.shows_error(0)
    output.forget(0)
    assert not output.shows_error(0)


@pytest.mark.parametrize(
    "line", [b'{"logged": {"loss": 1.0}}', b'{"exception": "ValueError: 1"}', b"{", b"[]"]
)
def test_message_that_is_not_of_paceline_is_ignored(line):
    messages = []
    output = RankOutput(1, io.BytesIO(), io.BytesIO(), lambda *message: messages.append(message))
    output.take(0, STATUS, line + b'\n{"finished": 0}\n')
    output.close()
    assert messages == [(0, {"finished": 0})]
