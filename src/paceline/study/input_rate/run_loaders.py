"""Loaders running on all ranks at once, without training, to compare a prediction with."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...data.loading.file_dataset import Files
from .load_rank import LoadRankConfig
from .sample_files import Place, files_of
from .storage_rate import drop_from_cache

Running = list["subprocess.Popen[str]"]


def measure_rates(feed: LoadRankConfig, data: Any, some: list[Place], state: str) -> float:
    """Measure the samples per second of all ranks together, from "storage" or "memory"."""
    stored = state == "storage"
    cores = shares(feed.ranks)
    feeds = [replace(feed, rank=r, cores=cores[r], again=not stored) for r in range(feed.ranks)]
    if not stored:
        return measure_run(feeds)
    return measure_run(feeds, lambda: all_forgotten(data, some))


def measure_run(feeds: list[LoadRankConfig], before: Callable[[], object] = lambda: None) -> float:
    """Run one process per feed; return their samples per second together.

    ``before`` is called when all processes are ready, before the measurement starts.
    """
    running = started(feeds)
    try:
        before()
        go(running)
        found = [json.loads(_line(process) or "{}") for process in running]
    finally:
        ended(running)
    return float(sum(one["samples"] / one["seconds"] for one in found if one.get("samples")))


def shares(ranks: int) -> list[tuple[int, ...]]:
    """Return the CPUs of each rank as a launcher binds them: several each, or one shared."""
    mine = sorted(os.sched_getaffinity(0))
    each = max(len(mine) // ranks, 1)
    return [tuple(mine[rank * each % len(mine) :][:each]) for rank in range(ranks)]


def started(feeds: list[LoadRankConfig]) -> Running:
    """Start the processes and wait for their first batches.

    Raises:
        ValueError: A process failed.
    """
    running: Running = []
    try:
        running.extend(
            subprocess.Popen(feed.words(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for feed in feeds
        )
        for process in running:
            if _line(process) != "ready":
                raise ValueError("a loading rank has failed; its error is above")
    except BaseException:
        ended(running)
        raise
    return running


def go(running: Running) -> None:
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()


def ended(running: Running) -> None:
    for process in running:
        process.kill()
        process.wait()


def all_forgotten(data: Any, some: list[Place]) -> bool:
    """Drop every file that contains samples from the page cache; return whether that succeeded."""
    return drop_from_cache([(path, 0, 0) for path in _every_file(data, some)])


def _every_file(data: Any, some: list[Place]) -> set[Path]:
    return {path for path, _, _ in some} | (
        set() if isinstance(data, Files) else set(files_of(data))
    )


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
