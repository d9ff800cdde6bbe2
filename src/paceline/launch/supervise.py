"""Supervise the ranks of a job until they have ended, on one node or several."""

import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState

from .affinity.report_bindings import BindingsReport
from .guard.guarded_job import GuardedJob
from .job import Job
from .layout import Seat
from .monitor.hang_detector import HangDetector
from .monitor.interrupt import Interrupt, TerminatedError, ignore_termination, raise_on_termination
from .monitor.live_records import JobSnapshot
from .monitor.output import RankOutput
from .ranks.elastic_agent import ElasticAgent
from .ranks.host import Host
from .ranks.rendezvous import Rendezvous
from .recovery.shrink import RemainingHosts, check_min_hosts
from .requeue import STOPPED_EARLY_EXIT_CODE
from .script_source import uses_horovod
from .summary import write_summary

if TYPE_CHECKING:
    from .guard.loss_guard import LossGuard


def watch(
    job: Job,
    hosts: Sequence[Host],
    seats: list[Seat],
    run: str,
    started: int,
    interrupt: Interrupt,
    fetch_records: Callable[[int], JobSnapshot | None],
    remaining: RemainingHosts | None = None,
    guard: "LossGuard | None" = None,
) -> int:
    """Start the ranks, supervise them until they have ended, and return the exit code.

    Args:
        started: When the command began, ns of the monotonic clock.
        fetch_records: Fetches the tails of the ranks' records, and their stacks.
        remaining: Hosts that remain of a job on several nodes, or None.
        guard: Holds the loss against a reference, or None.
    """
    if remaining is None:
        check_min_hosts(job.min_hosts, len(hosts))
    raise_on_termination()
    spec = WorkerSpec(
        role="default",
        local_world_size=len(seats),
        rdzv_handler=Rendezvous(run, hosts[0], job.port),
        entrypoint=job.name,
        max_restarts=job.max_restarts,
        monitor_interval=1e-6,  # must be above 0; the agent waits for its hosts
    )
    agent = ElasticAgent(spec, hosts, seats, started, uses_horovod(job))
    agent.interrupt, agent.remaining, agent.guarded = interrupt, remaining, GuardedJob(guard)
    agent.bindings = (
        BindingsReport(lambda text: agent.output.say(text)) if job.report_bindings else None
    )
    raise_on_termination(agent.defer_termination)
    agent.hang_detector = HangDetector(job.hang_timeout, fetch_records)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda kind, _: agent.pending_signals.append(kind))
    agent.start_output()
    try:
        result = agent.run()
    except KeyboardInterrupt:
        return _report_interrupt(agent.output, "interrupted", signal.SIGINT)
    except TerminatedError as end:
        return _report_interrupt(agent.output, signal.Signals(end.number).name, end.number)
    except ValueError as mistake:
        if agent.cause is None:
            raise
        agent.output.say(f"paceline: no further attempt: {mistake}\n")
        return agent.cause.shell_exit_code or 1
    finally:
        ignore_termination()
        if agent.bindings is not None:
            agent.bindings.end()
        agent.guarded.finish(agent.output.say)
        agent.output.close()
        if job.summary is not None and job.record is None:
            write_summary(job.summary, job.words, agent.summary, guard)
    ended_well = agent.stopped_at_step is not None or (agent.end and not agent.end.exit_code)
    if ended_well and agent.guarded.has_reached:
        return 0
    if agent.stopped_at_step is not None and agent.guarded.exit_code:
        sys.stderr.write(agent.guarded.describe_checkpoint(agent.stopped_at_step))
        return agent.guarded.exit_code
    if agent.stopped_at_step is not None:
        interrupt.stopped_early = agent.early_stop_deadline is None
        sys.stderr.write(
            f"paceline: a checkpoint of step {agent.stopped_at_step} was written, and the job "
            f"stopped early (exit code {STOPPED_EARLY_EXIT_CODE}). HINT: start the job again to "
            "continue\n"
        )
        return STOPPED_EARLY_EXIT_CODE
    if result.state == WorkerState.SUCCEEDED:
        return agent.guarded.exit_code or agent.job_code or int(agent.output.lost)
    return agent.cause.shell_exit_code or 1 if agent.cause is not None else 1


def _report_interrupt(output: RankOutput, why: str, number: int) -> int:
    output.say(f"paceline: {why}: Paceline ended all ranks; complete checkpoints remain valid\n")
    return 128 + number
