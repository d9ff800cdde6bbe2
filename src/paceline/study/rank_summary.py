"""A job whose ranks measure something, and what rank 0 sends of it."""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..launch.job import Job
from ..launch.ranks.local_host import ForkedRankServer


def summary_of(job: Job, begin: Callable[[Job], int]) -> tuple[int, Any]:
    """The exit code of the job that ``begin`` runs, and its summary; None where there is none."""
    scratch = Path(tempfile.mkdtemp(prefix="paceline-"))
    summary = scratch / "found.json"
    try:
        code = begin(replace(job, summary=summary))
        found = json.loads(summary.read_text()) if summary.exists() else None
    except ForkedRankServer:  # this process is the rank server: the state belongs to its parent
        raise
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    shutil.rmtree(scratch, ignore_errors=True)
    return code, found
