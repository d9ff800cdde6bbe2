"""Metrics of a validation that Lightning logs with the value of each rank."""

import math
from collections.abc import Iterator

from ....record.training.facts.events import MetricFacts
from ....record.training.facts.ranks import RankFacts
from ....record.training.facts.samples import Phase
from ..mistakes import MISTAKES, Finding
from ..view import View, listed, unique

SAME = 1e-6  # relative difference of values that a script has combined itself


def logged_metric_of_one_rank(view: View) -> Iterator[Finding]:
    """Find metrics that are logged without ``sync_dist`` and differ between the ranks."""
    names = own_metrics(view)
    if not names:
        return
    first = names[0]
    values = [_values(one, first) for one in view.ranks]
    number = next(at for at, each in enumerate(zip(*values, strict=False)) if not _agree(each))
    logged = [one.line for one in _evaluated(view.ranks[0]) if one.name in names]
    printed = [one.line for one in view.ranks[0].outputs if any(name in one.text for name in names)]
    ours, theirs = values[0][number], values[1][number]
    yield Finding(
        MISTAKES["metric-of-one-rank"],
        [*logged, *printed],
        f"The validation logs {listed(names)} without sync_dist, and each rank evaluates its own "
        f"samples: {first} is {ours:.4g} on rank 0 and {theirs:.4g} on rank 1. Rank 0 prints and "
        "logs the value of its own samples. Checkpoints and early stopping may differ between "
        "ranks.",
        values={"metrics": len(names), "rank 0": ours, "rank 1": theirs},
        remedy="log them with self.log(..., sync_dist=True), or use metrics of torchmetrics",
    )


def own_metrics(view: View) -> list[str]:
    """Return the metrics of a validation whose values no rank combines with those of others."""
    logged = _evaluated(view.ranks[0])
    reduced = {one.name for one in logged if one.is_reduced}
    names = unique([one.name for one in logged if one.name not in reduced])
    return [
        name
        for name in names
        if view.size > 1
        and not all(map(_agree, zip(*(_values(one, name) for one in view.ranks), strict=False)))
    ]


def _evaluated(facts: RankFacts) -> list[MetricFacts]:
    return [one for one in facts.metrics if one.phase is Phase.EVALUATION]


def _values(facts: RankFacts, name: str) -> list[float]:
    return [one.value for one in _evaluated(facts) if one.name == name]


def _agree(values: tuple[float, ...]) -> bool:
    if any(map(math.isnan, values)):
        return all(map(math.isnan, values))
    return all(math.isclose(one, values[0], rel_tol=SAME) for one in values)
