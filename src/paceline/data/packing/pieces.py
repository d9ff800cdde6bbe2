"""Pieces of the shuffled order, which ranks pack in parallel. Each piece is packed as whole shards.

    pieces.json      the partition of the order into pieces; a later call continues with it
    run-NAME/        work folder of one job: a claim file for each piece that a rank has taken, and
                     the pieces being written. Nothing in it is kept
    piece-000012/    a complete piece: its shards, their rows and names, and its state

A piece is written in the job's folder and renamed when it is complete, so a killed rank leaves no
partial piece. A rank that lost contact, and that a later job no longer counts, does no harm: either
its folder is gone, or its pieces hold the same bytes.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from ...security.files import InvalidFileError
from ...security.schema import Count, Size, read_json
from ..format.meta_schema import MAX_DIMS, MAX_SAMPLE_BYTES, nbytes
from ..format.shard_format import ROW_STRUCT
from . import pack_state
from .encode import EncodedSample
from .encoder_threads import MAX_AHEAD_BYTES, MAX_CHUNK_SAMPLES, Encoder, Span
from .shard_writer import PIECE_STATE_FILE, ShardWriter
from .statistics import Statistics
from .unfinished import PIECE_PREFIX, discard

PARTITION_FILE = "pieces.json"
MAX_PARTITION_BYTES = 1 << 16
SHARD_FILL = 0.9  # of the shard size, by the mean sample size: most pieces fit into one shard
MIN_PIECES_PER_RANK = 4  # so that no rank waits long for the last piece


@dataclass(frozen=True)
class Partition:
    """How the order is partitioned into pieces.

    Attributes:
        first: Place where the first piece begins; samples before it are in shards already.
        each: Places per piece.
        samples: Number of samples in the whole order.
        channels: Shape of the per-channel means; None if unknown.
    """

    first: Count
    each: Size
    samples: Count
    channels: Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMS)] | None = None

    @classmethod
    def of(
        cls,
        places: Span,
        size: float,
        shard_bytes: int,
        ranks: int,
        channels: tuple[int, ...] | None,
    ) -> "Partition":
        """Partition ``places`` into pieces of about one shard.

        Pieces are smaller if each rank would get fewer than MIN_PIECES_PER_RANK. ``size`` is the
        mean bytes of a sample.
        """
        first, samples = places
        shard = int(SHARD_FILL * shard_bytes / max(size, 1.0))
        share = -(-(samples - first) // (MIN_PIECES_PER_RANK * ranks))
        return cls(first, max(min(shard, share), 1), samples, channels)

    @classmethod
    def load(cls, work: Path) -> "Partition | None":
        """Return the partition of an earlier call; None if it is missing or damaged."""
        path = work / PARTITION_FILE
        try:
            partition = read_json(path, cls, MAX_PARTITION_BYTES)
        except (OSError, InvalidFileError):
            return None
        too_large = nbytes("float64", partition.channels or ()) > MAX_SAMPLE_BYTES
        return None if too_large else partition

    def save(self, work: Path) -> None:
        pack_state.write_state(work / PARTITION_FILE, asdict(self))

    def __len__(self) -> int:
        return -(-(self.samples - self.first) // self.each)

    def span(self, piece: int) -> Span:
        start = self.first + piece * self.each
        return start, min(start + self.each, self.samples)

    def piece(self, place: int) -> int:
        """Return the piece that holds a place."""
        return (place - self.first) // self.each


class PieceWriter:
    """Write the pieces that one process packs. run: folder of its job, in ``work``."""

    def __init__(
        self,
        partition: Partition,
        work: Path,
        run: Path,
        shard_bytes: int,
        images: bool,
        classes: bool,
    ) -> None:
        self.partition, self.work, self.run = partition, work, run
        self.shard_bytes, self.images, self.classes = shard_bytes, images, classes
        self.samples = self.bytes = 0  # done by this process; samples that are left out count
        self._writer: ShardWriter | None = None

    def pack(
        self,
        encoder: Encoder,
        chosen: Iterable[int],
        workers: int,
        step: Callable[[], None],
        ahead: int = MAX_AHEAD_BYTES,
    ) -> None:
        """Pack the pieces ``chosen``.

        Args:
            step: Called after each sample.

        Raises:
            ValueError: A sample can't be packed.
            OSError: A sample can't be written.
        """
        # Small chunks use all threads within a piece, and claim the next piece only late.
        chunk = min(max(self.partition.each // (4 * workers), 1), MAX_CHUNK_SAMPLES)
        spans = (self.partition.span(piece) for piece in chosen)
        try:
            for place, packed in encoder.encode(spans, workers, ahead, chunk):
                self._add(place, packed)
                step()
        finally:
            if self._writer is not None:
                self._writer.abort()

    def _add(self, place: int, packed: EncodedSample | str) -> None:
        piece = self.partition.piece(place)
        _, stop = self.partition.span(piece)
        if self._writer is None:
            folder = self.run / piece_name(piece)
            folder.mkdir()
            self._writer = ShardWriter(folder, folder, self.shard_bytes, self.images, self.classes)
            if self.partition.channels is not None:
                self._writer.statistics = Statistics.empty(self.images, self.partition.channels)
        bytes_before = self._writer.bytes
        self._writer.add_or_skip(packed, place)
        self.samples, self.bytes = self.samples + 1, self.bytes + self._writer.bytes - bytes_before
        if place + 1 == stop:
            self._writer.finish_piece(stop)
            self._writer.abort()
            try:
                self._writer.folder.rename(self.work / piece_name(piece))
            except OSError:
                if not (self.work / piece_name(piece) / PIECE_STATE_FILE).exists():
                    raise
                # Another rank has completed the same piece, with the same bytes. This one is
                # removed with the folder of the job.
            self._writer = None


class PieceClaims:
    """Iterator over the pieces that one rank packs.

    A rank first packs the pieces assigned to it, then pieces that other ranks have not begun. It
    claims a piece by creating the piece's file, in which only one rank can succeed.
    """

    def __init__(self, run: Path, pieces: list[int], rank: int, size: int) -> None:
        self.run, self.pieces, self.rank, self.size = run, pieces, rank, size

    def __iter__(self) -> Iterator[int]:
        for piece in self.pieces[self.rank :: self.size]:
            if self._claim(piece):
                yield piece
        claimed: set[str] = set()
        while True:
            claimed |= {
                item.partition("-")[2] for item in os.listdir(self.run) if item[:6] == "claim-"
            }
            left = [piece for piece in self.pieces if str(piece) not in claimed]
            if not left:
                return
            # From the end: far from the piece that its owner is at, and from other such ranks.
            piece = left[-1 - self.rank % len(left)]
            claimed.add(str(piece))  # a network file system may return an old listing
            if self._claim(piece):
                yield piece

    def _claim(self, piece: int) -> bool:
        try:
            os.close(os.open(self.run / f"claim-{piece}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


def piece_name(piece: int) -> str:
    return f"{PIECE_PREFIX}{piece:06}"


def complete_pieces(
    partition: Partition, work: Path, folder: Path, shards: int
) -> dict[int, tuple[int, int]]:
    """Return (samples, bytes) of each complete piece.

    A piece whose files do not match its state is discarded.

    shards: number of shards before the first piece. A call that was killed while it joined the
    pieces has already moved some shards to their final names, so these are checked, too.
    """
    found = {}
    for piece in range(len(partition)):
        place = work / piece_name(piece)
        try:
            shard_states = pack_state.piece_state(place / PIECE_STATE_FILE).shards
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            discard(place)
            continue
        final_paths = [
            folder / f"shard-{number:05}.bin"
            for number in range(shards, shards + len(shard_states))
        ]
        piece_paths = [place / item.file for item in shard_states]
        sizes = [_size(a) or _size(b) for a, b in zip(piece_paths, final_paths, strict=True)]
        rows = [_size(place / f"rows-{number:05}") for number in range(len(shard_states))]
        whole = sizes == [item.bytes for item in shard_states]
        if not whole or rows != [ROW_STRUCT.size * item.samples for item in shard_states]:
            discard(place)
            continue
        start, stop = partition.span(piece)
        found[piece] = (stop - start, sum(item.bytes for item in shard_states))
        shards += len(shard_states)
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
