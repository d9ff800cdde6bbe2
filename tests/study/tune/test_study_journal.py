"""The journal of a study: what killed writers and full disks leave, and who may write."""

import errno
import os
import time

import pytest
from played_trials import PlayedServer, once, play, write_study

from paceline.study.tune import journal
from paceline.study.tune.journal import open_journal, remove_partial_line, remove_stale_lock
from paceline.study.tune.open_study import locked
from paceline.study.tune.tune import load_spec


def test_the_beginning_of_a_line_is_removed(tmp_path):
    path = tmp_path / "journal"
    path.write_bytes(b'{"a": 1}\n{"b": 2}\n{"c"' + b"x" * 200_000)
    assert remove_partial_line(path)
    assert path.read_bytes() == b'{"a": 1}\n{"b": 2}\n'
    assert not remove_partial_line(path)
    path.write_bytes(b'{"a')
    assert remove_partial_line(path)
    assert path.read_bytes() == b""


def test_the_lock_of_a_killed_writer_is_removed_soon(tmp_path):
    path = tmp_path / "journal"
    path.touch()
    os.symlink(path, f"{path}.lock")
    before = time.monotonic()
    assert remove_stale_lock(path)
    assert time.monotonic() - before < 5
    assert not remove_stale_lock(path)
    os.symlink(path, f"{path}.lock")
    open_journal(path, writes=True).get_all_studies()  # does not wait


def test_a_write_that_fails_leaves_the_journal_as_it_was(tmp_path, monkeypatch):
    path = write_study(tmp_path)
    server, calls = PlayedServer(once), []
    fsync = os.fsync

    def full(fd):
        calls.append(fd)
        if len(calls) == 25:  # the line is written in part, and can't be completed
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(journal.JournalFullError, match="No space left"):
        play(path, server, cores=1)
    assert (tmp_path / "study.journal").read_bytes().endswith(b"\n")
    server.running.clear()
    opened, complete = play(path, server, cores=1, continued=True)
    assert complete
    assert len(opened.study.trials) == 6
    assert [code for _, code in server.ends] == [0] * 6


def test_a_second_runner_is_refused(tmp_path):
    spec = load_spec(write_study(tmp_path))
    pid = os.fork()
    if not pid:
        with locked(spec, print):
            (tmp_path / "held").touch()
            time.sleep(60)
        os._exit(0)
    try:
        while not (tmp_path / "held").exists():
            time.sleep(0.01)
        with pytest.raises(ValueError, match=f"in use by run .*process {pid}"), locked(spec, print):
            pass
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    with locked(spec, print):  # the lock of a dead process does not count
        pass


def test_optuna_opens_the_study(tmp_path):
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    play(write_study(tmp_path), PlayedServer(once))
    storage = JournalStorage(JournalFileBackend(str(tmp_path / "study.journal")))
    study = optuna.load_study(study_name="study", storage=storage)
    assert len(study.trials) == 6
    assert study.best_value == max(one.value for one in study.trials)


def test_a_study_is_not_begun_twice_by_mistake(tmp_path):
    path = write_study(tmp_path)
    play(path, PlayedServer(once))
    with pytest.raises(ValueError, match=r"has a study already, with 6 trials.*--continue"):
        play(path, PlayedServer(once))
    changed = path.read_text().replace("high = 3.0", "high = 2.0")
    path.write_text(changed)
    with pytest.raises(ValueError, match=r"parameters\.x\.high was 3\.0 and is 2\.0.*--fork"):
        play(path, PlayedServer(once), continued=True)


def test_a_study_that_does_not_exist_is_not_continued(tmp_path):
    with pytest.raises(ValueError, match="has no study yet"):
        play(write_study(tmp_path), PlayedServer(once), continued=True)
