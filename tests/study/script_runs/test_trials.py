"""Trials: several at the same time, their limit, Ctrl-C, order, failures."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from paceline.study import trials as module
from paceline.study.script_runs.run_process import run_processes
from paceline.study.trials import (
    InterruptedTrialError,
    ScriptRequest,
    Trial,
    Trials,
    TrialSpec,
    in_turn,
    on_first_host,
    rounds,
)


def shell(text, log):
    return ["sh", "-c", text], log


def test_commands_run_at_the_same_time(tmp_path):
    wait = "touch {0}; until [ -e {1} ]; do sleep 0.01; done; echo met; exit {2}"
    commands = [
        shell(wait.format(tmp_path / "a", tmp_path / "b", 0), tmp_path / "1.log"),
        shell(wait.format(tmp_path / "b", tmp_path / "a", 7), tmp_path / "2.log"),
    ]
    assert [code for code, _ in run_processes(commands, 60)] == [0, 7]
    assert (tmp_path / "2.log").read_text() == "met\n"


def test_commands_that_last_too_long_are_ended_together(tmp_path):
    commands = [shell("exit 3", tmp_path / "1.log"), shell("exec sleep 600", tmp_path / "2.log")]
    before = time.monotonic()
    (first, _), (second, took_s) = run_processes(commands, 0.5)
    assert (first, second) == (3, None)
    assert 0.5 <= took_s < 60
    assert time.monotonic() - before < 60


class ShellTrials(Trials):
    """Trials that run a shell instead of ``paceline run``."""

    def _command(self, spec, changes):
        return ["sh", "-c", *(spec.args or [])]


def test_interrupted_trials_end_all_processes(tmp_path):
    pids = [tmp_path / "1.pid", tmp_path / "2.pid"]
    specs = [
        TrialSpec(None, tmp_path / f"{n}.log", args=[f"echo $$ > {pid}; exec sleep 600"])
        for n, pid in enumerate(pids)
    ]

    def interrupt():
        while not all(pid.exists() and pid.read_text().strip() for pid in pids):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    with ShellTrials(ScriptRequest("x.py", []), print, "paceline-test-") as trials:
        threading.Thread(target=interrupt).start()
        with pytest.raises(InterruptedTrialError):
            trials.run_trials(specs)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid.read_text()), 0)


def test_failure_has_the_words_of_the_script(tmp_path):
    with ShellTrials(ScriptRequest("x.py", []), print, "paceline-test-") as trials:
        text = "echo step; echo 'paceline: rank 1 failed: ValueError: no data'; exit 4"
        trial = trials.run_trial(TrialSpec(None, tmp_path / "log", args=[text]))
    failure = trial.failure(None, "2 ranks")
    assert failure.short == "ValueError: no data"
    assert failure.text.splitlines()[0] == "the script with 2 ranks ended with exit code 4:"
    log = tmp_path / "refused"
    log.write_text("paceline: --bind none: 3 ranks need 3 cores. HINT: -n 2\n")
    refused = Trial(TrialSpec(None, log), 2, 1.0, 0.0).failure(None, "3 ranks")
    assert refused.short == "--bind none: 3 ranks need 3 cores. HINT: -n 2"
    done = Trial(TrialSpec(None, tmp_path / "log"), 0, 1.0, 0.0)
    assert done.failure(None, "2 ranks") is None
    unrecorded = Trial(TrialSpec(tmp_path, tmp_path / "log"), 0, 1.0, 0.0)
    assert "exit code 0" in unrecorded.failure(unrecorded.load(), "2 ranks").text


def test_rounds_repeat_what_is_unfinished_in_turn():
    left = {"a": 3, "b": 1, "c": 2}
    order = []
    for keys in rounds(lambda: [one for one, count in left.items() if count], 9):
        order.append("".join(keys))
        for key in keys:
            left[key] -= 1
    assert order == ["abc", "ca", "a"]
    assert len(list(rounds(lambda: ["x"], 2))) == 2
    assert in_turn((False, True), 1) == [True, False]


def test_trials_at_the_same_time_have_their_own_settings(tmp_path, monkeypatch):
    asked = []

    def run(commands, limit_s, server):
        for words, _ in commands:
            asked.append(Path(words[words.index("--settings") + 1]).read_text())
        return [(0, 1.0) for _ in commands]

    monkeypatch.setattr(module, "run_processes", run)
    specs = [
        TrialSpec(None, tmp_path / "log", ranks=1, settings={"global-batch": batch})
        for batch in (64, 128)
    ]
    with Trials(ScriptRequest("x.py", []), print, "paceline-test-") as trials:
        trials.run_trials(specs)
    assert ["global-batch = 64" in asked[0], "global-batch = 128" in asked[1]] == [True, True]


def test_one_rank_runs_on_the_first_host():
    where = ["-H", "a:4,b:4", "--launcher", "srun"]
    assert on_first_host(where, 1) == ["-H", "a:1", "--launcher", "srun"]
    assert on_first_host(["--hostfile", "x"], 1) == ["--hostfile", "x"]
