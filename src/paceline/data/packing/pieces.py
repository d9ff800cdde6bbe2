"""The order in pieces, which ranks pack side by side: each piece by itself, as whole shards.

    pieces.json      where the order is cut; a later call goes on with the same cut
    run-NAME/        of one job: a file for each piece that a rank has taken, and what is being
                     written. Nothing of it is kept
    piece-000012/    a whole piece: its shards with their rows and names, and what is known of it

A piece is written in the job's folder, and gets its name at once when it is whole. So a rank that
is killed leaves nothing half, and one that nobody has heard of for a while, and that a later job
no longer counts with, can do no harm: its folder is gone, or what it gives is the same bytes.
"""

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from ...security.files import InvalidFileError
from ...security.schema import Count, Size
from ..format.meta_schema import MAX_DIMS
from ..format.shard_format import ROW_STRUCT, write_atomically
from . import pack_state
from .encode import Packed
from .encoder_threads import AHEAD_BYTES, CHUNK, Encoder, Span
from .shard_writer import WHOLE, Writer
from .statistics import Statistics
from .unfinished import PIECE, discard

CUT = "pieces.json"
FULL = 0.9  # of a shard, as large as samples are in the mean: most pieces are one shard
A_RANK = 4  # pieces at least, so that none waits long for the last one


@dataclass(frozen=True)
class Cut:
    """first: the place where the first piece begins; what is before it lies in shards already.
    each: places of a piece. samples: in all. channels: the shape of their means, None where it
    is not known."""

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
    ) -> "Cut":
        """Into pieces of about a shard, or smaller ones where each rank would get few. size: bytes
        of a sample."""
        first, samples = places
        shard = int(FULL * shard_bytes / max(size, 1.0))
        share = -(-(samples - first) // (A_RANK * ranks))
        return cls(first, max(min(shard, share), 1), samples, channels)

    @classmethod
    def load(cls, work: Path) -> "Cut | None":
        """Return that of an earlier call; None where there is none, or a damaged one."""
        try:
            found = pack_state.cut_state(work / CUT)
        except (OSError, InvalidFileError):
            return None
        channels = None if found.channels is None else tuple(found.channels)
        return cls(found.first, found.each, found.samples, channels)

    def save(self, work: Path) -> None:
        write_atomically(work / CUT, pack_state.as_json(asdict(self)))

    def __len__(self) -> int:
        return -(-(self.samples - self.first) // self.each)

    def span(self, piece: int) -> Span:
        start = self.first + piece * self.each
        return start, min(start + self.each, self.samples)

    def piece(self, place: int) -> int:
        """The one that a place is in."""
        return (place - self.first) // self.each


class Pieces:
    """Pieces as one process writes them. run: the folder of its job, in ``work``."""

    def __init__(
        self, cut: Cut, work: Path, run: Path, shard_bytes: int, images: bool, classes: bool
    ) -> None:
        self.cut, self.work, self.run = cut, work, run
        self.shard_bytes, self.images, self.classes = shard_bytes, images, classes
        self.samples = self.bytes = 0  # that this process has done, those left out among them
        self._writer: Writer | None = None

    def pack(
        self,
        encoder: Encoder,
        chosen: Iterable[int],
        workers: int,
        step: Callable[[], None],
        ahead: int = AHEAD_BYTES,
    ) -> None:
        """Pack these pieces. step: is called after each sample. Raises ValueError for a sample
        that can't be packed, OSError where it can't be written."""
        # Not all of a piece with one thread, nor the next one taken long before this one is done.
        chunk = min(max(self.cut.each // (4 * workers), 1), CHUNK)
        spans = (self.cut.span(piece) for piece in chosen)
        try:
            for place, packed in encoder.encoded(spans, workers, ahead, chunk):
                self._add(place, packed)
                step()
        finally:
            if self._writer is not None:
                self._writer.abort()

    def _add(self, place: int, packed: Packed | str) -> None:
        piece = self.cut.piece(place)
        _, stop = self.cut.span(piece)
        if self._writer is None:
            folder = self.run / name(piece)
            folder.mkdir()
            self._writer = Writer(folder, folder, self.shard_bytes, self.images, self.classes)
            if self.cut.channels is not None:
                self._writer.statistics = Statistics.empty(self.images, self.cut.channels)
        before = self._writer.bytes
        self._writer.take(packed, place)
        self.samples, self.bytes = self.samples + 1, self.bytes + self._writer.bytes - before
        if place + 1 == stop:
            self._writer.whole(stop)
            self._writer.abort()
            try:
                self._writer.folder.rename(self.work / name(piece))
            except OSError:
                if not (self.work / name(piece) / WHOLE).exists():
                    raise
                shutil.rmtree(self._writer.folder)  # another one was sooner, with the same
            self._writer = None


class Claims:
    """The pieces that one of several ranks packs: those that are dealt to it, and then what others
    have not begun. A rank takes a piece by making its file, which only one can."""

    def __init__(self, run: Path, pieces: list[int], rank: int, size: int) -> None:
        self.run, self.pieces, self.rank, self.size = run, pieces, rank, size

    def __iter__(self) -> Iterator[int]:
        for piece in self.pieces[self.rank :: self.size]:
            if self._taken(piece):
                yield piece
        gone: set[str] = set()
        while True:
            gone |= {one.partition("-")[2] for one in os.listdir(self.run) if one[:6] == "claim-"}
            left = [piece for piece in self.pieces if str(piece) not in gone]
            if not left:
                return
            piece = left[-1 - self.rank % len(left)]  # where neither its owner is yet nor others
            gone.add(str(piece))  # a list that a file server remembers may be old
            if self._taken(piece):
                yield piece

    def _taken(self, piece: int) -> bool:
        try:
            os.close(os.open(self.run / f"claim-{piece}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        except FileExistsError:
            return False
        return True


def name(piece: int) -> str:
    return f"{PIECE}{piece:06}"


def done(cut: Cut, work: Path, folder: Path, shards: int) -> dict[int, tuple[int, int]]:
    """Of each piece that is whole, (samples, bytes). One whose files are not what it says is
    discarded. shards: how many there are before the first piece; those of the pieces have their
    last names already where a call was killed while it joined them."""
    found = {}
    for piece in range(len(cut)):
        place = work / name(piece)
        try:
            told = pack_state.whole_state(place / WHOLE).shards
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            discard(place)
            continue
        last = [folder / f"shard-{number:05}.bin" for number in range(shards, shards + len(told))]
        here = [place / one.file for one in told]
        sizes = [_size(a) or _size(b) for a, b in zip(here, last, strict=True)]
        rows = [_size(place / f"rows-{number:05}") for number in range(len(told))]
        whole = sizes == [one.bytes for one in told]
        if not whole or rows != [ROW_STRUCT.size * one.samples for one in told]:
            discard(place)
            continue
        start, stop = cut.span(piece)
        found[piece] = (stop - start, sum(one.bytes for one in told))
        shards += len(told)
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
