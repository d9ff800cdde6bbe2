"""The mistakes that ``paceline verify`` names, and what a finding says of one."""

from dataclasses import dataclass, field
from enum import StrEnum

from .comparison import Difference


class Nature(StrEnum):
    """What a finding is based on."""

    MEASURED = "measured"  # something differs from one process, or between ranks
    MEANT = "meant"  # it does, and the same in one process that trains the ranks' batches in turn
    QUESTION = "question"  # both values are given; which one is right depends on the intention


@dataclass(frozen=True)
class Meant:
    """A difference from one process that a script may mean, and that is confirmed.

    By an experiment, or as the printed number is known on the ranks.

    Attributes:
        name: Name for ``--accept``.
        clause: What it is, as the end of a sentence.
        is_usual: Whether right trainings have it: it does not change the exit code.
    """

    name: str
    clause: str
    is_usual: bool


MEANT = {
    one.name: one
    for one in (
        Meant("batch-norm", "batch normalization over the part of a rank", is_usual=True),
        Meant("random-numbers", "random numbers of each rank in the model or the loop", True),
        Meant("padding", "padding of the batches of each rank to their longest sample", True),
        Meant("part-loss", "a loss or a normalization over the part of a rank", is_usual=False),
        Meant("own-loss", "a printed loss of the batches of one rank", is_usual=False),
    )
}


@dataclass(frozen=True)
class Mistake:
    """A kind of mistake.

    Attributes:
        id: Name in ``--json``.
        title: What is wrong, in a few words.
        measured: What is measured for it; what is asked about, if it is only a question.
        remedy: What to change; an imperative.
        nature: Of its findings.
        explains: Ids of mistakes that follow from it: they are not listed beside it.
        is_gradient: Whether it names a difference between the gradient and that of one process.
        is_late: Whether it appears in what comes after the steps: validation, files, a resume.
    """

    id: str
    title: str
    measured: str
    remedy: str
    nature: Nature = Nature.MEASURED
    explains: tuple[str, ...] = ()
    is_gradient: bool = False
    is_late: bool = False


def _ids(text: str) -> tuple[str, ...]:
    return tuple(text.split())


MISTAKES = {
    one.id: one
    for one in (
        Mistake(
            "replicas-start-different",
            "Ranks start with different parameters",
            "parameters of the ranks at the first forward",
            "set the same seed on all ranks before the model is made, or broadcast rank 0's "
            "parameters (DistributedDataParallel does so)",
            explains=_ids("replicas-diverge gradients-differ state-differs batch-norm-differs"),
        ),
        Mistake(
            "replicas-diverge",
            "Parameters of the ranks become different",
            "parameters of the ranks before and after each step, and the steps that each makes",
            "let each parameter be changed in the same way on all ranks",
            explains=_ids("state-differs gradients-differ"),
        ),
        Mistake(
            "gradients-summed",
            "Gradients are summed over the ranks, and not averaged",
            "the gradient beside that of one process, else beside the mean of the ranks' gradients",
            "divide the sum by the number of ranks",
            explains=_ids("gradients-differ learning-rate-scaled-twice"),
            is_gradient=True,
        ),
        Mistake(
            "gradients-divided-twice",
            "Gradients are divided by the number of ranks twice",
            "the gradient beside that of one process, else beside the mean of the ranks' gradients",
            "leave out the division: the exchange averages already",
            explains=("gradients-differ",),
            is_gradient=True,
        ),
        Mistake(
            "gradients-not-exchanged",
            "Gradients are not exchanged between the ranks",
            "the gradients that the ranks compute and use",
            "call the model through its DistributedDataParallel wrapper, leave no_sync before the "
            "last backward of a step, and wrap a model whose trained parameters require gradients",
            explains=_ids(
                "replicas-diverge gradients-differ gradients-summed gradients-divided-twice "
                "uneven-batches-averaged clipped-before-exchange accumulation-divided-wrongly "
                "state-differs batch-norm-differs"
            ),
        ),
        Mistake(
            "clipped-before-exchange",
            "Gradients are clipped before they are exchanged",
            "the gradient of each rank before and after a call that clips, and that of one process",
            "clip after the exchange: with DistributedDataParallel, after the last backward",
            explains=_ids("gradients-differ replicas-diverge"),
            is_gradient=True,
        ),
        Mistake(
            "accumulation-divided-wrongly",
            "The loss is not divided by the number of accumulated batches",
            "the gradient of a step beside the mean of those of its batches",
            "divide the loss by the number of batches of a step, once",
            explains=("gradients-differ",),
        ),
        Mistake(
            "uneven-batches-averaged",
            "Batches of different sizes have equal weight in the gradient",
            "the weight of each rank's gradient in that of one process, and its samples",
            "weight each rank's loss by its number of samples, or drop the last batch",
            explains=("gradients-differ",),
            is_gradient=True,
        ),
        Mistake(
            "loss-summed",
            "The loss is a sum over samples, whose gradient is averaged over ranks",
            "the gradient beside that of one process, else beside the sum of the ranks' gradients",
            "use the mean over samples, or scale the learning rate with the global batch size",
            explains=_ids("gradients-differ uneven-batches-averaged"),
            is_gradient=True,
        ),
        Mistake(
            "same-samples",
            "Ranks train the same samples",
            "the samples of the ranks: positions in the dataset, else contents",
            "split the dataset: DistributedSampler, or world.shard(loader)",
            explains=_ids(
                "samples-repeated samples-never-trained gradients-differ "
                "schedule-counts-other-steps"
            ),
        ),
        Mistake(
            "samples-repeated",
            "Samples are trained several times in an epoch",
            "how often an epoch of all ranks trains each sample",
            "use a sampler that returns each sample once",
        ),
        Mistake(
            "samples-never-trained",
            "Samples are never trained",
            "the samples that no rank trains, and one process does",
            "check the lengths, offsets and drop_last of the split",
        ),
        Mistake(
            "epoch-not-set",
            "All epochs have the same order",
            "the order of the samples in each epoch",
            "call sampler.set_epoch(epoch) at the start of each epoch",
        ),
        Mistake(
            "same-random-numbers",
            "Random numbers are the same where they have to differ",
            "states of the random number generators of ranks, workers and epochs",
            "add the rank (and the worker's number) to the seed after the model is made",
        ),
        Mistake(
            "different-random-numbers",
            "Random numbers differ between ranks where they have to agree",
            "samples that one rank trains and another validates or reads otherwise; buffers",
            "use a generator with the same seed on all ranks, such as "
            "torch.Generator().manual_seed(0)",
            explains=_ids(
                "samples-repeated samples-never-trained validation-misses-samples "
                "validation-repeats-samples gradients-differ state-differs"
            ),
        ),
        Mistake(
            "learning-rate-not-scaled",
            "The learning rate is that of one rank",
            "a question: the learning rates on N ranks and on one",
            "scale it with the global batch size if that is wanted",
            Nature.QUESTION,
        ),
        Mistake(
            "learning-rate-scaled-twice",
            "The learning rate is scaled twice",
            "a question: the learning rates on N ranks and on one",
            "multiply it by the number of ranks at one place",
            explains=("learning-rate-not-scaled",),
            nature=Nature.QUESTION,
        ),
        Mistake(
            "learning-rates-differ",
            "Ranks have different learning rates",
            "the learning rates of the ranks in each step",
            "compute the learning rate from values that are equal on all ranks",
            explains=_ids(
                "replicas-diverge state-differs learning-rate-not-scaled learning-rate-scaled-twice"
            ),
        ),
        Mistake(
            "schedule-counts-other-steps",
            "The learning-rate schedule has another length than the training",
            "a question: the length of the schedule in epochs, on N ranks and on one",
            "compute its length from the number of steps on N ranks: len(loader) after the split",
            nature=Nature.QUESTION,
        ),
        Mistake(
            "batch-norm-differs",
            "Statistics of batch normalization differ between the ranks",
            "running statistics of the ranks",
            "use SyncBatchNorm, or keep broadcast_buffers=True",
            explains=("batch-norm-of-one-rank",),
        ),
        Mistake(
            "batch-norm-of-one-rank",
            "Batch normalization uses the batch of one rank",
            "gradients beside those of one process that trains the ranks' batches in turn",
            "use SyncBatchNorm if the statistics of the global batch are wanted",
            Nature.QUESTION,
            is_late=True,
        ),
        Mistake(
            "metric-of-one-rank",
            "A printed value is that of one rank",
            "printed and logged values beside losses and evaluated samples of all ranks",
            "sum the value and the number of samples over the ranks before it is printed",
            explains=("metric-differs",),
            is_late=True,
        ),
        Mistake(
            "metric-differs",
            "A printed value differs from that of one process",
            "values that ranks and one process print with the same parameters and samples",
            "combine sums and numbers of samples of all ranks before the value is computed",
            is_late=True,
        ),
        Mistake(
            "validation-repeats-samples",
            "Validation counts samples several times",
            "how often a validation of all ranks evaluates each sample",
            "leave out the samples that the sampler added, or validate on one rank",
            explains=("metric-differs",),
            is_late=True,
        ),
        Mistake(
            "validation-misses-samples",
            "Validation leaves out samples",
            "the samples that no rank evaluates",
            "use drop_last=False, and a split that covers all samples",
            explains=("metric-differs",),
            is_late=True,
        ),
        Mistake(
            "state-differs",
            "A state differs between the ranks",
            "buffers, scalers, schedules and averages of the ranks; buffers also of one process",
            "update it by values that are equal on all ranks",
        ),
        Mistake(
            "checkpoint-incomplete",
            "A checkpoint does not contain what a resumed run needs",
            "states, rates and averages of the resumed run, and the states in the checkpoint",
            "save model, optimizer, scheduler, averaged weights, epoch and position",
            explains=("resume-differs",),
            is_late=True,
        ),
        Mistake(
            "checkpoint-written-by-all",
            "Several ranks write the same checkpoint",
            "the ranks that write a file",
            "save on rank 0 only, or to a file of each rank",
            is_late=True,
        ),
        Mistake(
            "resume-differs",
            "A resumed run goes on with other values than were saved",
            "values, learning rates and optimizer states of the resumed run",
            "load all states on all ranks before the first step",
            is_late=True,
        ),
        Mistake(
            "resume-repeats-samples",
            "A resumed run repeats or skips samples",
            "the samples of the resumed run",
            "save the epoch and the position in it, and go on from there",
            is_late=True,
        ),
        Mistake(
            "gradients-differ",
            "The gradient differs from that of one process",
            "losses, gradients, clipped gradients, updates and buffers beside those of one process",
            "compare the lines between the loss and the optimizer's step on one rank and on N",
            is_gradient=True,
        ),
    )
}


@dataclass(frozen=True)
class Finding:
    """A mistake in the user's script.

    Attributes:
        mistake: Its kind.
        lines: "FILE:LINE" of the code to look at, the most important one first, each once.
        ranks: The ranks concerned; empty if all are.
        step: Optimizer step of the first occurrence, counted from 1; None if it is not of a step.
        layer: Name of a parameter or layer; "" if it is not of a layer.
        text: What was observed, in sentences with values.
        values: The same for machines.
        remedy: What to change in this script, if more is known than ``mistake.remedy``.
        nature: Of this finding, if another than that of ``mistake``.
        meant: Name in ``MEANT``, for ``Nature.MEANT``.
        is_accepted: Whether the user accepts it (``--accept``).
        difference: The difference from one process that it names.
    """

    mistake: Mistake
    lines: list[str]
    text: str
    ranks: list[int] = field(default_factory=list)
    step: int | None = None
    layer: str = ""
    values: dict[str, float | int | str] = field(default_factory=dict)
    remedy: str = ""
    nature: Nature | None = None
    meant: str = ""
    is_accepted: bool = False
    difference: Difference | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lines", [one for one in dict.fromkeys(self.lines) if one])

    @property
    def kind(self) -> Nature:
        """What it is based on."""
        return self.nature or self.mistake.nature

    @property
    def is_question(self) -> bool:
        """Whether the answer depends on what is wanted."""
        return self.kind is Nature.QUESTION

    @property
    def is_wrong(self) -> bool:
        """Whether N ranks do not train what one process does: the exit code is 1."""
        is_usual = bool(self.meant) and MEANT[self.meant].is_usual
        is_excused = self.kind is Nature.MEANT and (self.is_accepted or is_usual)
        return not self.is_question and not is_excused
