"""Explanations on the page, written for readers without experience with profilers."""

from collections.abc import Iterable
from dataclasses import dataclass

from ...analyze.figures.losses import Loss
from ...analyze.figures.report import Report
from ...analyze.figures.stalls import STILL
from ..numbers import amount, counted, duration, percent, size
from ..sentences import doing, sentence
from ..terminal.run_report import MAX_DESCRIBED_LOSSES

# Why a loss occurs, and where to look: by kind of the loss, or by what the late rank did longer.
_OWN = {
    "input": (
        "The model stood still because its next batch was not there yet: the loader was not ahead.",
        "the loader: its number of workers, what it does to each sample, the files' place and size",
    ),
    "checkpoint": (
        "Training stood still while a checkpoint was copied or written.",
        "how often it saves, how much, and to which file system",
    ),
    "validation": (
        "Training stood still while the model was evaluated.",
        "how often it evaluates, on how many samples, and whether all ranks share them",
    ),
    "other": (
        "The script did work of its own between the phases of its steps.",
        "the lines named above: logging, metrics, waiting for files, copies to the device",
    ),
}
_LATE = {
    "useful": (
        "{rank} needed longer to compute the same step. All others stood still at the next "
        "exchange until it arrived: the slowest rank sets the pace of all.",
        "what else runs on its host or its cores, its binding, its clock rate, and whether it got "
        "more or longer samples than the others",
    ),
    "input": (
        "{rank} got its batches late, and all others waited for it at the next exchange.",
        "this rank's loader and the host it reads from",
    ),
    "checkpoint": (
        "{rank} saved a checkpoint while the others stood still.",
        "saving beside the training, or all ranks writing their part",
    ),
    "validation": (
        "{rank} evaluated alone while all others stood still: a part of the run that more ranks "
        "do not make shorter.",
        "evaluating on all ranks, each its share of the samples",
    ),
    "other": (
        "{rank} did work of the script's own while the others stood still.",
        "what the script does on this rank only: logging, plots, writing files",
    ),
    STILL: (
        "{rank} stood still for a while: none of its threads ran. All others waited for it at the "
        "next exchange.",
        "the line of the script that ran then, who stopped the rank or its host, whether its "
        "memory was swapped out, and the host's log",
    ),
    "wait": ("{rank} came late because it had waited itself.", "whom {rank} waited for"),
    "transfer": (
        "{rank} came late because an exchange before this one, of this group or another, took "
        "longer for it than for the others.",
        "where its group's ranks are placed, and whether its host's link is slower",
    ),
}
_TRANSFER = (
    "All ranks were there, and the exchange itself took this long{rate}: the data had to go "
    "through the network, or through the host's memory.",
    "the bandwidth in the table of collectives against what the link can do, which interface is "
    "used, and how much is sent how often",
)
_NOBODY = (
    "Short waits, which can't be booked to one rank.",
    "the spread of step times below: small differences from step to step, on all ranks",
)


@dataclass(frozen=True)
class Explanation:
    """Explanation of one loss.

    Attributes:
        share: Share of all ranks' time.
        what: Description of the loss.
        why: Explanation of its cause.
        look: Where to look.
        together: Share of both parts of a loss, which are the time that ranks spend in it
            themselves, and the time that other ranks wait for them. None if there is only one part.
    """

    share: float
    what: str
    why: str
    look: str
    together: float | None


def largest_losses(report: Report) -> list[Explanation]:
    """Return the largest losses with explanations."""
    found = [loss for loss in report.losses if loss.share >= 0.001][:MAX_DESCRIBED_LOSSES]
    return [_explain(loss, report) for loss in found]


def _explain(loss: Loss, report: Report) -> Explanation:
    rank = f"Rank {loss.rank}"
    if loss.kind == "transfer":
        why, look = _TRANSFER
        why = why.format(rate=_rate(loss, report))
    elif loss.kind == "wait" and loss.rank is None:
        why, look = _NOBODY
    elif loss.kind == "wait":
        why, look = (part.format(rank=rank) for part in _LATE[doing(loss, report)])
    else:
        why, look = _OWN[loss.kind]
    what = sentence(loss, report)
    return Explanation(loss.share, what[0].upper() + what[1:], why, look, _together(loss, report))


def _rate(loss: Loss, report: Report) -> str:
    """Return the size and the bus bandwidth of the loss's collective, in words."""
    for group in report.groups:
        for one in group.collectives:
            if (group.name, one.name) == (loss.group, loss.collective) and one.busbw is not None:
                each = size(one.bytes / one.count)
                return f" ({each} on average, at {one.busbw:.2g} GB/s of bus bandwidth)"
    return ""


def _together(loss: Loss, report: Report) -> float | None:
    """Return the sum of the losses of one kind and of the waits for ranks that have this loss."""
    kind = loss.doing if loss.kind == "wait" else loss.kind
    if kind not in _OWN:
        return None
    halves = [one.share for one in report.losses if kind in (one.kind, one.doing)]
    return sum(halves) if len(halves) > 1 else None


def achieved(report: Report) -> str:
    """Return what the job did, in one or two sentences."""
    ranks = counted(report.size, "rank")
    hosts = len(set(report.hosts))
    on = f" on {hosts} hosts" if hosts > 1 else ""
    if report.window_s is None or report.efficiencies is None:
        return f"{ranks}{on} ran for {duration(report.wall_s)}: too few steps to measure."
    rate = f", {amount(report.samples_per_s)} samples/s" if report.samples_per_s else ""
    median = report.step_times
    step = f", {duration(median.median_s)} a step" if median is not None else ""
    useful = report.efficiencies.useful
    return (
        f"{ranks}{on} trained {counted(report.steps, 'step')} in "
        f"{duration(report.wall_s)}{rate}{step}. "
        f"{percent(useful)} of the ranks' time went into computing for the model, "
        f"{percent(1 - useful)} did not."
    )


def joined(parts: Iterable[str]) -> str:
    """Return the parts as an enumeration, such as "a, b and c"."""
    *first, last = parts
    return f"{', '.join(first)} and {last}" if first else last
