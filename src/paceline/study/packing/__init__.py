"""Run ``paceline pack`` on ranks of one or several hosts: processes that share only DEST.

The process that starts them locks DEST, lists the samples, and spools a sequential source. Then it
partitions the order into pieces, each rank (__main__.py) packs one piece after the other, and at
the end the pieces are joined. If any process is killed, complete pieces are kept, and the same
command continues, on any number of ranks; so does ``pack`` without ranks.
"""

import json
import os
import secrets
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...data.format.shard_format import write_atomically
from ...data.packing.encode import EncodingOptions
from ...data.packing.pack import PackJob, PackOptions, PackReport, ProgressCallback, open_pack_job
from ...data.packing.pieces import Partition
from ...data.packing.unfinished import RUN_PREFIX, SPOOL_FOLDER, discard
from ...data.sources.open_source import import_function
from ...launch.job import Job
from ...launch.layout import ranks_per_host
from ...launch.options import LaunchOptions
from ...launch.start import start
from ...launch.target import find_target
from ...security.files import read_regular
from ...security.schema import read_json
from ...security.text import printable
from ..measuring_jobs import removed_after_job

RANK_MODULE = "paceline.study.packing"
TASK, FAILED = "task.json", "failed"  # files in the job's folder
# Maximum delay until files that other hosts have written become visible on this host.
MAX_PIECE_DELAY_S = 60.0
INTERRUPTED_EXIT_CODE = 130
MAX_TASK_BYTES = 16 << 20  # the task lists all pieces
MAX_FAILURE_BYTES = 1 << 20


@dataclass(frozen=True)
class PackRequest:
    """What to pack.

    Attributes:
        apply: "MODULE:FUNCTION".
        encoding: Fields of EncodingOptions other than ``apply``.
        workers: Threads of each rank.
    """

    source: str
    dest: str
    labels: str | None = None
    apply: str | None = None
    workers: int | None = None
    encoding: dict[str, Any] = field(default_factory=dict)
    wish: PackOptions = field(default_factory=PackOptions)

    @property
    def encoding_options(self) -> EncodingOptions:
        """Return the encoding options.

        Raises:
            ValueError: The function ``apply`` can't be imported.
        """
        apply = None if self.apply is None else import_function(self.apply, "--apply")
        return EncodingOptions(**self.encoding, apply=apply)


@dataclass(frozen=True)
class Task:
    """What each rank reads from the job's folder.

    Attributes:
        left: Pieces to pack.
        description: Description of the source, for messages.
        done: Number of samples that were packed before.
        bytes: Size of these samples.
        classes: Whether labels are classes.
    """

    asked: PackRequest
    cut: Partition
    left: list[int]
    kind: str
    description: str
    spooled: bool
    done: int
    bytes: int
    classes: bool

    def save(self, run: Path) -> None:
        write_atomically(run / TASK, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, run: Path) -> "Task":
        """Read the task of a job. Its strings are not escaped: paths may hold any character.

        Raises:
            FileNotFoundError: This host does not see the job's folder.
            InvalidFileError: The file is damaged.
        """
        return read_json(run / TASK, cls, MAX_TASK_BYTES, escape=False)


def pack_on_ranks(
    asked: PackRequest, placement: LaunchOptions, step: ProgressCallback
) -> PackReport:
    """Pack a source on several ranks; the result is the same as that of ``data.pack``.

    Args:
        step: Called while a source is spooled. Rank 0 prints the progress of the ranks.

    Raises:
        ValueError: As for ``data.pack``; also if hosts are invalid or a rank failed.
        KeyboardInterrupt: The user interrupted the ranks.
    """
    ranks = _expected_ranks(placement)
    began = time.monotonic()
    with open_pack_job(
        asked.source, asked.dest, asked.labels, asked.encoding_options, asked.wish, step
    ) as job:
        cut = job.partition(ranks)
        complete = job.complete_pieces(cut)
        before = cut.first + sum(samples for samples, _ in complete.values())
        task = Task(
            asked,
            cut,
            [piece for piece in range(len(cut)) if piece not in complete],
            job.source.kind,
            job.source.description,
            (job.work / SPOOL_FOLDER).exists(),
            before,
            job.writer.bytes + sum(size for _, size in complete.values()),
            job.writer.classes,
        )
        if task.left:
            _run_ranks(task, placement, job)
        report = job.join_pieces(cut, before)
    report.seconds = time.monotonic() - began
    return report


def _expected_ranks(placement: LaunchOptions) -> int:
    """Return the expected number of ranks; by default one per core of this host on each host."""
    found = find_target(placement.nodes)
    if placement.ranks is not None:
        return sum(ranks_per_host(found.hosts, placement.ranks, found.explicit))
    return sum(host.slots or _cores() for host in found.hosts)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _run_ranks(task: Task, placement: LaunchOptions, job: PackJob) -> None:
    """Start ranks that pack the remaining pieces."""
    run = job.work / f"{RUN_PREFIX}{secrets.token_hex(6)}"
    run.mkdir()
    task.save(run)
    # Fresh interpreters: a rank needs no torch, and ``apply`` may not survive a fork.
    launch_job = Job(
        RANK_MODULE, [str(run.absolute())], True, fresh=True, bind="none", hang_timeout=0.0
    )
    with removed_after_job(lambda: discard(run)):
        code = start(launch_job, replace(placement, min_ranks_per_host=_cores()))
        failed = _read_failure(run)
    if failed:
        raise ValueError(failed)
    if code == INTERRUPTED_EXIT_CODE:
        raise KeyboardInterrupt
    if code:
        raise ValueError(
            f"{job.folder}: the ranks ended with exit code {code}. Complete pieces are "
            "kept. HINT: repeat the same command, which continues"
        )
    _wait_for_pieces(job, task.cut)


def _read_failure(run: Path) -> str:
    """Return the reason why a rank could not continue, or ""."""
    try:
        reason = read_regular(run / FAILED, MAX_FAILURE_BYTES)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{run / FAILED}: {error.strerror}"
    return printable(reason.decode(errors="replace"))


def _wait_for_pieces(job: PackJob, cut: Partition) -> None:
    """Wait until all pieces are visible: a network file system may return an old listing."""
    until = time.monotonic() + MAX_PIECE_DELAY_S
    while len(complete := job.complete_pieces(cut)) < len(cut):
        if time.monotonic() > until:
            raise ValueError(
                f"{job.folder}: {len(cut) - len(complete):,} of {len(cut):,} pieces that ranks "
                "have packed are not visible on this host. HINT: use a folder on a file system "
                "that all hosts share, and repeat the same command, which continues"
            )
        time.sleep(0.5)
