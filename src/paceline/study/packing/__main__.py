"""One rank of ``paceline pack``: ``-m paceline.study.packing RUN``, where RUN is its job's folder.

A rank needs no GPU, torch or process group: ranks claim pieces, report their progress and report
failures through files in that folder.
"""

import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path

from ...cluster.rank_identity import RankIdentity, rank_identity
from ...data.format.shard_format import write_atomically
from ...data.packing.encoder_threads import MAX_AHEAD_BYTES, Encoder, shuffled_order
from ...data.packing.pack import make_encoder
from ...data.packing.pieces import PieceClaims, PieceWriter
from ...data.packing.unfinished import SPOOL_FOLDER, report_disk_errors
from ...data.sources.open_source import open_source
from ...data.sources.source import ShardSource, Source
from ...record.ring.launcher_messages import notify, send_to_launcher
from ...report.terminal.packed_dataset import progress
from ...security.files import InvalidFileError, open_regular, read_regular
from . import FAILED, Task

PROGRESS_INTERVAL_S = 1.0  # interval between reports of progress
FINAL_PROGRESS_INTERVAL_S = 0.1  # interval on rank 0 when it has no piece left
MAX_RANKS_AT_FULL_RATE = 64  # with more ranks, the interval grows in proportion
LOG_INTERVAL_S = 10.0  # interval between progress lines without a terminal
COUNTS = struct.Struct("<qq")  # samples and bytes
MIN_AHEAD_BYTES = 32 << 20


def main() -> int:
    """Pack and return the exit code. The launcher reports errors of the user."""
    run, rank_place = Path(sys.argv[1]), rank_identity(dict(os.environ))
    host = socket.gethostname()
    try:
        task = Task.load(run)
    except InvalidFileError as mistake:
        _fail(run, rank_place.rank, mistake)
        return 0
    except FileNotFoundError:
        dest = run.parent.parent
        raise ValueError(
            f"{dest} is another folder on {host}. HINT: use a folder on a file system that all "
            "hosts share"
        ) from None
    limit, images = task.asked.wish.shard_bytes, task.kind == "images"
    pieces = PieceWriter(task.cut, run.parent, run, limit, images, task.classes)
    reporter = ProgressReporter(run, rank_place, task, pieces)
    try:
        try:
            encoder = _encoder(task, run.parent)
        except ValueError as mistake:
            raise ValueError(f"{host}: {mistake}") from None
        with report_disk_errors(Path(task.asked.dest)):
            _pack(task, pieces, encoder, run, rank_place, reporter)
    except ValueError as mistake:
        _fail(run, rank_place.rank, mistake)
    return 0


def _fail(run: Path, rank: int, mistake: ValueError) -> None:
    """Record why this rank can't continue: the launcher reports it, and the other ranks end."""
    write_atomically(run / f"failing-{rank}", str(mistake).encode(errors="replace"))
    (run / f"failing-{rank}").replace(run / FAILED)


def _encoder(task: Task, work: Path) -> Encoder:
    asked = task.asked
    encoding_options = asked.encoding_options
    source: Source
    source = (
        ShardSource(work / SPOOL_FOLDER)
        if task.spooled
        else open_source(asked.source, asked.labels, work, asked.wish.follow_links)
    )
    source.kind, source.description = task.kind, task.description
    if len(source) != task.cut.samples:
        raise ValueError(
            f"{source.description} has {len(source):,} samples on this host, but "
            f"{task.cut.samples:,} where the job was started. HINT: use the same source on all "
            "hosts"
        )
    return make_encoder(
        source, encoding_options, asked.wish, shuffled_order(len(source), asked.wish.seed)
    )


def _pack(
    task: Task,
    pieces: PieceWriter,
    encoder: Encoder,
    run: Path,
    rank_place: RankIdentity,
    reporter: "ProgressReporter",
) -> None:
    local_ranks = rank_place.local_size or 1
    workers = task.asked.workers or max(2 * len(os.sched_getaffinity(0)) // local_ranks, 2)
    claims = PieceClaims(run, task.left, rank_place.rank, rank_place.size)
    reporter.start()
    ahead = max(MAX_AHEAD_BYTES // local_ranks, MIN_AHEAD_BYTES)
    pieces.pack(encoder, claims, workers, lambda: None, ahead)
    reporter.finish()


class ProgressReporter(threading.Thread):
    """Thread that reports this rank's progress and, on rank 0, shows that of all ranks.

    The thread ends the rank if another rank has failed.
    """

    def __init__(
        self, run: Path, rank_place: RankIdentity, task: Task, pieces: PieceWriter
    ) -> None:
        super().__init__(daemon=True)
        self.run_folder, self.rank_place, self.task, self.pieces = run, rank_place, task, pieces
        self.interval_s = PROGRESS_INTERVAL_S * max(1.0, rank_place.size / MAX_RANKS_AT_FULL_RATE)
        self.in_terminal = os.environ.get("PACELINE_TTY") == "1"
        self.began = time.monotonic()
        self.next_log = self.began + (0.0 if self.in_terminal else LOG_INTERVAL_S)
        self.progress_by_rank = dict.fromkeys(range(rank_place.size), (0, 0))
        self.shown = False
        self._finished = threading.Event()

    def run(self) -> None:
        while not self._finished.wait(self.interval_s):
            self._report()

    def finish(self) -> None:
        """Report that this rank has no piece left; rank 0 then shows the others' progress."""
        self._finished.set()
        self.join()
        left = self.task.cut.samples - self.task.done
        while True:
            self._report()
            if (
                self.rank_place.rank
                or sum(samples for samples, _ in self.progress_by_rank.values()) >= left
            ):
                break
            time.sleep(self.interval_s / PROGRESS_INTERVAL_S * FINAL_PROGRESS_INTERVAL_S)
        if self.shown and self.in_terminal:
            notify("\r\x1b[2K")

    def _report(self) -> None:
        if (self.run_folder / FAILED).exists() or not self.run_folder.exists():
            send_to_launcher(finished=0)
            os._exit(0)
        self._write(self.pieces.samples, self.pieces.bytes)
        if self.rank_place.rank == 0:
            for rank in self.progress_by_rank:
                self._read(rank)
            self._show()

    def _write(self, samples: int, size: int) -> None:
        # Reopened each time: on a network file system others only see it after a close.
        path, flags = self.run_folder / f"done-{self.rank_place.rank}", os.O_CREAT | os.O_WRONLY
        file = open_regular(path, flags, follow_links=False, mode=0o666)
        try:
            os.pwrite(file, COUNTS.pack(samples, size), 0)
        finally:
            os.close(file)

    def _read(self, rank: int) -> None:
        try:
            counts = read_regular(self.run_folder / f"done-{rank}", COUNTS.size)
        except (OSError, InvalidFileError):
            return
        if len(counts) == COUNTS.size:
            samples, size = COUNTS.unpack(counts)
            self.progress_by_rank[rank] = max(samples, 0), max(size, 0)

    def _show(self) -> None:
        now = time.monotonic()
        if now < self.next_log:
            return
        self.next_log, self.shown = now + (0.0 if self.in_terminal else LOG_INTERVAL_S), True
        samples = sum(samples for samples, _ in self.progress_by_rank.values())
        size = self.task.bytes + sum(size for _, size in self.progress_by_rank.values())
        rate = samples / (now - self.began)
        done = self.task.done + samples
        line = f"paceline: {progress('packed', done, self.task.cut.samples, size, rate)}"
        notify(f"\r\x1b[2K{line}\r" if self.in_terminal else f"{line}\n")


if __name__ == "__main__":
    raise SystemExit(main())
