"""State files in DEST/.packing, written atomically and checked when a later call reads them."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np

from ...security.files import InvalidFileError, open_regular, read_regular
from ...security.schema import Count, read_json
from ..format.meta_schema import ScalarOrPerChannel, Shard
from ..format.shard_format import ROW_STRUCT, create_new_file, write_atomically

MAX_STATE_BYTES = 1 << 28  # it holds the messages of samples that were left out
MAX_PARSED_STATE_BYTES = 1 << 30


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

    shard: Shard
    next: Count
    left_out: list[str]
    statistics: MomentsSchema
    alike: Annotated[list[tuple[str, list[Count]]], msgspec.Meta(max_length=2)]


@dataclass
class PieceState:
    """whole.json: all shards of a complete piece."""

    shards: list[Shard]
    left_out: list[str]
    statistics: MomentsSchema
    alike: Annotated[list[tuple[str, list[Count]]], msgspec.Meta(max_length=2)]


def shard_state(work: Path, number: int) -> ShardState:
    """Read the state of a complete shard.

    Raises:
        OSError: It is missing or not regular.
        InvalidFileError: It is damaged.
    """
    path = work / f"shard-{number:05}.json"
    state = read_json(path, ShardState, MAX_STATE_BYTES, max_parsed_bytes=MAX_PARSED_STATE_BYTES)
    _check_shards(path, [state.shard], number)
    _check_moments(path, state.statistics)
    return state


def piece_state(path: Path) -> PieceState:
    """Read the state of a piece. Raises as ``shard_state``."""
    state = read_json(path, PieceState, MAX_STATE_BYTES, max_parsed_bytes=MAX_PARSED_STATE_BYTES)
    _check_shards(path, state.shards, 0)
    _check_moments(path, state.statistics)
    return state


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
        shutil.copyfileobj(read, written)


def write_state(path: Path, state: Any) -> None:
    """Write a state as JSON, atomically."""
    write_atomically(path, json.dumps(state).encode())


def _check_shards(path: Path, shards: list[Shard], first: int) -> None:
    for number, shard in enumerate(shards, first):
        if shard.file != f"shard-{number:05}.bin":
            raise InvalidFileError(path, f"names {shard.file} as shard {number}")


def _check_moments(path: Path, moments: MomentsSchema) -> None:
    known = {"samples", "count", "mean", "squares"} & moments.keys()
    if "classes" not in moments or len(known) not in (0, 4):
        raise InvalidFileError(path, "has only a part of its statistics")
    if known and np.shape(moments["mean"]) != np.shape(moments["squares"]):
        raise InvalidFileError(path, "has different numbers of means and of sums of squares")
