"""The runner of a study, with trials that are played: kills, failures, budgets, promotion."""

import math
import os
import re
from collections import Counter
from types import SimpleNamespace

import pytest
from played_trials import (
    Heard,
    PlayedServer,
    Writes,
    by_epochs,
    has_study,
    killed_at,
    once,
    play,
    value_of,
    write_study,
)

from paceline.study.probe.measure.host_facts import free_space
from paceline.study.study_nodes import Node
from paceline.study.tune import trial_outcome
from paceline.study.tune.searches.search import FAILURE
from paceline.study.tune.trial_outcome import StudyStoppedError

PROMOTION = {"pruner": "promotion", "epochs": 9, "trials": 9}


# Of the writes of a study one in STRIDE kills the runner, in the quick tests.
STRIDE = 7


def states(opened):
    return Counter(one.state.name for one in opened.study.get_trials(deepcopy=False))


def ranking(opened):
    done = [one for one in opened.study.get_trials(deepcopy=False) if one.values]
    return [(one.number, one.params["x"], one.value) for one in sorted(done, key=lambda t: t.value)]


def failure_of(opened, number):
    return opened.study.get_trials(deepcopy=False)[number].user_attrs[FAILURE]


def test_all_trials_run_side_by_side(tmp_path):
    server = PlayedServer(once)
    opened, complete = play(write_study(tmp_path), server, cores=2)
    assert complete
    assert states(opened) == {"COMPLETE": 6}
    assert server.most == 2
    assert {share[:2] for share in server.shares} == {(0, 1), (1, 1)}


def test_trials_of_two_ranks_get_cores_of_their_own(tmp_path):
    server = PlayedServer(once)
    play(write_study(tmp_path, ranks=2), server, cores=5)
    assert server.most == 2
    assert {share[:2] for share in server.shares} == {(0, 2), (2, 2)}


def test_known_points_come_first(tmp_path):
    path = write_study(tmp_path)
    path.write_text(path.read_text() + "[[known]]\nx = 0.5\n[[known]]\nx = 0.75\n")
    opened, _ = play(path, PlayedServer(once))
    assert [one.params["x"] for one in opened.study.trials[:2]] == [0.5, 0.75]
    assert states(opened) == {"COMPLETE": 6}


@pytest.mark.parametrize("options", [{}, PROMOTION], ids=["random", "promotion"])
def test_no_kill_loses_or_repeats_a_trial(tmp_path, monkeypatch, options):
    writes = Writes(monkeypatch)
    (tmp_path / "whole").mkdir()
    script = by_epochs(9) if options else once
    whole = PlayedServer(script)
    opened, _ = play(write_study(tmp_path / "whole", **options), whole, cores=1)
    expected = ranking(opened)
    total = writes.count
    assert total > 20
    for kill_at in range(1, total + 1, STRIDE):
        folder = tmp_path / str(kill_at)
        folder.mkdir()
        path = write_study(folder, **options)
        server = PlayedServer(script)
        with killed_at(writes, kill_at):
            play(path, server, cores=1)
        server.running.clear()
        opened, complete = play(path, server, cores=1, continued=has_study(path))
        assert complete
        assert ranking(opened) == expected, kill_at
        whole_runs = Counter(trial for trial, code in server.ends if code == 0)
        assert set(whole_runs.values()) == {1}, kill_at
        assert len(opened.study.trials) == (9 if options else 6)


def test_promotion_continues_the_best_from_their_checkpoints(tmp_path):
    server = PlayedServer(by_epochs(9))
    opened, _ = play(write_study(tmp_path, **PROMOTION), server, cores=1)
    trials = opened.study.get_trials(deepcopy=False)
    epochs = [max(one.intermediate_values) for one in trials]
    assert Counter(epochs)[9] >= 1
    assert Counter(epochs)[1] >= 5
    # the best point is among those that went to the end; no epoch was trained twice
    best = max(trials, key=lambda one: one.params["x"])
    assert max(best.intermediate_values) == 9
    for one in trials:
        assert sorted(one.intermediate_values) == list(range(1, max(one.intermediate_values) + 1))
    assert states(opened)["RUNNING"] == 0


def test_a_trial_that_is_about_to_pause_is_not_promoted_yet(tmp_path):
    """Its processes still write the checkpoint while other trials begin."""
    server = PlayedServer(by_epochs(9))
    server.polls_to_pause = 4
    opened, complete = play(write_study(tmp_path, **PROMOTION), server, cores=3)
    assert complete
    assert states(opened)["COMPLETE"] >= 1


def test_promoted_trials_get_the_ranks_of_their_rung(tmp_path):
    path = write_study(tmp_path, **PROMOTION)
    path.write_text(path.read_text() + "[pruner]\nranks = [1, 2, 4]\n")
    server = PlayedServer(by_epochs(9))
    play(path, server, cores=4)
    ranks = {}
    for trial, _, count in server.log:
        ranks.setdefault(trial, []).append(count)
    assert {tuple(each) for each in ranks.values()} <= {(1,), (1, 2), (1, 2, 4)}
    assert (1, 2, 4) in {tuple(each) for each in ranks.values()}


def test_a_trial_without_checkpoint_cannot_be_promoted(tmp_path):
    def script(played):
        for epoch in range(1, 10):
            yield epoch, value_of(played)
        return 0

    with pytest.raises(StudyStoppedError, match="no checkpoint in"):
        play(write_study(tmp_path, **PROMOTION), PlayedServer(script), cores=1)


def test_optunas_pruner_stops_trials(tmp_path):
    server = PlayedServer(by_epochs(9))
    options = {"pruner": "successive-halving", "trials": 8}
    opened, _ = play(write_study(tmp_path, **options), server, cores=1)
    assert states(opened)["PRUNED"] >= 3
    assert states(opened)["COMPLETE"] >= 1


def test_failures_are_told_apart(tmp_path):
    said = {
        0: ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", 1),
        1: ("ValueError: the loss is not finite: nan (rank 0, step 3)", 1),
        2: ("KeyError: 'x'", 1),
        3: ("paceline: the job hung", 124),
    }

    def script(played):
        if played.trial not in said:
            yield from once(played)
            return 0
        if played.trial == 0:
            yield 1, 0.5
        text, code = said[played.trial]
        with open(played.start.files.output, "a") as file:
            file.write(f"{text}\n")
        return code

    server, heard = PlayedServer(script), Heard()
    opened, complete = play(write_study(tmp_path), server, cores=1, heard=heard)
    assert complete
    kinds = [failure_of(opened, number)["kind"] for number in range(4)]
    assert kinds == ["out of memory", "diverged", "crashed", "hung"]
    assert Counter(trial for trial, *_ in server.log)[3] == 2  # repeated once
    assert "KeyError" in failure_of(opened, 2)["text"]


@pytest.mark.parametrize("said", ["", "OSError: [Errno 28] No space left on device"])
def test_a_full_disk_loses_no_trial(tmp_path, monkeypatch, said):
    """The trial is run again, also if its output could not be written either."""

    def script(played):
        if played.trial == 2 and free[0] < 1 << 20:
            with open(played.start.files.output, "a") as file:
                file.write(said)
            return 120
        yield from once(played)
        return 0

    free = [1000.0]
    monkeypatch.setattr(trial_outcome, "free_space", lambda _: free[0])
    path = write_study(tmp_path)
    full = re.compile("trial 2 could not write: .*no space left", re.IGNORECASE)
    with pytest.raises(StudyStoppedError, match=full):
        play(path, PlayedServer(script), cores=1)
    free[0] = 1e9
    opened, complete = play(path, PlayedServer(script), cores=1, continued=True)
    assert complete
    assert states(opened) == {"COMPLETE": 6}


def test_a_file_system_without_a_number_of_blocks_is_not_full(tmp_path, monkeypatch):
    none = SimpleNamespace(f_blocks=0, f_bavail=0, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: none)
    assert free_space(tmp_path) is None


def test_a_diverged_trial_is_ended_at_once(tmp_path):
    def script(played):
        if played.trial == 0:
            yield 1, math.nan
            for step in range(2, 1000):
                yield step, 1.0
        yield 1, 1.0
        return 0

    server = PlayedServer(script)
    opened, _ = play(write_study(tmp_path), server, cores=1)
    assert failure_of(opened, 0) == {"kind": "diverged", "text": "score is nan at step 1"}
    assert server.ends[0] == (0, 130)


def test_the_first_failures_of_one_kind_stop_the_study(tmp_path):
    def script(played):
        yield from ()
        with open(played.start.files.output, "a") as file:
            file.write("ModuleNotFoundError: No module named 'nothing'\n")
        return 1

    server = PlayedServer(script)
    with pytest.raises(StudyStoppedError, match=r"first 3 trials have all failed.*\n?.*nothing"):
        play(write_study(tmp_path), server, cores=1)
    assert len(server.log) == 3


def test_a_missing_metric_is_told_after_the_first_trial(tmp_path):
    path = write_study(tmp_path, metric="acuracy")
    server = PlayedServer(once)
    with pytest.raises(StudyStoppedError, match=r"never reported acuracy\. It reported score"):
        play(path, server, cores=1)
    assert len(server.log) == 1
    path.write_text(path.read_text().replace("acuracy", "score"))
    opened, complete = play(path, server, cores=1, continued=True)  # no trial had a value
    assert complete
    assert opened.study.study_name == "study-2"


def test_an_interrupted_study_is_continued(tmp_path):
    path, server = write_study(tmp_path), PlayedServer(by_epochs(5))
    calls = []

    def interrupted():
        calls.append(1)
        return len(calls) > 8

    opened, complete = play(path, server, cores=2, interrupted=interrupted)
    assert not complete
    assert states(opened)["RUNNING"] == 2
    before = len(server.log)
    opened, complete = play(path, server, cores=2, continued=True)
    assert complete
    assert states(opened) == {"COMPLETE": 6}
    assert {server.log[before][0], server.log[before + 1][0]} == {
        trial for trial, code in server.ends if code == 143
    }


def test_the_mean_of_repeats_is_the_value(tmp_path):
    def script(played):
        yield 1, value_of(played) + value_of(played, "--seed")
        return 0

    text = 'command = "train.py --x {x} --seed {seed}"'
    path = write_study(tmp_path, repeats=3, trials=2, seed=10)
    path.write_text(path.read_text().replace(path.read_text().split("\n")[4], text))
    lines = [line for line in path.read_text().splitlines() if not line.startswith("command")]
    path.write_text("\n".join([lines[0], text, *lines[1:]]))
    opened, _ = play(path, PlayedServer(script), cores=1)
    for one in opened.study.trials:
        assert one.value == pytest.approx(one.params["x"] + 11)


def test_only_the_best_trials_are_repeated(tmp_path):
    def script(played):
        yield 1, value_of(played)
        return 0

    keys = {"command": "train.py --x {x} --seed {seed}", "trials": 20, "repeats": 3}
    server = PlayedServer(script)
    opened, _ = play(write_study(tmp_path, repeat="best", **keys), server, cores=1)
    runs = Counter(trial for trial, *_ in server.log)
    seen = []
    for one in opened.study.trials:
        rank = sum(value > one.value for value in seen)
        assert runs[one.number] == (3 if rank < max((len(seen) + 1) / 4, 1) else 1)
        seen.append(one.value)
    assert 3 in runs.values()
    assert 1 in runs.values()


def test_a_budget_of_epochs_ends_the_study(tmp_path):
    path = write_study(tmp_path, epochs=5, total_epochs=12)
    opened, complete = play(path, PlayedServer(by_epochs(5)), cores=1)
    assert complete
    assert states(opened) == {"COMPLETE": 3}


def test_the_best_report_can_be_the_value(tmp_path):
    def script(played):
        yield from enumerate((1.0, 3.0, 2.0), 1)
        return 0

    opened, _ = play(write_study(tmp_path, value="best"), PlayedServer(script))
    assert {one.value for one in opened.study.trials} == {3.0}


def test_a_grid_ends_after_its_points(tmp_path):
    parameters = "[parameters.x]\nchoices = [1.0, 2.0, 3.0, 4.0]\n"
    path = write_study(tmp_path, parameters=parameters, search="grid", trials=20)
    opened, complete = play(path, PlayedServer(once))
    assert complete
    assert sorted(one.params["x"] for one in opened.study.trials) == [1, 2, 3, 4]


def test_a_lost_node_gets_no_further_trial(tmp_path):
    def script(played):
        if played.start.hosts.startswith("bad"):
            with open(played.start.files.output, "a") as file:
                file.write("paceline: rank 0 on bad was lost with its node: it did not answer\n")
            return 137
        yield from once(played)
        return 0

    server, heard = PlayedServer(script), Heard()
    nodes = [Node("bad", 1), Node("good", 1)]
    opened, complete = play(write_study(tmp_path), server, heard=heard, nodes=nodes)
    assert complete
    assert states(opened) == {"COMPLETE": 6}
    assert heard.messages[0] == "bad is lost, and no further trial starts there"
    assert sum(hosts.startswith("bad") for hosts in server.hosts) == 1


def test_a_trial_of_many_ranks_gets_whole_nodes(tmp_path):
    server = PlayedServer(once)
    nodes = [Node("a", 2), Node("b", 2), Node("c", 2)]
    play(write_study(tmp_path, ranks=4), server, nodes=nodes)
    assert set(server.hosts) == {"a:2,b:2"}
    with pytest.raises(ValueError, match="room for 6 ranks on 6 cores"):
        play(write_study(tmp_path, ranks=7), server, continued=True, nodes=nodes)
