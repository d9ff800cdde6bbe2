"""Run a measuring job and return the summary that its rank 0 sends."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..launch.job import Job
from ..launch.ranks.local_host import ForkedRankServer
from ..security.removal import TemporaryFolder


def run_and_read_summary(job: Job, begin: Callable[[Job], int]) -> tuple[int, Any]:
    """Run the job with ``begin``; return its exit code, and its summary or None."""
    scratch = TemporaryFolder()
    summary = scratch.path / "found.json"
    try:
        code = begin(replace(job, summary=summary))
        found = json.loads(summary.read_text()) if summary.exists() else None
    except ForkedRankServer:  # raised in the forked rank server: the folder belongs to its parent
        raise
    except BaseException:
        scratch.remove()
        raise
    scratch.remove()
    return code, found
