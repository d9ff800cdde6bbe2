"""Propose remedies for what bends a scaling curve, and predict their gain at the larger size.

The remedies are those of ``paceline diagnose`` for the same causes. It would measure them with
experiments; here the record of the larger size is the only evidence, so more of the gains are
unknown until they are tried.
"""

from pathlib import Path

from ..analyze.diagnosis.causes import Cause
from ..analyze.diagnosis.confirmation import NOT_TESTABLE, RECORD
from ..analyze.diagnosis.diagnosis import Remedy
from ..analyze.diagnosis.evidence import Evidence
from ..analyze.diagnosis.rungs import Interval, Waterfall
from ..analyze.figures.report import Report, analyse
from ..analyze.records.load_run import load_run
from ..analyze.scaling.bends import Bend, GrownLoss, Proposal
from ..analyze.scaling.costs import SizeCosts
from ..analyze.scaling.forecast import analyse_kind
from ..analyze.scaling.study_folder import RECORD_FOLDER
from ..analyze.scaling.study_model import ScalingStudy
from .remedies import read_script, remedies

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
    found = [one for one in remedies(evidence, causes, script, {}) if one.cause in grown]
    order = list(grown)
    found.sort(key=lambda one: order.index(one.cause))
    return [_proposal(one, grown[one.cause]) for one in found]


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
        (point,) = (one for one in study.of_kind(kind) if one.ranks == bend.larger)
        report = _report(Path(study.folder) / point.runs[0].folder / RECORD_FOLDER)
        if bend.main is not None and report is not None:
            found[bend.larger] = propose(bend, costs[bend.larger], report, script)
    return found


def _report(record: Path) -> Report | None:
    try:
        return analyse(load_run(record))
    except (ValueError, OSError):
        return None
