"""The metadata of a packed dataset (paceline.json), validated before use.

The checksum in the file detects corruption. It does not authenticate the file, because anyone can
compute it. So the type, the range and the consistency of every value are checked.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np

from ...security.files import InvalidFileError
from ...security.schema import Count, Size, check

# Rows of the index store positions in this tuple, so the order must never change.
DTYPES = (
    *("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "bool", "complex64", "complex128"),
)
ITEM_BYTES = (1, 1, 2, 4, 8, 2, 4, 8, 2, 4, 8, 1, 8, 16)  # of each of DTYPES, in the same order
MAX_DIMS = 32
MAX_META_BYTES = 32 << 20  # about 250,000 shards
MAX_PARSED_META_BYTES = 512 << 20
MAX_SAMPLE_BYTES = 1 << 32  # limit for a decoded sample, and for a label
SHARD_NAME = re.compile(r"shard-[0-9]{5,9}\.bin")

Checksum = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
ScalarOrPerChannel = float | list[float]


@dataclass(frozen=True)
class ArraySpec:
    """Dtype and shape of arrays."""

    dtype: Annotated[str, msgspec.Meta(pattern=rf"^({'|'.join(DTYPES)})\Z")]
    shape: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMS)]

    @classmethod
    def of(cls, array: Any) -> "ArraySpec":
        """Return dtype and shape of an array."""
        return cls(array.dtype.name, array.shape)

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape)


@dataclass
class Shard:
    """One shard file.

    Attributes:
        file: File name.
        samples: Number of samples.
        bytes: Size of the file.
        crc: CRC-32C of the whole file.
    """

    file: Annotated[str, msgspec.Meta(pattern=rf"^{SHARD_NAME.pattern}\Z")]
    samples: Size
    bytes: Count
    crc: Checksum


@dataclass
class FileChecksum:
    """Size and CRC-32C of a whole file."""

    bytes: Count
    crc: Checksum


class StatisticsSchema(TypedDict, total=False):
    """Means, standard deviations and class counts, as written by ``Statistics.as_json``."""

    of: Count
    mean: ScalarOrPerChannel
    deviation: ScalarOrPerChannel
    classes: dict[str, Count]


class PackedSchema(TypedDict, total=False):
    """Source and options of the packing."""

    source: str
    kind: Annotated[str, msgspec.Meta(pattern=r"^(images|arrays|files)\Z")]
    seed: int
    encoding: dict[str, Any]
    left_out: Count
    date: str


@dataclass
class DatasetMeta:
    """The metadata of a packed dataset: paceline.json without format, version and checksum.

    Attributes:
        samples: Number of samples.
        shards: Shard files.
        array: Dtype and shape of all samples, None if they differ.
        label: Dtype and shape of the labels, "class", or None without labels.
        classes: Names of the classes 0, 1, 2, ...
        names: Whether the dataset has a names.txt.
        statistics: Means, standard deviations and class counts.
        packed: Source, options and date of the packing.
        files: Sizes and checksums of index.bin and names.txt; empty for datasets that were packed
            by older versions of Paceline.
    """

    samples: Size
    shards: list[Shard]
    array: ArraySpec | None
    label: ArraySpec | Annotated[str, msgspec.Meta(pattern=r"^class\Z")] | None
    classes: list[str]
    names: bool
    statistics: StatisticsSchema
    packed: PackedSchema
    files: dict[
        Annotated[str, msgspec.Meta(pattern=r"^(index\.bin|names\.txt)\Z")], FileChecksum
    ] = field(default_factory=dict)

    @property
    def tail(self) -> int:
        """Return the size in bytes of an array label, which follows its sample; 0 without one."""
        return self.label.nbytes if isinstance(self.label, ArraySpec) else 0

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


def validate_meta(tree: Any, file: Path) -> DatasetMeta:
    """Return the validated content of a parsed paceline.json.

    Raises:
        InvalidFileError: A value has the wrong type, is out of range or contradicts another value.
    """
    meta = check(tree, DatasetMeta, file)
    reason = _contradiction(meta)
    if reason:
        raise InvalidFileError(file, f"contradicts itself: {reason}")
    return meta


def nbytes(dtype: str, shape: tuple[int, ...] | list[int]) -> int:
    """Return the size in bytes of an array with a dtype of DTYPES."""
    return math.prod(shape) * ITEM_BYTES[DTYPES.index(dtype)]


def _contradiction(meta: DatasetMeta) -> str:
    names = [shard.file for shard in meta.shards]
    if len(set(names)) < len(names):
        return "two shards have the same file name"
    samples = sum(shard.samples for shard in meta.shards)
    if samples != meta.samples:
        return f"its shards have {samples:,} samples, but the dataset has {meta.samples:,}"
    for name, array in (("array", meta.array), ("label", meta.label)):
        if isinstance(array, ArraySpec) and array.nbytes > MAX_SAMPLE_BYTES:
            return f"{name}: {array.dtype} of {array.shape} is larger than 4 GiB"
    statistics = meta.statistics
    if "mean" in statistics:
        if not {"of", "deviation"} <= statistics.keys():
            return "statistics: the deviation or the number of samples of the mean is missing"
        if np.shape(statistics["mean"]) != np.shape(statistics["deviation"]):
            return "statistics: the mean and the deviation differ in length"
    if "names.txt" in meta.files and not meta.names:
        return "names.txt has a checksum, but the dataset has no names"
    return ""
