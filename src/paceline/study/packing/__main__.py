"""One rank of ``paceline pack``: ``-m paceline.study.packing RUN``, the folder of its job.

It needs no GPU, no torch and no process group: which pieces are taken, how far each rank is, and
that one can't go on, are files in that folder."""

import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path

from ...cluster.rank_identity import Place, place
from ...data.format.shard_format import write_atomically
from ...data.packing.encoder_threads import AHEAD_BYTES, Encoder, in_order
from ...data.packing.pack import encoder
from ...data.packing.pieces import Claims, Pieces
from ...data.packing.unfinished import SPOOL, full_told
from ...data.sources.open_source import find
from ...data.sources.source import ShardSource, Source
from ...record.ring.launcher_messages import notify, send_to_launcher
from ...report.terminal.packed_dataset import progress
from ...security.files import InvalidFileError, open_regular, read_regular
from . import FAILED, Task

BEAT = 1.0  # seconds between two looks at what others have done
LAST = 0.1  # the same, for rank 0 once it has nothing left to do
RANKS = 64  # that may look so often
QUIET_S = 10.0  # between two lines of progress where there is no terminal
COUNTS = struct.Struct("<qq")  # samples and bytes
LEAST_AHEAD = 32 << 20


def main() -> int:
    """Pack; the exit code. A mistake that the user can mend is the launcher's to tell."""
    run, who = Path(sys.argv[1]), place(dict(os.environ))
    host = socket.gethostname()
    try:
        task = Task.load(run)
    except InvalidFileError as mistake:
        _fail(run, who.rank, mistake)
        return 0
    except FileNotFoundError:
        dest = run.parent.parent
        raise ValueError(
            f"{dest}: what {host} sees there is another folder. HINT: one on a file system that "
            "all hosts share"
        ) from None
    limit, images = task.asked.wish.shard_bytes, task.kind == "images"
    pieces = Pieces(task.cut, run.parent, run, limit, images, task.classes)
    beat = Beat(run, who, task, pieces)
    try:
        try:
            of_mine = _encoder(task, run.parent)
        except ValueError as mistake:
            raise ValueError(f"{host}: {mistake}") from None
        with full_told(Path(task.asked.dest)):
            _pack(task, pieces, of_mine, run, who, beat)
    except ValueError as mistake:
        _fail(run, who.rank, mistake)
    return 0


def _fail(run: Path, rank: int, mistake: ValueError) -> None:
    """Write down why this rank can't go on: the launcher tells it, and the other ranks end."""
    write_atomically(run / f"failing-{rank}", str(mistake).encode(errors="replace"))
    (run / f"failing-{rank}").replace(run / FAILED)


def _encoder(task: Task, work: Path) -> Encoder:
    asked = task.asked
    how = asked.how
    source: Source
    source = ShardSource(work / SPOOL) if task.spooled else find(asked.source, asked.labels, work)
    source.kind, source.told = task.kind, task.told
    if len(source) != task.cut.samples:
        raise ValueError(
            f"{source.told}: has {len(source):,} samples here, and {task.cut.samples:,} where the "
            "job was started. HINT: the same source on all hosts"
        )
    return encoder(source, how, asked.wish, in_order(len(source), asked.wish.seed))


def _pack(
    task: Task, pieces: Pieces, encoder: Encoder, run: Path, who: Place, beat: "Beat"
) -> None:
    beside = who.local_size or 1
    workers = task.asked.workers or max(2 * len(os.sched_getaffinity(0)) // beside, 2)
    claims = Claims(run, task.left, who.rank, who.size)
    beat.start()
    ahead = max(AHEAD_BYTES // beside, LEAST_AHEAD)
    pieces.pack(encoder, claims, workers, lambda: None, ahead)
    beat.finish()


class Beat(threading.Thread):
    """Writes down what this rank has done, ends it where another one can't go on, and shows on
    rank 0 what all have done."""

    def __init__(self, run: Path, who: Place, task: Task, pieces: Pieces) -> None:
        super().__init__(daemon=True)
        self.run_folder, self.who, self.task, self.pieces = run, who, task, pieces
        self.every = BEAT * max(1.0, who.size / RANKS)
        self.moving = os.environ.get("PACELINE_TTY") == "1"
        self.began = time.monotonic()
        self.due = self.began + (0.0 if self.moving else QUIET_S)
        self.known = dict.fromkeys(range(who.size), (0, 0))
        self.shown = False
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(self.every):
            self._beat()

    def finish(self) -> None:
        """This rank has no piece left. Rank 0 goes on to show what the others do."""
        self._over.set()
        self.join()
        left = self.task.cut.samples - self.task.done
        while True:
            self._beat()
            if self.who.rank or sum(samples for samples, _ in self.known.values()) >= left:
                break
            time.sleep(self.every / BEAT * LAST)
        if self.shown and self.moving:
            notify("\r\x1b[2K")

    def _beat(self) -> None:
        if (self.run_folder / FAILED).exists() or not self.run_folder.exists():
            send_to_launcher(finished=0)
            os._exit(0)
        self._write(self.pieces.samples, self.pieces.bytes)
        if self.who.rank == 0:
            for rank in self.known:
                self._read(rank)
            self._show()

    def _write(self, samples: int, size: int) -> None:
        # Opened and closed each time: only then others see it where a file server is between.
        path, flags = self.run_folder / f"done-{self.who.rank}", os.O_CREAT | os.O_WRONLY
        file = open_regular(path, flags, follow_links=False, mode=0o666)
        try:
            os.pwrite(file, COUNTS.pack(samples, size), 0)
        finally:
            os.close(file)

    def _read(self, rank: int) -> None:
        try:
            told = read_regular(self.run_folder / f"done-{rank}", COUNTS.size)
        except (OSError, InvalidFileError):
            return
        if len(told) == COUNTS.size:
            samples, size = COUNTS.unpack(told)
            self.known[rank] = max(samples, 0), max(size, 0)

    def _show(self) -> None:
        now = time.monotonic()
        if now < self.due:
            return
        self.due, self.shown = now + (0.0 if self.moving else QUIET_S), True
        samples = sum(samples for samples, _ in self.known.values())
        size = self.task.bytes + sum(size for _, size in self.known.values())
        rate = samples / (now - self.began)
        done = self.task.done + samples
        line = f"paceline: {progress('packed', done, self.task.cut.samples, size, rate)}"
        notify(f"\r\x1b[2K{line}\r" if self.moving else f"{line}\n")


if __name__ == "__main__":
    raise SystemExit(main())
