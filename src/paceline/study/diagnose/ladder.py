"""Ladder of experiments of ``paceline diagnose``.

The experiments are short runs of the user's script. Each of them disables something from outside
(record/experiments/rung.py). They are repeated in interleaved rounds until the time budget is used.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

from ...analyze.diagnosis.descriptions import FirstRun
from ...analyze.diagnosis.exchanged_calls import measure_exchanged_calls
from ...analyze.diagnosis.ladder_results import (
    COMPLETE,
    FAILED,
    INTERRUPTED,
    OUT_OF_TIME,
    RUNGS,
    Hypothesis,
    Ladder,
    hypotheses,
    rung_name,
)
from ...analyze.diagnosis.rare_events import survey
from ...analyze.diagnosis.rules.failed_parts import FailedParts
from ...analyze.diagnosis.rungs import EndedError, RungResult, measure_rung
from ...analyze.figures.report import analyse_with_window, untracked_training
from ...analyze.records.load_run import Run
from ...analyze.records.operator_file import OperatorFiles, read_operator_files
from ...plurals import counted
from ...record.experiments.lines.sidecar import CollectiveKind
from ...record.experiments.rung import (
    CACHED,
    EVERYTHING,
    LOADER,
    ONE_THREAD,
    PROFILED_STEPS,
    SILENT,
    SWITCHED,
    Rung,
)
from ...record.ring.states import State
from ..script_runs.run_process import MINUTE_S
from ..trials import InterruptedTrialError, done_steps
from .plan import (
    LEAST_STEPS,
    MIN_STEPS_SHORT_RUN,
    Plan,
    RoundCost,
    first_plan,
    fit_into_script,
    next_plan,
    run_limit_s,
)
from .run_script import FailedError, OutOfTimeError, Runner, RunRequest

# The run of ``paceline diagnose`` that profiles the operators of a few steps.

STEPS_BEFORE = 10  # measured steps before the profile
TIME_SHARE = 0.2  # of the time left, at most, for this run
SLOWDOWN = 5.0  # expected, of a step whose operators are profiled


def profile_operators(runner: Runner, cost: RoundCost, script_steps: int | None) -> OperatorFiles:
    """Profile the operators of a few steps of all ranks, if there is time for it.

    No failure of this run ends the diagnosis.

    Args:
        runner: Runs the script.
        cost: Cost of a run with one phase.
        script_steps: Number of steps of the script; None if it has more than those of a first run.

    Raises:
        InterruptedTrialError: The user interrupted the run.
    """
    warm, steps = runner.asked.warming, runner.asked.steps or STEPS_BEFORE
    left_s, most = TIME_SHARE * runner.deadline.left_s, script_steps or math.inf
    profile_s = SLOWDOWN * PROFILED_STEPS * cost.step_s
    if cost.duration_s(warm + steps) + profile_s > left_s or warm + steps + PROFILED_STEPS > most:
        warm, steps = 1, MIN_STEPS_SHORT_RUN
    expected_s = cost.duration_s(warm + steps) + profile_s
    if expected_s > left_s:
        note = "there is no time to profile the operators. HINT: increase --minutes"
        return OperatorFiles([], [note])
    rung = Rung(warm, steps, (EVERYTHING,), profiles=True)
    named = f"the operators of {PROFILED_STEPS} steps"
    try:
        run = runner.run(False, rung, named=named, limit_s=run_limit_s(expected_s))
    except FailedError as failed:
        note = f"the script fails while its operators are profiled: {failed.short}"
        return OperatorFiles([], [note])
    except OutOfTimeError:
        return OperatorFiles([], ["profiling the operators takes too long"])
    files, notes = read_operator_files(Path(run.name))
    failures = [record.meta.get("rung", {}).get("profile_failure") for record in run.records]
    notes += dict.fromkeys(
        f"the operators were not profiled: {failure}" for failure in failures if failure
    )
    if not files and not notes:
        notes = ["the operators were not profiled: the script ends after its first steps"]
    return OperatorFiles(files, notes)


# Figures of one run of the ladder.


def steps_s(run: Run) -> float:
    """Return the duration of all steps of the first rank."""
    rows = run.records[0].events_in(State.STEP)
    return float(rows["end"].max() - rows["start"].min()) / 1e9


def broadcast_share(run: Run, steps: tuple[int, int]) -> float:
    """Return the share of time in broadcasts of buffers, in the steps from the first one on to
    before the second one. Waits for a late rank are part of it.
    """
    measured = analyse_with_window(run, steps).measured
    calls = measure_exchanged_calls(measured) if measured is not None else []
    return sum(
        call.transfer + call.wait for call in calls if call.site.kind == CollectiveKind.BUFFER
    )


def loader_totals(run: Run) -> dict[str, float] | None:
    """Return the totals of all ranks' loaders when they run without training, or None."""
    totals = [record.meta.get("rung", {}).get("loader") for record in run.records]
    known = [total for total in totals if total and total["batches"]]
    if not known:
        return None
    keys = set.intersection(*(set(total) for total in known))  # older records lack some
    return {key: sum(total[key] for total in known) for key in known[0] if key in keys} | {
        "ranks": len(known)
    }


def split_phases(phases: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return one run for each phase; the loader alone is measured after the first of them."""
    parts = [(phase,) for phase in phases if phase != LOADER]
    return [(*parts[0], LOADER), *parts[1:]] if LOADER in phases else list(parts)


FIRST_STEPS = 10  # steps of the first run, which measures the duration of a step
SURVEY_SHARE = 0.25  # of the time budget, at most, for the first run
REPETITIONS = (3, 9)  # minimum and maximum number of rounds


def climb_ladder(asked: RunRequest, say: Callable[[str], None]) -> Ladder:
    """Run the ladder until its deadline, or until the user interrupts it.

    Raises:
        ValueError: The script cannot be measured.
        KeyboardInterrupt: The user interrupted it before anything was measured.
    """
    with Runner(asked, say) as runner:
        return _Climb(asked, runner).run()


class _Climb:
    def __init__(self, asked: RunRequest, runner: Runner) -> None:
        self.asked, self.runner, self.began = asked, runner, time.monotonic()
        self.workers = 0  # most workers of a rank's loader
        self.start_s = 0.1  # time of a run outside of its steps: mostly the start of its processes
        self.in_steps_s = 0.0  # duration of all steps of the last round
        self.has_repeated = False  # a round, because a run failed
        self.step_s = 0.0  # of the first run
        self.script_steps: int | None = None  # if the first run reached the script's end
        # The runs of a round: whether one rank runs alone, and the phases. The run of all ranks is
        # first, because it can be evaluated without the other one.
        self.runs: list[tuple[bool, tuple[str, ...]]] = [
            (False, (EVERYTHING, CACHED, SILENT, LOADER)),
            (True, (EVERYTHING, CACHED)),
        ]
        self.hypotheses: list[Hypothesis] = []
        self.parts = FailedParts()

    def run(self) -> Ladder:
        found = self._first_run()
        try:
            if found.ended == COMPLETE:
                cost = RoundCost(self.start_s, self.step_s, 1)
                found.operators = profile_operators(self.runner, cost, self.script_steps)
                self._run_rounds(found)
        except KeyboardInterrupt:  # while operators are profiled
            found.ended = INTERRUPTED
        found.book_rare(self._most_phases(), self.hypotheses)
        found.seconds = time.monotonic() - self.began
        found.notes += [*self._short_notes(found), *self.parts.notes]
        return found

    def _first_run(self) -> Ladder:
        """Run all ranks once, to measure the duration of a step and inspect the script.

        Its record is the result if no time is left for anything else.
        """
        asked, ended, cut = self.asked, COMPLETE, False
        steps, warm = asked.steps or FIRST_STEPS, asked.warming
        before = time.monotonic()
        until_s = 0.0 if asked.where else self.runner.deadline.part(SURVEY_SHARE).at_s
        rung = Rung(warm, steps, (EVERYTHING,), survey_until=until_s)
        try:
            run = self.runner.run(
                False, rung, asked.count, named=f"{steps} steps, and a survey of what follows"
            )
        except (OutOfTimeError, InterruptedTrialError) as early:
            if early.run is None or done_steps(early.run) < 2:
                raise
            run, cut = early.run, True
            ended = INTERRUPTED if isinstance(early, InterruptedTrialError) else COMPLETE
        took_s = time.monotonic() - before
        done = done_steps(run)
        if done < warm + steps:
            if done < 2:
                children = untracked_training(run.records)
                raise ValueError(children[0]) if children else EndedError(done, warm + steps)
            warm = min(warm, max(1, done // 3))
            steps = min(steps, done - warm)
        self.step_s = measure_rung(run, warm, steps, EVERYTHING).step_s
        self.start_s = max(took_s - steps_s(run), 0.1)
        self._adapt_to_script(run, (warm, warm + steps))
        rungs: dict[str, list[RungResult]] = {
            name: [] for name, kind in RUNGS.items() if self._has(kind)
        }
        found = Ladder(warm, steps, rungs, run, run, ended=ended, survey=survey(run, warm))
        if not cut and done < rung.warm + rung.steps:
            self.script_steps = done
        return found

    def _run_rounds(self, found: Ladder) -> None:
        """Run rounds until the time is over; the results of each are added to ``found``."""
        asked, deadline = self.asked, self.runner.deadline
        if asked.steps:
            plan: Plan | None = Plan(asked.warming, asked.steps)
        else:
            plan = first_plan(
                deadline.left_s, self._cost(), asked.warming, self.workers, REPETITIONS
            )
        if self.script_steps is not None:
            plan = self._fitted(plan, EndedError(self.script_steps, 0), found)
        while plan is not None and _rounds(found) < REPETITIONS[1]:
            turn, before, done = time.monotonic(), len(found.refused), _rounds(found)
            try:
                self._run_round(found, plan)
            except EndedError as ended:
                plan = self._fitted(plan, ended, found)
                continue
            except (OutOfTimeError, KeyboardInterrupt) as early:
                if isinstance(early, KeyboardInterrupt):
                    found.ended = INTERRUPTED
                elif done < REPETITIONS[0]:
                    found.ended = OUT_OF_TIME
                if done:
                    found.keep_rounds(done)
                return
            except FailedError as failed:
                found.ended = FAILED
                found.notes.append(f"the experiments ended early: {failed}")
                return
            took_s = time.monotonic() - turn
            if _rounds(found) > done:
                self.start_s = max((took_s - self.in_steps_s) / self._runs_per_round, 0.1)
            missing = max(REPETITIONS[0] - _rounds(found), 0)
            if len(found.refused) > before and not found.rungs["everything"]:
                continue  # the round was discarded
            plan = self._next(plan, took_s, missing)
        if _rounds(found) < REPETITIONS[0]:
            found.ended = OUT_OF_TIME

    def _next(self, plan: Plan, took_s: float, missing: int) -> Plan | None:
        left_s = self.runner.deadline.left_s
        if self.asked.steps:
            return plan if took_s <= left_s else None
        return next_plan(plan, took_s, left_s, self._cost(), missing, self.workers)

    def _cost(self) -> RoundCost:
        phases = sum(phase != LOADER for _, phases in self.runs for phase in phases)
        separate = sum(hypothesis.experiment.is_separate for hypothesis in self.hypotheses)
        starts_s = self._runs_per_round * self.start_s
        return RoundCost(starts_s, self.step_s, phases + separate)

    @property
    def _runs_per_round(self) -> int:
        return len(self.runs) + sum(
            hypothesis.experiment.is_separate for hypothesis in self.hypotheses
        )

    def _has(self, kind: tuple[bool, str]) -> bool:
        return any(kind == (alone, phase) for alone, phases in self.runs for phase in phases)

    def _short_notes(self, found: Ladder) -> list[str]:
        """Return notes on rounds or steps that are fewer than they should be."""
        rounds = _rounds(found)
        minutes = f"--minutes {self.asked.minutes:g}"
        if found.ended == INTERRUPTED:
            return [f"interrupted: the figures are of {counted(rounds, 'round')}"]
        if found.ended == OUT_OF_TIME:
            round_s = self._cost().duration_s(LEAST_STEPS + self.asked.warming)
            needed = (REPETITIONS[0] * round_s + self.start_s) / MINUTE_S
            return [
                f"{minutes} was enough for {counted(rounds, 'round')} of experiments, and "
                f"{REPETITIONS[0]} are needed to tell what is noise. HINT: --minutes "
                f"{max(math.ceil(1.2 * needed), math.ceil(self.asked.minutes + 0.1))}"
            ]
        if self.asked.steps or found.notes or found.steps >= LEAST_STEPS:
            return []
        more = (LEAST_STEPS + self.asked.warming) / (found.steps + found.warm)
        return [
            f"steps are too long for {minutes}: each run measured only {found.steps}, and the "
            "figures are less precise. HINT: --minutes "
            f"{math.ceil(more * found.seconds / MINUTE_S)}"
        ]

    def _fitted(self, plan: Plan | None, ended: EndedError, found: Ladder) -> Plan:
        """Return a plan that fits into a script that ends early.

        If not even short phases fit into one run, each phase gets a run of its own.
        """
        assert plan is not None
        fits = fit_into_script(plan, ended.done, self._most_phases())
        if fits is None and self._most_phases() > 1:
            self.runs = [
                (alone, part) for alone, phases in self.runs for part in split_phases(phases)
            ]
            fits = fit_into_script(plan, ended.done, 1)
            if plan.warm + plan.steps <= ended.done:
                fits = plan
        if fits is None:
            raise ended
        found.notes = [
            f"the script ends after {counted(ended.done, 'step')}: each experiment measures only "
            f"{fits.steps}. HINT: let the script train longer for more precise figures"
        ]
        found.keep_rounds(0)
        found.savings.clear()
        return fits

    def _most_phases(self) -> int:
        return max(sum(phase != LOADER for phase in phases) for _, phases in self.runs)

    def _run_round(self, found: Ladder, plan: Plan) -> None:
        """Run every rung once, with one rank and with all ranks.

        A rung that fails is left out from now on, and the results of this run are discarded.

        Raises:
            OutOfTimeError, InterruptedTrialError: The round was ended early. Its results are kept
                if there is no other round.
        """
        count = _rounds(found)
        self.in_steps_s = 0.0
        for alone, phases in self.runs:
            left = tuple(phase for phase in phases if rung_name(alone, phase) not in found.refused)
            if not left:
                continue
            rung = Rung(plan.warm, plan.steps, left)
            limit_s = self._limit_s(rung)
            try:
                run = self.runner.run(alone, rung, limit_s=limit_s)
                self.in_steps_s += steps_s(run)
            except FailedError as failed:
                if not alone and self._will_repeat(found, count, failed):
                    return
                self._refuse(found, count, rung, alone, failed.steps, failed)
                if alone:
                    continue
                return
            except (OutOfTimeError, InterruptedTrialError) as early:
                if isinstance(early, OutOfTimeError) and self.runner.deadline.left_s:
                    slow = FailedError(f"it took longer than {limit_s:.0f} s", 0, "too slow")
                    done = done_steps(early.run) if early.run is not None else 0
                    self._refuse(found, count, rung, alone, done, slow)
                    if alone:
                        continue
                    return
                self._use_part(found, count, rung, alone, early.run)
                raise
            for phase in left:
                if phase != LOADER:
                    self._measure(found, run, rung, alone, phase)
            if not alone and EVERYTHING in left:
                found.run, found.warm, found.steps = run, plan.warm, plan.steps
                first = rung.first_measured_step(EVERYTHING)
                found.rounds.append((run, (first, first + plan.steps)))
            found.loader = (loader_totals(run) if not alone else None) or found.loader
        for tested in self.hypotheses:
            if tested.experiment.is_separate and tested.experiment.rung not in found.refused:
                self._test(tested, found, plan)

    def _limit_s(self, rung: Rung) -> float:
        """Return the time after which a run counts as failed."""
        steps = len(rung.phases) * (rung.warm + rung.steps)
        return run_limit_s(self.start_s + steps * self.step_s)

    def _test(self, tested: Hypothesis, found: Ladder, plan: Plan) -> None:
        """Test a hypothesis in a run of its own; one that cannot be tested is left out.

        Raises:
            OutOfTimeError, InterruptedTrialError: The run was ended early.
        """
        experiment = tested.experiment
        rung = Rung(plan.warm, plan.steps, (experiment.phase,))
        limit_s = self._limit_s(rung)
        named = f"{counted(plan.steps, 'step')} of {experiment.rung}"
        try:
            run = self.runner.run(
                False, rung, settings=dict(experiment.settings), named=named, limit_s=limit_s
            )
            self.in_steps_s += steps_s(run)
            why = tested.why_void(run)
        except FailedError as failed:
            why = str(failed)
        except OutOfTimeError:
            if not self.runner.deadline.left_s:
                raise
            why = f"it took longer than {limit_s:.0f} s"
        if why:
            found.refused[experiment.rung] = why
            found.drop(experiment)
        else:
            found.add(experiment, *tested.measure(run, rung))

    def _measure(self, found: Ladder, run: Run, rung: Rung, alone: bool, phase: str) -> None:
        if phase in SWITCHED:
            tested = next(
                hypothesis for hypothesis in self.hypotheses if hypothesis.experiment.phase == phase
            )
            if why := tested.why_void(run):
                found.refused[tested.experiment.rung] = why
                found.drop(tested.experiment)
            else:
                found.add(tested.experiment, *tested.measure(run, rung))
            return
        taken = measure_rung(run, rung.first_measured_step(phase), rung.steps, phase)
        found.rungs[rung_name(alone, phase)].append(taken)

    def _will_repeat(self, found: Ladder, count: int, failed: FailedError) -> bool:
        """Return whether the round is run again, and discard what it measured so far.

        One run of a diagnosis may fail by chance.
        """
        if self.has_repeated:
            return False
        self.has_repeated = True
        found.keep_rounds(count)
        found.notes.append(f"a run failed, and was repeated: {failed}")
        return True

    def _refuse(
        self, found: Ladder, count: int, rung: Rung, alone: bool, steps: int, failed: FailedError
    ) -> None:
        """Leave out the rung that failed, and those after it, and discard this round.

        If one rank alone fails, only its part of the round is discarded.
        """
        number = min(rung.phase_index(steps), len(rung.phases) - 1)
        found.keep_rounds(count, alone)
        if rung_name(alone, rung.phases[number]) == "everything":
            raise failed
        found.refused |= {rung_name(alone, phase): str(failed) for phase in rung.phases[number:]}
        for tested in self.hypotheses:
            if tested.experiment.rung in found.refused:
                found.drop(tested.experiment)

    def _use_part(
        self, found: Ladder, count: int, rung: Rung, alone: bool, run: Run | None
    ) -> None:
        """Keep what an unfinished round has measured, if there is no complete round."""
        if count:
            return
        for phase in rung.phases if run is not None and not run.missing else ():
            assert run is not None
            try:
                self._measure(found, run, rung, alone, phase)
            except (EndedError, KeyError):  # the run was ended before this phase was over
                break
            if not alone and phase == EVERYTHING:
                found.run, found.warm, found.steps = run, rung.warm, rung.steps

    def _adapt_to_script(self, run: Run, steps: tuple[int, int]) -> None:
        """Adapt later runs to what the first run shows of the script.

        A single rank computes with as many threads as one of several ranks, and rungs that only
        some scripts need are added.
        """
        self.runner.use_threads_of(run)
        facts = [record.meta.get("rung", {}) for record in run.records]
        self.workers = max(rank_facts.get("workers", 0) for rank_facts in facts)
        broadcasts = self.parts.compute(
            "broadcasts of buffers", lambda: broadcast_share(run, steps), 0.0
        )
        self.hypotheses = hypotheses(FirstRun(facts, broadcasts))
        within = [
            hypothesis.experiment
            for hypothesis in self.hypotheses
            if not hypothesis.experiment.is_separate
        ]
        single, switched = (
            [experiment.phase for experiment in within if experiment.is_alone == is_alone]
            for is_alone in (True, False)
        )
        threads = (
            [ONE_THREAD] if any(rank_facts.get("threads", 1) > 1 for rank_facts in facts) else []
        )
        together = (EVERYTHING, *switched, CACHED, SILENT, *threads, LOADER)
        self.runs = [(False, together), (True, (EVERYTHING, CACHED, *single))]


def _rounds(found: Ladder) -> int:
    return len(found.rungs["everything"])
