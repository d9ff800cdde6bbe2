"""Being the agent of a job until its ranks have ended, on one host or on several."""

import signal
import sys
from collections.abc import Callable, Sequence

from torch.distributed.elastic.agent.server.api import WorkerSpec, WorkerState

from .affinity.report_bindings import Report
from .job import Job
from .layout import Seat
from .monitor.hang_detector import Silence
from .monitor.interrupt import Interrupt, TerminatedError, no_longer_end, raise_on_end
from .monitor.live_records import Seen
from .monitor.output import Output
from .ranks.elastic_agent import Agent, Host
from .ranks.rendezvous import Rendezvous
from .recovery.shrink import Remaining, check
from .requeue import LEFT


def watch(
    job: Job,
    hosts: Sequence[Host],
    seats: list[Seat],
    run: str,
    started: int,
    interrupt: Interrupt,
    look: Callable[[int], Seen | None],
    remaining: Remaining | None = None,
) -> int:
    """Start the ranks and be their agent until they have ended; the exit code. look: fetches the
    ends of the ranks' records, and their stacks. remaining: keeps account of several hosts, of
    which some may be lost."""
    if remaining is None:
        check(job.min_hosts, len(hosts))
    raise_on_end()
    spec = WorkerSpec(
        role="default",
        local_world_size=len(seats),
        rdzv_handler=Rendezvous(run, hosts[0], job.port),
        entrypoint=job.name,
        max_restarts=job.max_restarts,
        monitor_interval=0.05,
    )
    agent = Agent(spec, hosts, seats, started)
    agent.interrupt, agent.summary = interrupt, job.summary
    agent.remaining = remaining
    agent.bindings = Report(lambda text: agent.output.say(text)) if job.report_bindings else None
    raise_on_end(agent.take_end)
    agent.silence = Silence(job.hang_timeout, look)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda kind, _: agent.signals.append(kind))
    agent.show()
    try:
        result = agent.run()
    except KeyboardInterrupt:
        return _interrupted(agent.output, "interrupted", signal.SIGINT)
    except TerminatedError as end:
        return _interrupted(agent.output, signal.Signals(end.number).name, end.number)
    except ValueError as mistake:
        if agent.cause is None:
            raise
        agent.output.say(f"paceline: no further attempt: {mistake}\n")
        return agent.cause.code or 1
    finally:
        no_longer_end()
        if agent.bindings is not None:
            agent.bindings.end()
        agent.output.close()
    if agent.left is not None:
        interrupt.go_on_later = agent.leave_by is None
        sys.stderr.write(
            f"paceline: a checkpoint of step {agent.left} was written; the job left early (exit "
            f"code {LEFT}). HINT: start it again and it goes on\n"
        )
        return LEFT
    if result.state == WorkerState.SUCCEEDED:
        return 0
    return agent.cause.code or 1 if agent.cause is not None else 1


def _interrupted(output: Output, why: str, number: int) -> int:
    output.say(f"paceline: {why}: all ranks were ended; checkpoints written so far are whole\n")
    return 128 + number
