"""The answer of ``paceline verify`` in the terminal, as JSON and as a page in Chromium."""

import io
import json
import os
from contextlib import redirect_stdout
from unittest.mock import patch

import pytest
from pages import CONTRAST, HOSTILE, agree, drawn, watched

from paceline.analyze.verification.find import judge
from paceline.report.page.write_page import document_page
from paceline.report.terminal.draw import print_document
from paceline.report.verification_document import (
    NOBODY,
    SEVERAL,
    as_json,
    samples_chart,
    verification_charts,
    verification_document,
)
from trainings import LOOP, Training, shuffled, verified


def judged(**changes):
    runs = verified(Training(**changes))
    runs.command = ["train.py", "--x y"]
    return runs, *judge(runs)


@pytest.fixture(scope="module")
def wrong():
    """A training whose epochs all have the same order."""
    return judged(order=lambda r, n, e: shuffled(r, n, 0, 32), epochs=3)


@pytest.fixture(scope="module")
def right():
    return judged(epochs=1)


def printed(found):
    with redirect_stdout(io.StringIO()) as text, patch.dict(os.environ, COLUMNS="400"):
        print_document(lambda _: verification_document(found))
    return text.getvalue()


def test_mistake_is_named_with_its_line_and_remedy(wrong):
    text = printed(wrong)
    assert "2 ranks do not train what one process does: 1 difference." in text
    assert "DIFFERS  All epochs have the same order. Ranks 0 and 1 trained 16 samples" in text
    lines = [line.rstrip() for line in text.splitlines()]
    assert lines[1] == lines[5] == ""
    assert lines[2].startswith("DIFFERS  All epochs")
    assert lines[3].startswith(f"  Look at {LOOP}")
    assert lines[6].startswith("Compared: ")
    assert "Call sampler.set_epoch(epoch)" in text


def test_right_training_says_what_was_compared(right):
    text = printed(right)
    assert "2 ranks train what one process does, as far as it was compared." in text
    assert "4 steps of 4 parameters in 1 epoch" in text
    assert "32 trained and 0 evaluated samples" in text
    assert "4 steps compared with one process that trains the same samples" in text
    assert "DIFFERS" not in text


def test_json_has_findings_and_what_was_compared(wrong):
    data = json.loads(json.dumps(as_json(wrong), allow_nan=False))
    assert data["format"] == "paceline-verification"
    (one,) = [one for one in data["findings"] if one["nature"] == "measured"]
    assert one["mistake"] == "epoch-not-set"
    assert one["lines"][0] == LOOP
    assert data["differences"] == 1
    assert data["compared"]["steps"] == 12
    assert len(data["compared"]["differences"]) == 4


@pytest.fixture
def opened(browser, tmp_path):
    with watched(browser) as show:

        def open_(found, width=1280, theme="light"):
            path = tmp_path / f"page-{show.count}.html"
            charts = verification_charts(found)
            page = document_page(verification_document(found, charts), charts)
            path.write_text(page, encoding="utf-8")
            return show(path, width, theme)

        yield open_


def test_page_has_findings_and_charts(wrong, opened):
    page = opened(wrong)
    data = json.loads(json.dumps(as_json(wrong), allow_nan=False))
    assert agree(page, data) > 7
    assert "DIFFERS" in page.inner_text(".losses")
    (samples,) = drawn(page, "samples")
    assert samples["y"] == ["epoch 1", "epoch 2", "epoch 3"]
    assert samples["z"][0] == samples["z"][2]
    assert set(samples["z"][0]) == {0, 1}
    bars, marks = drawn(page, "layers")
    assert len(bars["y"]) == len(marks["y"]) == 4
    assert all(value < limit for value, limit in zip(bars["x"], marks["x"], strict=True))
    rates = drawn(page, "rates")
    assert [one["name"] for one in rates] == ["2 ranks", "1 rank"]
    assert rates[0]["x"] == rates[1]["x"]


def test_hostile_names_are_text_on_a_narrow_screen(opened):
    found = judged(order=lambda r, n, e: shuffled(0, 1, e, 32))
    runs, findings, seen = found
    runs.command = [HOSTILE]
    findings[0].lines[0] = HOSTILE
    seen.notes.append(HOSTILE)
    page = opened(found, 390, "dark")
    assert page.evaluate("window.ours") is None
    assert HOSTILE in page.inner_text(".losses")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert page.evaluate(CONTRAST) == []


def test_samples_of_no_rank_and_of_several_are_marked():
    runs = verified(
        Training(order=lambda r, n, e: [list(range(20)), list(range(12, 30))][r], epochs=1),
        with_replay=False,
    )
    (row,) = samples_chart(runs.ranks)["z"]
    assert row[0] == 0
    assert row[13] == SEVERAL
    assert row[25] == 1
    assert row[31] == NOBODY
