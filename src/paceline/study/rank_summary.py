"""Run a measuring job and return the summary that its rank 0 sends."""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..launch.job import Job
from ..launch.ranks.local_host import ForkedRankServer


def run_and_read_summary(job: Job, begin: Callable[[Job], int]) -> tuple[int, Any]:
    """Run the job with ``begin``; return its exit code, and its summary or None."""
    scratch = Path(tempfile.mkdtemp(prefix="paceline-"))
    summary = scratch / "found.json"
    try:
        code = begin(replace(job, summary=summary))
        found = json.loads(summary.read_text()) if summary.exists() else None
    except ForkedRankServer:  # raised in the forked rank server: the folder belongs to its parent
        raise
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(scratch, ignore_errors=True)
    return code, found
