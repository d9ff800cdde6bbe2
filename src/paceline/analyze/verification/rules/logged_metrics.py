"""Metrics of a validation that Lightning logs with the value of each rank."""

from collections.abc import Iterator

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
    first, facts = names[0], view.ranks[0]
    values = [_values(one, first) for one in view.ranks]
    number = next(at for at, each in enumerate(zip(*values, strict=False)) if not _agree(each))
    logged = [one.line for one in facts.metrics if one.name in names]
    printed = [one.line for one in facts.outputs if any(name in one.text for name in names)]
    told = " and ".join(f"{each[number]:.4g} on rank {r}" for r, each in enumerate(values[:2]))
    yield Finding(
        MISTAKES["metric-of-one-rank"],
        unique([*logged, *printed]),
        f"{listed(names)}: logged without sync_dist in the validation, where each rank evaluates "
        f"samples of its own ({first} is {told}). What rank 0 prints, logs and compares is the "
        "value of its own samples, and checkpoints and early stopping may differ between ranks.",
        values={"metrics": len(names), "rank 0": values[0][number], "rank 1": values[1][number]},
        remedy="log them with self.log(..., sync_dist=True), or use metrics of torchmetrics",
    )


def own_metrics(view: View) -> list[str]:
    """Return the metrics of a validation whose values no rank combines with those of others."""
    logged = [one for one in view.ranks[0].metrics if one.phase is Phase.EVALUATION]
    reduced = {one.name for one in logged if one.is_reduced}
    names = unique([one.name for one in logged if one.name not in reduced])
    return [
        name
        for name in names
        if view.size > 1
        and not all(map(_agree, zip(*(_values(one, name) for one in view.ranks), strict=False)))
    ]


def _values(facts: RankFacts, name: str) -> list[float]:
    return [one.value for one in facts.metrics if one.name == name]


def _agree(values: tuple[float, ...]) -> bool:
    return all(abs(one - values[0]) <= SAME * abs(values[0]) for one in values[1:])
