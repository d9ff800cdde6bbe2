"""Facts of loaders and of the batches that they returned."""

from dataclasses import dataclass, field
from enum import StrEnum


class Phase(StrEnum):
    """What the training does at the time of a fact."""

    SETUP = "setup"  # before the first batch
    TRAINING = "training"
    EVALUATION = "evaluation"  # batches without a backward


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
        rows: Positions of the samples that the model got, if it got only some of them; else empty.
    """

    loader: int
    pass_number: int
    number: int
    samples: int
    indices: list[int] | None
    contents: list[list[int]]
    step: int
    rows: list[int] = field(default_factory=list)

    @property
    def pass_key(self) -> tuple[int, int]:
        """Key of the loader, and number of its pass."""
        return self.loader, self.pass_number

    @property
    def place(self) -> tuple[int, int, int]:
        """Key of the loader, number of its pass, and number of the batch in it."""
        return self.loader, self.pass_number, self.number

    @property
    def used(self) -> int:
        """Number of samples that the model got.

        Those of the dataset count, if they are known: the first dimension of a tensor may be
        another one.
        """
        return len(self.rows) or (self.samples if self.indices is None else len(self.indices))

    @property
    def by_sample(self) -> list[tuple[int, ...]]:
        """The checksums of each sample's tensors; [] if the contents are not known."""
        return list(zip(*self.contents, strict=True))


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
        skipped: Batches of a stream that were read, and not returned, before the last one.
        skipped_samples: Samples of these batches.
        is_read: Whether a stream was read to its end.
    """

    number: int
    phase: Phase
    line: str
    sampler_epoch: int | None
    batches: int
    planned: list[list[int]] | None
    is_complete: bool
    first_step: int
    skipped: int = 0
    skipped_samples: int = 0
    is_read: bool = False


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
