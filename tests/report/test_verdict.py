"""The three lines of every report: what limits the training, the evidence, what to do next."""

import io
import json
import re
from dataclasses import replace

import pytest
from records import Rank, made, report_of, report_text
from rich.console import Console
from test_diagnosis_page import CAUSES, RUNGS, found, rung

from paceline.analyze.diagnosis.causes import Cause
from paceline.analyze.diagnosis.diagnosis import Remedy, Trial, TrialResults
from paceline.analyze.diagnosis.rungs import Interval
from paceline.analyze.figures.report import analyse, analyse_with_window
from paceline.analyze.records.load_run import Run, load_run
from paceline.cli.common.options import HostAndEnvOptions, RankOptions, launch_words
from paceline.record.ring.states import State
from paceline.report.diagnosis.diagnosis_document import verdict_of_diagnosis
from paceline.report.page.run_page import single
from paceline.report.run_verdict import verdict_of_run
from paceline.report.terminal.run_report import panel

WORKERS = Remedy(
    *("loader-workers", "input-waiting", 4, Interval(0.4, 0.3, 0.5), "a formula", True),
    "DataLoader(num_workers=4)",
    line=12,
)


def text_of(report):
    console = Console(width=120, file=io.StringIO())
    console.print(panel(report, 120, full=True))
    return console.file.getvalue()


def run(folder, state, longer, steps=30, ranks=1, command=("train.py", "--lr", "1 e")):
    """Return the report of ranks that spend ``longer`` ms of each step in a state, and 20 ms in a
    forward."""
    made_ranks = []
    for number in range(ranks):
        rank = Rank(folder, number, ranks)
        rank.step(0, 10)
        for step in range(1, steps + 1):
            begin = 10 + (step - 1) * (longer + 20)
            rank.was(State.INPUT, begin, begin)
            rank.was(state, begin, begin + longer)
            rank.was(State.FORWARD, begin + longer, begin + longer + 20)
            rank.step(begin, begin + longer + 20, samples=8, number=step)
        made_ranks.append(rank)
    return replace(report_of(made_ranks), command=list(command))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (State.INPUT, "33.3 % of the ranks' time is lost to waiting for the next batch."),
        (State.VALIDATION, "33.3 % of the ranks' time is lost to validation."),
        (State.CHECKPOINT, "33.3 % of the ranks' time is lost to checkpoints."),
    ],
)
def test_verdict_of_a_run_names_the_largest_loss_and_the_command_to_continue(
    tmp_path, state, words
):
    verdict = verdict_of_run(run(tmp_path, state, 10))
    assert verdict.verdict == words
    assert "in all steps" in verdict.why
    assert verdict.next == "paceline diagnose -n 1 train.py --lr '1 e'"


def test_next_repeats_the_environment_variables_of_the_run(tmp_path):
    report = run(tmp_path, State.VALIDATION, 10, command=["train.py"])
    report = replace(report, env=["A=1 2", "B", "HF_TOKEN=..."])
    words = "paceline diagnose -n 1 --env 'A=1 2' --env B --env HF_TOKEN=... train.py"
    assert words in verdict_of_run(report).next


def test_next_is_the_line_of_the_script_where_the_record_names_it(tmp_path):
    report = run(tmp_path, State.CHECKPOINT, 10)
    line = {"file": "/home/a/train.py", "line": 42, "function": "f", "code": "torch.save(m, p)"}
    losses = [replace(loss, lines=[line]) for loss in report.losses]
    verdict = verdict_of_run(replace(report, losses=losses))
    assert verdict.next.startswith("edit train.py:42 (torch.save(m, p)): save less often")


def test_waits_for_a_rank_are_booked_to_what_it_did(tmp_path):
    report = analyse(load_run(made(tmp_path / "run", size=4)))
    verdict = verdict_of_run(report)
    assert re.match(
        r"\d\d\.\d % .* lost to waiting for rank 3, which computes lon", verdict.verdict
    )
    assert verdict.why.startswith("Waiting for rank 3 (node1), which computed longer; mostly in")
    assert verdict.next == "paceline diagnose -H node0:2,node1:2 SCRIPT"


def test_share_of_a_verdict_is_shown_as_the_sum_of_the_rows_of_its_states(tmp_path):
    report = run(tmp_path, State.INPUT, 10)
    (loss,) = report.losses
    shares = {"transfer": (0.2, 0.05), "wait": (0.04,), "input": (0.01,)}
    losses = [
        replace(loss, kind=kind, rank=None, share=share, collective="all-reduce", lines=[])
        for kind, parts in shares.items()
        for share in parts
    ]
    report = replace(report, losses=losses)
    verdict = verdict_of_run(report)
    assert re.findall(r"([a-z]*) ?\(?(\d+\.\d) %", verdict.verdict) == [
        *(("", "29.0"), ("transfer", "25.0"), ("wait", "4.0"))
    ]
    assert "20.0 %: all-reduce itself" in verdict.why
    text = re.sub(r"[│\s]+", " ", text_of(report))
    assert "1.0 %: 1 smaller loss (--json) 30.0 %: all losses" in text


def test_waits_for_a_core_have_one_name(tmp_path):
    ranks = []
    for number in range(2):
        rank = Rank(tmp_path, number, 2)
        rank.step(0, 10)
        for step in range(1, 30):
            begin = 10 + 20 * (step - 1)
            rank.was(State.FORWARD, begin, begin + 20)
            rank.was(State.STARVED, begin, begin + 20, amount=8_000_000)
            rank.step(begin, begin + 20, samples=8, number=step)
        ranks.append(rank)
    report = report_of(ranks)
    verdict = verdict_of_run(report)
    assert verdict.verdict == "40.0 % of the ranks' time is lost to waiting for a core."
    text = text_of(report)
    assert re.search(r"core wait +40\.0 %", text)
    page = single(analyse_with_window(Run("test", [r.record() for r in ranks], missing=[])))
    visible = re.sub(r"<script.*?</script>|<style.*?</style>|<[^>]*>", " ", page, flags=re.DOTALL)
    assert "core wait" in visible
    for seen in (text, visible):
        assert not re.search("starved|without a core|had no core|free core", seen)


def test_healthy_run_has_a_verdict_too(tmp_path):
    verdict = verdict_of_run(run(tmp_path, State.INPUT, 0.5))
    assert verdict.verdict == (
        "No loss takes 5 % of the ranks' time or more: 97.6 % of the ranks' time is useful."
    )
    assert verdict.why.startswith("The largest loss is 2.4 %: waiting for the next batch")
    assert verdict.next.startswith("paceline diagnose -n 1 train.py --lr '1 e'  # measures")


def test_few_steps_and_low_confidence_make_a_verdict_uncertain(tmp_path):
    few = verdict_of_run(run(tmp_path, State.INPUT, 10, steps=4))
    assert few.verdict.startswith("Uncertain (only 4 measured steps): 33.3 % of")
    report = replace(run(tmp_path, State.INPUT, 10), confidence=0.4)
    assert verdict_of_run(report).verdict.startswith("Uncertain (confidence 0.40): 33.3 %")


def test_run_without_steps_says_why_and_what_to_do(tmp_path):
    rank = Rank(tmp_path, 0, 1)
    rank.was(State.FORWARD, 0, 10)
    verdict = verdict_of_run(report_of([rank]))
    assert verdict.verdict.startswith("No optimizer step was recorded")
    assert verdict.why.startswith(
        "No rank called step() of a torch optimizer or model.fit of Keras"
    )
    assert "world.epochs" in verdict.next
    failed = Rank(tmp_path, 0, 1, failure="ValueError: no data")
    verdict = verdict_of_run(report_of([failed]))
    assert verdict.why == "Rank 0 failed before its first step: ValueError: no data."
    assert verdict.next == "correct this error, and run the script again"
    failed.step(0, 10)
    one = Rank(tmp_path, 0, 1)
    one.step(0, 10)
    verdict = verdict_of_run(report_of([one]))
    assert verdict.why == "The script made 1 step, and the first one is warm-up."


def test_text_and_json_of_a_report_begin_with_the_same_words(tmp_path):
    folder = made(tmp_path / "run", size=2)
    verdict = verdict_of_run(analyse(load_run(folder)))
    data = json.loads(report_text([folder], as_json=True))
    assert data["verdict"] == vars(verdict)
    text = re.sub(r"[│\s]+", " ", report_text([folder]))
    order = [text.index(f"{label} {sentence}") for label, sentence in verdict.lines()]
    assert order == sorted(order)
    assert order[-1] < text.index("wall time")


def test_verdict_of_a_diagnosis_has_the_first_cause_and_its_remedy(tmp_path):
    told = replace(found(tmp_path / "run"), remedies=[WORKERS], options=["-n", "4"])
    verdict = verdict_of_diagnosis(told)
    assert verdict.verdict == (
        "43.0 % (41 to 47) of a step's time is lost to waiting for the loader."
    )
    measured = replace(CAUSES[0], measured=Interval(0.43, 0.426, 0.431))
    wider = verdict_of_diagnosis(replace(told, causes=[measured])).verdict
    assert wider.startswith("43.0 % (41 to 47 with the record) of a step's time")
    assert verdict.why.startswith("The loader takes 14.2 ms per batch and mostly waits")
    command = "paceline diagnose -n 4 --try loader-workers train.py '--x y'"
    assert verdict.next == f"{command}  # predicted gain +40 %"
    edit = replace(WORKERS, settable=False)
    by_hand = verdict_of_diagnosis(replace(told, remedies=[edit]))
    assert by_hand.next == "line 12: DataLoader(num_workers=4) (predicted gain +40 %)"


def test_next_after_trials_is_to_keep_what_helped_most(tmp_path):
    trial = Trial(WORKERS, WORKERS.gain, Interval(0.35, 0.3, 0.4), True, "", 3)
    tried = TrialResults(trials=[trial], kept={"loader-workers": 4}, faster=1.35)
    told = replace(found(tmp_path / "run"), remedies=[WORKERS], tried=tried)
    assert verdict_of_diagnosis(told).next == (
        "line 12: DataLoader(num_workers=4) (measured gain +35 %)"
    )


def test_next_after_a_trial_without_time_is_to_try_again(tmp_path):
    trial = Trial(WORKERS, WORKERS.gain, None, False, "not measured", late=True)
    told = replace(found(tmp_path / "run"), remedies=[WORKERS], tried=TrialResults([trial]))
    assert verdict_of_diagnosis(told).next.endswith(
        "--try loader-workers train.py '--x y'  # predicted gain +40 %"
    )
    slower = replace(trial, late=False, gain=Interval(-0.1, -0.2, -0.05))
    rejected = replace(told, tried=TrialResults([slower]))
    assert verdict_of_diagnosis(rejected).next == (
        "paceline diagnose --json diagnosis.json train.py '--x y'"
        "  # no remedy is known: the file has the evidence"
    )


def test_options_that_the_user_did_not_give_are_not_in_the_command():
    nodes = HostAndEnvOptions()
    assert nodes.words() == []
    assert launch_words(False, RankOptions(), nodes, {"--horovod": None}) == []
    assert launch_words(False, RankOptions(bind="core"), nodes, {}) == ["--bind", "core"]


def test_values_of_environment_variables_are_not_in_the_command(tmp_path):
    options = ["-n", "4", "--env", "TOKEN=secret"]
    told = replace(found(tmp_path / "run"), remedies=[WORKERS], options=options)
    assert "--env TOKEN --try loader-workers" in verdict_of_diagnosis(told).next
    assert "secret" not in json.dumps(vars(verdict_of_diagnosis(told)))


def test_diagnosis_without_a_cause_is_healthy_or_uncertain(tmp_path):
    even = {name: rung(1200, 1201, 1199) for name in RUNGS} | {
        "alone": rung(300, 301, 299, ranks=1)
    }
    healthy = verdict_of_diagnosis(found(tmp_path / "a", even, causes=[]))
    assert healthy.verdict.startswith("No cause takes 5 % of a step's time or more: 100.0 % of")
    assert healthy.next == "no change is needed"
    usual = Cause("exchange-bandwidth", 0.12, (0.1, 0.14), "all-reduce is slow", witness="exchange")
    told = replace(found(tmp_path / "c", even, causes=[]), usual=[usual])
    costs = verdict_of_diagnosis(told)
    assert costs.verdict.startswith("No cause takes 5 % of a step's time or more, except for usual")
    assert costs.why == "12.0 % of a step, of usual costs: all-reduce is slow."
    noisy = {name: rung(1200, 700, 1700) for name in RUNGS}
    noisy["alone"] = rung(500, 500, 500, ranks=1)
    uncertain = verdict_of_diagnosis(found(tmp_path / "b", noisy, causes=[]))
    assert uncertain.verdict.startswith("Uncertain (noisy rounds): No cause is certain")
    assert uncertain.next == "paceline diagnose --minutes 10 train.py '--x y'"


def test_diagnosis_without_experiments_says_what_failed(tmp_path):
    note = "experiments left out (silent): the script ended after 3 steps. HINT: reduce --steps"
    told = found(tmp_path / "run", RUNGS | {"silent": []}, causes=[], notes=[note])
    verdict = verdict_of_diagnosis(told)
    assert verdict.verdict.startswith("Paceline cannot determine what limits the training")
    assert verdict.why == "Experiments left out (silent): the script ended after 3 steps."
    assert verdict.next == "reduce --steps"
