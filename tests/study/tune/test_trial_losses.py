"""Trials that wait are named with their largest loss; the noise scale gives bounds of the batch."""

import json

from played_trials import PlayedServer, once, play, write_study

from paceline.report.terminal.draw import draw_panel
from paceline.report.tuning.tuning_document import tuning_document
from paceline.report.tuning.tuning_files import tuning_json
from paceline.study.tune.study_view import read_view

SUMMARIES = {
    0: {"losses": [{"kind": "input", "share": 0.25}, {"kind": "other", "share": 0.6}]},
    1: {"losses": [{"kind": "wait", "share": 0.2}, {"kind": "transfer", "share": 0.3}]},
    2: {"losses": [{"kind": "input", "share": 0.05}]},  # too little
    3: {"losses": [{"kind": "input", "share": 0.9}], "verdict": {"verdict": "Uncertain (few)"}},
    4: {"losses": [{"kind": "input", "share": 0.4}]},
    5: {"format": "paceline-job", "reason": "no figures"},
}
NOISE = {"samples": 420.0, "low": 310.0, "high": 600.0, "global_batch": 64, "steps": 20}


def test_trials_that_wait_are_named(tmp_path):
    def script(played):
        summary = {**SUMMARIES[played.trial], "noise_scale": NOISE if played.trial == 2 else None}
        played.start.files.summary.write_text(json.dumps(summary))
        yield from once(played)
        return 0

    opened, _ = play(write_study(tmp_path), PlayedServer(script))
    view = read_view(opened)
    assert [(row.waits_for, row.waits) for row in view.rows] == [
        *(("input", 0.25), ("exchange", 0.5), ("", 0.0), ("", 0.0), ("input", 0.4), ("", 0.0)),
    ]
    data = tuning_json(view)
    assert data["trials"][1]["waits_for"] == "exchange"
    assert data["trials"][2]["noise_scale"] == [420.0, 310.0, 600.0]
    waiting, exchange, batch = data["notes"]
    assert "2 trials waited for the next batch, trial 4 longest: 40.0 %" in waiting
    assert "--stage" in waiting
    assert "1 trial waited for other ranks" in exchange
    assert "noise scale of trial 2 is 420 samples (310 to 600)" in batch
    assert draw_panel(tuning_document(view))


def test_a_damaged_summary_is_no_obstacle(tmp_path):
    def script(played):
        played.start.files.summary.write_text('{"losses": [{"kind": "input", "share": "much"}]}')
        yield from once(played)
        return 0

    opened, complete = play(write_study(tmp_path), PlayedServer(script))
    assert complete
    assert not any(row.waits_for for row in read_view(opened).rows)
