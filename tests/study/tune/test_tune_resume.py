"""What a study finds when it begins again: left folders, forks and attempts that were cut short."""

import fcntl
import os
from dataclasses import replace

import pytest
from played_trials import (
    Heard,
    KilledError,
    PlayedServer,
    Writes,
    by_epochs,
    once,
    play,
    write_study,
)

from paceline.study.tune import tune
from paceline.study.tune.searches.search import FAILURE, RUN_FIGURES, Search
from paceline.study.tune.trial_outcome import StudyStoppedError

PROMOTION = {"pruner": "promotion", "epochs": 9, "trials": 9}
KNOWN = "[[known]]\nx = 0.5\n[[known]]\nx = 0.75\n"


def trials_of(opened):
    return opened.study.get_trials(deepcopy=False)


def test_a_folder_of_another_study_is_not_adopted(tmp_path):
    path = write_study(tmp_path)
    play(path, PlayedServer(once))
    path.with_suffix(".journal").unlink()
    server = PlayedServer(once)
    with pytest.raises(ValueError, match=r"HINT: move it away: mv .*study\.trials"):
        play(path, server)
    path.with_suffix(".trials").rename(tmp_path / "old")
    assert play(path, server)[1]


def test_a_fork_takes_no_name_that_is_used(tmp_path):
    path = write_study(tmp_path)
    play(path, PlayedServer(once))
    (tmp_path / "study-2.toml").touch()
    (tmp_path / "study-3.trials").mkdir()
    opened, _ = play(path, PlayedServer(once), forked=True)
    assert opened.study.study_name == "study-4"
    assert len(trials_of(opened)) == 6


def test_a_fork_that_was_killed_gets_all_trials_once(tmp_path, monkeypatch):
    writes = Writes(monkeypatch)
    for kill_at in (1, 6, 8):  # its creation, its second copy, its new known point
        folder = tmp_path / str(kill_at)
        folder.mkdir()
        path = write_study(folder, trials=3)
        path.write_text(path.read_text() + KNOWN)
        play(path, PlayedServer(once), cores=1)
        path.write_text(path.read_text().replace("high = 3.0", "high = 3.5") + "[[known]]\nx = 1\n")
        path.write_text(path.read_text().replace("trials = 3", "trials = 5"))
        writes.count, writes.kill_at = 0, kill_at
        with pytest.raises(KilledError):
            play(path, PlayedServer(once), cores=1, forked=True)
        writes.kill_at = -1
        server, is_begun = PlayedServer(once), kill_at > 1
        opened, _ = play(path, server, cores=1, continued=is_begun, forked=not is_begun)
        assert opened.study.study_name == "study-2"
        points = [one.params["x"] for one in trials_of(opened)]
        assert points[:2] == [0.5, 0.75], kill_at
        assert points[3] == 1, kill_at
        assert len(set(points)) == 5, kill_at


@pytest.mark.parametrize("kill_at", [2, 3, 4, 5])  # after the study was created
def test_a_goal_that_was_corrected_counts(tmp_path, monkeypatch, kill_at):
    writes = Writes(monkeypatch)
    writes.kill_at = kill_at
    path = write_study(tmp_path, goal="min")
    with pytest.raises(KilledError):
        play(path, PlayedServer(once))
    writes.kill_at = -1
    opened, _ = play(write_study(tmp_path), PlayedServer(once))
    assert opened.study.direction.name == "MAXIMIZE"


def test_the_duration_of_a_trial_that_ended_without_runner_counts(tmp_path):
    class Killed(PlayedServer):
        def ended(self, timeout_s):
            if super().ended(timeout_s):
                raise KilledError
            return []

    path = write_study(tmp_path, metric=["score", "seconds"], goal=["max", "min"])
    with pytest.raises(KilledError):
        play(path, Killed(once), cores=1)
    opened, _ = play(path, PlayedServer(once), cores=4, continued=True)
    first = trials_of(opened)[0]
    assert first.values[1] == 1.0
    figures = first.user_attrs[RUN_FIGURES]
    assert figures["seconds"] == 1.0
    assert figures["node_hours"] == 1 / 3600  # it had the only core


@pytest.mark.parametrize("pruner", ["median", "successive-halving"])
def test_a_trial_that_was_to_stop_is_not_revived(tmp_path, monkeypatch, pruner):
    options = {"pruner": pruner, "trials": 8, "epochs": 2}
    told = []
    original = Search.tell

    def tell(self, work, outcome):
        if outcome.state == "stopped" and not told:
            told.append(work.number)
            raise KilledError
        original(self, work, outcome)

    monkeypatch.setattr(Search, "tell", tell)
    path, server = write_study(tmp_path, **options), PlayedServer(by_epochs(2))
    with pytest.raises(KilledError):
        play(path, server, cores=1)
    before = len(server.log)
    opened, complete = play(path, server, cores=1, continued=True)
    assert complete
    assert trials_of(opened)[told[0]].state.name == "PRUNED"
    assert told[0] not in [trial for trial, *_ in server.log[before:]]


def test_a_trial_is_not_promoted_while_its_last_attempt_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "OLD_ATTEMPT_TIMEOUT_S", 0.05)
    path, held = write_study(tmp_path, **PROMOTION), []

    class Holds(PlayedServer):
        def start(self, start):
            super().start(start)
            held.append(os.open(start.files.lock, os.O_RDWR))
            fcntl.flock(held[-1], fcntl.LOCK_SH)

    server = Holds(by_epochs(9))
    with pytest.raises(StudyStoppedError, match=r"processes of trial \d+ .* still run"):
        play(path, server, cores=1)
    assert len({trial for trial, *_ in server.log}) == len(server.log)
    for fd in held:
        os.close(fd)
    assert play(path, PlayedServer(by_epochs(9)), cores=1, continued=True)[1]


def test_a_trial_without_its_source_checkpoint_fails(tmp_path, monkeypatch):
    def begin(self):
        work = original(self)
        return replace(work, checkpoint_of=0) if work.number == 1 else work

    original = Search.begin
    monkeypatch.setattr(Search, "begin", begin)
    heard = Heard()
    opened, complete = play(write_study(tmp_path), PlayedServer(once), cores=1, heard=heard)
    assert complete
    assert [one.state.name for one in trials_of(opened)] == ["COMPLETE", "FAIL", *["COMPLETE"] * 4]
    assert trials_of(opened)[1].user_attrs[FAILURE]["kind"] == "no checkpoint"
    assert "HINT" in trials_of(opened)[1].user_attrs[FAILURE]["text"]
