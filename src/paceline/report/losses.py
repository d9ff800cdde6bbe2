"""The largest losses of a run, with explanations for readers without experience with profilers."""

from dataclasses import dataclass

from ..analyze.figures.losses import Loss
from ..analyze.figures.report import Report
from ..analyze.figures.stalls import STILL
from . import document as doc
from .numbers import percent, size
from .sentences import doing, sentence
from .verdict import begin_sentence

MAX_DESCRIBED_LOSSES = 3
MIN_LISTED_LOSS = 0.001  # of all ranks' time

# Why a loss occurs, and where to look: by kind of the loss, or by what the late rank did longer.
_OWN = {
    "input": (
        "The model waited because its next batch was not ready: the loader was not fast enough.",
        "the number of workers of the loader, its work for each sample, and the location and size "
        "of the files",
    ),
    "checkpoint": (
        "Training waited while a checkpoint was copied or written.",
        "the number, the size and the file system of the checkpoints",
    ),
    "validation": (
        "Training waited while the script evaluated the model.",
        "the frequency of the validation, its number of samples, and whether all ranks share them",
    ),
    "starved": (
        "The training thread waited for a core: it was ready to run, and all cores that it may use "
        "were busy.",
        "other programs on the node, the number of threads of each rank and of its loader's "
        "workers, and the binding of the ranks to cores",
    ),
    "other": (
        "The script did other work between the phases of its steps.",
        "the lines named above: logging, metrics, waits for files, copies to the device",
    ),
    "bubble": (
        "Stages of the pipeline waited for each other: while it filled and emptied in each step, "
        "and for the stage that computes longest.",
        "the number of micro-batches, the schedule, and the balance of the stages",
    ),
}
_LATE = {
    "useful": (
        "{rank} needed longer to compute the same step. All other ranks waited for it "
        "in the next collective: the slowest rank determines the step time of all ranks.",
        "other processes on its node or its cores, its binding, its clock rate, and whether it has "
        "more or longer samples than the other ranks",
    ),
    "input": (
        "{rank} got its batches late, and all other ranks waited for it in the next collective.",
        "the loader of this rank and the storage of its node",
    ),
    "checkpoint": (
        "{rank} saved a checkpoint while the other ranks waited for it.",
        "asynchronous checkpoints, or checkpoints of which each rank writes its part",
    ),
    "validation": (
        "{rank} evaluated alone while all other ranks waited for it. More ranks do not shorten "
        "this part of the run.",
        "validation on all ranks, each with a part of the samples",
    ),
    "starved": (
        "{rank} waited for a core, and all other ranks waited for it in the next collective.",
        "other programs on its node, and the cores that it shares with other ranks",
    ),
    "other": (
        "{rank} did other work of the script while the other ranks waited for it.",
        "work that the script does on this rank only: logging, plots, files",
    ),
    "bubble": (
        "{rank} arrived late because it had waited for another stage of its pipeline.",
        "the balance of the stages",
    ),
    STILL: (
        "{rank} stood still for a while: none of its threads ran. All other ranks waited for "
        "it in the next collective.",
        "the line of the script that ran at this time, signals that stopped the rank, pauses of "
        "its node, swapped-out memory, and the system log of the node",
    ),
    "wait": (
        "{rank} arrived late because it had waited for another rank.",
        "the rank for which {rank} waited",
    ),
    "transfer": (
        "{rank} arrived late because a previous collective, of this or another process group, "
        "took longer for it than for the other ranks.",
        "the placement of the ranks of its group, and the bandwidth of the link of its node",
    ),
}
_TRANSFER = (
    "All ranks had arrived, and the communication itself took this time{rate}. Its data went "
    "through the network, or through the memory of the node.",
    "the bandwidth in the table of collectives compared with the bandwidth of the link, the "
    "network interface, and the number and size of the collectives",
)
_NO_RANK = (
    "These waits are short, and no single rank causes them.",
    "the spread of the step times below: small differences from step to step on all ranks",
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
    found = [loss for loss in report.losses if loss.share >= MIN_LISTED_LOSS][:MAX_DESCRIBED_LOSSES]
    return [_explain(loss, report) for loss in found]


def loss_items(report: Report, path: str = "") -> tuple[list[doc.Item], float]:
    """Return the largest losses as a list, and the share of the others.

    Args:
        path: Of the report in the JSON.
    """
    found = largest_losses(report)
    items = []
    for number, loss in enumerate(found):
        share = doc.Part(percent(loss.share), doc.STRONG, f"{path}losses.{number}.share")
        why = loss.why
        if loss.together is not None:
            is_wait = report.losses[number].kind == "wait"
            other = "time of this rank itself" if is_wait else "waits of the other ranks for it"
            why += f" Together with the {other}: {percent(loss.together)} of all ranks' time."
        explained = [doc.on_page(text) for text in (why, f"Where to look: {loss.look}.")]
        label = [doc.in_terminal(f"{number + 1}. "), share]
        items.append(doc.Item(label, loss.what, explained))
    return items, sum(loss.share for loss in report.losses) - sum(loss.share for loss in found)


def _explain(loss: Loss, report: Report) -> Explanation:
    rank = f"Rank {loss.rank}"
    if loss.kind == "transfer":
        why, look = _TRANSFER
        why = why.format(rate=_rate(loss, report))
    elif loss.kind == "wait" and loss.rank is None:
        why, look = _NO_RANK
    elif loss.kind == "wait":
        why, look = (part.format(rank=rank) for part in _LATE[doing(loss, report)])
    else:
        why, look = _OWN[loss.kind]
    what = begin_sentence(sentence(loss, report))
    return Explanation(loss.share, what, why, look, _together(loss, report))


def _rate(loss: Loss, report: Report) -> str:
    """Return the size and the bus bandwidth of the loss's collective, in words."""
    for group in report.groups:
        for collective in group.collectives if group.name == loss.group else ():
            if collective.name == loss.collective and collective.busbw is not None:
                each = size(collective.bytes / collective.count)
                return f" ({each} on average, at {collective.busbw:.2g} GB/s of bus bandwidth)"
    return ""


def _together(loss: Loss, report: Report) -> float | None:
    """Return the sum of the losses of one kind and of the waits for ranks that have this loss."""
    kind = loss.doing if loss.kind == "wait" else loss.kind
    if kind not in _OWN:
        return None
    halves = [
        loss.share
        for loss in report.losses
        if kind == (loss.doing if loss.kind == "wait" else loss.kind)
    ]
    return sum(halves) if len(halves) > 1 else None
