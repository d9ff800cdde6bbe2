"""What ``paceline verify`` observes of a training in one rank. This module needs no torch.

The facts refer to tensors by the numbers of rows in ``RankFacts.sketches``.

Lines are "FILE:LINE" of the user's code, relative to the working directory; "" if none is known.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

SCHEDULE_END = "the end of its decay"
FLAT = "FullyShardedDataParallel"  # shards flat parameters, whose gradients are not observed


class Phase(StrEnum):
    """What the training does at the time of a fact."""

    SETUP = "setup"  # before the first batch
    TRAINING = "training"
    EVALUATION = "evaluation"  # batches without a backward


@dataclass
class ParameterFacts:
    """A parameter of a model.

    Attributes:
        name: Name in the user's model, without the prefix of a wrapper.
        shape: Shape of the whole parameter.
        dtype: Such as "float32".
        requires_grad: At the time when the model was wrapped; without a wrapper, at the first
            forward.
        shard_offset: Position of this rank's shard in the flattened whole parameter; 0 if the
            rank holds all of it.
        shard_numel: Number of elements that this rank holds.
    """

    name: str
    shape: list[int]
    dtype: str
    requires_grad: bool
    shard_offset: int
    shard_numel: int


@dataclass
class ModelFacts:
    """A trained model: the outermost module of a forward that has parameters.

    Attributes:
        key: Number of the model in this rank.
        class_name: Class of the user's module.
        wrapper: "DistributedDataParallel", "FSDP2" or "FullyShardedDataParallel"; "" if none.
        line: Where it was wrapped; without a wrapper, the line of its first forward.
        is_sharded: Whether each rank holds a part of the parameters.
        broadcasts_buffers: Whether DistributedDataParallel sends rank 0's buffers to all ranks.
        parameters: All parameters.
        outside_forwards: Lines that called a module of the wrapped model, and not the wrapper.
        no_sync_lines: Lines that entered ``no_sync``, or switched the synchronization off.
        initial: By parameter, the row of its values before the wrapper's broadcast.
        first: By parameter, the row of its values at the first training forward.
        batch_norms: Names of batch normalization layers that compute statistics of one rank only.
        ignored: Parameters that DistributedDataParallel was told to ignore.
        hook_lines: Lines that registered hooks on gradients.
        exchange_hook_lines: Lines that registered a communication hook.
    """

    key: int
    class_name: str
    wrapper: str
    line: str
    is_sharded: bool
    broadcasts_buffers: bool
    parameters: list[ParameterFacts]
    outside_forwards: list[str] = field(default_factory=list)
    no_sync_lines: list[str] = field(default_factory=list)
    initial: dict[str, int] = field(default_factory=dict)
    first: dict[str, int] = field(default_factory=dict)
    batch_norms: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    hook_lines: list[str] = field(default_factory=list)
    exchange_hook_lines: list[str] = field(default_factory=list)


@dataclass
class BatchFacts:
    """A batch that a loader returned.

    Attributes:
        loader, pass_number: The pass; passes of a loader are counted from 0.
        number: Position in its pass.
        samples: Number of samples.
        indices: Indices of the samples in the dataset; None if they are not known.
        contents: For each tensor of the batch whose first dimension is the number of samples, a
            checksum of each sample.
        step: Optimizer steps before it.
    """

    loader: int
    pass_number: int
    number: int
    samples: int
    indices: list[int] | None
    contents: list[list[int]]
    step: int


@dataclass
class PassFacts:
    """A pass over a loader, such as an epoch.

    Attributes:
        number: Position among the passes of this loader.
        phase: TRAINING if a backward followed one of its batches.
        line: The line that iterates.
        sampler_epoch: ``sampler.epoch`` at the start; None if the sampler has none.
        batches: Number of batches that were trained or evaluated.
        planned: Indices of the samples of all batches of the pass, also of those that were not
            read because ``paceline verify`` shortens epochs; None if they are not known.
        is_complete: Whether all batches of the pass were read.
        first_step: Optimizer steps before the pass.
    """

    number: int
    phase: Phase
    line: str
    sampler_epoch: int | None
    batches: int
    planned: list[list[int]] | None
    is_complete: bool
    first_step: int


@dataclass
class LoaderFacts:
    """A loader.

    Attributes:
        key: Number of the loader in this rank.
        line: Where it was made.
        dataset: Class of the dataset.
        dataset_length: Number of samples; None if it is not known.
        dataset_checksum: Checksum of the indices of a ``Subset`` (also nested ones), and of the
            first samples' contents if these are cheap to get; 0 if neither is known.
        is_iterable: Whether the dataset is an IterableDataset.
        batch_size: None if a batch sampler decides.
        sampler: Class of the sampler.
        sampler_has_epoch: Whether the sampler, or the IterableDataset, has ``set_epoch``.
        drops_last: ``drop_last``.
        workers: Number of worker processes.
        passes: Its passes, in order.
        subset: Of a ``Subset`` (also nested), the indices in the innermost dataset; else None.
        root_length: Number of samples of the innermost dataset.
        root_checksum: Checksum of the first samples' contents of the innermost dataset, or 0.
        sampler_line: Where the user's code defines ``__iter__`` of the sampler; "" if it does not.
        split_line: Where a ``Subset`` was made.
        sampler_seed_line, sampler_return_line: Where it seeds or shuffles, and returns the order.
    """

    key: int
    line: str
    dataset: str
    dataset_length: int | None
    dataset_checksum: int
    is_iterable: bool
    batch_size: int | None
    sampler: str
    sampler_has_epoch: bool
    drops_last: bool
    workers: int
    passes: list[PassFacts] = field(default_factory=list)
    subset: list[int] | None = None
    root_length: int | None = None
    root_checksum: int = 0
    sampler_line: str = ""
    split_line: str = ""
    sampler_seed_line: str = ""
    sampler_return_line: str = ""


@dataclass
class BackwardFacts:
    """A backward.

    Attributes:
        line: The line that called it.
        model: Key of the model whose forward came before.
        batches: Numbers of the batches (in ``RankFacts.batches``) that were fetched for it.
        root: Value of the tensor from which the backward started.
        loss: Value of the last loss function before it (without a reduction, the sum of its
            elements); None if none was seen.
        scale: Loss scale of a gradient scaler at this time; 1 without one.
        is_syncing: False within ``no_sync``.
        gradients: By parameter, the row of the gradient that this rank computed, before any
            exchange. Empty if it cannot be observed. Without those that were cleared before
            another backward of the same step.
        reduction: "mean", "sum" or "none" of that loss function; "" if it is not known.
        elements: Number of targets that it counted; 0 if it is not known.
        autocast: dtype of autocast in the forward; "" without autocast.
        raw: By parameter whose gradient a hook of the script has changed before any exchange, the
            row of the gradient before.
    """

    line: str
    model: int
    batches: list[int]
    root: float
    loss: float | None
    scale: float
    is_syncing: bool
    gradients: dict[str, int] = field(default_factory=dict)
    reduction: str = ""
    elements: int = 0
    autocast: str = ""
    raw: dict[str, int] = field(default_factory=dict)


@dataclass
class ClipFacts:
    """A call of ``clip_grad_norm_`` or ``clip_grad_value_``.

    Attributes:
        line: The line that called it.
        limit: Its limit.
        norm: The norm that it returned; None for ``clip_grad_value_``.
        gradients: By parameter, the row of the gradient before it was clipped.
        clipped: By parameter, the row of the gradient afterwards.
    """

    line: str
    limit: float
    norm: float | None
    gradients: dict[str, int]
    clipped: dict[str, int]


@dataclass
class StepFacts:
    """A step of an optimizer.

    Attributes:
        index: Number of steps of this optimizer before it.
        optimizer: Key of the optimizer.
        line: The line that called ``step``.
        learning_rates: Of each parameter group, in this step.
        backwards: The backwards since the last step.
        clips: The calls that clipped gradients since the last step.
        scale: Loss scale of the gradients before they were unscaled; 1 without a scaler.
        is_skipped: Whether a gradient scaler skipped the step.
        gradients: By parameter, the row of the gradient that the optimizer uses.
        parameters: By parameter, the row of its values after the step.
        buffers: By name, the row of the model's floating-point buffers at the step.
        before: By parameter, the row of its values before the step.
        momenta: Of each parameter group: ``momentum``, or the first of ``betas``; NaN without them.
        state_tensors: Tensors of several elements in the optimizer's state before the step; -1 if
            it is not known.
        gradient_lines: Lines of the script that changed gradients after a backward, in order; of
            the first steps only.
        value_lines: Lines between this step and the one before that changed parameters; of the
            first steps only.
    """

    index: int
    optimizer: int
    line: str
    learning_rates: list[float]
    backwards: list[BackwardFacts] = field(default_factory=list)
    clips: list[ClipFacts] = field(default_factory=list)
    scale: float = 1.0
    is_skipped: bool = False
    gradients: dict[str, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    state_tensors: int = -1
    momenta: list[float] = field(default_factory=list)
    gradient_lines: list[str] = field(default_factory=list)
    value_lines: list[str] = field(default_factory=list)


@dataclass
class OptimizerFacts:
    """An optimizer.

    Attributes:
        key: Number of the optimizer in this rank.
        class_name: Its class.
        line: Where it was made.
        parameters: Names of its parameters, by parameter group ("MODEL KEY/NAME";
            "?OPTIMIZER KEY.NUMBER" for one of no model).
        initial_rates: Learning rate of each group when it was made.
        rate_lines: Lines of the script that changed learning rates in the first steps.
    """

    key: int
    class_name: str
    line: str
    parameters: list[list[str]]
    initial_rates: list[float]
    rate_lines: list[str] = field(default_factory=list)


@dataclass
class ScheduleFacts:
    """A learning-rate scheduler.

    Attributes:
        class_name: Its class.
        line: Where it was made.
        optimizer: Key of its optimizer.
        lengths: Its attributes that count steps (T_max, total_steps, step_size, milestones, ...),
            and as ``SCHEDULE_END`` where the functions of a LambdaLR have decayed.
        step_lines: Lines that called ``step``.
        steps: Optimizer steps before each call of ``step``.
    """

    class_name: str
    line: str
    optimizer: int
    lengths: dict[str, list[int]]
    step_lines: list[str] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)


@dataclass
class DrawFacts:
    """Random numbers that were drawn, or could have been.

    Attributes:
        place: "fetch" (a dataset's samples), "forward" or "construction" (of the first model).
        generator: "torch", "cuda", "numpy" or "python".
        worker: Number of the loader's worker process; None in the rank itself.
        loader: Key of the loader for "fetch", key of the model otherwise.
        pass_number: Pass of the loader; 0 otherwise.
        number: Batch of the pass, or number of the forward.
        state: Checksum of the generator's state before.
        has_drawn: Whether the state has changed.
        line: The line that drew, or the closest one known.
    """

    place: str
    generator: str
    worker: int | None
    loader: int
    pass_number: int
    number: int
    state: int
    has_drawn: bool
    line: str


@dataclass
class CollectiveFacts:
    """A collective, or a send or receive, of the script (not those of verify).

    Attributes:
        kind: Such as "allreduce".
        operation: "sum", "avg", ...; "" if it has none.
        nbytes: Bytes of its tensors.
        phase: What the training did.
        step: Optimizer steps before it.
        is_in_backward: Whether a backward ran.
        line: The line of the script; "" within a backward.
        dtype: Of its tensors; "" if it is not known.
        peak: Largest absolute value that this rank sends in a reduction of floating-point tensors
            during the training; -1 if it is not known.
        removes_repeated: Whether a library gathers results of an evaluation, and removes those of
            samples that its sampler has repeated.
    """

    kind: str
    operation: str
    nbytes: int
    phase: Phase
    step: int
    is_in_backward: bool
    line: str
    dtype: str = ""
    peak: float = -1.0
    removes_repeated: bool = False


@dataclass
class OutputFacts:
    """A line of text that the rank wrote to its standard output or error, or logged as a scalar.

    Attributes:
        text: The line.
        line: The line of code that wrote it.
        phase: What the training did at last.
        step: Optimizer steps before it.
        collectives: Number of collectives (in ``RankFacts.collectives``) before it.
        batches: Number of batches (in ``RankFacts.batches``) before it.
    """

    text: str
    line: str
    phase: Phase
    step: int
    collectives: int
    batches: int


@dataclass
class StateFacts:
    """A state besides model and optimizer that ranks have to agree on.

    Attributes:
        kind: "scaler", "schedule" or "average" (a copy of the model whose values are averaged).
        name: Its class, and a name if it has one.
        line: Where it was made.
        step: Optimizer steps before this value.
        values: Numbers of the state, such as the loss scale.
        rows: By parameter, the row of its values; empty for states without tensors.
        changed_by: Lines that change it: the one of the training loop, and the innermost one.
    """

    kind: str
    name: str
    line: str
    step: int
    values: dict[str, float] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    changed_by: list[str] = field(default_factory=list)


@dataclass
class FileFacts:
    """A checkpoint that was saved or loaded.

    Attributes:
        path: Path as the script gave it.
        is_save: Saved, or loaded.
        line: The line that did.
        step: Optimizer steps before it.
        pass_number: Passes of the training loader that had begun.
        keys: Top-level keys; with a dot, those of one level below.
        contains: Which of "model", "optimizer", "schedule", "scaler", "random" states are in it.
        rows: By parameter (of the model state), the row of its values.
        learning_rates: Those in an optimizer state; empty without one.
        is_distributed: Whether all ranks write it together (torch.distributed.checkpoint).
    """

    path: str
    is_save: bool
    line: str
    step: int
    pass_number: int
    keys: list[str]
    contains: list[str]
    rows: dict[str, int] = field(default_factory=dict)
    learning_rates: list[float] = field(default_factory=list)
    is_distributed: bool = False


@dataclass
class RestoreFacts:
    """A call of ``load_state_dict``.

    Attributes:
        what: "model", "optimizer" or "schedule".
        key: Of the optimizer; -1 for others.
        line: The line that called it.
        step: Optimizer steps before it.
    """

    what: str
    key: int
    line: str
    step: int


@dataclass
class SeedFacts:
    """A call that seeded a generator.

    Attributes:
        generator: "torch", "numpy", "python", or "own" for an object that the script made.
        value: The seed.
        line: The line that called it.
        step: Optimizer steps before it.
    """

    generator: str
    value: int
    line: str
    step: int


@dataclass
class OperatorFacts:
    """An operator of the first step of a training.

    Attributes:
        name: Such as "aten.addmm".
        line: The line of the script; "" within a backward.
        checksum: Of the values of its first result; 0 if it has none.
    """

    name: str
    line: str
    checksum: int


@dataclass
class RankFacts:
    """All that was observed in one rank.

    Attributes:
        rank, size: Rank and number of ranks.
        ended: "limit" if verify ended the run, "script" if the script did, "error" after an
            exception.
        unseen: What could not be observed, each with its reason.
        seeds: Calls that seeded generators, in order.
        operators: Operators of the first step, in order; empty unless they were traced.
        parts: Maximum number of parts in which a replay trains a global batch.
        restores: Calls that restored states, in order.
    """

    rank: int
    size: int
    ended: str = ""
    models: list[ModelFacts] = field(default_factory=list)
    optimizers: list[OptimizerFacts] = field(default_factory=list)
    schedules: list[ScheduleFacts] = field(default_factory=list)
    loaders: list[LoaderFacts] = field(default_factory=list)
    batches: list[BatchFacts] = field(default_factory=list)
    steps: list[StepFacts] = field(default_factory=list)
    draws: list[DrawFacts] = field(default_factory=list)
    collectives: list[CollectiveFacts] = field(default_factory=list)
    outputs: list[OutputFacts] = field(default_factory=list)
    states: list[StateFacts] = field(default_factory=list)
    files: list[FileFacts] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    seeds: list[SeedFacts] = field(default_factory=list)
    operators: list[OperatorFacts] = field(default_factory=list)
    parts: int = 1
    restores: list[RestoreFacts] = field(default_factory=list)
    sketches: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
