"""Search for running jobs and their ring files.

Ring files of ranks on this host are in the job folders. The launcher of a multi-node job provides
those of the other hosts (``live_records``).
"""

import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from ...analyze.live.live_view import last_attempt
from ...analyze.records.load_run import Run, load_run
from ...record.ring.ring import DEFAULT_CAPACITY
from ...security.text import printable
from .. import job_folder
from . import live_records

MAX_REMOTE_EVENTS = 8192  # maximum number of events per rank (the newest) fetched from other hosts


@dataclass(frozen=True)
class RunningJob:
    """A running job.

    Attributes:
        name: Value of ``--job``.
        command: The script or module, and its arguments.
        started: Start time, in seconds since 1970, if known.
        target: Folder for the record, or None.
        asks_launcher: Whether the ring files are requested from the launcher. Otherwise they are
            read from the job folders on this host.
        start_host: Name of the other host on which the job was started, or "".
    """

    name: str
    command: list[str]
    started: float | None
    target: Path | None
    asks_launcher: bool
    start_host: str = ""

    def snapshot(self, max_events: int) -> live_records.JobSnapshot | None:
        """Return the current state of the job, or None if it has ended.

        Args:
            max_events: Maximum number of events per rank.
        """
        if self.asks_launcher:
            return live_records.query_launcher(self.name, max_events)
        folders = [folder for folder in job_folder.running() if _name(folder) == self.name]
        tails = [
            tail for folder in folders for tail in live_records.local_tails(folder, max_events)
        ]
        return live_records.JobSnapshot(tails, [], False, {}) if folders else None


def find(folder: Path | None, name: str | None) -> RunningJob:
    """Return the running job that records into ``folder``, or has this name, or is the only one
    on this host.

    Raises:
        ValueError: There is no such job, or there are several.
    """
    jobs = _running()
    if name is not None:
        found = [job for job in jobs if job.name == name]
        if not found:
            raise ValueError(
                f"--job {name}: you have no job of this name on this node.{_listed(jobs)}"
            )
        return found[0]
    if folder is not None:
        return _of_folder(folder, jobs)
    if len(jobs) == 1:
        return jobs[0]
    if not jobs:
        raise ValueError(
            "you have no running job on this node. HINT: run paceline top on the node where you "
            "started paceline run"
        )
    raise ValueError(f"you have {len(jobs)} running jobs on this node.{_listed(jobs)}")


def _of_folder(folder: Path, jobs: list[RunningJob]) -> RunningJob:
    label = job_folder.read_label(folder)
    run, target = label.run, folder.resolve()
    for job in jobs:  # jobs with a reachable launcher are first
        if job.target is not None and job.target.resolve() == target:
            return job
        if run and job.name == run:
            return job
    if any(folder.glob("*.ring")):
        raise ValueError(f"{folder}: the run has ended. HINT: paceline report {folder}")
    if label.host:
        here, host = socket.gethostname(), label.host
        if host == here:
            raise ValueError(
                f"{folder}: no job on this node ({here}) records into this folder. HINT: if the "
                "job is starting, try again; if it was killed, the next paceline run on this "
                "node saves its record"
            )
        raise ValueError(
            f"{folder}: the job was started on {host}, not on this node ({here}). HINT: ssh {host} "
            f"paceline top {target}"
        )
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder. HINT: name the folder of paceline run --record"
        )
    raise ValueError(
        f"{folder}: no job records into this folder. HINT: name the folder of paceline run "
        "--record, or none if you have one job on this node"
    )


MAX_NAMED = 8  # maximum number of ignored sockets that are reported
_reported: set[str] = set()  # ignored launcher sockets that were already reported


def _running() -> list[RunningJob]:
    """Return this user's jobs that are visible from this host, multi-node jobs first."""
    found: dict[str, RunningJob] = {}
    for run in live_records.running_launchers():
        try:
            snapshot = live_records.query_launcher(run, 0)
        except live_records.UnreachableError:
            if run not in _reported and len(_reported) < MAX_NAMED:
                _reported.add(run)
                sys.stderr.write(
                    f"paceline: the launcher's socket of job {printable(run)} accepts no "
                    "connection, and is ignored: it may belong to another user\n"
                )
            continue
        except ValueError:
            snapshot = live_records.JobSnapshot([], [], False, {})  # launcher is suspended
        if snapshot is None:
            continue
        record = snapshot.job.get("record")
        target = Path(record) if record else None
        found[run] = RunningJob(
            run, snapshot.job.get("command", []), None, target, asks_launcher=True
        )
    for folder in job_folder.running():
        label = job_folder.read_label(folder)
        name = _name(folder)
        if name not in found and label.run not in found:
            target = job_folder.read_destination(folder)
            start_host = job_folder.read_label(target).host if target is not None else ""
            start_host = "" if start_host == socket.gethostname() else start_host
            found[name] = RunningJob(
                name,
                label.command,
                label.started,
                target,
                asks_launcher=False,
                start_host=start_host,
            )
    return list(found.values())


def _name(folder: Path) -> str:
    """Return the name of the job that a job folder belongs to.

    Under another launcher (``paceline record``) each rank has a job folder, and the ranks of a job
    share the record folder.
    """
    run, target = job_folder.read_label(folder).run, job_folder.read_destination(folder)
    if run == folder.name or target is None:
        return run or folder.name
    return f"{run}:{target}" if run else str(target)


def _listed(jobs: list[RunningJob]) -> str:
    if not jobs:
        return " HINT: without --job and DIR, paceline top shows the only job on this node"
    lines = [
        f"\n    {job.name}  {' '.join(job.command)}" + (f"  -> {job.target}" if job.target else "")
        for job in jobs
    ]
    return " HINT: paceline top DIR, or --job with one of these names:" + "".join(lines)


def load_so_far(folder: Path) -> Run:
    """Return the record in ``folder``, or the incomplete record of the job that records there.

    Complete records are loaded by ``analyze.records.load_run``.

    Raises:
        ValueError: There is no record. If the job was started on another host, the message names
            it.
    """
    if any(folder.glob("*.ring")):
        return load_run(folder)
    label = job_folder.read_label(folder)
    try:
        job = find(folder, None)
        snapshot = job.snapshot(MAX_REMOTE_EVENTS if job.asks_launcher else DEFAULT_CAPACITY)
    except ValueError:
        snapshot = None
    ranks, notes = last_attempt(snapshot.tails) if snapshot is not None else ([], [])
    if ranks:
        records = [rank.record for rank in ranks]
        missing = set(range(int(records[0].meta["size"]))) - {record.rank for record in records}
        return Run(
            str(folder), records, sorted(missing), notes, label.command, running=True, env=label.env
        )
    host = label.host
    if host and host != socket.gethostname():
        raise ValueError(
            f"{folder} has no record yet. Its job was started on {host} and may still be "
            f"running. HINT: ssh {host} paceline report {folder.resolve()}"
        )
    return load_run(folder)
