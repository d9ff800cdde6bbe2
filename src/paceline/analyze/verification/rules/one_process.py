"""Differences from one process with the same samples, where no other rule names them."""

from collections.abc import Iterator

from ..differences import Difference, What
from ..mistakes import MISTAKES, Finding, Nature
from ..replay import NOISE_FACTOR
from ..view import View, listed
from .step_gradients.weights import is_compensated

_IN_TURN = "one process that trains the batches of the ranks one after the other"


def differs(view: View) -> Iterator[Finding]:
    """Find the first difference from one process."""
    one = view.difference
    if one is not None:
        more = f" Nor is it the gradient of {_IN_TURN}." if view.runs.cut is not None else ""
        nature = Nature.QUESTION if is_compensated(view) else Nature.MEASURED
        yield _finding(one, _lines(view, one), more, nature)


def part_loss(view: View) -> Iterator[Finding]:
    """Tell that the loss of a rank depends on its part of the batch, as an experiment confirms."""
    one = view.comparison.whole
    if one is None or "part-loss" not in view.comparison.meant:
        return
    more = (
        f" O{_IN_TURN[1:]} computes the same gradient as the ranks: what a "
        "rank computes depends on which samples are in its part of the batch."
    )
    remedy = (
        "gather what the loss compares from all ranks; if the loss is meant to be that of each "
        "part: --accept part-loss"
    )
    yield _finding(one, one.lines, more, Nature.MEANT, "part-loss", remedy)


def _lines(view: View, one: Difference) -> list[str]:
    """Return the lines to look at: those that clip, hooks, and others that change gradients."""
    key = (one.optimizer, one.index)
    step = next((x for x in view.steps if (x.optimizer, x.index) == key), None)
    if step is None or one.what is What.BUFFER:
        return one.lines
    clips = [clip.line for clip in step.steps[0].clips if one.what is What.USED]
    lines = [*clips, *view.hook_lines(step)]
    exchange = next((x for x in view.exchanges if x.step is step), None)
    if exchange is not None and not exchange.is_mean:
        before = view.lines_before_exchange(step)
        lines = [*before, *lines, *view.lines_after_exchange(step)]
    return [*lines, *one.lines]


def _finding(
    one: Difference, lines: list[str], more: str, nature: Nature, meant: str = "", remedy: str = ""
) -> Finding:
    text = one.sentence
    if len(one.names) > 1:
        text += f"; so do those of {len(one.names) - 1} other{'s' * (len(one.names) > 2)}"
    if (losses := one.losses) is not None:
        is_equal = losses.size <= NOISE_FACTOR * losses.rounding
        of_both = f"{losses.ranks:.6g} on the ranks and {losses.one:.6g} in {one.against}"
        text += f". The loss of the step is {'equal' if is_equal else of_both}"
    return Finding(
        MISTAKES["state-differs" if one.what is What.BUFFER else "gradients-differ"],
        lines,
        f"{text}.{more}",
        step=one.index + 1,
        layer=one.name,
        values={"difference": one.size, "rounding": one.rounding, "parameters": len(one.names)},
        remedy=remedy,
        nature=nature,
        meant=meant,
        difference=one,
    )


def batch_norm(view: View) -> Iterator[Finding]:
    """Tell that batch normalization uses the batch of a rank, and whether that was confirmed."""
    found = view.comparison
    is_of_all = bool(found.steps) and found.whole is None and not view.replay.in_parts
    is_confirmed = "batch-norm" in found.meant
    sizes = [one.samples for stream in view.training[:1] for one in stream.first.batches[:1]]
    model = next((one for one in view.ranks[0].models if one.batch_norms), None)
    if view.size < 2 or model is None or not sizes or is_of_all:
        return
    text = (
        f"{listed(model.batch_norms)} of {model.class_name} "
        f"compute{'s' * (len(model.batch_norms) == 1)} statistics of the {sizes[0]} samples of "
        f"one rank, where one process with the global batch has {sizes[0] * view.size}."
    )
    if is_confirmed:
        text += f" O{_IN_TURN[1:]} computes the same gradients."
    yield Finding(
        MISTAKES["batch-norm-of-one-rank"],
        [model.line],
        text,
        layer=model.batch_norms[0],
        values={"samples": sizes[0], "global": sizes[0] * view.size},
        nature=Nature.MEANT if is_confirmed else None,
        meant="batch-norm" if is_confirmed else "",
        difference=found.whole if is_confirmed else None,
    )
