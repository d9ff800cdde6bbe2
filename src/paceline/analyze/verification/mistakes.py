"""The mistakes that ``paceline verify`` names, and what a finding says of one."""

from dataclasses import dataclass, field
from enum import StrEnum


class Certainty(StrEnum):
    """How a finding is to be read."""

    MISTAKE = "mistake"  # N ranks do not train what one process does
    QUESTION = "question"  # it depends on what is wanted; both values are given


@dataclass(frozen=True)
class Mistake:
    """A kind of mistake.

    Attributes:
        id: Name in ``--json``.
        title: What is wrong, in a few words.
        remedy: What to change; an imperative.
        certainty: Of its findings.
        explains: Ids of mistakes that follow from it: they are not listed beside it.
    """

    id: str
    title: str
    remedy: str
    certainty: Certainty = Certainty.MISTAKE
    explains: tuple[str, ...] = ()


MISTAKES = {
    one.id: one
    for one in (
        Mistake(
            "replicas-start-different",
            "Ranks start with different parameters",
            "set the same seed on all ranks before the model is made, or broadcast rank 0's "
            "parameters (DistributedDataParallel does so)",
            explains=(
                "replicas-diverge",
                "gradients-differ",
                "state-differs",
                "batch-norm-differs",
            ),
        ),
        Mistake(
            "replicas-diverge",
            "Parameters of the ranks become different",
            "let each parameter be changed in the same way on all ranks",
            explains=("state-differs", "gradients-differ"),
        ),
        Mistake(
            "gradients-summed",
            "Gradients are summed over the ranks, and not averaged",
            "divide the sum by the number of ranks",
            explains=("gradients-differ", "learning-rate-scaled-twice"),
        ),
        Mistake(
            "gradients-divided-twice",
            "Gradients are divided by the number of ranks twice",
            "leave out the division: the exchange averages already",
            explains=("gradients-differ",),
        ),
        Mistake(
            "gradients-not-exchanged",
            "Gradients are not exchanged between the ranks",
            "call the model through its DistributedDataParallel wrapper, leave no_sync before the "
            "last backward of a step, and wrap a model whose trained parameters require gradients",
            explains=(
                "replicas-diverge",
                "gradients-differ",
                "gradients-summed",
                "gradients-divided-twice",
                "uneven-batches-averaged",
                "clipped-before-exchange",
                "accumulation-divided-wrongly",
                "state-differs",
                "batch-norm-differs",
            ),
        ),
        Mistake(
            "clipped-before-exchange",
            "Gradients are clipped before they are exchanged",
            "clip after the exchange: with DistributedDataParallel, after the last backward",
            explains=("gradients-differ", "replicas-diverge"),
        ),
        Mistake(
            "accumulation-divided-wrongly",
            "The loss is not divided by the number of accumulated batches",
            "divide the loss by the number of batches of a step, once",
            explains=("gradients-differ",),
        ),
        Mistake(
            "uneven-batches-averaged",
            "Batches of different sizes have equal weight in the gradient",
            "weight each rank's loss by its number of samples, or drop the last batch",
            explains=("gradients-differ",),
        ),
        Mistake(
            "loss-summed",
            "The loss is a sum over samples, whose gradient is averaged over ranks",
            "use the mean over samples, or scale the learning rate with the global batch size",
            explains=("gradients-differ", "uneven-batches-averaged"),
        ),
        Mistake(
            "same-samples",
            "Ranks train the same samples",
            "split the dataset: DistributedSampler, or world.shard(loader)",
            explains=(
                "samples-repeated",
                "samples-never-trained",
                "gradients-differ",
                "schedule-counts-other-steps",
            ),
        ),
        Mistake(
            "samples-repeated",
            "Samples are trained several times in an epoch",
            "use a sampler that returns each sample once",
        ),
        Mistake(
            "samples-never-trained",
            "Samples are never trained",
            "check the lengths, offsets and drop_last of the split",
        ),
        Mistake(
            "epoch-not-set",
            "All epochs have the same order",
            "call sampler.set_epoch(epoch) at the start of each epoch",
        ),
        Mistake(
            "same-random-numbers",
            "Random numbers are the same where they have to differ",
            "add the rank (and the worker's number) to the seed after the model is made",
        ),
        Mistake(
            "different-random-numbers",
            "Random numbers differ between ranks where they have to agree",
            "use a generator with the same seed on all ranks, such as "
            "torch.Generator().manual_seed(0)",
            explains=(
                "samples-repeated",
                "samples-never-trained",
                "validation-misses-samples",
                "validation-repeats-samples",
                "gradients-differ",
                "state-differs",
            ),
        ),
        Mistake(
            "learning-rate-not-scaled",
            "The learning rate is that of one rank",
            "scale it with the global batch size if that is wanted",
            Certainty.QUESTION,
        ),
        Mistake(
            "learning-rate-scaled-twice",
            "The learning rate is scaled twice",
            "multiply it by the number of ranks at one place",
            explains=("learning-rate-not-scaled",),
        ),
        Mistake(
            "learning-rates-differ",
            "Ranks have different learning rates",
            "compute the learning rate from values that are equal on all ranks",
            explains=(
                "replicas-diverge",
                "state-differs",
                "learning-rate-not-scaled",
                "learning-rate-scaled-twice",
            ),
        ),
        Mistake(
            "schedule-counts-other-steps",
            "The learning-rate schedule has another length than the training",
            "compute its length from the number of steps on N ranks: len(loader) after the split",
        ),
        Mistake(
            "batch-norm-differs",
            "Statistics of batch normalization differ between the ranks",
            "use SyncBatchNorm, or keep broadcast_buffers=True",
            explains=("batch-norm-of-one-rank",),
        ),
        Mistake(
            "batch-norm-of-one-rank",
            "Batch normalization uses the batch of one rank",
            "use SyncBatchNorm if the statistics of the global batch are wanted",
            Certainty.QUESTION,
        ),
        Mistake(
            "metric-of-one-rank",
            "A printed value is that of one rank",
            "sum the value and the number of samples over the ranks before it is printed",
        ),
        Mistake(
            "validation-repeats-samples",
            "Validation counts samples several times",
            "leave out the samples that the sampler added, or validate on one rank",
        ),
        Mistake(
            "validation-misses-samples",
            "Validation leaves out samples",
            "use drop_last=False, and a split that covers all samples",
        ),
        Mistake(
            "state-differs",
            "A state differs between the ranks",
            "update it by values that are equal on all ranks",
        ),
        Mistake(
            "checkpoint-incomplete",
            "A checkpoint does not contain what a resumed run needs",
            "save model, optimizer, scheduler, scaler, epoch and position",
            explains=("resume-differs",),
        ),
        Mistake(
            "checkpoint-written-by-all",
            "Several ranks write the same checkpoint",
            "save on rank 0 only, or to a file of each rank",
        ),
        Mistake(
            "resume-differs",
            "A resumed run goes on with other values than were saved",
            "load all states on all ranks before the first step",
        ),
        Mistake(
            "resume-repeats-samples",
            "A resumed run repeats or skips samples",
            "save the epoch and the position in it, and go on from there",
        ),
        Mistake(
            "gradients-differ",
            "The gradient differs from that of one process",
            "compare the lines between the loss and the optimizer's step on one rank and on N",
        ),
    )
}


@dataclass(frozen=True)
class Finding:
    """A mistake in the user's script.

    Attributes:
        mistake: Its kind.
        lines: "FILE:LINE" of the code to look at, the most important one first.
        ranks: The ranks concerned; empty if all are.
        step: Optimizer step of the first occurrence, counted from 1; None if it is not of a step.
        layer: Name of a parameter or layer; "" if it is not of a layer.
        text: What was observed, in sentences with values.
        values: The same for machines.
        remedy: What to change in this script, if more is known than ``mistake.remedy``.
        certainty: Of this finding, if another than that of ``mistake``.
    """

    mistake: Mistake
    lines: list[str]
    text: str
    ranks: list[int] = field(default_factory=list)
    step: int | None = None
    layer: str = ""
    values: dict[str, float | int | str] = field(default_factory=dict)
    remedy: str = ""
    certainty: Certainty | None = None

    @property
    def is_question(self) -> bool:
        """Whether the answer depends on what is wanted."""
        return (self.certainty or self.mistake.certainty) is Certainty.QUESTION
