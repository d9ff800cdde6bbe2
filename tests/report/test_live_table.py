"""Tables on a terminal begin without data, and lines go above them."""

import sys

import pytest

from paceline.report.terminal.live_studies import StudyDisplay, TuneDisplay


@pytest.mark.parametrize("kind", [StudyDisplay, TuneDisplay])
@pytest.mark.parametrize("is_terminal", [True, False])
def test_display_begins_without_data_and_shows_messages(kind, is_terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    with kind() as display:
        display.message("something happened")
    assert "paceline: something happened" in capsys.readouterr().err
