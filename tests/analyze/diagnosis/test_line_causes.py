"""Causes that name a line: what no other cause explains, and the work of one rank."""

import pytest
from rungs import rung
from test_causes import INPUT, LOADER, WAITS_INPUT, judged

from paceline.analyze.diagnosis.line_profile import Doing, Entry, LineProfile, Stack
from paceline.analyze.figures.losses import Loss
from paceline.analyze.records.rank_lines import SampledLine

MAIN = SampledLine("train.py", 40, "main", "loss = model(x)")
FORWARD = SampledLine("model.py", 7, "Net.forward", "h = self.mix(h)")
MIX = SampledLine("model.py", 12, "Net.mix", "total += weight(node)")
READ = SampledLine("data.py", 5, "Files.__getitem__", "text = file.read()")
EXTRA = SampledLine("train.py", 9, "extra", "total += k")
CALLER = SampledLine("train.py", 44, "main", "extra()")
HELPERS = [SampledLine("helpers.py", n, f"helper_{n}", "return 1") for n in range(4)]


def profile(*parts, waited=None, samples=400):
    """Return a profile of two ranks.

    ``parts``: (rank or None for both, lines from the innermost, state, doing, share); the rest of a
    rank's time is an operator in MAIN.
    """
    found = LineProfile([0, 1], samples=samples, waited=waited or {})
    for rank in (0, 1):
        rest = 1.0
        for of, lines, state, doing, share in parts:
            if of in (None, rank):
                add(found, rank, lines, state, doing, share)
                rest -= share
        add(found, rank, (MAIN,), "useful", Doing.TORCH, rest)
    return found


def add(found, rank, lines, state, doing, share):
    stack = Stack(tuple(lines), "")
    if stack not in found.stacks:
        found.stacks.append(stack)
    entry = Entry(rank, found.stacks.index(stack), state, doing)
    found.times[entry] = found.times.get(entry, 0.0) + share


def of_line(share, doing=Doing.PYTHON, state="useful"):
    return profile((None, (MIX, FORWARD, MAIN), state, doing, share))


@pytest.mark.parametrize(
    "doing",
    [Doing.PYTHON, Doing.SHORT_CALLS, Doing.FILE, Doing.LIBRARY, Doing.WAIT, Doing.GARBAGE],
)
def test_line_that_takes_a_tenth_of_a_step_is_a_cause(doing):
    (cause,) = judged(line_profile=of_line(0.3, doing))
    assert cause.id == "line"
    assert cause.share == pytest.approx(0.3)
    assert cause.sentence.startswith("Net.mix ")
    assert cause.sentence.endswith("mostly in line 12: total += weight(node)")
    assert cause.evidence["lines"][0]["file"] == "model.py"
    assert cause.evidence["doing"] == str(doing)


@pytest.mark.parametrize(
    "found",
    [
        of_line(0.08),
        of_line(0.6, Doing.TORCH),
        of_line(0.6, Doing.CORE),
        of_line(0.6, Doing.COLLECTIVE, "wait"),
        of_line(0.6, Doing.WAIT, "input"),
    ],
)
def test_small_parts_operators_and_waits_for_others_are_no_cause_of_their_own(found):
    assert judged(line_profile=found) == []


def test_lines_of_one_function_count_together():
    lines = [SampledLine("model.py", n, "Net.mix", "x") for n in range(4)]
    parts = [(None, (line, FORWARD, MAIN), "useful", Doing.PYTHON, 0.04) for line in lines]
    (cause,) = judged(line_profile=profile(*parts))
    assert cause.share == pytest.approx(0.16)


def test_many_small_functions_are_named_by_the_line_that_calls_them():
    parts = [(None, (one, FORWARD, MAIN), "useful", Doing.PYTHON, 0.05) for one in HELPERS]
    (cause,) = judged(line_profile=profile(*parts))
    assert cause.share == pytest.approx(0.2)
    assert "line 7: h = self.mix(h)" in cause.sentence


def test_input_cause_explains_the_lines_of_its_state_and_names_them():
    found = profile((None, (READ, MAIN), "input", Doing.FILE, 0.5))
    (cause,) = judged(losses=WAITS_INPUT, loader=LOADER, line_profile=found, **INPUT)
    assert cause.id.startswith("input")
    assert cause.sentence.endswith("mostly in line 5: text = file.read()")
    assert cause.evidence["loader_lines"][0]["file"] == "data.py"


def test_input_cause_names_the_line_of_the_workers():
    found = profile()
    add(found, 0, (READ,), "input", Doing.FILE, 0.0)
    found.workers[(len(found.stacks) - 1, Doing.FILE)] = 0.4
    (cause,) = judged(losses=WAITS_INPUT, loader=LOADER, line_profile=found, **INPUT)
    assert "line 5: text = file.read()" in cause.sentence


TRANSFORM = SampledLine("data.py", 9, "Set.__getitem__", "y = scipy.fft.fft(x, workers=8)")
# A worker of each rank opens a file for each sample, and computes with many threads on 2 cores.
CROWDED = LOADER | {
    "opened": 6400,
    "read": 6400 * 4096,
    "busy_s": 9.0,
    "system_s": 6.0,
    "waited_s": 90.0,
    "busy_threads": 32,
}


def of_workers(reading):
    """Return a profile in which workers spend this share of their time in reading files."""
    found = profile()
    for line, doing, share in (
        (READ, Doing.FILE, reading),
        (TRANSFORM, Doing.LIBRARY, 0.9 - reading),
    ):
        add(found, 0, (line,), "input", doing, 0.0)
        found.workers[(len(found.stacks) - 1, doing)] = share
    return found


@pytest.mark.parametrize(
    ("reading", "loader", "name"),
    [
        (0.05, CROWDED, "too-many-threads"),
        (None, CROWDED, "too-many-threads"),
        (0.8, CROWDED, "input-small-files"),
        (0.05, CROWDED | {"waited_s": 0.0}, "input-preprocessing"),
        (0.05, CROWDED | {"busy_threads": 2}, "input-preprocessing"),
        (0.05, CROWDED | {"waited_s": 0.0, "busy_s": 1.0}, "input-waiting"),
    ],
)
def test_small_files_are_a_cause_only_if_workers_read_and_have_cores(reading, loader, name):
    found = of_workers(reading) if reading is not None else None
    (cause,) = judged(losses=WAITS_INPUT, loader=loader, line_profile=found, **INPUT)
    assert cause.id == name, cause.sentence
    if name == "too-many-threads":
        assert cause.evidence["threads_waiting"] == 9.0
        assert "on average 9.0 of its threads per rank wait for a core" in cause.sentence
        assert "16 busy threads on each of 2 ranks share 2 cores" in cause.sentence


LOCK = SampledLine("data.py", 7, "Set.__getitem__", "with lock: time.sleep(t)")


@pytest.mark.parametrize(("waiting", "name"), [(0.5, "waiting"), (0.2, "small-files")])
def test_loader_whose_lines_mostly_wait_is_not_limited_by_files(waiting, name):
    found = profile()
    for line, doing, share in (
        (LOCK, Doing.WAIT, waiting),
        (READ, Doing.FILE, 0.4),
        (TRANSFORM, Doing.LIBRARY, 0.05),
    ):
        add(found, 0, (line,), "input", doing, 0.0)
        found.workers[(len(found.stacks) - 1, doing)] = share
    loader = CROWDED | {"waited_s": 0.0}
    (cause,) = judged(losses=WAITS_INPUT, loader=loader, line_profile=found, **INPUT)
    assert cause.id == f"input-{name}", cause.sentence


def test_other_programs_take_the_cores_of_a_loader():
    real = rung(0.1, delayed=0.3, host=2.0, process=0.3, children=0.5)
    found = of_workers(0.05)
    rungs = INPUT | {"everything": real}
    (cause,) = judged(losses=WAITS_INPUT, loader=CROWDED, line_profile=found, **rungs)
    assert cause.id == "noisy-machine"


WORK_OF_RANK_1 = profile(
    (1, (EXTRA, CALLER), "other", Doing.PYTHON, 0.2),
    (0, (MAIN,), "wait", Doing.COLLECTIVE, 0.2),
    waited={1: {EXTRA: 0.09, MAIN: 0.01}},
)


def test_work_of_one_rank_is_named_with_its_line_and_with_what_others_wait():
    (cause,) = judged(line_profile=WORK_OF_RANK_1, late="in 3 of 10 steps")
    assert cause.id == "slow-rank"
    assert cause.evidence["rank"] == 1
    assert cause.share == pytest.approx(0.18)  # of the other rank's time
    assert "rank 1, in 3 of 10 steps, is busy in extra" in cause.sentence
    assert "line 9: total += k" in cause.sentence


def test_work_of_one_rank_replaces_the_cause_script_for_the_same_line():
    losses = [Loss("other", 0.1), Loss("wait", 0.1, 1, "b", "other")]
    found = judged(line_profile=WORK_OF_RANK_1, losses=losses)
    assert [cause.id for cause in found] == ["slow-rank"]


def test_line_in_which_all_ranks_spend_time_is_not_the_work_of_one():
    found = profile(
        (None, (EXTRA, CALLER), "other", Doing.PYTHON, 0.09),
        waited={1: {EXTRA: 0.09, MAIN: 0.01}},
    )
    assert judged(line_profile=found) == []


def test_few_samples_do_not_name_a_rank():
    few = LineProfile(
        [0, 1], 20, WORK_OF_RANK_1.stacks, WORK_OF_RANK_1.times, WORK_OF_RANK_1.waited
    )
    assert judged(line_profile=few) == []


def test_script_cause_names_the_line_of_the_profile():
    found = profile((None, (EXTRA, CALLER), "other", Doing.PYTHON, 0.2))
    (cause,) = judged(line_profile=found, losses=[Loss("other", 0.2)])
    assert cause.id == "script"
    assert "line 9: total += k" in cause.sentence


FIT = SampledLine("train.py", 3, "main", "trainer.fit(model)")


@pytest.mark.parametrize(("share", "named"), [(0.1, []), (0.2, ["script"])])
def test_work_of_a_library_between_the_steps_is_a_cause_only_if_it_is_large(share, named):
    found = LineProfile([0, 1], samples=400)
    for rank in (0, 1):
        add(found, rank, (FIT,), "other", Doing.LIBRARY, share)
        add(found, rank, (FORWARD, FIT), "useful", Doing.TORCH, 1 - share)
    causes = judged(line_profile=found, losses=[Loss("other", share)])
    assert [cause.id for cause in causes] == named
    assert all("the library with the training loop" in cause.sentence for cause in causes)


SCORE = [SampledLine("train.py", n, "score", f"total += {n}") for n in range(20, 26)]
PRINT = SampledLine("train.py", 50, "main", "print(total.item())")


def test_script_cause_names_the_function_with_most_time_and_not_the_longest_line():
    parts = [(None, (line, CALLER), "other", Doing.PYTHON, 0.05) for line in SCORE]
    longest = (None, (SampledLine("train.py", 46, "main", "log(x)"),), "other", Doing.FILE, 0.08)
    (cause,) = judged(line_profile=profile(longest, *parts), losses=[Loss("other", 0.38)])
    assert cause.evidence["lines"][0]["function"] == "score"
    assert cause.evidence["doing"] == "python"


@pytest.mark.parametrize(
    ("doing", "name"),
    [
        (Doing.FILE, "synchronisation"),  # it prints
        (Doing.WAIT, "synchronisation"),
        (Doing.TORCH, "script"),  # the line computes its value, on a CPU
        (Doing.PYTHON, "script"),
    ],
)
def test_line_that_computes_a_value_does_not_wait_for_it(doing, name):
    found = profile((None, (PRINT,), "other", doing, 0.3))
    (cause,) = judged(line_profile=found, losses=[Loss("other", 0.3)])
    assert cause.id == name


def test_time_off_the_cores_is_in_the_line_that_waits():
    """The forward computes longer than it sleeps."""
    sleep = SampledLine("model.py", 9, "Net.forward", "time.sleep(0.02)")
    found = profile((None, (sleep, MAIN), "useful", Doing.WAIT, 0.3))
    (cause,) = judged(line_profile=found, silent=rung(process=0.6))
    assert cause.id == "script"
    assert cause.evidence["lines"][0]["line"] == 9
    assert cause.sentence.endswith("mostly in line 9: time.sleep(0.02)")
