"""``paceline diagnose``: run the ladder, compare it with the record, propose and try remedies."""

import functools
import json
import os
import re
import socket
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from ...analyze.diagnosis.causes import (
    causes,
    operator_causes,
    ranked,
    split_usual,
    unconfirmed_causes,
    witnesses,
)
from ...analyze.diagnosis.diagnosis import Diagnosis, PredictionError, Trial, TrialResults
from ...analyze.diagnosis.evidence import Evidence
from ...analyze.diagnosis.exchanged_calls import measure_exchanged_calls, measure_gradient_sync
from ...analyze.diagnosis.ladder_results import Ladder
from ...analyze.diagnosis.lateness import computing_spread, lateness
from ...analyze.diagnosis.line_profile import LineProfile, profile_of_runs
from ...analyze.diagnosis.operator_profile import combine_profiles, profile_notes
from ...analyze.diagnosis.rules.failed_parts import FailedParts
from ...analyze.diagnosis.rules.operators import findings
from ...analyze.diagnosis.rungs import RungResult, Waterfall, waterfall
from ...analyze.figures.losses import lines_in
from ...analyze.figures.measured_window import MeasuredWindow
from ...analyze.figures.report import Report, RunAnalysis, analyse_with_window
from ...analyze.figures.sharded_blocks import sharded_model
from ...analyze.figures.step_work import Roofline, on_roofline
from ...analyze.records.state_timeline import STATES
from ...cost.machine.machine_file import Machine
from ...knobs.settings import Setting, write_settings
from ...plurals import counted, named_ranks
from ...predict.remedies import read_script, remedies
from ...record.ring.header_schema import FiniteFloat
from ...report.diagnosis.intervals import format_gain
from ...report.numbers import percent
from ...security.files import InvalidFileError, error_reason, open_regular, read_regular
from ...security.schema import parse_json
from ..script_runs.run_process import MINUTE_S, Deadline
from .ladder import climb_ladder
from .run_script import OutOfTimeError, RunRequest
from .try_remedies import ALL, confirm_kept, select_remedies, try_remedies

# Notes on containers of the script that grow in each step and keep tensors.

MAX_CODE_CHARS = 80


def growing_notes(records: Sequence[Any], source: str) -> list[str]:
    """Return a note for each container that grows, with the line that fills it.

    source: Source code of the script.
    """
    found: dict[str, tuple[dict[str, Any], list[int]]] = {}
    for record in records:
        for container in record.meta.get("rung", {}).get("growing", []):
            found.setdefault(container["name"], (container, []))[1].append(record.rank)
    return [_note(one, ranks, len(records), source) for one, ranks in found.values()]


def _note(container: dict[str, Any], ranks: list[int], size: int, source: str) -> str:
    on = "" if len(ranks) == size else f" of {named_ranks(ranks)}"
    added = counted(container["elements"], "element")
    place = _line_that_fills(container["name"], source)
    text = f"the {container['kind']} {container['name']}{on} grows by {added} in each step{place}"
    kib = f"{container['bytes'] / 1024:,.0f} KiB"
    if container["graphs"]:
        hint = "append loss.item() or tensor.detach(), or clear it in each step"
        return f"{text} and keeps tensors with their graphs: memory grows. HINT: {hint}"
    hint = "limit its length (collections.deque(maxlen=N)), or clear it"
    return f"{text} and keeps {kib} of tensors per step: memory grows. HINT: {hint}"


def _line_that_fills(name: str, source: str) -> str:
    """Return the first line that adds to the container, in parentheses; "" if there is none."""
    variable = re.escape(name.partition(" in ")[0].rpartition(".")[2])
    adds = rf"\b{variable}(\.(append|appendleft|add|extend|insert|update|setdefault)\(|"
    adds += r"\s*\+=|\[[^\]]*\]\s*=(?!=))"
    for number, line in enumerate(source.splitlines(), 1):
        if re.search(adds, line):
            return f" (line {number}: {line.strip()[:MAX_CODE_CHARS]})"
    return ""


# Predicted and measured gains of this user, to know and show the prediction error.
#
# They are stored as lines of JSON in ``$XDG_STATE_HOME/paceline/predictions.jsonl`` (default:
# ``~/.local/state``).

MAX_PREDICTIONS_BYTES = 16 << 20  # about 50,000 lines
MIN_PAIRS = 3  # minimum number of pairs for an error estimate of one kind


@dataclass(frozen=True)
class PredictedGain:
    """Predicted and measured gain of one trial.

    Attributes:
        date: Date of the trial.
        script: Training script.
        knob: Name of the knob.
        source: Kind of the prediction.
        predicted: Predicted gain, as a share of the throughput.
        low: Lower end of the predicted interval.
        high: Upper end of the predicted interval.
        measured: Measured gain, as a share of the throughput.
    """

    date: str
    script: str
    knob: str
    source: str
    predicted: FiniteFloat
    low: FiniteFloat
    high: FiniteFloat
    measured: FiniteFloat


def predictions_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "paceline" / "predictions.jsonl"


def predicted_gains(script: str, trials: Sequence[Trial]) -> Iterator[PredictedGain]:
    """Yield each prediction of the trials whose gain was measured, with that gain."""
    name, date = Path(script).name, datetime.now(UTC).isoformat(timespec="seconds")
    for trial in trials:
        for source, gain in ((trial.remedy.source, trial.first), (trial.source, trial.predicted)):
            if gain is not None and trial.gain is not None:
                knob, measured = trial.remedy.knob, trial.gain.mean
                yield PredictedGain(
                    date, name, knob, source, gain.mean, gain.low, gain.high, measured
                )


def store_predictions(pairs: Iterable[PredictedGain]) -> str:
    """Append predictions to the file; return the reason if that failed, else ""."""
    file = predictions_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(open_regular(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "a") as stream:
            stream.writelines(json.dumps(asdict(pair)) + "\n" for pair in pairs)
    except OSError as error:
        return f"{file}: {error_reason(error)}: these predictions are not remembered"
    return ""


def prediction_errors() -> dict[str, PredictionError]:
    """Return the prediction error by kind (source), for kinds with at least MIN_PAIRS pairs."""
    each: dict[str, list[float]] = {}
    for pair in _stored_predictions():
        each.setdefault(pair.source, []).append(100 * abs(pair.measured - pair.predicted))
    return {
        source: PredictionError(statistics.median(points), len(points))
        for source, points in each.items()
        if len(points) >= MIN_PAIRS
    }


def _stored_predictions() -> list[PredictedGain]:
    try:
        lines = read_regular(predictions_file(), MAX_PREDICTIONS_BYTES).splitlines()
    except (OSError, InvalidFileError):
        return []
    found = []
    for line in lines:
        try:
            found.append(parse_json(line, PredictedGain, predictions_file()))
        except InvalidFileError:  # a truncated line, or one of another version
            continue
    return found


# The diagnosis, and the trials of remedies after it.

LINES = ("other", "wait", "transfer", "useful")  # states for which lines of the script are evidence
REPORT_S, REPORT_SHARE = 3.0, 0.05  # time for the report at the end, the smaller of both
# With --try, everything together takes at most this factor of the requested minutes.
TRY_BUDGET_FACTOR = 1.5
LADDER_SHARE = 0.5  # of that time, for the first diagnosis
TRIALS_SHARE = 0.6  # of the time left, for each pass of trials; a new diagnosis gets the rest
NAMED_SHARE = 0.8  # the same, where only the named remedies are tried: one pass
CONFIRM_SHARE = 0.2  # of the time of all trials, for all kept remedies together
PASSES = 2  # of --try all: remedies that helped can reveal other causes
LATE = 1  # additional pass for promising remedies that the time budget did not allow before
MAX_SPREAD = 0.15  # standard deviation of the rounds' step times over their median; more is noise


T = TypeVar("T")


def total_deadline(minutes: float, tries: bool) -> Deadline:
    """Return the deadline of a diagnosis that begins now, with or without trials of remedies."""
    seconds = MINUTE_S * minutes * (TRY_BUDGET_FACTOR if tries else 1.0)
    return Deadline.after(seconds - min(REPORT_S, REPORT_SHARE * seconds))


def run_diagnosis(
    asked: RunRequest, say: Callable[[str], None], machine: Machine | None = None
) -> Diagnosis:
    """Run the ladder and diagnose the script.

    Raises:
        ValueError: The script cannot be measured.
    """
    asked = replace(asked, deadline=asked.deadline or total_deadline(asked.minutes, False))
    ladder = climb_ladder(replace(asked, count=machine is not None), say)
    last = analyse_with_window(ladder.run, (ladder.warm, ladder.warm + ladder.steps))
    examined = last
    if all(record.on_gpu for record in ladder.first.records):  # only this run samples kernels
        examined = analyse_with_window(ladder.first)
    report = examined.report
    rungs = ladder.rungs
    notes = [*ladder.notes, *_refused(ladder), *_unseen(rungs), *_noisy_rounds(rungs)]
    notes += growing_notes(ladder.first.records, read_script(asked.script))
    roofline = _roofline(ladder, report, machine) if machine is not None else None
    parts = FailedParts()
    lines = parts.compute("lines of the script", lambda: _line_profile(ladder, last), None)
    operators = combine_profiles(ladder.operators.files, ladder.operators.notes)
    if operators is None:
        reasons = profile_notes(ladder.operators.files, ladder.operators.notes)
        notes += [f"inside the model: {reason}" for reason in reasons]
    diagnosis = Diagnosis(
        [asked.script, *asked.args],
        ladder,
        report,
        notes=notes,
        roofline=roofline,
        lines=lines,
        options=asked.typed_options,
        operators=operators,
        minutes=asked.minutes,
    )
    if not (rungs["silent"] and rungs["cached"] and rungs["everything"]):
        return diagnosis
    return _with_causes(asked, diagnosis, examined.measured, parts)


def _with_causes(
    asked: RunRequest, diagnosis: Diagnosis, measured: MeasuredWindow | None, parts: FailedParts
) -> Diagnosis:
    """Return the diagnosis with the causes of lost time, and remedies.

    Args:
        measured: Window of the run that the report is of.
        parts: Receives what could not be computed.
    """
    ladder, operators = diagnosis.ladder, diagnosis.operators
    bounds = [ladder.rungs[name] for name in ("alone", "silent", "cached", "everything")]
    count = min(len(results) for results in bounds if results)  # a later round may lack a rung
    fall = waterfall(*(results[:count] for results in bounds))
    evidence = _evidence(ladder, diagnosis.report, measured, fall, diagnosis.lines, parts)
    seen = parts.compute("the causes", lambda: witnesses(evidence), [])
    found = causes(evidence, parts)
    if operators is not None:
        within = parts.compute(
            "findings inside the model", lambda: operator_causes(findings(operators), found), []
        )
        found = ranked([*found, *within])
    caused, usual = split_usual(found)
    source = read_script(asked.script)
    proposed = parts.compute(
        "the remedies", lambda: remedies(evidence, found, source, asked.settings), []
    )
    unconfirmed = unconfirmed_causes(evidence, parts)
    return replace(
        diagnosis,
        waterfall=evidence.waterfall,
        witnesses=[witness for witness in seen if witness.ladder is not None or witness.record],
        causes=caused,
        notes=[*diagnosis.notes, *parts.notes],
        remedies=proposed,
        usual=usual,
        unconfirmed=unconfirmed,
        off=prediction_errors(),
    )


def try_all(
    asked: RunRequest,
    found: Diagnosis,
    names: list[str],
    say: Callable[[str], None],
    update: Callable[[Diagnosis], None] = lambda _: None,
) -> Diagnosis:
    """Try remedies, and diagnose the script again with those that helped.

    Args:
        asked: The request, whose deadline is that of all trials.
        found: The diagnosis before the trials.
        names: Names of knobs, or "all": remedies that only the new diagnosis proposes are then
            tried, too.
        say: Receives what happens now.
        update: Receives the diagnosis after each trial.

    Returns:
        The diagnosis with all results, also if the user interrupts the trials or the time is over.
    """
    deadline = asked.deadline or total_deadline(asked.minutes, True).part(1 - LADDER_SHARE)
    asked = replace(asked, deadline=deadline)
    result, notes = TrialResults(kept=dict(asked.settings)), list(found.notes)
    diagnoses: list[Diagnosis] = []
    reported = 0

    def say_and_update(text: str) -> None:
        nonlocal reported
        if len(result.trials) != reported:
            reported = len(result.trials)
            update(replace(found, tried=result))
        say(text)

    try:
        # extend() keeps the diagnoses that were yielded before an exception.
        diagnoses.extend(_passes(asked, found, names, result, say_and_update))
        remark = confirm_kept(asked, found.ladder.steps, result, say_and_update)
        notes += [remark] if remark else []
    except KeyboardInterrupt:
        notes.append("the trials were interrupted, and not all remedies were tried")
    except OutOfTimeError as late:
        notes.append(f"the script was not diagnosed again with the kept settings: {late}")
    except ValueError as mistake:
        notes.append(f"with the kept settings the script could not be diagnosed again: {mistake}")
    failure = store_predictions(predicted_gains(asked.script, result.trials))
    notes += [failure] if failure else []
    measured = {trial.remedy.knob for trial in result.trials if trial.gain is not None}
    last = None
    if diagnoses and result.kept != asked.settings:
        left = [remedy for remedy in diagnoses[-1].remedies if remedy.knob not in measured]
        last = replace(diagnoses[-1], remedies=left)
    return replace(found, tried=result, after=last, notes=notes, off=prediction_errors())


def _passes(
    asked: RunRequest,
    found: Diagnosis,
    names: list[str],
    result: TrialResults,
    say: Callable[[str], None],
) -> Iterator[Diagnosis]:
    """Add trials to ``result``, and yield a new diagnosis after each pass that kept a remedy."""
    wanted = select_remedies(names, found.remedies)
    assert asked.deadline is not None
    deadline = asked.deadline.part(1 - CONFIRM_SHARE)
    for at in range(PASSES + LATE):
        share = TRIALS_SHARE if ALL in names else NAMED_SHARE
        asked = replace(asked, deadline=deadline.part(share))
        before, retried = dict(result.kept), {remedy.knob for remedy in wanted}
        result.trials = [trial for trial in result.trials if trial.remedy.knob not in retried]
        try_remedies(asked, found.ladder.steps, wanted, result, say, found.ladder.run_s)
        if result.kept == before:
            return
        again = replace(asked, settings=dict(result.kept), deadline=deadline.part(TRIALS_SHARE))
        after = run_diagnosis(again, say)
        yield after
        late = {trial.remedy.knob for trial in result.trials if trial.late}
        proposed = select_remedies([ALL], after.remedies) if ALL in names else []
        wanted = [remedy for remedy in proposed if remedy.knob not in result.decided]
        if at + 1 >= PASSES:
            wanted = [
                remedy
                for remedy in wanted
                if remedy.knob in late and remedy.gain and remedy.gain.mean > 0
            ]
        if not wanted:
            return


def _roofline(ladder: Ladder, report: Report, machine: Machine) -> Roofline | None:
    """Return the FLOPs that the first run counted, at the step time of the last run."""
    times, found = report.step_times, report.efficiencies
    useful = found.useful if found is not None else None
    return on_roofline(ladder.first.records, machine, times.median_s if times else None, useful)


def _line_profile(ladder: Ladder, last: RunAnalysis) -> LineProfile | None:
    """Return the line profile of all rounds. ``last``: the analysis of the last round."""
    runs = [analyse_with_window(run, steps) for run, steps in ladder.rounds[:-1]]
    windows = [run.measured for run in (*runs, last) if run.measured is not None]
    step_s = [rung.step_s for rung in ladder.rungs["everything"]]
    return profile_of_runs(windows, statistics.fmean(step_s) if step_s else 0.0)


def _evidence(
    ladder: Ladder,
    report: Report,
    measured: MeasuredWindow | None,
    found: Waterfall,
    profile: LineProfile | None,
    parts: FailedParts,
) -> Evidence:
    facts = ladder.facts

    def of_window(part: str, measure: Callable[[MeasuredWindow], T], default: T) -> T:
        if measured is None:
            return default
        return parts.compute(part, functools.partial(measure, measured), default)

    def lines_of(state: str, window: MeasuredWindow) -> list[dict[str, object]]:
        return lines_in(window.records, window.timelines, STATES.index(state))

    return Evidence(
        waterfall=found,
        report=report,
        loader=ladder.loader,
        threads=facts[0].get("threads", report.places[0].threads),
        cores=_cores(report, facts),
        per_host=max(report.hosts.count(host) for host in set(report.hosts)),
        steps=ladder.steps,
        rungs=ladder.rungs,
        savings=ladder.savings,
        facts=facts,
        gradients=of_window("gradient synchronization", measure_gradient_sync, None),
        lines={
            state: of_window(f"lines of {state}", functools.partial(lines_of, state), [])
            for state in (LINES if measured is not None else ())
        },
        exchanged=of_window("calls of collectives", measure_exchanged_calls, []),
        sharded=parts.compute(
            "sharded blocks", lambda: sharded_model(report.blocks, ladder.run.records), None
        ),
        rank_spread=of_window("differences between ranks", computing_spread, None),
        line_profile=profile,
        describe_lateness=lambda rank: lateness(measured, rank) if measured is not None else "",
        rare_losses=ladder.survey.losses if ladder.survey is not None else None,
    )


def _refused(ladder: Ladder) -> list[str]:
    """Return notes on the rungs that could not be run, one for each reason."""
    found: dict[str, list[str]] = {}
    for rung, why in ladder.refused.items():
        found.setdefault(why, []).append(rung)
    notes = [f"experiments left out ({', '.join(rungs)}): {why}" for why, rungs in found.items()]
    if "alone" in ladder.refused:
        notes.append(
            "one rank alone could not be run (it may need more memory than one of several ranks): "
            "the ideal is the rate of all ranks at the pace of the fastest, without communication "
            "and input"
        )
    return notes


def _noisy_rounds(rungs: dict[str, list[RungResult]]) -> list[str]:
    """Return a note if the step times of the rounds differ by much."""
    times = [rung.step_s for rung in rungs["everything"]]
    if len(times) < 2:
        return []
    # Not the range, which grows with the number of rounds.
    if statistics.stdev(times) < MAX_SPREAD * statistics.median(times):
        return []
    return [
        f"step times of different rounds are {1e3 * min(times):.3g} to {1e3 * max(times):.3g} ms, "
        "and all figures are uncertain by as much. HINT: end other programs on the nodes, bind the "
        "ranks (--bind core), or increase --minutes"
    ]


def _unseen(rungs: dict[str, list[RungResult]]) -> list[str]:
    """Return notes on what could not be switched off in this script."""
    found = []
    if any(not rung.cached for rung in rungs["cached"]):
        found.append(
            "the script uses no torch DataLoader whose batches could be cached in memory: only the "
            "record shows the share of the input"
        )
    if any(not rung.silent for rung in rungs["silent"]):
        found.append("the script uses no process group: there is no communication to switch off")
    return found


def _cores(report: Report, facts: list[dict[str, Any]]) -> int | None:
    """Return the number of hardware threads that the first host's ranks together may use."""
    together = 0
    for host, rank_facts in zip(report.hosts, facts, strict=False):
        if host == report.hosts[0]:
            together |= int(rank_facts.get("mask") or "0", 16)
    return together.bit_count() or None


# Save the settings that ``paceline diagnose --try`` kept, for ``paceline run --settings``.


def save_kept_settings(found: Diagnosis, path: Path) -> str:
    """Write the settings that were kept, and return a message for the user.

    No file is written if no setting was kept.
    """
    assert found.tried is not None
    kept = found.tried.kept
    if not kept:
        return f"no remedy was kept, so {path} is not written"
    settings = {
        name: Setting(value, _why(found, found.tried, name)) for name, value in kept.items()
    }
    write_settings(
        path,
        settings,
        {
            "script": Path(found.command[0]).name,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "host": socket.gethostname(),
            "cores": os.cpu_count() or 0,
            "ranks": found.report.size,
            "torch": version("torch"),
        },
    )
    return f"the kept settings are in {path}; apply them with paceline run --settings {path} ..."


def _why(found: Diagnosis, tried: TrialResults, name: str) -> tuple[str, ...]:
    trial = next((trial for trial in tried.trials if trial.remedy.knob == name), None)
    if trial is None:
        return ("set before the trials",)
    cause = next((cause for cause in found.causes if cause.id == trial.remedy.cause), None)
    if cause is not None:
        why = [f"{cause.id}: {percent(cause.share)} of a step's time"]
    else:  # the cause was found in a later pass, or the remedy was requested without a cause
        why = [f"{trial.remedy.cause}, found with the settings that were kept before"] * bool(
            trial.remedy.cause
        )
    foreseen = f"predicted {format_gain(trial.predicted)} from {trial.source}, "
    measured = f"measured {format_gain(trial.gain)} of the throughput"
    return (*why, (foreseen if trial.predicted is not None else "") + measured)
