"""What a study finds when it begins again: left folders, forks and attempts that were cut short."""

import pytest
from played_trials import (
    KilledError,
    PlayedServer,
    Writes,
    once,
    play,
    write_study,
)

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
