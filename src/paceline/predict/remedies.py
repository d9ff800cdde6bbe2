"""Select the knobs that address each cause, each with its predicted gain."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..analyze.diagnosis.causes import Cause
from ..analyze.diagnosis.confirmation import NOT_TESTABLE, RECORD
from ..analyze.diagnosis.diagnosis import Remedy
from ..analyze.diagnosis.evidence import Evidence
from ..analyze.diagnosis.rules.script import off_core_share
from ..analyze.diagnosis.rungs import Interval, Waterfall
from ..analyze.diagnosis.table import CAUSES
from ..analyze.figures.report import Report, analyse
from ..analyze.records.load_run import load_run
from ..analyze.scaling.bends import Bend, GrownLoss, Proposal
from ..analyze.scaling.costs import SizeCosts
from ..analyze.scaling.forecast import analyse_kind
from ..analyze.scaling.study_folder import RECORD_FOLDER
from ..analyze.scaling.study_model import ScalingStudy
from ..knobs.registry import COMPUTING, KNOBS, Knob
from ..security.files import read_regular
from .gains import predict_saving

MAX_SOURCE_BYTES = 4 << 20  # of a script
MIN_SAVING = 0.01  # share of a step: smaller savings are not proposed
MAX_SAVING = 0.95  # share of a step: larger savings are not credible and are clipped
MIN_UNCERTAINTY = 0.2  # minimum relative uncertainty of a gain: error of narrower predictions
MIN_COMPUTING_SHARE = 0.5  # of a step: with less, faster computing is not proposed
MAX_CAUSE_SHARE = 0.2  # a larger cause comes before faster computing
MAX_OF_CAUSE = 4  # remedies of one cause, of those that Paceline can set and of the edits each


def read_script(script: str | Path) -> str:
    """Return the source of a training script; "" if it is a module's name or cannot be read."""
    try:
        return read_regular(script, MAX_SOURCE_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return ""


def remedies(
    e: Evidence, causes: Sequence[Cause], script: str, known: Mapping[str, Any]
) -> list[Remedy]:
    """Return the remedies, those that Paceline can set first, then by gain over effort.

    Args:
        script: Source code of the training script.
        known: Values of the knobs that are already set.
    """
    found = [
        remedy
        for cause in (*causes, *_computing(e, causes))
        for name, knob in KNOBS.items()
        if cause.id in knob.answers and (remedy := _remedy(name, knob, e, cause, script))
        if known.get(name) != remedy.value
    ]
    best: dict[str, Remedy] = {}
    for remedy in found:  # one knob may address several causes
        other = best.get(remedy.knob)
        if other is None or _sort_key(remedy) > _sort_key(other):
            best[remedy.knob] = remedy
    ranked = sorted(best.values(), key=lambda remedy: (not remedy.settable, -_sort_key(remedy)))
    counts: Counter[tuple[str, bool]] = Counter()
    shown = []
    for remedy in ranked:
        kind = (remedy.cause, remedy.settable)
        counts[kind] += 1
        if counts[kind] <= MAX_OF_CAUSE:
            shown.append(remedy)
    return shown


def _computing(e: Evidence, causes: Sequence[Cause]) -> list[Cause]:
    """Return computing as a pseudo-cause, if it is most of a step and no cause is large.

    Time in which a rank computes nothing is left out: that in which it uses no core, and that of
    the causes that lie within the useful time.
    """
    within = sum(cause.share for cause in causes if CAUSES[cause.id].is_in_useful)
    share = e.useful_share - off_core_share(e) - within
    largest = max((cause.share for cause in causes), default=0.0)
    if share < MIN_COMPUTING_SHARE or largest >= MAX_CAUSE_SHARE:
        return []
    return [Cause(COMPUTING, share, (share, share), "", {})]


def _sort_key(remedy: Remedy) -> float:
    """Return the mean gain over the effort; remedies that must be measured come last."""
    effort = KNOBS[remedy.knob].effort + remedy.numbers
    return remedy.gain.mean / effort if remedy.gain is not None else 0.0


def gain_of(saves: Interval) -> Interval:
    """Convert a saved share s of the step time to a gain of the throughput: s / (1 - s)."""
    mean, low, high = (min(share, MAX_SAVING) for share in (saves.mean, saves.low, saves.high))
    return Interval(mean / (1 - mean), low / (1 - low), high / (1 - high))


def _widen(gain: Interval) -> Interval:
    """Widen an interval to MIN_UNCERTAINTY: conclusions are less certain than measurements."""
    least = MIN_UNCERTAINTY * abs(gain.mean)
    low, high = min(gain.low, gain.mean - least), max(gain.high, gain.mean + least)
    return Interval(gain.mean, low, high)


def gain_after(gain: Interval, faster: float) -> Interval:
    """Return the gain for a step that is already ``faster`` times as fast.

    The remedy still saves the same number of seconds.
    """
    if faster == 1:
        return gain
    # Saved shares of the original step.
    each = (value / (1 + value) for value in (gain.mean, gain.low, gain.high))
    mean, low, high = (min(one * faster, MAX_SAVING) for one in each)
    return gain_of(Interval(mean, low, high))


def _remedy(name: str, knob: Knob, e: Evidence, cause: Cause, script: str) -> Remedy | None:
    saving = predict_saving(name, e, cause)
    if saving is None or (saving.saves is not None and saving.saves.mean < MIN_SAVING):
        return None
    gain = _widen(gain_of(saving.saves)) if saving.saves is not None else None
    line, code = _line(knob, cause, script)
    edit = knob.edit.format(value=saving.value)
    return Remedy(
        name,
        cause.id,
        saving.value,
        gain,
        saving.source,
        bool(knob.hook),
        edit,
        line,
        code,
        knob.numbers,
        knob.costs,
    )


def _line(knob: Knob, cause: Cause, script: str) -> tuple[int | None, str]:
    """Find the line to edit: one that the record contains, else the only one that matches."""
    seen = cause.evidence.get("lines") or []
    if seen and not knob.hook and not knob.is_edited_elsewhere:
        return int(seen[0]["line"]), str(seen[0]["code"])
    if not knob.looks_for:
        return None, ""
    lines = enumerate(script.splitlines(), 1)
    fits = [(at, line.strip()) for at, line in lines if re.search(knob.looks_for, line)]
    fits = [fit for fit in fits if not fit[1].startswith(("#", "import ", "from "))]
    return fits[0] if len(fits) == 1 or (fits and knob.hook) else (None, "")


# Remedies for what bends a scaling curve, and their predicted gain at the larger size.
#
# They are those of ``paceline diagnose`` for the same causes. It would measure them with
# experiments; here the record of the larger size is the only evidence, so more of the gains are
# unknown until they are tried.

MIN_STEP_SHARE = 0.02  # of a step at the larger size: for less, nothing is proposed


def propose(bend: Bend, costs: SizeCosts, report: Report, script: str = "") -> list[Proposal]:
    """Return remedies for the losses that grew, of the largest loss first.

    Args:
        bend: The step to the larger size.
        costs: Of the larger size.
        report: Of a run of the larger size.
        script: Source code of the training script.
    """
    grown = {loss.cause: loss for loss in bend.losses if loss.step_share >= MIN_STEP_SHARE}
    if not bend.real or not grown:
        return []
    evidence = _evidence(costs, report)
    causes = [_cause(loss) for loss in grown.values()]
    found = [remedy for remedy in remedies(evidence, causes, script, {}) if remedy.cause in grown]
    order = list(grown)
    found.sort(key=lambda remedy: order.index(remedy.cause))
    return [_proposal(remedy, grown[remedy.cause]) for remedy in found]


def _evidence(costs: SizeCosts, report: Report) -> Evidence:
    """Return what the record of one run shows, without a ladder."""
    one = Interval(1.0, 1.0, 1.0)
    on_gpu = any((place.device or "cpu").startswith("cuda") for place in report.places)
    return Evidence(
        waterfall=Waterfall(one, one, [], 0),
        report=report,
        loader=None,
        threads=costs.threads,
        cores=costs.cores,
        per_host=costs.per_host,
        steps=report.steps,
        facts=[{"gpu": on_gpu}],
    )


def _cause(loss: GrownLoss) -> Cause:
    share = min(loss.step_share, 1.0)
    found: dict[str, object] = {"calls_a_step": loss.calls} if loss.calls else {}
    return Cause(
        loss.cause,
        share,
        (share, share),
        loss.sentence,
        found,
        confirmed=NOT_TESTABLE,
        basis=RECORD,
    )


def _proposal(remedy: Remedy, loss: GrownLoss) -> Proposal:
    gain = remedy.gain
    return Proposal(
        cause=remedy.cause,
        knob=remedy.knob,
        edit=remedy.edit,
        settable=remedy.settable,
        line=remedy.line,
        gain=min(gain.mean, loss.gain) if gain is not None else None,
        at_most=loss.gain,
    )


def study_proposals(study: ScalingStudy, kind: str) -> dict[int, list[Proposal]]:
    """Return the remedies for each bend of a kind of scaling, by ranks of the larger size.

    They need the record of a run of the larger size; a size without one is left out.
    """
    analysis = analyse_kind(study, kind)
    if analysis is None:
        return {}
    script = read_script(Path(study.request.cwd) / study.request.script)
    costs = {size.ranks: size for size in analysis.costs}
    found = {}
    for bend in analysis.bends:
        (point,) = (point for point in study.of_kind(kind) if point.ranks == bend.larger)
        report = _report(Path(study.folder) / point.runs[0].folder / RECORD_FOLDER)
        if bend.main is not None and report is not None:
            found[bend.larger] = propose(bend, costs[bend.larger], report, script)
    return found


def _report(record: Path) -> Report | None:
    try:
        return analyse(load_run(record))
    except (ValueError, OSError):
        return None
