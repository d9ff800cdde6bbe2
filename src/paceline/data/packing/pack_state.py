"""State files in DEST/.packing, written atomically and checked when a later call reads them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec

from ...security.files import InvalidFileError, open_regular, read_regular
from ...security.schema import Count, Size, parse_json
from ..format.meta_schema import MAX_DIMS, MAX_SAMPLE_BYTES, ScalarOrPerChannel, ShardSchema
from ..format.shard_format import ROW_STRUCT, ArraySpec, Shard, create_new_file

MAX_STATE_BYTES = 1 << 28  # it holds the messages of samples that were left out
MAX_PARSED_STATE_BYTES = 1 << 30
MAX_PARTITION_BYTES = 1 << 16


class MomentsSchema(TypedDict, total=False):
    """Result of ``Statistics.as_state``."""

    samples: Count
    count: float
    mean: ScalarOrPerChannel
    squares: ScalarOrPerChannel
    classes: list[tuple[int, Count]]


@dataclass
class ShardState:
    """shard-00000.json: a complete shard. next: place in the order of the next sample."""

    shard: ShardSchema
    next: Count
    left_out: list[str]
    statistics: MomentsSchema
    alike: Annotated[list[tuple[str, list[Count]]], msgspec.Meta(max_length=2)]


@dataclass
class PieceState:
    """whole.json: all shards of a complete piece."""

    shards: list[ShardSchema]
    left_out: list[str]
    statistics: MomentsSchema
    alike: Annotated[list[tuple[str, list[Count]]], msgspec.Meta(max_length=2)]


@dataclass
class PartitionState:
    """pieces.json: ``Partition``."""

    first: Count
    each: Size
    samples: Count
    channels: Annotated[list[Count], msgspec.Meta(max_length=MAX_DIMS)] | None


def shard_state(work: Path, number: int) -> ShardState:
    """Read the state of a complete shard.

    Raises:
        OSError: It is missing or not regular.
        InvalidFileError: It is damaged.
    """
    path = work / f"shard-{number:05}.json"
    data = read_regular(path, MAX_STATE_BYTES)
    found = parse_json(data, ShardState, path, max_parsed_bytes=MAX_PARSED_STATE_BYTES)
    _check_shards(path, [found.shard], number)
    _check_moments(path, found.statistics)
    return found


def piece_state(path: Path) -> PieceState:
    """Read the state of a piece. Raises as ``shard_state``."""
    data = read_regular(path, MAX_STATE_BYTES)
    found = parse_json(data, PieceState, path, max_parsed_bytes=MAX_PARSED_STATE_BYTES)
    _check_shards(path, found.shards, 0)
    _check_moments(path, found.statistics)
    return found


def partition_state(path: Path) -> PartitionState:
    """Read the partition of the order. Raises as ``shard_state``."""
    found = parse_json(read_regular(path, MAX_PARTITION_BYTES), PartitionState, path)
    if found.channels and ArraySpec("float64", tuple(found.channels)).nbytes > MAX_SAMPLE_BYTES:
        raise InvalidFileError(path, f"says {found.channels} channels")
    return found


def shard_of(found: ShardSchema) -> Shard:
    """Return the shard of a state."""
    return Shard(found.file, found.samples, found.bytes, found.crc)


def rows_of(folder: Path, number: int, samples: int) -> bytes:
    """Read the rows of a shard. Raises InvalidFileError if their number is not ``samples``."""
    path = folder / f"rows-{number:05}"
    rows = read_regular(path, samples * ROW_STRUCT.size)
    if len(rows) != samples * ROW_STRUCT.size:
        raise InvalidFileError(
            path, f"has {len(rows):,} bytes, fewer than {samples:,} samples have"
        )
    return rows


def copy_file(source: Path, dest: Path) -> None:
    with open(open_regular(source), "rb") as read, create_new_file(dest) as written:
        while chunk := read.read(1 << 20):
            written.write(chunk)


def as_json(state: Any) -> bytes:
    return json.dumps(state).encode()


def _check_shards(path: Path, shards: list[ShardSchema], first: int) -> None:
    for number, shard in enumerate(shards, first):
        if shard.file != f"shard-{number:05}.bin":
            raise InvalidFileError(path, f"names {shard.file} as shard {number}")


def _check_moments(path: Path, found: MomentsSchema) -> None:
    known = {"samples", "count", "mean", "squares"} & found.keys()
    if "classes" not in found or len(known) not in (0, 4):
        raise InvalidFileError(path, "has only a part of its statistics")
    if known:
        moments = (found["mean"], found["squares"])
        if len({len(moment) if isinstance(moment, list) else -1 for moment in moments}) > 1:
            raise InvalidFileError(path, "has different numbers of means and of sums of squares")
