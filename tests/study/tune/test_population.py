"""Population-based training: generations, lineage, kills, failures, the options in study files."""

import errno
import os
import random
import shutil
import signal
import tomllib
from pathlib import Path

import msgspec
import pytest
import ranks
from played_trials import (
    Heard,
    KilledError,
    PlayedServer,
    Writes,
    by_epochs,
    has_study,
    killed_at,
    play,
    value_of,
    write_study,
)
from test_tune_command import tune

from paceline.launch.monitor.interrupt import TerminatedError
from paceline.report.tuning.tuning_files import best_text, tuning_json
from paceline.study.tune import trial_server
from paceline.study.tune.parameters import Parameter
from paceline.study.tune.study_view import read_view
from paceline.study.tune.trial_folder import TrialFolder
from paceline.study.tune.trial_outcome import StudyStoppedError
from paceline.study.tune.trial_server import TrialStart

STUDY = """
[study]
command = "train.py --x {x} --epochs {epochs} --checkpoint {checkpoint}"
metric = "score"
goal = "max"
trials = 12
epochs = 6
search = "random"
pruner = "population"
"""
PARAMETERS = (
    "[parameters.x]\nlow = 0.1\nhigh = 3.0\n[pruner]\nsize = 4\nevery = 2\nresample = 0.0\n"
)
STRIDE = 5  # of the writes of a study one in STRIDE kills the runner


def study_in(folder, parameters=PARAMETERS, **keys):
    folder.mkdir(exist_ok=True)
    return write_study(folder, STUDY, parameters, **keys)


def trials_of(opened):
    return opened.study.get_trials(deepcopy=False)


def outline(opened):
    return [
        (one.number, one.state.name, one.params, one.values, one.intermediate_values)
        for one in trials_of(opened)
    ]


def test_the_worst_members_continue_from_the_checkpoints_of_the_best(tmp_path):
    server = PlayedServer(by_epochs(6))
    opened, complete = play(study_in(tmp_path), server, cores=2)
    assert complete
    rows = read_view(opened).rows
    assert [row.state for row in rows] == ["complete"] * 12
    assert [row.generation for row in rows] == [0] * 4 + [1] * 4 + [2] * 4
    for row in rows:
        assert sorted(row.intermediate) == [row.first_step + 1, row.first_step + 2]
        assert row.steps == 2
    for generation in (1, 2):
        before = rows[4 * generation - 4 : 4 * generation]
        best, *_, worst = sorted(before, key=lambda row: -row.values[0])
        for member, row in enumerate(rows[4 * generation : 4 * generation + 4]):
            if before[member] is worst:
                assert row.parent == best.number
                x = best.parameters["x"]
                assert row.parameters["x"] in (0.8 * x, min(1.25 * x, 3.0))
            else:
                assert row.parent == before[member].number
                assert row.parameters == before[member].parameters
    text = best_text(read_view(opened))
    schedule = tomllib.loads(text)["schedule"]
    assert [(one["first"], one["last"]) for one in schedule] == [(1, 2), (3, 4), (5, 6)]
    assert schedule[-1]["trial"] == read_view(opened).best[0]
    assert None in [trial["parent"] for trial in tuning_json(read_view(opened))["trials"]]


def test_no_kill_changes_a_population(tmp_path, monkeypatch):
    writes = Writes(monkeypatch)
    opened, _ = play(study_in(tmp_path / "whole"), PlayedServer(by_epochs(6)), cores=1)
    expected, total = outline(opened), writes.count
    for kill_at in range(1, total + 1, STRIDE):
        path, server = study_in(tmp_path / str(kill_at)), PlayedServer(by_epochs(6))
        with killed_at(writes, kill_at):
            play(path, server, cores=1)
        server.running.clear()
        opened, complete = play(path, server, cores=1, continued=has_study(path))
        assert complete
        assert outline(opened) == expected, kill_at


def test_a_member_whose_checkpoint_was_not_written_is_run_again(tmp_path):
    """The runner is killed when it has stored the value of the last epoch of a generation."""

    class Killed(PlayedServer):
        def ended(self, timeout_s):
            found = super().ended(timeout_s)
            for played in self.running.values():
                if played.waits_at == 2:
                    played.checkpoint.joinpath("epoch").write_text("1")
                    self.paused = played.trial
            if hasattr(self, "paused"):
                super().ended(timeout_s)
                raise KilledError
            return found

        def _advance(self, played):
            return None if played.waits_at == 2 else super()._advance(played)

    path = study_in(tmp_path)
    with pytest.raises(KilledError):
        play(path, Killed(by_epochs(6)), cores=1)
    server = PlayedServer(by_epochs(6))
    opened, complete = play(path, server, cores=1, continued=True)
    assert complete
    assert server.log[0][0] == 0
    assert all(len(one.intermediate_values) == 2 for one in trials_of(opened))


def test_an_interrupted_population_is_continued(tmp_path):
    opened, _ = play(study_in(tmp_path / "whole"), PlayedServer(by_epochs(6)), cores=2)
    expected = sorted(outline(opened), key=lambda one: one[0])
    for most in (3, 8, 14, 19):
        path, calls = study_in(tmp_path / str(most)), []

        def interrupted(calls=calls, most=most):
            calls.append(1)
            return len(calls) > most

        play(path, PlayedServer(by_epochs(6)), cores=2, interrupted=interrupted)
        opened, complete = play(path, PlayedServer(by_epochs(6)), cores=2, continued=True)
        assert complete
        assert outline(opened) == expected, most


def test_a_failed_member_is_replaced(tmp_path):
    def script(played):
        if played.trial == 2:
            yield 1, float("nan")
        yield from by_epochs(6)(played)
        return 0

    opened, complete = play(study_in(tmp_path), PlayedServer(script), cores=1)
    assert complete
    rows = read_view(opened).rows
    assert rows[2].state == "failed"
    best = max((row for row in rows[:4] if row.values), key=lambda row: row.values[0])
    assert [row.parent for row in rows[4:8]] == [0, 1, best.number, 3]
    assert [row.state for row in rows[3:]] == ["complete"] * 9


def test_a_population_that_has_failed_ends_the_study(tmp_path):
    def script(played):
        if played.trial >= 4:
            return 1
        yield from by_epochs(6)(played)
        return 0

    with pytest.raises(ValueError, match="all 4 trials of generation 1 have failed"):
        play(study_in(tmp_path), PlayedServer(script), cores=1)


def test_a_member_needs_a_checkpoint(tmp_path):
    def script(played):
        for epoch in range(1, 7):
            yield epoch, value_of(played)
        return 0

    with pytest.raises(StudyStoppedError, match="no checkpoint in"):
        play(study_in(tmp_path), PlayedServer(script), cores=1)


@pytest.mark.parametrize("killed", [False, True])
def test_a_member_must_report_at_the_end_of_its_generation(tmp_path, killed):
    """Also if it has passed that step while no runner ran."""

    def script(played):
        for epoch in (3, 6):
            played.checkpoint.mkdir(exist_ok=True)
            (played.checkpoint / "epoch").write_text(str(epoch))
            yield epoch, value_of(played)
        return 0

    class Killed(PlayedServer):
        def ended(self, timeout_s):
            super().ended(timeout_s)
            raise KilledError

    path = study_in(tmp_path)
    if killed:
        with pytest.raises(KilledError):
            play(path, Killed(script), cores=1)
    said = r"step 3, and not step 2, the end of its generation. HINT: .*every = 3"
    with pytest.raises(StudyStoppedError, match=said):
        play(path, PlayedServer(script), cores=1, continued=killed)


class LateServer(PlayedServer):
    """Has trials train on at the end of a generation, as after a time without an answer."""

    def __init__(self, script, late):
        super().__init__(script)
        self.late, self.is_killed = late, False

    def _advance(self, played):
        if self.late and played.waits_at == 2:
            self.late -= 1
            played.request = msgspec.structs.replace(played.request, steps=[])
            played.waits_at = None
        return super()._advance(played)

    def ended(self, timeout_s):
        found = super().ended(timeout_s)
        if self.is_killed and found:
            raise KilledError
        return found


@pytest.mark.parametrize("killed", [False, True])
def test_a_member_that_trained_on_is_run_again(tmp_path, killed):
    opened, _ = play(study_in(tmp_path / "whole"), PlayedServer(by_epochs(6)), cores=1)
    expected = outline(opened)
    path, server, heard = study_in(tmp_path / "late"), LateServer(by_epochs(6), 1), Heard()
    if killed:
        server.is_killed = True
        with pytest.raises(KilledError):
            play(path, server, cores=1)
        assert server.ends == [(0, 0)]
        server = PlayedServer(by_epochs(6))
    opened, complete = play(path, server, cores=1, heard=heard, continued=killed)
    assert complete
    assert outline(opened) == expected
    assert any("trial 0: it trained on" in one for one in heard.messages)


def test_a_member_that_never_pauses_has_failed(tmp_path):
    with pytest.raises(StudyStoppedError, match=r"trained on after the step .* HINT"):
        play(study_in(tmp_path), LateServer(by_epochs(6), 99), cores=1)


def test_other_trials_go_on_while_a_checkpoint_is_copied(tmp_path):
    class Copies(PlayedServer):
        def start(self, start):
            super().start(start)
            played = self.running[start.number]
            played.copies_until = self.polls + 40 * (played.trial % 2)

        def _advance(self, played):
            copying = [one.trial for one in self.running.values() if is_copying(one)]
            code = super()._advance(played)
            if code is not None and copying and played.trial not in copying:
                ended.append(played.trial)
            return code

    def is_copying(played):
        return played.start.parent and not played.checkpoint.exists()

    ended: list[int] = []
    opened, _ = play(study_in(tmp_path / "quick"), PlayedServer(by_epochs(6)), cores=4)
    server = Copies(by_epochs(6))
    found, complete = play(study_in(tmp_path / "slow"), server, cores=2)
    assert complete
    assert outline(found) == outline(opened)
    assert server.most == 2
    assert ended


def test_a_copy_that_is_ended_leaves_nothing(tmp_path, monkeypatch):
    def end(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("SIGTERM was ignored")

    source, target = TrialFolder(tmp_path / "0"), TrialFolder(tmp_path / "1")
    source.checkpoint.mkdir(parents=True)
    (source.checkpoint / "epoch").write_text("1")
    attempt = target.begin_attempt()
    start = TrialStart(
        1, str(target.path), attempt.number, [], 1, (0, 1, 0, 0), "", parent=str(source.path)
    )
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with monkeypatch.context() as patched:
            patched.setattr(shutil, "copytree", end)
            with pytest.raises(TerminatedError):
                trial_server.take_parents_checkpoint(start)
        files = {one.name for one in target.path.iterdir()}
        assert files == {attempt.lock.name, ".paceline"}
        for left in (".checkpoint-1", "gone-.checkpoint-2"):  # of processes that were killed
            (target.path / left / "checkpoint").mkdir(parents=True)
        (target.path / "model.checkpoint-3").touch()  # of the script
        trial_server.take_parents_checkpoint(start)
        kept = {"checkpoint", "model.checkpoint-3"}
        assert {one.name for one in target.path.iterdir()} == {*files, *kept}
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)


@pytest.mark.parametrize("where", ["copy2", "makedirs"])
def test_a_full_disk_is_named_when_a_checkpoint_is_copied(tmp_path, monkeypatch, where):
    def full(path, *args, **options):
        if where == "makedirs" and Path(path).name != "part":
            return made(path, *args, **options)
        raise OSError(errno.ENOSPC, "No space left on device", "epoch")

    made, source, target = os.makedirs, TrialFolder(tmp_path / "0"), TrialFolder(tmp_path / "1")
    (source.checkpoint / "part").mkdir(parents=True)
    (source.checkpoint / "epoch").write_text("1")
    target.begin_attempt()
    with monkeypatch.context() as patched:
        if where == "copy2":
            patched.setattr(shutil.copytree, "__defaults__", (False, None, full, False, False))
        else:
            patched.setattr(os, "makedirs", full)
        with pytest.raises(OSError, match="No space left") as found:
            target.take_checkpoint(source)
    assert found.value.errno == errno.ENOSPC
    assert not target.has_checkpoint
    target.take_checkpoint(source)
    assert (target.checkpoint / "epoch").read_text() == "1"


def test_checkpoints_that_no_trial_needs_are_removed(tmp_path):
    keys = {"epochs": 12, "trials": 24}
    opened, _ = play(study_in(tmp_path, **keys), PlayedServer(by_epochs(12)), cores=1)
    rows = read_view(opened).rows
    kept = {row.number for row in rows if opened.trial(row.number).has_checkpoint}
    assert kept == set(range(16, 24))


def test_a_fork_begins_a_new_population(tmp_path):
    path = study_in(tmp_path)
    play(path, PlayedServer(by_epochs(6)), cores=2)
    path.write_text(path.read_text().replace("high = 3.0", "high = 4.0"))
    opened, complete = play(path, PlayedServer(by_epochs(6)), cores=2, forked=True)
    assert complete
    assert len(trials_of(opened)) == 12


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("size = 4", "size = 1", "pruner.size must be an integer of at least 2"),
        ("size = 4", "size = 5", "5 members and 3 generations .* HINT: trials = 15"),
        ("every = 2", "every = 6", "leaves one generation"),
        ("every = 2", "evry = 2", "HINT: every"),
        ("resample = 0.0", "resample = 2.0", "between 0 and 1"),
        ("resample = 0.0", "factors = [0]", "numbers above 0"),
        ("resample = 0.0", "perturb = ['y']", "names no parameter: y. HINT: x"),
        (" --checkpoint {checkpoint}", "", "has no {checkpoint}"),
        (" --epochs {epochs}", "", "needs {epochs} in study.command"),
        ("epochs = 6", "", "HINT: add epochs"),
    ],
)
def test_options_are_checked(tmp_path, old, new, said):
    path = study_in(tmp_path)
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(ValueError, match=said):
        play(path, PlayedServer(by_epochs(6)))


def test_a_perturbed_value_stays_in_its_range():
    draw = random.Random(0)
    kinds = [
        Parameter("a", 1e-5, 1e-1, log=True),
        Parameter("b", 1, 9, is_int=True),
        Parameter("c", 0.0, 1.0, step=0.25),
        Parameter("d", -1.0, 1.0),
        Parameter("e", choices=("x", "y", "z")),
    ]
    for parameter in kinds:
        value = parameter.at(draw.random())
        for _ in range(100):
            factor = draw.choice([0.8, 1.25])
            other = parameter.near(value, factor)
            assert parameter.accepts(other)
            inside = not parameter.choices and parameter.low < other < parameter.high
            assert not inside or (other > value) == (factor > 1)
            value = other
        assert parameter.accepts(parameter.at(0.0))
        assert parameter.accepts(parameter.at(1.0))
    assert Parameter("n", 1, 9, is_int=True).near(2, 0.9) == 1
    assert Parameter("e", choices=(1, 2, 3)).near(2, 1.25) == 3


TRAIN = """
    import argparse, json
    from pathlib import Path
    import torch
    import paceline

    parser = argparse.ArgumentParser()
    for name in ("--lr", "--checkpoint", "--folder", "--epochs"):
        parser.add_argument(name)
    args = parser.parse_args()
    world = paceline.init(progress=False, record=False)
    torch.manual_seed(0)
    inputs = torch.arange(16.0).reshape(16, 1) / 16
    data = torch.utils.data.TensorDataset(inputs, 3 * inputs)
    loader = world.shard(torch.utils.data.DataLoader(data, batch_size=16), global_batch=16)
    model = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=float(args.lr), momentum=0.5)
    model, optimizer = world.distribute(model, optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    world.keep(scheduler=scheduler)
    for epoch in world.epochs(int(args.epochs), checkpoint=args.checkpoint):
        total = world.meter()
        for x, y in world.batches(loader):
            loss = ((model(x.double()) - y.double()) ** 2).mean()
            world.backward(loss)
            world.step(optimizer)
            total.add(loss=loss * len(x), count=len(x))
        scheduler.step()
        weights = [p.item() for p in model.parameters()]
        with (Path(args.folder) / f"rank-{world.rank}").open("a") as file:
            file.write(json.dumps([epoch, scheduler.get_last_lr()[0], weights]) + "\\n")
        world.log(loss=total.ratio("loss", "count"))
"""
LR = """
[parameters.lr]
low = 0.01
high = 1.0
log = true
[pruner]
size = 2
every = 1
share = 0.5
resample = 0.0
"""


def expected_weights(lineage):
    """Return the weights after each epoch of plain PyTorch, with the rates of a lineage."""
    import torch

    torch.manual_seed(0)
    x = torch.arange(16.0).reshape(16, 1).double() / 16
    model = torch.nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    for epoch, row in enumerate(lineage):
        optimizer.param_groups[0]["lr"] = row["parameters"]["lr"] * 0.9**epoch
        optimizer.zero_grad()
        ((model(x) - 3 * x) ** 2).mean().backward()
        optimizer.step()
    return [p.item() for p in model.parameters()]


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 2])
def test_a_perturbed_learning_rate_is_the_one_that_trains(tmp_path, count):
    import json

    ranks.write(tmp_path, TRAIN, "train.py")
    command = "train.py --lr {lr} --epochs {epochs} --checkpoint {checkpoint} --folder {folder}"
    keys = {"command": command, "metric": "loss", "goal": "min", "trials": 6, "epochs": 3}
    write_study(tmp_path, STUDY, LR, ranks=count, **keys)
    trials = json.loads(tune(tmp_path, "--json").stdout)["trials"]
    assert [one["state"] for one in trials] == ["complete"] * 6
    changed = 0
    for one in trials:
        lineage = [one]
        while lineage[0]["parent"] is not None:
            lineage.insert(0, trials[lineage[0]["parent"]])
        folder = tmp_path / f"study.trials/{one['number']:05}"
        for rank in range(count):
            (line,) = (folder / f"rank-{rank}").read_text().splitlines()
            epoch, rate, weights = json.loads(line)
            assert epoch == one["generation"] == len(lineage) - 1
            assert rate == pytest.approx(one["parameters"]["lr"] * 0.9 ** (epoch + 1), rel=1e-12)
            assert weights == pytest.approx(expected_weights(lineage), rel=1e-9)
        if len(lineage) > 1 and lineage[-2]["parameters"] != one["parameters"]:
            changed += 1
            said = (folder / "attempt-1.out").read_text()
            assert (
                "SGD is restored from a checkpoint, and keeps the options of this trial: lr" in said
            )
    assert changed == 2
