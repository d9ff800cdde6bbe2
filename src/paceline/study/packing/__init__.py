"""``paceline pack`` on ranks of one host or several: processes that share DEST and nothing else.

The process that starts them holds DEST, looks for the samples, and makes the spool of a source
that can only be read in its order. Then the order is cut into pieces, each rank (__main__.py)
takes one after the other, and at the end the pieces are joined. Where anything of it is killed,
whole pieces are kept, and the same command goes on, on any number of ranks; so does ``pack``
without ranks.
"""

import json
import os
import secrets
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ...data.format.shard_format import write_atomically
from ...data.packing.encode import Encoding
from ...data.packing.pack import Packing, Report, Step, Wish, packing
from ...data.packing.pieces import Cut
from ...data.packing.unfinished import RUN, SPOOL, discard
from ...data.sources.open_source import imported
from ...launch.job import Job
from ...launch.layout import counts
from ...launch.ranks.local_host import ForkedRankServer
from ...launch.start import start
from ...launch.target import target
from ...security.files import InvalidFileError, read_regular
from ...security.text import printable

RANK = "paceline.study.packing"
TASK, FAILED = "task.json", "failed"  # in the folder of the job
SEEN_SECONDS = 60.0  # for what other hosts have written to be seen here, too
INTERRUPTED = 130
MAX_TASK_BYTES = 1 << 28  # it lists the pieces
MAX_FAILURE_BYTES = 1 << 20


@dataclass(frozen=True)
class Where:
    """Ranks and hosts, as the options say."""

    ranks: int | None = None
    hosts: str | None = None
    hostfile: Path | None = None
    launcher: str | None = None
    variables: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether there are to be any."""
        return any((self.ranks is not None, self.hosts, self.hostfile, self.launcher))


@dataclass(frozen=True)
class Asked:
    """What is packed. apply: "MODULE:FUNCTION". encoding: fields of Encoding beside it. workers:
    threads of each rank."""

    source: str
    dest: str
    labels: str | None = None
    apply: str | None = None
    workers: int | None = None
    encoding: dict[str, Any] = field(default_factory=dict)
    wish: Wish = field(default_factory=Wish)

    @property
    def how(self) -> Encoding:
        """Raises ValueError for a function that can't be imported."""
        apply = None if self.apply is None else imported(self.apply, "--apply")
        return Encoding(**self.encoding, apply=apply)


@dataclass(frozen=True)
class Task:
    """What each rank is told. left: pieces that are to be packed. done, bytes: samples and what
    they take that were there before."""

    asked: Asked
    cut: Cut
    left: list[int]
    kind: str
    told: str
    spooled: bool
    done: int
    bytes: int
    classes: bool  # whether labels are

    def save(self, run: Path) -> None:
        write_atomically(run / TASK, json.dumps(asdict(self)).encode())

    @classmethod
    def load(cls, run: Path) -> "Task":
        """Read the task of a job. Its texts stay as they are: paths may hold any character.

        Raises:
            FileNotFoundError: This host does not see the folder.
            InvalidFileError: The file is damaged.
        """
        data = read_regular(run / TASK, MAX_TASK_BYTES)
        try:
            return msgspec.convert(json.loads(data), cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise InvalidFileError(run / TASK, f"is no task: {printable(str(error))}") from None


def pack_on_ranks(asked: Asked, where: Where, step: Step) -> Report:
    """Pack as ``data.pack`` does. step: is told of a spool; how far the ranks are, rank 0 says.

    Raises ValueError as ``data.pack`` does, for mistakes about hosts, and where a rank ends before
    the others; KeyboardInterrupt where the user ends them.
    """
    ranks = _ranks(where)
    began = time.monotonic()
    with packing(asked.source, asked.dest, asked.labels, asked.how, asked.wish, step) as job:
        cut = job.cut(ranks)
        there = job.done(cut)
        before = cut.first + sum(samples for samples, _ in there.values())
        task = Task(
            asked,
            cut,
            [piece for piece in range(len(cut)) if piece not in there],
            job.source.kind,
            job.source.told,
            (job.work / SPOOL).exists(),
            before,
            job.writer.bytes + sum(size for _, size in there.values()),
            job.writer.classes,
        )
        if task.left:
            _packed(task, where, job)
        report = job.join(cut, before)
    report.seconds = time.monotonic() - began
    return report


def _ranks(where: Where) -> int:
    """How many there will be, about: of hosts that don't say, as many as this one has cores."""
    found = target(where.hosts, where.hostfile, where.launcher)
    if where.ranks is not None:
        return sum(counts(found.hosts, where.ranks, found.explicit))
    return sum(host.slots or _cores() for host in found.hosts)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _packed(task: Task, where: Where, packing: Packing) -> None:
    """Have ranks pack what is left."""
    run = packing.work / f"{RUN}{secrets.token_hex(6)}"
    run.mkdir()
    task.save(run)
    try:
        # Interpreters of their own: a rank needs no torch, and what the user applies no fork.
        job = Job(RANK, [str(run.absolute())], True, fresh=True, bind="none", hang_timeout=0.0)
        code = start(
            job,
            where.ranks,
            where.hosts,
            where.hostfile,
            where.launcher,
            list(where.variables),
            min_ranks_per_host=_cores(),
        )
        failed = _failure(run)
    except ForkedRankServer:  # this process is the rank server: the state belongs to its parent
        raise
    except BaseException:
        discard(run)
        raise
    discard(run)
    if failed:
        raise ValueError(failed)
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    if code:
        raise ValueError(
            f"{packing.folder}: the ranks ended with exit code {code}. What is packed so far is "
            "kept. HINT: say the same again, which goes on where it was"
        )
    _seen(packing, task.cut)


def _failure(run: Path) -> str:
    """Return why a rank could not go on, or ""."""
    try:
        told = read_regular(run / FAILED, MAX_FAILURE_BYTES)
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{run / FAILED}: {error.strerror}"
    return printable(told.decode(errors="replace"))


def _seen(packing: Packing, cut: Cut) -> None:
    """Wait for all pieces: what a file server has told of a folder may be some seconds old."""
    until = time.monotonic() + SEEN_SECONDS
    while len(there := packing.done(cut)) < len(cut):
        if time.monotonic() > until:
            raise ValueError(
                f"{packing.folder}: {len(cut) - len(there):,} of {len(cut):,} pieces that ranks "
                "have packed are not to be seen here. HINT: a folder on a file system that all "
                "hosts share; then say the same again, which goes on where it was"
            )
        time.sleep(0.5)
