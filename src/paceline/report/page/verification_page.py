"""Page of a verification: findings, and charts of samples, gradients and learning rates."""

import shlex
from typing import Any

from ...analyze.verification.mistakes import Finding
from ...analyze.verification.passes import Stream, streams
from ...analyze.verification.steps import trained as in_training
from ...record.training.facts.ranks import RankFacts
from ...record.training.facts.samples import Phase
from ..numbers import counted, elapsed
from ..terminal.verification.findings import compared_sentences, label_of
from ..verdict.of_verification import Verification, verdict_of_verification
from .write_page import page

MAX_COLUMNS = 400  # samples, or blocks of them, in a row of the chart
MAX_LAYERS = 60  # bars: those with the largest difference
MAX_RANK_COLOURS = 8
NOBODY, SEVERAL = -1, -2  # instead of a rank
SMALLEST = 1e-17  # length of a bar of equal gradients, on a logarithmic axis


def verification(found: Verification) -> str:
    """Return the page as HTML."""
    runs, findings, seen = found
    charts = {
        "samples": samples_chart(runs.ranks),
        "layers": layers_chart(found),
        "rates": rates_chart(found),
    }
    shown = {name: data for name, data in charts.items() if data}
    there = {
        "summary": "Summary",
        "samples": "Samples" * ("samples" in shown),
        "layers": "Gradients" * ("layers" in shown),
        "rates": "Learning rate" * ("rates" in shown),
        "how": "Method",
    }
    context = {
        "title": f"Paceline: verification of {(runs.command or ['a training'])[0]}",
        "heading": f"Is the training of {counted(len(runs.ranks), 'rank')} that of one process?",
        "parts": [(key, name) for key, name in there.items() if name],
        "command": shlex.join(runs.command),
        "conclusion": verdict_of_verification(found),
        "findings": [(one, label_of(one)[0].capitalize(), _meta(one)) for one in findings],
        "counts": (sum(x.is_wrong for x in findings), sum(x.is_question for x in findings)),
        "sentences": compared_sentences(seen),
        "seen": seen,
        "drawn": shown,
        "labels": {name: _label(name, data) for name, data in shown.items()},
        "elapsed": elapsed(runs.seconds),
    }
    return page("verification.html", shown, context)


def _meta(one: Finding) -> str:
    """Return step, layer and ranks of a finding in words."""
    parts = [f"step {one.step}" if one.step is not None else "", one.layer]
    if one.ranks:
        what = "rank" if len(one.ranks) == 1 else "ranks"
        parts.append(f"{what} {', '.join(map(str, one.ranks))}")
    return "; ".join(part for part in parts if part)


def samples_chart(ranks: list[RankFacts]) -> dict[str, Any]:
    """Return which rank trains which sample, by epoch; empty if the samples are not known.

    ``z`` has a row for each epoch, and a column for each sample or block of samples: a rank,
    NOBODY or SEVERAL.
    """
    for stream in streams(ranks, Phase.TRAINING):
        if not (stream.shares_dataset or stream.has_root):
            continue
        loader = stream.first.loader
        length = loader.root_length if stream.has_root else loader.dataset_length
        rows = _rows(stream, length or 0)
        if rows:
            width = -(-(length or 1) // MAX_COLUMNS)
            starts = range(0, length or 0, width)
            return {
                "z": [[_common(row[at : at + width]) for at in starts] for row in rows],
                "x": [str(at) if width == 1 else f"{at}-{at + width - 1}" for at in starts],
                "y": [f"epoch {at + 1}" for at in range(len(rows))],
                "ranks": len(ranks),
                "colours": min(len(ranks), MAX_RANK_COLOURS),
            }
    return {}


def _rows(stream: Stream, length: int) -> list[list[int]]:
    """Return by epoch the rank that trains each sample."""
    rows = []
    for one in stream.passes:
        row = [NOBODY] * length
        for rank, made in one.ranks.items():
            for at in [at for batch in stream.plan(made) or [] for at in batch]:
                if 0 <= at < length:
                    row[at] = rank if row[at] in (NOBODY, rank) else SEVERAL
        if any(value != NOBODY for value in row):
            rows.append(row)
    return rows


def _common(values: list[int]) -> int:
    """Return what to show of a block of samples: what is odd, else the most frequent rank."""
    for odd in (SEVERAL, NOBODY):
        if odd in values:
            return odd
    return max(set(values), key=values.count)


def layers_chart(found: Verification) -> dict[str, Any]:
    """Return the difference of each gradient from that of one process, and its tolerance."""
    _, _, seen = found
    largest = sorted(seen.differences.items(), key=lambda one: -one[1][0])[:MAX_LAYERS]
    kept = {name for name, _ in largest}
    names = [name for name in seen.differences if name in kept]
    if not names:
        return {}
    return {
        "names": [name.partition("/")[2] or name for name in names],
        "values": [max(seen.differences[name][0], SMALLEST) for name in names],
        "limits": [max(seen.differences[name][1], SMALLEST) for name in names],
    }


def rates_chart(found: Verification) -> dict[str, Any]:
    """Return the learning rate over the samples trained, on N ranks and on one."""
    runs, _, _ = found
    lines = []
    single = runs.single
    size = len(runs.ranks)
    for name, facts, times in ((f"{size} ranks", runs.ranks[0], size), ("1 rank", single, 1)):
        if facts is None:
            continue
        line = _rates(facts, times)
        if line["x"]:
            lines.append({"name": name, **line})
    return {"lines": lines} if lines else {}


def _rates(facts: RankFacts, times: int) -> dict[str, Any]:
    trained, x, y = 0, [], []
    for step in facts.steps:
        if step.optimizer != facts.steps[0].optimizer or not step.learning_rates:
            continue
        x.append(trained)
        y.append(step.learning_rates[0])
        trained += times * sum(
            facts.batches[at].samples for one in step.backwards for at in in_training(facts, one)
        )
    return {"x": x, "y": y}


def _label(name: str, data: dict[str, Any]) -> str:
    """Return the description of a chart for screen readers."""
    if name == "samples":
        odd = [sum(row.count(value) for row in data["z"]) for value in (NOBODY, SEVERAL)]
        return (
            f"Which of {data['ranks']} ranks trains which sample, by epoch: {odd[0]} columns of "
            f"samples that no rank trains, {odd[1]} that several ranks train."
        )
    if name == "layers":
        above = sum(v > limit for v, limit in zip(data["values"], data["limits"], strict=True))
        return f"Difference of {len(data['names'])} gradients; {above} are above the tolerance."
    return "Learning rate over the number of trained samples."
