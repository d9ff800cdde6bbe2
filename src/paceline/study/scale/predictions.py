"""Predict sizes before they are measured, and store the predictions in the study's folder."""

from pathlib import Path

from ...analyze.scaling.forecast import predict_next
from ...analyze.scaling.study_folder import read_study, store_predictions
from ...analyze.scaling.study_model import Prediction, ScalingStudy, Setup

MIN_SIZES = 2  # measured ones of a kind, to predict another


def predict_setup(folder: Path, setup: Setup) -> list[Prediction]:
    """Predict a setup from smaller sizes, and store that, before its first run.

    Raises:
        OSError: The folder can't be written.
        ValueError: The study can't be read.
    """
    study = read_study(folder)
    kinds = {one.kind for one in study.points if one.setup == setup}
    found = [
        one
        for kind in sorted(kinds)
        if _measured(study, kind, setup.ranks) >= MIN_SIZES
        for one in predict_next(study, kind, [setup.ranks])
        if one.global_batch == setup.global_batch
    ]
    return _store(folder, study, found)


def predict_larger(folder: Path) -> list[Prediction]:
    """Predict the next two sizes of each kind, and store that. Raises as ``predict_setup``."""
    study = read_study(folder)
    found = [one for kind in study.request.kinds for one in predict_next(study, kind)]
    return _store(folder, study, found)


def _measured(study: ScalingStudy, kind: str, below: int) -> int:
    return sum(bool(point.figures) and point.ranks < below for point in study.of_kind(kind))


def _store(folder: Path, study: ScalingStudy, found: list[Prediction]) -> list[Prediction]:
    """Store the predictions that no earlier one from the same sizes replaces."""
    known = {(one.kind, one.ranks, one.model, tuple(one.sizes)) for one in study.predictions}
    new = [one for one in found if (one.kind, one.ranks, one.model, tuple(one.sizes)) not in known]
    if new:
        store_predictions(folder, new)
    return new
