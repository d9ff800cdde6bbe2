"""Loading of the record in a folder, also the incomplete record of a job that still runs."""

import socket
from pathlib import Path

from ...analyze.live.live_view import last_attempt
from ...analyze.records.load_run import Run, load_run
from ...record.ring.ring import DEFAULT_CAPACITY
from .. import job_folder
from . import running_jobs

FROM_HOSTS = 8192  # maximum number of events per rank (the newest) fetched from other hosts


def load_so_far(folder: Path) -> Run:
    """Return the record in ``folder``, or the incomplete record of the job that records there.

    Complete records are loaded by ``analyze.records.load_run``.

    Raises:
        ValueError: There is no record. If the job was started on another host, the message names
            it.
    """
    if any(folder.glob("*.ring")):
        return load_run(folder)
    about = job_folder.read_label(folder)
    try:
        job = running_jobs.find(folder, None)
        seen = job.snapshot(FROM_HOSTS if job.over else DEFAULT_CAPACITY)
    except ValueError:
        seen = None
    ranks, notes = last_attempt(seen.tails) if seen is not None else ([], [])
    if ranks:
        records = [rank.record for rank in ranks]
        missing = set(range(int(records[0].meta["size"]))) - {one.rank for one in records}
        return Run(
            str(folder), records, sorted(missing), notes, about.command, running=True, env=about.env
        )
    host = about.host
    if host and host != socket.gethostname():
        raise ValueError(
            f"{folder} has no record yet. Its job was started on {host} and may still be "
            "running. HINT: "
            f"ssh {host} paceline report {folder.resolve()}"
        )
    return load_run(folder)
