"""The start of a rank in a new interpreter."""

import errno
import os

import pytest

from paceline.launch.ranks import rank_process
from paceline.launch.ranks.fork_server import RankStart


def test_environment_too_large_for_new_interpreter_is_reported(monkeypatch):
    def refuse(*_):
        raise OSError(errno.E2BIG, os.strerror(errno.E2BIG))

    monkeypatch.setattr(rank_process, "become", lambda start: None)
    monkeypatch.setattr(os, "execv", refuse)
    monkeypatch.setenv("HUGE", "x" * 70_000)
    start = RankStart({}, [], None, (0, 1, 2))
    monkeypatch.setattr(os, "set_inheritable", lambda *_: None)
    with pytest.raises(
        SystemExit, match=r"largest environment variables are HUGE \(70,005 bytes\).*env -u HUGE"
    ):
        rank_process.exec_fresh(start)
