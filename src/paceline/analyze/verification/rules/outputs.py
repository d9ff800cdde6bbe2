"""Printed metrics of a validation that are those of one rank."""

import re
from collections.abc import Iterator

from ....record.training.facts.events import OutputFacts
from ....record.training.facts.samples import Phase
from ..mistakes import MISTAKES, Finding
from ..passes import RankPass, Sample, Stream
from ..view import View, is_reduction
from .logged_metrics import own_metrics
from .printed_losses import NUMBER, is_printed_by

EVALUATED = re.compile(
    r"\b(val|valid|validation|eval|evaluation|test|dev|acc|accuracy|f1|auc|ppl|perplexity|error|"
    r"err|score|metric|correct|top-?[15]|precision|recall|bleu|iou|miou|mse|mae|rmse|r2|dice|map)"
    r"(?=\b|[_\d@])|accuracy|(val|test|eval)_",
    re.IGNORECASE,
)
RANK = re.compile(r"\brank\b", re.IGNORECASE)


def metric_of_one_rank(view: View) -> Iterator[Finding]:
    """Find values of a divided validation that are printed before any exchange."""
    if own_metrics(view):
        return  # Lightning's are known by name
    for stream in view.evaluation:
        if len(stream.loaders) < view.size or not _is_divided(stream):
            continue
        for one in stream.passes:
            rank = 0
            if rank not in one.ranks:
                continue
            made = one.ranks[rank]
            output = _printed_after(view, made.batches[0].step, stream, one.number)
            if output is None:
                continue
            samples = _planned(made) or sum(batch.samples for batch in made.batches)
            whole = stream.first.loader.dataset_length
            of = f" of {whole}" if whole and whole > samples else ""
            yield Finding(
                MISTAKES["metric-of-one-rank"],
                [output.line, *reversed(stream.lines)],
                f"Rank 0 prints {output.text.strip()[:80]!r} after it has evaluated {samples}{of} "
                f"samples, its own part, and no collective combines the values of {view.size} "
                "ranks before.",
                ranks=[0],
                values={"samples": samples, "text": output.text.strip()[:80]},
            )


def _is_divided(stream: Stream) -> bool:
    """Return whether the ranks evaluate different samples."""
    first = stream.passes[0]
    seen: list[set[Sample]] = []
    for rank, made in first.ranks.items():
        plan = stream.plan(made)
        if plan is not None and (stream.shares_dataset or stream.has_root):
            seen.append({at for batch in plan for at in batch})
            continue
        seen.append(set(stream.read(rank, made)))
    return all(seen) and any(one != seen[0] for one in seen[1:])


def _printed_after(view: View, step: int, stream: Stream, number: int) -> OutputFacts | None:
    """Return the first output with a metric after a pass and before the next training batch.

    None if a collective that combines values came before it.
    """
    facts, others = view.ranks[0], view.ranks[1:]
    made = stream.passes[number].ranks[facts.rank]
    own = {(made.loader.key, made.facts.number)}
    positions = [at for at, b in enumerate(facts.batches) if (b.loader, b.pass_number) in own]
    if not positions:
        return None
    start, end = positions[0], positions[-1]
    after = facts.without_evaluated(range(end + 1, len(facts.batches)))
    limit = after[0] if after else len(facts.batches)
    before = [one.collectives for one in facts.outputs if one.batches <= start]
    reduced = [
        at
        for at, one in enumerate(facts.collectives)
        if is_reduction(one) and one.phase is Phase.EVALUATION and at >= max(before, default=0)
    ]
    for output in facts.outputs:
        if not end < output.batches <= limit or not NUMBER.search(output.text):
            continue
        if any(at < output.collectives for at in reduced if facts.collectives[at].step >= step):
            return None
        if RANK.search(output.text) or is_printed_by(others, output):
            continue
        if EVALUATED.search(output.text):
            return output
    return None


def _planned(made: RankPass) -> int:
    return sum(len(batch) for batch in made.facts.planned or [])
