"""Run a job on this node: check it, start the ranks, watch them, report."""

import contextlib
import functools
import gc
import importlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

from ..comm.reachable_address import variables as interface_variables
from ..security.run_lock import RunLock
from . import job_folder
from .job import Job, check, preloads, variables
from .layout import make_seats
from .linux_processes import SUBREAPER, prctl
from .monitor import live_records
from .monitor.interrupt import TERMINATION_SIGNALS, Interrupt, TerminatedError, raise_on_termination
from .ranks.local_host import ForkedRankServer, LocalHost, RankServer, start_server
from .ranks.process_groups import end_remaining_children
from .requeue import requeue
from .summary import print_summary


def run(job: Job, message: str = "") -> int:
    """Run the job. Return its exit code: 0, that of the first failing rank, 128 + a signal's
    number, or ``requeue.STOPPED_EARLY_EXIT_CODE``.

    Args:
        job: The job.
        message: Printed to stderr before the ranks start, if the job can run.

    Raises:
        ValueError: A mistake of the user, before any rank starts.
    """
    interrupt = Interrupt()
    raise_on_termination(interrupt.remember_termination)
    try:
        code, kept = _run(job, interrupt, message)
    except TerminatedError as end:
        return end.report_before_start()
    if job.record is not None and kept:
        print_summary(job.record, code, job.summary, job.guard)
    if interrupt.stopped_early:
        requeue()
    return code


def _run(job: Job, interrupt: Interrupt, message: str) -> tuple[int, bool]:
    """Run the job. Return its exit code, and whether its record was kept."""
    from .affinity import bind_ranks

    bind_ranks.take_share(job)
    source, places = check(job), bind_ranks.plan_bindings(job)
    sys.stderr.write(message)
    prctl(SUBREAPER, 1)
    started_ns = time.monotonic_ns()
    variables_by_rank = bind_ranks.variables_of_all(job, places)
    folder, command = job_folder.job_folder(), job.words
    server: RankServer | None = None
    lock: RunLock | None = None
    try:
        if job.record is not None:
            lock = job_folder.lock_record(job.record, folder.name)
            job_folder.write_destination(folder, job.record, command, folder.name, job.env)
        else:
            job_folder.try_write_label(folder, command, folder.name)
        server = start_server(folder, preloads(job, source))
        if lock is not None:  # not before: a process with threads should not fork
            lock.keep(lambda line: print(f"paceline: {line}", file=sys.stderr))
        interrupt.check()
        from .supervise import watch

        job_variables = {**variables(job, folder.name), "PACELINE_RECORD": str(folder)}
        environment = {**interface_variables("lo"), **os.environ, **job_variables}
        local_host = LocalHost(server, environment, places, variables_by_rank, smt=job.smt)
        fetch_records = functools.partial(live_records.local_snapshot, folder)
        code = watch(
            job,
            [local_host],
            make_seats([job.ranks]),
            folder.name,
            started_ns,
            interrupt,
            fetch_records,
        )
    except ForkedRankServer:  # this process is the rank server: the state belongs to its parent
        raise
    except BaseException:
        _clean_up(server, folder, lock)
        raise
    return code, _clean_up(server, folder, lock)


def _clean_up(server: RankServer | None, folder: Path, lock: RunLock | None) -> bool:
    """End all processes of the job and remove its folder. Return whether its record was kept."""
    if server is not None:
        server.end(2.0)
    end_remaining_children()
    kept = job_folder.clear(folder)
    if lock is not None:
        lock.release()
    return kept


def run_rank_server(job: ForkedRankServer) -> NoReturn:
    """Run the rank server, and the rank in each process forked from it."""
    from .ranks import fork_server, rank_process

    for number in TERMINATION_SIGNALS:  # the launcher handles them
        signal.signal(number, signal.SIG_IGN)
    # A module that asks for GPUs must not initialize their driver: forks could not use it then.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # ranks have their own environment
    for name in job.preloads:
        with contextlib.suppress(Exception):  # the script will get the same, with a traceback
            importlib.import_module(name)
    gc.freeze()  # keep imported objects shared: the ranks' garbage collectors skip them
    start = fork_server.serve(job.channel, job.folder)
    if job.preloads:
        rank_process.run_forked(start)
    rank_process.exec_fresh(start)
