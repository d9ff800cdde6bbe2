"""What a report says: in which steps a loss occurs, counts and ordinals, small rates."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from records import Rank, made, report_of, report_text

import paceline
from paceline.analyze.figures.losses import Loss
from paceline.plurals import counted, ordinal
from paceline.record.ring.states import State
from paceline.report.numbers import figure
from paceline.report.run_document import achieved
from paceline.report.sentences import LATE_BECAUSE, outliers, sentence, troubles
from paceline.report.terminal.run_report import render


def job(folder, extra, steps=90, state=State.INPUT, ranks=1, starts_loader=False):
    """Return ranks with steps of 20 ms; ``extra``: ms that a step takes longer in ``state``.

    starts_loader: Whether the loader begins a new pass in these steps: the end of the pass and the
    next iterator are recorded as waits, too.
    """
    found = []
    for i in range(ranks):
        rank = Rank(folder, i, ranks)
        rank.step(0, 10)
        begin = 10
        for step in range(1, steps + 1):
            longer = extra.get(step, 0)
            if longer and starts_loader:
                rank.was(State.INPUT, begin, begin)
                rank.was(State.INPUT, begin, begin + longer / 2)
            rank.was(State.INPUT, begin + longer / 2, begin + longer / 2)
            rank.was(state, begin, begin + longer)
            rank.was(State.FORWARD, begin + longer, begin + longer + 20)
            begin += longer + 20
            rank.step(begin - longer - 20, begin, samples=8, number=step)
        if longer := extra.get(steps + 1, 0):
            rank.was(state, begin, begin + longer)
        found.append(rank)
    return found


def where(ranks):
    """Return what the sentence of the only loss says about its steps."""
    report = report_of(ranks)
    (loss,) = report.losses
    text = sentence(loss, report)
    found = re.search(r"(\d+ % of it )?(in|at|after) [^;]*$", text.partition(".")[0])
    assert found is not None, text
    return found[0]


EVERY_30TH = dict.fromkeys((30, 60, 90), 400)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (dict.fromkeys(range(1, 91), 3), "in all steps"),
        (dict.fromkeys(range(1, 91), 3) | {7: 0}, "in nearly all steps (89 of 90)"),
        (EVERY_30TH, "in every 30th step, from 30 to 90"),
        (dict.fromkeys(range(2, 91, 2), 5), "in every 2nd step, from 2 to 90"),
        (dict.fromkeys((11, 33, 54, 76), 50), "in about every 22nd step, from 11 to 76"),
        (dict.fromkeys((4,), 50), "in step 4"),
        (dict.fromkeys((4, 70), 50), "in steps 4 and 70"),
        (dict.fromkeys((4, 9, 70, 71), 50), "in steps 4, 9, 70 and 71"),
        (dict.fromkeys(range(20, 40), 5), "in steps 20 to 39"),
        ({91: 400}, "after the last step"),
        (EVERY_30TH | dict.fromkeys(range(1, 30), 0.1), "in every 30th step, from 30 to 90"),
        (
            EVERY_30TH | dict.fromkeys(range(1, 30), 12),
            "78 % of it in every 30th step, from 30 to 90",
        ),
        ({n: 5 for n in range(1, 91) if n % 7 in (1, 3)}, "in 26 of 90 steps"),
    ],
)
def test_loss_names_the_steps_that_have_it(tmp_path, extra, words):
    assert where(job(tmp_path, extra)) == words


def test_input_at_the_ends_of_epochs_is_named_so(tmp_path):
    """Three ends of epochs span most of the window, and are not in all of its steps."""
    ranks = job(tmp_path, dict.fromkeys((20, 50, 81), 300), starts_loader=True)
    assert where(ranks) == "at the ends of epochs (about every 30th step, from 20 to 81)"


def test_end_of_the_last_epoch_is_after_the_last_step(tmp_path):
    """No pass of the loader begins in it; its workers are ended."""
    ranks = job(tmp_path, dict.fromkeys((31, 61, 91), 300), starts_loader=True)
    assert where(ranks) == "at the ends of epochs (every 30th step, from 31 to 91)"


def test_one_end_of_an_epoch_is_named_so(tmp_path):
    assert where(job(tmp_path, {40: 300}, starts_loader=True)) == "at the end of an epoch (step 40)"


def test_validation_once_in_30_steps_is_not_in_all_of_them(tmp_path):
    ranks = job(tmp_path, EVERY_30TH, state=State.VALIDATION)
    assert where(ranks) == "in every 30th step, from 30 to 90"


def test_occurrence_is_in_the_json(tmp_path):
    (loss,) = report_of(job(tmp_path, EVERY_30TH)).losses
    one = loss.occurs
    assert (one.count, one.of, one.period, one.steps) == (3, 90, 30, [30, 60, 90])


def test_range_of_one_step_has_no_end(tmp_path):
    """Without single steps, the range of tenths is named."""
    report = report_of(job(tmp_path, EVERY_30TH))
    loss = replace(report.losses[0], occurs=None, steps=(4, 4))
    assert sentence(loss, report).endswith(", in step 4.")
    assert sentence(replace(loss, steps=(4, 9)), report).endswith(", in steps 4 to 9.")


def test_late_exchange_does_not_claim_another_group(tmp_path):
    report = report_of(job(tmp_path, EVERY_30TH, ranks=2))
    loss = Loss("wait", 0.1, 1, "host", "transfer", "0", "all-reduce")
    text = sentence(loss, report)
    assert "waiting for rank 1, which was late after its previous collective" in text
    assert not [words for words in (text, LATE_BECAUSE["transfer"]) if "elsewhere" in words]


def test_outliers_have_ordinal_numbers(tmp_path):
    report = report_of(job(tmp_path, dict.fromkeys(range(2, 90, 22), 400), state=State.VALIDATION))
    (line,) = outliers(report)
    assert line.startswith("4 steps, every 22nd from 2 to 68: ")


def still_job(folder, samples, ranks=2):
    """Return ranks of which none ran from 110 to 2010 ms, outside of all phases.

    samples: (time in ms, number of the line) that the sampler saw in it.
    """
    found = []
    for i in range(ranks):
        rank = Rank(folder, i, ranks)
        rank.step(0, 10)
        rank.was(State.FORWARD, 10, 50)
        for at, number in samples:
            rank.was(State.SAMPLE, at, at, amount=number)
        rank.was(State.STILL, 110, 2010)
        rank.step(10, 2020, number=1)
        for step in range(2, 30):
            rank.was(State.FORWARD, 2020 + 40 * (step - 2), 2060 + 40 * (step - 2))
            rank.step(2020 + 40 * (step - 2), 2060 + 40 * (step - 2), number=step)
        found.append(rank)
    return found


def with_lines(ranks):
    from paceline.analyze.figures.report import analyse
    from paceline.analyze.records.load_run import Run

    records = [rank.record() for rank in ranks]
    for record in records:
        for number, code in ((1, "model = compile(model)"), (2, "profiler.stop()")):
            fields = {"file": "/a/train.py", "line": 10 * number, "function": "main", "code": code}
            record.lines[number] = fields
    return analyse(Run("test", records, missing=[]))


def test_standstill_in_a_call_of_the_script_names_its_line(tmp_path):
    """The line is that of the late sample with which the standstill ended."""
    report = with_lines(still_job(tmp_path, [(60, 1), (2010, 2)]))
    (one,) = report.stood_still
    assert (one.line["line"], one.state) == (20, "other")
    (line,) = troubles(report)
    assert line == (
        "host stood still for 1.9 s in step 1: no thread of its ranks ran (ranks 0-1), as when "
        "train.py:20 (profiler.stop()) calls C code that holds the interpreter lock (GIL), or a "
        "node or a whole job is paused"
    )


def test_line_of_a_loss_is_the_one_that_took_longest(tmp_path):
    """Both lines were sampled once; the sampler could not run during the longer one."""
    report = with_lines(still_job(tmp_path, [(60, 1), (2010, 2)]))
    (other,) = [loss for loss in report.losses if loss.kind == "other"]
    assert [line["line"] for line in other.lines] == [20, 10]
    assert other.lines[0]["share"] > 0.99
    assert "Seen at train.py:20  profiler.stop()" in sentence(other, report)


def test_slow_job_has_a_rate_above_zero(tmp_path):
    rank = Rank(tmp_path, 0, 1)
    rank.step(0, 10)
    for step in range(1, 6):
        rank.was(State.FORWARD, 20_000 * (step - 1) + 10, 20_000 * step)
        rank.step(20_000 * (step - 1) + 10, 20_000 * step + 10, samples=8, number=step)
    report = report_of([rank])
    assert report.samples_per_s == pytest.approx(0.4)
    assert "0.4 samples/s" in render(report)
    assert "0.4 samples/s" in achieved(report)
    assert (figure(0.0), figure(0.00042), figure(0.4), figure(12345)) == (
        *("0.000", "0.00042", "0.400", "12,345"),
    )


def test_counts_and_ordinals():
    assert [counted(n, "rank") for n in (0, 1, 2, 1000)] == [
        *("0 ranks", "1 rank", "2 ranks", "1,000 ranks"),
    ]
    assert counted(2, "batch", "batches") == "2 batches"
    numbers = (1, 2, 3, 4, 11, 12, 13, 21, 22, 101, 111)
    assert " ".join(map(ordinal, numbers)) == (
        "1st 2nd 3rd 4th 11th 12th 13th 21st 22nd 101st 111th"
    )


def compared(folder, before, after):
    """Return the comparison of two jobs of ``made`` as JSON and as text."""
    folders = [made(folder / name, **options) for name, options in (("a", before), ("b", after))]
    text = re.sub(r"[│\s]+", " ", report_text(folders))
    return json.loads(report_text(folders, as_json=True)), text


def test_comparison_says_which_state_explains_the_difference(tmp_path):
    """All efficiencies may be alike while every state takes longer: the states say which."""
    data, text = compared(tmp_path, {"compute": 20.0}, {"compute": 60.0})
    rows = {row["state"]: row for row in data["states"]["rows"]}
    assert data["states"]["unit"] == "step"
    assert rows["useful"]["before_s"] == pytest.approx(0.025, rel=0.01)
    assert rows["useful"]["after_s"] == pytest.approx(0.065, rel=0.01)
    assert rows["useful"]["real"]
    assert not rows["wait"]["real"]
    for side in ("before_s", "after_s"):
        whole = sum(row[side] for row in rows.values())
        assert whole == pytest.approx(data["states"]["whole"][side])
    assert data["states"]["explained_by"] == ["useful"]
    assert "A step takes 40 ms longer. It is explained by useful +40 ms (100 %)." in text
    assert re.search(r"useful 25 ms 65 ms \+40 ms ± \S+ ms longer", text)
    assert re.search(r"wait 5 ms 5 ms 0 ms ± \S+ ms within the noise", text)


def test_comparison_of_a_run_with_itself_explains_nothing(tmp_path):
    data, text = compared(tmp_path, {}, {})
    assert data["states"]["explained_by"] == []
    assert "A step takes as long as before, within the noise." in text


def test_runs_with_other_batches_are_compared_per_sample(tmp_path):
    """Twice the samples a step in twice the time: a sample takes as long."""
    data, text = compared(tmp_path, {"compute": 20.0}, {"compute": 60.0, "samples": 16})
    assert data["states"]["unit"] == "sample"
    useful = data["states"]["rows"][0]
    assert useful["before_s"] == pytest.approx(0.025 / 8, rel=0.01)
    assert useful["after_s"] == pytest.approx(0.065 / 16, rel=0.01)
    assert "time per sample" in text


def test_no_message_has_an_ordinal_of_its_own():
    source = Path(paceline.__file__).parent
    files = [path for path in source.rglob("*.py") if path.name != "plurals.py"]
    pattern = re.compile(r"\}(st|nd|rd|th)\b")
    assert not [path for path in files if pattern.search(path.read_text())]


def test_ranks_have_their_place_in_the_mesh(tmp_path):
    axes = [["data", 1], ["tensor", 2]]
    meshes = [{"axes": axes, "place": [0, i]} for i in range(2)]
    ranks = [Rank(tmp_path, i, 2, mesh=mesh) for i, mesh in enumerate(meshes)]
    for i, rank in enumerate(ranks):
        rank.step(0, 10)
        for step in range(20):
            begin, late = 10 + 20 * step, 8 * i
            rank.was(State.FORWARD, begin, begin + 4 + late)
            rank.collective(begin + 4 + late, begin + 4 + late, begin + 18)
            rank.step(begin, begin + 20, samples=4, number=step + 1)
    report = report_of(ranks)
    assert report.mesh == {0: {"data": 0, "tensor": 0}, 1: {"data": 0, "tensor": 1}}
    assert json.loads(report.to_json())["mesh"]["1"] == {"data": 0, "tensor": 1}
    wait = next(one for one in report.losses if one.kind == "wait" and one.rank is not None)
    assert sentence(wait, report).startswith("waiting for rank 1 (data 0, tensor 1), which")
