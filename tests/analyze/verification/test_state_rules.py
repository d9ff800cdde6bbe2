"""Rules on random numbers, schedules, outputs, states and checkpoints."""

import numpy as np
import pytest
import torch

from paceline.analyze.verification.find import MISTAKES, judge, without_consequences
from paceline.analyze.verification.mistakes import Finding
from paceline.analyze.verification.runs_facts import ResumeError, VerifyRuns
from paceline.observe.facts.events import (
    CollectiveFacts,
    DrawFacts,
    FileFacts,
    OutputFacts,
    RestoreFacts,
)
from paceline.observe.facts.models import ParameterFacts, StateFacts
from paceline.observe.facts.samples import BatchFacts, LoaderFacts, PassFacts, Phase
from paceline.observe.facts.steps import ScheduleFacts
from paceline.observe.observation import SketchTable
from trainings import LOADER, LOOP, OPTIMIZER, STEP, Training, find, shuffled, train, verified


def ids(found, questions=False):
    return [one.mistake.id for one in found if one.is_question is questions]


def drawn(state, place="forward", workers=(None,), generator="torch"):
    """Return runs that draw; state: of (rank, worker, pass, number)."""
    ranks = train(Training())
    for facts in ranks:
        facts.draws = [
            DrawFacts(place, generator, w, 0, p, n, state(facts.rank, w, p, n), True, "train.py:40")
            for p in range(2)
            for n in range(3)
            for w in workers
        ]
    return VerifyRuns(ranks)


@pytest.mark.parametrize("place", ["forward", "fetch", "loop"])
def test_same_random_numbers_of_ranks_are_named(place):
    right = drawn(lambda rank, worker, p, n: 1000 * rank + 10 * p + n, place)
    assert ids(find(right)) == []
    (one,) = [x for x in find(drawn(lambda r, w, p, n: 10 * p + n, place)) if not x.is_question]
    assert one.mistake.id == "same-random-numbers"
    assert one.lines[0] == "train.py:40"
    assert "Ranks 0 and 1 draw the same random numbers of torch" in one.text


def test_equal_first_state_alone_is_no_mistake():
    """Ranks with one seed whose draws go apart after the first forward."""
    runs = drawn(lambda rank, worker, p, n: 1000 * rank * (p + n > 0) + 10 * p + n)
    assert ids(find(runs)) == []


def test_same_random_numbers_of_workers_are_named():
    different = drawn(lambda r, w, p, n: 1000 * r + 100 * w + 10 * p + n, "fetch", (0, 1), "numpy")
    assert ids(find(different)) == []
    same = drawn(lambda r, w, p, n: 1000 * r + 10 * p + n, "fetch", (0, 1), "numpy")
    found = find(same)
    assert ids(found) == ["same-random-numbers"]
    assert "workers 0 and 1" in found[0].text
    each_epoch = drawn(lambda r, w, p, n: 1000 * r + 100 * w + n, "fetch", (0, 1), "numpy")
    assert "epochs 1 and 2" in find(each_epoch)[0].text


def test_different_learning_rates_are_one_mistake():
    runs = verified(Training(rate=lambda rank, size, step: 0.1 * (1 + rank * (step > 1))))
    (one,) = [x for x in find(runs) if not x.is_question]
    assert one.mistake.id == "learning-rates-differ"
    assert one.step == 3
    assert "0.1 on rank 0 and 0.2 on rank 1" in one.text


@pytest.mark.parametrize(
    ("power", "wanted"), [(0.5, []), (1, []), (2, ["learning-rate-scaled-twice"])]
)
def test_scaled_learning_rates(power, wanted):
    asked = Training(4, samples=48, rate=lambda rank, size, step: 0.01 * size**power)
    runs = verified(asked)
    runs.alone = train(Training(1, samples=48, rate=asked.rate))[0]
    assert ids(find(runs)) == []  # the user's choice: a question with both values
    assert ids(find(runs), questions=True) == wanted


def test_unscaled_learning_rate_is_a_question():
    runs = verified(Training())
    runs.alone = train(Training(1))[0]
    (one,) = find(runs)
    assert one.is_question
    assert one.mistake.id == "learning-rate-not-scaled"
    assert one.text == (
        "The learning rate is 0.1 on one rank and on 2, with 2 times the global batch: "
        "is 0.2 wanted?"
    )


@pytest.mark.parametrize(
    ("power", "class_name", "wanted"),
    [
        (0, "OneCycleLR", ["learning-rate-not-scaled"]),
        (0, "LambdaLR", []),  # may scale the rate later
        (1, "OneCycleLR", []),
        (2, "OneCycleLR", ["learning-rate-scaled-twice"]),
    ],
)
def test_scale_of_rates_whose_schedule_is_faster_on_more_ranks(power, class_name, wanted):
    def rate(rank, size, step):
        return 0.01 * size**power * (1 + step * size / 100)

    runs = verified(Training(4, samples=48, rate=rate), with_replay=False)
    runs.alone = train(Training(1, samples=48, rate=rate))[0]
    for facts in (*runs.ranks, runs.alone):
        facts.schedules = [ScheduleFacts(class_name, "train.py:15", 0, {}, ["train.py:25"], [])]
    assert [one.mistake.id for one in find(runs)] == wanted


def test_rate_of_an_optimizer_that_a_schedule_replaces_does_not_count():
    runs = verified(Training(rate=lambda rank, size, step: 0.01 * size), with_replay=False)
    runs.alone = train(Training(1, rate=lambda rank, size, step: 0.01))[0]
    for facts in (*runs.ranks, runs.alone):
        facts.schedules = [ScheduleFacts("OneCycleLR", "train.py:15", 0, {}, peaks=[0.02])]
    (one,) = find(runs)
    assert one.mistake.id == "learning-rate-not-scaled"
    assert one.lines[0] == "train.py:15"
    assert one.text.startswith("The learning rate is 0.02 on one rank and on 2, with 2")


def statistics(*means):
    """Return what is found if ranks evaluate an averaged model with these running means."""
    runs = verified(Training(), with_replay=False)
    for facts, value in zip(runs.ranks, means, strict=True):
        table = SketchTable()
        row = len(facts.sketches) + table.add(torch.full((4,), value))
        facts.sketches = np.concatenate([facts.sketches, table.array()])
        state = StateFacts(
            "statistics", "Average", "train.py:50", 4, rows={"1/norm.running_mean": row}
        )
        state.changed_by = ["train.py:48"]
        facts.states.append(state)
    return find(runs)


def test_statistics_of_an_averaged_model_that_differ_are_named():
    (one,) = statistics(1.0, 2.0)
    assert one.mistake.id == "batch-norm-differs"
    assert one.lines == ["train.py:48", "train.py:50"]
    assert "Average differs between ranks 0 and 1 after 4 steps" in one.text
    assert "norm.running_mean" in one.text
    assert statistics(1.0, 1.0) == []


def test_buffers_of_a_loss_that_differ_are_asked():
    runs = verified(Training(), with_replay=False)
    for facts in runs.ranks:
        row = len(facts.sketches)
        facts.sketches = np.concatenate([facts.sketches, facts.sketches[:1] * (1 + facts.rank)])
        state = StateFacts("buffer", "loss_of.center", "train.py:60", 4, rows={"center": row})
        state.changed_by = ["train.py:33"]
        facts.states.append(state)
    (one,) = find(runs)
    assert (one.mistake.id, one.is_question) == ("state-differs", True)
    assert one.lines == ["train.py:33", "train.py:60"]
    assert "The buffer loss_of.center differs between ranks 0 and 1 after 4 steps" in one.text


def scheduled(length, single_length, per_step=True, class_name="CosineAnnealingLR"):
    """Return runs with a schedule; an epoch has 8 steps on 2 ranks, and 16 on one."""
    runs = VerifyRuns(
        train(Training(samples=62, epochs=3)), alone=train(Training(1, samples=62, epochs=3))[0]
    )
    for facts, of in (*[(one, length) for one in runs.ranks], (runs.alone, single_length)):
        count = len(facts.steps)
        steps = list(range(1, count)) if per_step else [count // 3, 2 * count // 3, count]
        facts.schedules = [
            ScheduleFacts(class_name, "train.py:15", 0, {"T_max": [of]}, ["train.py:25"], steps)
        ]
    return runs


def test_schedule_lengths():
    def named(*lengths, **kind):
        found = find(scheduled(*lengths, **kind))
        return [one for one in found if one.mistake.id == "schedule-counts-other-steps"]

    assert named(24, 48) == []  # 3 epochs of each
    assert named(3, 3, per_step=False) == []
    (one,) = named(48, 48)
    assert one.is_question  # may be a training of 48 steps
    assert one.lines[0] == "train.py:15"
    assert "T_max = 48 on 2 ranks, which is 6 epochs of 8 steps" in one.text
    assert "48 on one, which is 3 epochs of 16 steps" in one.text


def test_lengths_of_several_groups_of_parameters_are_compared():
    for lengths, wanted in (([48, 48], 1), ([48, 24], 1), ([24, 48], 1), ([24, 24], 0)):
        runs = scheduled(24, 48)
        runs.ranks[0].schedules[0].lengths = {"total": lengths}
        runs.alone.schedules[0].lengths = {"total": [48, 48]}
        assert ids(find(runs), True).count("schedule-counts-other-steps") == wanted


def test_schedule_of_another_wrapper():
    """A library that advances the schedule once for each rank."""
    right, short = scheduled(48, 48), scheduled(24, 48)
    for runs in (right, short):
        for facts in runs.ranks:
            facts.schedules[0].steps = [x for x in facts.schedules[0].steps for _ in range(2)]
    assert "schedule-counts-other-steps" not in ids(find(right))
    (one,) = [x for x in find(short) if x.mistake.id == "schedule-counts-other-steps"]
    assert "24 on 2 ranks, which is 1.5 epochs" in one.text


def test_states_that_differ_are_named():
    def with_scale(scales):
        runs = VerifyRuns(train(Training()))
        for facts in runs.ranks:
            values = {"scale": scales[facts.rank]}
            facts.states = [StateFacts("scaler", "GradScaler", "train.py:16", 3, values)]
        return runs

    assert ids(find(with_scale([1024.0, 1024.0]))) == []
    found = find(with_scale([1024.0, 512.0]))
    assert ids(found) == ["state-differs"]
    assert "scale is 1024 and 512" in found[0].text


def test_average_that_one_rank_updates_is_named_with_the_line():
    runs = VerifyRuns(train(Training()))
    for facts in runs.ranks:
        row = next(iter(facts.steps[2 if facts.rank else 0].parameters.values()))
        state = StateFacts("average", "ema", LOOP, 3, rows={"0/first.weight": row})
        facts.states = [state, StateFacts("average", "ema", LOOP, 6, changed_by=["train.py:28"])]
    (one,) = [x for x in find(runs) if not x.is_question]
    assert one.mistake.id == "state-differs"
    assert one.lines[0] == "train.py:28"
    for facts in runs.ranks:  # each rank holds a part of the copy
        facts.models[0].is_sharded = True
    assert ids(find(runs)) == []


def test_gradients_with_the_names_of_parameters_are_no_average():
    """A dictionary of a script, before the ranks exchange what it holds."""
    runs = VerifyRuns(train(Training()))
    for facts in runs.ranks:
        rows = facts.steps[2].backwards[0].gradients
        facts.states = [StateFacts("average", "grads", LOOP, 3, rows=rows)]
    assert ids(find(runs)) == []


def test_running_statistics():
    def with_statistics(broadcasts, synchronized=False):
        runs = VerifyRuns(train(Training()))
        for facts in runs.ranks:
            facts.models[0].broadcasts_buffers = broadcasts
            for step in facts.steps:
                rows = list(step.parameters.values())
                step.buffers = {"0/bn.running_mean": rows[0]}
                facts.sketches[rows[0]] *= 1 if synchronized else 1 + facts.rank
                step.parameters = {}
        return runs

    assert ids(find(with_statistics(True))) == []
    assert ids(find(with_statistics(False, synchronized=True))) == []
    found = find(with_statistics(False))
    assert ids(found) == ["batch-norm-differs"]
    assert found[0].layer == "bn"
    for nbytes in (8, 64):  # of a metric, and of all 16 statistics
        runs = with_statistics(False)
        norm = ParameterFacts("bn.weight", [16], "float32", True, 16)
        for facts in runs.ranks:
            facts.models[0].parameters.append(norm)
        one = CollectiveFacts("allreduce", nbytes, Phase.EVALUATION, 4, False, "train.py:38")
        runs.ranks[0].collectives.append(one)
        assert [x.is_question for x in find(runs)] == [nbytes == 64]


def printed(text, collective=None, on=(0,), phase=Phase.EVALUATION):
    """Return ranks that validate a part each, and print; collective: between both."""
    ranks = train(Training(epochs=1))
    for facts in ranks:
        plan = [list(range(facts.rank, 20, 2))]
        facts.loaders.append(
            LoaderFacts(
                *(1, "train.py:30", "TensorDataset", 20, 88, False, 10, "DistributedSampler"),
                *(True, False, 0),
                passes=[PassFacts(0, Phase.EVALUATION, "train.py:33", None, 1, plan, True, 4)],
            )
        )
        batch = len(facts.batches)
        contents = [[500 + at for at in plan[0]]]
        facts.batches.append(BatchFacts(1, 0, 0, 10, plan[0], contents, 4))
        if collective:
            facts.collectives.append(CollectiveFacts(collective, 8, phase, 4, False, "x:1"))
        if facts.rank in on:
            count = len(facts.collectives)
            facts.outputs.append(OutputFacts(text, "train.py:36", phase, 4, count, batch + 1))
    return VerifyRuns(ranks)


def test_metric_of_one_part():
    found = find(printed("epoch 0 accuracy 0.8125"))
    assert ids(found) == ["metric-of-one-rank"]
    assert found[0].lines[0] == "train.py:36"
    assert "10 of 20 samples" in found[0].text
    assert ids(find(printed("epoch 0 accuracy 0.8125", "allreduce"))) == []
    assert ids(find(printed("epoch 0 accuracy 0.8125", "allgather"))) == []
    assert ids(find(printed("epoch 0 took 1.25 s"))) == []
    assert ids(find(printed("rank 0: accuracy 0.8125", on=(0, 1)))) == []
    assert ids(find(printed("accuracy 0.8125", on=(0, 1)))) == []  # each rank its own


def test_training_loss_of_rank_0_is_a_question():
    runs = VerifyRuns(train(Training()))
    losses = [facts.steps[2].backwards[0].root for facts in runs.ranks]
    own, mean = losses[0], sum(losses) / 2

    def with_text(text):
        runs.ranks[0].outputs = [OutputFacts(text, "train.py:26", Phase.TRAINING, 3, 0, 3)]
        return ids(find(runs), questions=True)

    assert with_text(f"loss {own:.5f}") == ["metric-of-one-rank"]
    assert with_text(f"loss {mean:.5f}") == []
    assert with_text("loss is fine after 3 steps") == []


def test_numbers_that_are_rank_0s_losses_need_no_words():
    runs = VerifyRuns(train(Training(epochs=3)))
    facts = runs.ranks[0]
    per_epoch = len(facts.steps) // 3

    def with_epochs(count, ranks):
        facts.outputs = []
        for epoch in range(count):
            steps = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
            losses = [s.backwards[0].root for one in ranks for s in one.steps[steps]]
            text = f"| {epoch} | {sum(losses) / len(losses):.5f} | 12.5 s |"
            at = (epoch + 1) * per_epoch
            facts.outputs.append(OutputFacts(text, "train.py:26", Phase.TRAINING, at, 0, at))
        return [one for one in find(runs) if one.mistake.id == "metric-of-one-rank"]

    (one,) = with_epochs(3, runs.ranks[:1])
    assert one.is_wrong  # one process prints another value
    accepted = judge(runs, ["own-loss"])[0]
    (one,) = [each for each in accepted if each.mistake.id == "metric-of-one-rank"]
    assert (one.is_wrong, one.is_accepted) == (False, True)
    assert "the mean over its own batches of an epoch" in one.text
    assert with_epochs(3, runs.ranks) == []
    assert with_epochs(1, runs.ranks[:1]) == []  # may be a coincidence


def test_running_mean_of_rank_0s_losses_is_a_question():
    """A log line during the epoch, as a right script has it."""
    runs = VerifyRuns(train(Training()))
    facts = runs.ranks[0]
    losses = [step.backwards[0].root for step in facts.steps[:4]]
    for at in (2, 3, 4):
        text = f"step {at} loss {losses[at - 1]:.5f} ({sum(losses[:at]) / at:.5f})"
        facts.outputs.append(OutputFacts(text, "train.py:26", Phase.TRAINING, at, 0, at))
    assert ids(find(runs)) == []
    assert ids(find(runs), questions=True) == ["metric-of-one-rank"]


def saved(path, rank=0, contains=("model", "optimizer"), step=4, **more):
    return FileFacts(path, True, "train.py:50", step, ["model", "epoch"], list(contains), **more)


def test_checkpoint_of_several_ranks():
    runs = VerifyRuns(train(Training()))
    for facts in runs.ranks:
        facts.files = [saved(f"model-{facts.rank}.pt")]
    assert ids(find(runs)) == []
    for facts in runs.ranks:
        facts.files = [saved("model.pt", is_distributed=True)]
    assert ids(find(runs)) == []
    for facts in runs.ranks:
        facts.files = [saved("model.pt")]
    assert ids(find(runs)) == ["checkpoint-written-by-all"]


def resumed(**order):
    """Return runs that save after the first epoch, and are started again."""
    asked = Training(epochs=2)
    runs = VerifyRuns(train(asked))
    runs.ranks[0].files = [saved("model.pt")]
    runs.resumed = train(Training(epochs=1, **order))
    for facts in runs.resumed:
        facts.files = [FileFacts("model.pt", False, "train.py:9", 0, ["model", "epoch"], [])]
    return runs


def test_resumed_order():
    goes_on = resumed(order=lambda r, n, e: shuffled(r, n, e + 1, 32))
    assert "resume-repeats-samples" not in ids(find(goes_on))
    again = find(resumed())
    assert "resume-repeats-samples" in ids(again)
    (one,) = [x for x in again if x.mistake.id == "resume-repeats-samples"]
    assert one.lines == [LOOP, "train.py:9", LOADER]


def test_resumed_run_that_leaves_out_an_epoch_is_named():
    runs = resumed(order=lambda r, n, e: shuffled(r, n, e + 2, 32))
    runs.ranks = train(Training(epochs=3))
    runs.ranks[0].files = [saved("model.pt")]
    (one,) = [x for x in find(runs) if x.mistake.id == "resume-repeats-samples"]
    assert "begins with batch 1 of epoch 3" in one.text
    assert "left out" in one.text


def test_batch_that_the_observed_run_left_out_is_where_a_resumed_run_goes_on():
    """Of shortened passes, the script has counted four batches, and goes on with the fifth."""
    runs = resumed(order=lambda r, n, e: shuffled(r, n, e, 80)[16:], samples=80)
    runs.ranks = train(Training(samples=80, shorter=4))
    runs.ranks[0].files = [saved("model.pt", step=4)]
    assert "resume-repeats-samples" not in ids(find(runs))
    runs.resumed = train(Training(samples=80, order=lambda r, n, e: shuffled(r, n, e, 80)[12:]))
    for facts in runs.resumed:
        facts.files = [FileFacts("model.pt", False, "train.py:9", 0, ["model", "epoch"], [])]
    assert "resume-repeats-samples" in ids(find(runs))


def test_resumed_run_that_leaves_out_the_rest_of_an_epoch_is_named():
    runs = resumed(order=lambda r, n, e: shuffled(r, n, e + 7, 32))
    runs.ranks[0].files = [saved("model.pt", step=3)]
    (one,) = [x for x in find(runs) if x.mistake.id == "resume-repeats-samples"]
    assert "batch 4 of epoch 1 comes after model.pt is written" in one.text
    assert "begins with other samples" in one.text
    runs.ranks[0].files = [saved("model.pt", step=4)]  # the next epoch is not known
    assert "resume-repeats-samples" not in ids(find(runs))


@pytest.mark.parametrize("is_restoring", [True, False])
def test_script_that_cannot_resume_is_named(is_restoring):
    runs = VerifyRuns(train(Training()))
    runs.resume_error = ResumeError("ValueError: no such group", ["train.py:8"], is_restoring)
    (one,) = find(runs)
    assert (one.mistake.id, one.is_question) == ("resume-differs", not is_restoring)
    assert one.lines == ["train.py:8"]


def test_consequences_are_not_listed():
    cause = Finding(MISTAKES["replicas-start-different"], ["a.py:1"], "")
    effect = Finding(MISTAKES["replicas-diverge"], ["a.py:2"], "")
    other = Finding(MISTAKES["epoch-not-set"], ["a.py:3"], "")
    assert without_consequences([effect, cause, other]) == [cause, other]
    assert without_consequences([other, other]) == [other]


def test_every_explained_mistake_exists():
    for one in MISTAKES.values():
        assert set(one.explains) <= MISTAKES.keys() - {one.id}


def test_failing_rule_is_noted_and_others_answer(monkeypatch):
    from paceline.analyze.verification import find as table

    def broken(view):
        raise IndexError("no such batch")

    monkeypatch.setattr(table, "RULES", (broken, *table.RULES))
    runs = VerifyRuns(train(Training(exchange=lambda ranks: ranks)))
    found, seen = table.judge(runs)
    assert ids(found) == ["gradients-not-exchanged"]
    assert "the rule 'broken' failed (IndexError: no such batch)" in seen.notes


@pytest.mark.parametrize("value", [1.0, 0.0, 1.001, None])
@pytest.mark.parametrize("is_saved", [True, False, None])
def test_state_of_an_optimizer_is_compared_with_that_without_the_interruption(value, is_saved):
    runs = resumed(order=lambda r, n, e: shuffled(r, n, e + 1, 32))
    (file,) = runs.ranks[0].files
    # None: what the file contains is not known, as of a folder of torch.distributed.checkpoint.
    file.contains = {True: ["model", "optimizer"], False: ["model"], None: []}[is_saved]
    for old, facts in zip(runs.ranks, runs.resumed, strict=True):
        gradient = old.steps[file.step - 1].gradients["0/head.weight"]
        old.steps[file.step].state = {"2 exp_avg": gradient}
        row = facts.steps[0].gradients["0/head.weight"]
        facts.sketches[row] = (value or 0.0) * old.sketches[gradient]
        facts.steps[0].state = {} if value is None else {"2 exp_avg": row}
        facts.restores = [RestoreFacts("optimizer", "train.py:8", 0)]
    found = [one for one in find(runs) if "exp_avg of head.weight" in one.text]
    kind = "resume-differs" if is_saved else "checkpoint-incomplete"
    assert [one.mistake.id for one in found] == [kind] * (value != 1.0)
    lines = ["train.py:9", "train.py:8", OPTIMIZER, STEP]
    assert all(one.lines == ([] if is_saved else ["train.py:50"]) + lines for one in found)
    assert all(("is missing" in one.text) == (value is None) for one in found)
