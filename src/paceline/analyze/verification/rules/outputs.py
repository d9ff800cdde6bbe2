"""Printed losses and metrics that are those of one rank."""

import re
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from ....record.training.facts import OutputFacts, Phase, RankFacts
from ..mistakes import MISTAKES, Certainty, Finding
from ..passes import Sample, Stream
from ..view import View, is_reduction, unique

NUMBER = re.compile(r"(?<![\w.])[-+]?\d+\.\d+(?:[eE][-+]?\d+)?(?![\w.])|[-+]?\d\.\d*[eE][-+]?\d+")
EVALUATED = re.compile(
    r"\b(val|valid|validation|eval|evaluation|test|dev|acc|accuracy|f1|auc|ppl|perplexity|error|"
    r"err|score|metric|correct|top-?[15]|precision|recall|bleu|iou|miou|mse|mae|rmse|r2|dice|map)"
    r"(?=\b|[_\d@])|accuracy|(val|test|eval)_",
    re.IGNORECASE,
)
LOSS = re.compile(r"loss|nll|cross.?entropy|\bce\b", re.IGNORECASE)
DIGITS = 3  # significant ones that a printed number has to have
RANK = re.compile(r"\brank\b|\[\d+\]", re.IGNORECASE)


def metric_of_one_rank(view: View) -> Iterator[Finding]:
    """Find values of a divided validation that are printed before any exchange."""
    for stream in view.evaluation:
        if len(stream.loaders) < view.size or not _is_divided(stream):
            continue
        for one in stream.passes:
            rank = 0
            if rank not in one.ranks:
                continue
            made = one.ranks[rank]
            found = _printed_after(view.ranks[rank], made.batches[0].step, stream, one.number)
            if found is None:
                continue
            output, is_sure = found
            samples = sum(len(batch) for batch in made.facts.planned or []) or sum(
                batch.samples for batch in made.batches
            )
            whole = stream.first.loader.dataset_length
            of = f" of {whole}" if whole and whole > samples else ""
            yield Finding(
                MISTAKES["metric-of-one-rank"],
                unique([output.line, *reversed(stream.lines)]),
                f"Rank 0 prints {output.text.strip()[:80]!r} after it has evaluated {samples}{of} "
                f"samples, its own part, and no collective combines the values of {view.size} "
                "ranks before.",
                ranks=[0],
                values={"samples": samples, "text": output.text.strip()[:80]},
                certainty=None if is_sure else Certainty.QUESTION,
            )
            return


def loss_of_one_rank(view: View) -> Iterator[Finding]:
    """Find printed training losses that are those of rank 0, and differ from the mean."""
    if view.size < 2:
        return
    losses = [_losses(facts) for facts in view.ranks]
    length = min(map(len, losses))
    if not length:
        return
    together = np.array([one[:length] for one in losses])
    plans = [s.first.facts.planned for s in view.training]
    epoch = len(plans[0]) if plans and plans[0] else 0
    for output in view.ranks[0].outputs:
        if output.phase is Phase.SETUP or not LOSS.search(output.text):
            continue
        if any(_is_printed(other, output) for other in view.ranks[1:]):
            continue  # each rank prints its own
        for text in NUMBER.findall(output.text.replace(",", " ")):
            found = _own_value(float(text), _precision(text), together, output.step, epoch)
            if found is None:
                continue
            own, mean = found
            yield Finding(
                MISTAKES["metric-of-one-rank"],
                unique([output.line]),
                f"The printed loss {text} is that of rank 0; the mean of {view.size} ranks is "
                f"{mean:.6g}. Is that of one rank wanted?",
                ranks=[0],
                step=output.step or None,
                values={"printed": own, "mean": mean},
                certainty=Certainty.QUESTION,
                remedy="average it over the ranks (all_reduce) before it is printed",
            )
            return


def _is_divided(stream: Stream) -> bool:
    """Return whether the ranks evaluate different samples."""
    first = stream.passes[0]
    seen: list[set[Sample]] = []
    for rank, made in first.ranks.items():
        plan = stream.plan(made)
        if plan is not None and (stream.shares_dataset or stream.has_root):
            seen.append({at for batch in plan for at in batch})
            continue
        contents = [stream.samples(rank, batch, made.loader) or [] for batch in made.batches]
        seen.append({sample for one in contents for sample in one})
    return all(seen) and any(one != seen[0] for one in seen[1:])


def _printed_after(
    facts: RankFacts, step: int, stream: Stream, number: int
) -> tuple[OutputFacts, bool] | None:
    """Return the first output with a metric after a pass and before the next training batch.

    The second value tells whether the line names the evaluation. None if a collective that
    combines values came before it.
    """
    made = stream.passes[number].ranks[facts.rank]
    own = {(made.loader.key, made.facts.number)}
    positions = [at for at, b in enumerate(facts.batches) if (b.loader, b.pass_number) in own]
    if not positions:
        return None
    start, end = positions[0], positions[-1]
    evaluated = {
        (loader.key, one.number)
        for loader in facts.loaders
        for one in loader.passes
        if one.phase is Phase.EVALUATION
    }
    after = [
        at
        for at, b in enumerate(facts.batches)
        if at > end and (b.loader, b.pass_number) not in evaluated
    ]
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
        if RANK.search(output.text):
            continue
        if EVALUATED.search(output.text):
            return output, True
        if LOSS.search(output.text):
            return output, False
    return None


def _losses(facts: RankFacts) -> list[float]:
    """Return the losses of a rank's backwards, in order."""
    return [
        (one.loss if one.loss is not None else one.root / one.scale)
        for step in facts.steps
        for one in step.backwards
    ]


def _is_printed(facts: RankFacts, output: OutputFacts) -> bool:
    """Return whether another rank writes the same line of code."""
    return any(one.line == output.line and one.line for one in facts.outputs)


def _precision(text: str) -> float:
    """Return half of the last printed digit."""
    head, _, exponent = text.lower().partition("e")
    decimals = len(head.partition(".")[2])
    return 0.5000001 * 10.0 ** (int(exponent or 0) - decimals)


def _own_value(
    printed: float, precision: float, losses: NDArray[np.float64], step: int, epoch: int
) -> tuple[float, float] | None:
    """Return rank 0's value and the mean of the ranks if the printed number is the former.

    Candidates are the last losses before the output, and means over several of them.
    """
    if abs(printed) < 10**DIGITS * precision / 5:
        return None
    for values in _candidates(losses, step, epoch):
        own, mean = float(values[0]), float(values.mean())
        if abs(own - printed) <= precision and abs(mean - printed) > 2 * precision:
            return own, mean
    return None


def _candidates(
    losses: NDArray[np.float64], step: int, epoch: int
) -> Iterator[NDArray[np.float64]]:
    count = losses.shape[1]
    for end in sorted({min(max(step + shift, 1), count) for shift in (-1, 0, 1)}):
        yield losses[:, end - 1]
        for start in range(end - 1):
            yield losses[:, start:end].mean(axis=1)
            if epoch:  # the script divides by the batches of the whole epoch
                yield losses[:, start:end].sum(axis=1) / epoch
