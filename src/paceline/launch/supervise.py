"""Supervise the ranks of a job until they have ended, on one node or several."""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch._C._distributed_c10d import HashStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from .affinity.report_bindings import BindingsReport
from .guard.guarded_job import GuardedJob
from .job import Job
from .job_end import JobEnd
from .layout import Seat, make_seats
from .monitor.failures import HangDetector, RankStatus, describe_failure, first_failure
from .monitor.interrupt import (
    EARLY_STOP_TIMEOUT_S,
    Interrupt,
    TerminatedError,
    ignore_termination,
    raise_on_termination,
)
from .monitor.live_records import JobSnapshot
from .monitor.output import RankOutput
from .monitor.rank_messages import MAKE_ROOM_SIGNAL
from .ranks import framework_variables, process_groups
from .ranks.host import Host
from .recovery.shrink import RemainingHosts, check_min_hosts
from .requeue import STOPPED_EARLY_EXIT_CODE
from .script_source import uses_horovod
from .summary import write_summary

MONITOR_INTERVAL_S = 0.05  # less if a rank of this node ends
END_GRACE_S = 3.0  # between asking a rank to end and killing it
SETTLE_S = 0.3  # after the first known failure, for an earlier one to become known
CONSEQUENCE_SETTLE_S = 3.0  # same, if that failure only says that another rank is gone
EXIT_TIMEOUT_S = 10.0  # for a finished rank to exit its interpreter


# Rendezvous handler for PyTorch's elastic agent: provides the ranks' store before each attempt.


class Rendezvous(RendezvousHandler):
    """Rendezvous of a job whose hosts are all connected before the elastic agent runs.

    Each attempt gets a new store.

    Attributes:
        host: Host on which the store is opened.
        waiting: Number of hosts with which the job continues; the ranks have exited for that.
    """

    def __init__(self, run_id: str, host: Host, port: int) -> None:
        self._run_id, self.host, self._port = run_id, host, port
        self.waiting = 0

    def next_rendezvous(self) -> RendezvousInfo:
        self.waiting = 0
        address, port = self.host.open_store(self._port)
        return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo(address, port))

    @property
    def use_agent_store(self) -> bool:
        return True

    def get_backend(self) -> str:
        return "paceline"

    def get_run_id(self) -> str:
        return self._run_id

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return self.waiting

    def shutdown(self) -> bool:
        self.host.close_store()
        return True


# PyTorch's elastic agent, with a new store for each attempt and ranks forked from a process that
# has imported torch.
#
# PyTorch's agents share one store between restarts; ranks of a new attempt then find the previous
# attempt's keys and connect to ended ranks (`connectFullMesh ... Connection refused`). Here every
# attempt has a new store on a port that is bound before any rank starts. There is one agent for
# all hosts of the job, so that one process knows which rank failed first.


class ElasticAgent(SimpleElasticAgent):
    """Start, watch and end the ranks of all hosts."""

    # Set before the agent runs.
    output: RankOutput
    interrupt: Interrupt
    hang_detector: HangDetector
    remaining: RemainingHosts | None = None  # if the job has several hosts
    bindings: BindingsReport | None = None  # if bindings are to be reported

    def __init__(
        self,
        spec: WorkerSpec,
        hosts: Sequence[Host],
        seats: list[Seat],
        started: int,
        horovod: bool = False,
    ) -> None:
        """Start no rank yet.

        Args:
            started: When the command began, ns of this host's monotonic clock.
            horovod: Whether the script uses Horovod.
        """
        super().__init__(spec, exit_barrier_timeout=60)
        self._hosts, self._seats = hosts, seats
        self._rank_addresses: tuple[list[framework_variables.Worker], int] = [], 0
        self._started_ns, self._horovod = started, horovod
        self.ranks: list[RankStatus] = []
        self.cause: RankStatus | None = None  # rank whose failure ended the last attempt
        self.end: JobEnd | None = None  # if Paceline ended the last attempt
        self.summary: str | None = None  # report of rank 0, as JSON
        self.job_code = 0  # exit code of a job whose ranks have ended with 0
        self.pending_signals: list[int] = []  # to be forwarded to the ranks
        self.early_stop_deadline: float | None = None  # deadline for ranks that were asked to stop
        self.guarded = GuardedJob(None)
        self._announced_can_stop_early = False  # what the hosts were last told
        self._attempt = -1
        self._returned_hosts: list[str] = []  # returned hosts, while the ranks stop for them

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Open a store and find ports for an attempt; a restart uses the hosts that remain."""
        spec = worker_group.spec
        self._attempt += 1
        remaining = self.remaining if self._attempt else None
        if remaining is not None:
            remaining.attempt = self._attempt
            changed = remaining.readmit_returned() | remaining.drop_lost()
            if changed | remaining.exclude_repeat_failure(self.cause):
                self._use_remaining_hosts(remaining, spec)
        while True:
            try:
                super()._rendezvous(worker_group)
                self._rank_addresses = framework_variables.worker_addresses(
                    self._seats, self._hosts
                )
                return
            except ValueError:  # a host whose loss was not known yet
                if remaining is None or not remaining.drop_lost():
                    raise
                self._use_remaining_hosts(remaining, spec)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        if self._attempt:
            self._announce_restart(worker_group.spec)
        self.ranks, self.cause, self.end, self._returned_hosts = [], None, None, []
        self.guarded.begin_attempt(len(self._seats))
        workers, coordinator = self._rank_addresses
        environment = dict(os.environ)
        for worker in worker_group.workers:
            self.output.forget(worker.global_rank)
            variables = {
                **self._variables(worker_group, worker),
                **framework_variables.variables(
                    workers, worker.global_rank, coordinator, environment, self._horovod
                ),
            }
            seat = self._seats[worker.global_rank]
            # Registered before the rank starts, so that its first messages are not lost.
            self.ranks.append(RankStatus(worker.global_rank, self._host_name_if_several(seat)))
            self._hosts[seat.host].start(worker.global_rank, seat.local_rank, variables)
        return {rank.rank: None for rank in self.ranks}

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._hosts[0].wait(MONITOR_INTERVAL_S)
        self.interrupt.check()
        self._collect_exits()
        self._poll_hosts()
        self._readmit_hosts()
        self._forward()
        if first_failure(self.ranks) is not None or any(not rank.running for rank in self.ranks):
            # a rank's last output comes before its exit
            self.output.drain(all_of_it=first_failure(self.ranks) is None)
        if first_failure(self.ranks) is not None:
            self._settle()
            self.cause = first_failure(self.ranks)
            assert self.cause is not None
            if self.early_stop_deadline is not None:  # the scheduler ends the job: do not restart
                self._remaining_restarts = 0
            return RunResult(state=WorkerState.FAILED)
        if self.bindings is not None:
            self.bindings.check(self._hosts, self._seats)
        self._end_unexited_ranks()
        self.end = self._ask_observers()
        if self.end is not None:
            for host in self._hosts:
                if host.name in self.end.silent_hosts:
                    host.give_up()
            self.cause = RankStatus(0, exit_code=self.end.exit_code)
            if not self.end.may_restart:
                self._remaining_restarts = 0
            return RunResult(state=WorkerState.FAILED)
        # A finished rank that not even SIGKILL ends (state D) is left: process_groups prints it.
        left_before = time.monotonic() - EXIT_TIMEOUT_S - process_groups.KILL_TIMEOUT_S
        if any(r.running and not r.is_left(left_before) for r in self.ranks):
            return RunResult(state=WorkerState.HEALTHY)
        if self._returned_hosts and self.stopped_at_step is not None:
            handler = worker_group.spec.rdzv_handler
            assert isinstance(handler, Rendezvous)
            handler.waiting = len(self._returned_hosts)  # a restart that does not count
            return RunResult(state=WorkerState.HEALTHY)
        results = {rank.rank: None for rank in self.ranks}
        return RunResult(state=WorkerState.SUCCEEDED, return_values=results)

    def _ask_observers(self) -> JobEnd | None:
        """Return why the job must end, if the guard or the hang detector says so."""
        end = self.guarded.check(self.output.say, self.can_stop_early, self._warn_ranks)
        if end is None and any(rank.running and rank.finished_code is None for rank in self.ranks):
            end = self.hang_detector.check(
                lambda: [host.progress() for host in self._hosts], self.output.say
            )
        return end

    def _stop_workers(self, worker_group: WorkerGroup, is_restart: bool = False) -> None:
        if self.end is not None:  # reported before any rank is ended
            self.output.say(self.end.text)
        self.end_ranks()
        self.output.drain()
        if self.cause is not None and self.end is None:
            number = self.cause.rank
            # its traceback is at the end of the output
            shown = self.cause.raised_exception and self.output.shows_error(number)
            tail = [] if shown else list(self.output.tails[number])
            waiting = next((rank for rank in self.ranks if rank.is_consequence), None)
            self.output.say(describe_failure(self.cause, tail, len(self.ranks) - 1, waiting))

    def _shutdown(self, death_sig: Any = signal.SIGTERM, timeout: int = 30) -> None:
        self.end_ranks()

    @contextlib.contextmanager
    def record_duration(self, state: str) -> Iterator[None]:
        """Record nothing: these events look up the host's name, which is slow on some hosts."""
        yield

    def _record_worker_events(self, result: RunResult) -> None:
        """Record nothing, for the same reason."""

    def end_ranks(self, grace: float = END_GRACE_S) -> None:
        """End every running rank: SIGTERM first, SIGKILL after ``grace`` seconds. A second Ctrl-C
        kills them at once. A rank that does not end is left: ``process_groups`` prints it when the
        job ends.
        """
        deadline = time.monotonic() + grace
        try:
            for rank in self.ranks:
                if rank.running:
                    # a rank that stops on a warning treats SIGTERM as one
                    self._signal(rank, signal.SIGHUP if rank.stops_on_warning else signal.SIGTERM)
                    self._signal(rank, signal.SIGCONT)  # a stopped process can't handle the signal
            while time.monotonic() < deadline and any(rank.running for rank in self.ranks):
                time.sleep(0.01)
                self._collect_exits()
        except KeyboardInterrupt:
            pass
        for rank in self.ranks:  # ranks that exited may have left processes behind
            self._signal(rank, signal.SIGKILL)
        deadline = time.monotonic() + process_groups.KILL_TIMEOUT_S
        awaited = [rank for rank in self.ranks if not rank.exit_overdue]
        while time.monotonic() < deadline and any(rank.running for rank in awaited):
            time.sleep(0.005)
            self._collect_exits()
        for rank in awaited:
            rank.exit_overdue = rank.running

    def _variables(self, group: WorkerGroup, worker: Any) -> dict[str, str]:
        spec, seat = group.spec, self._seats[worker.global_rank]
        started = self._started_ns if self._attempt == 0 else time.monotonic_ns()
        return {
            "PACELINE_STARTED_NS": str(started),
            "LOCAL_RANK": str(seat.local_rank),
            "RANK": str(worker.global_rank),
            "GROUP_RANK": str(seat.host),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_NAME": spec.role,
            "LOCAL_WORLD_SIZE": str(seat.local_size),
            "WORLD_SIZE": str(len(self._seats)),
            "GROUP_WORLD_SIZE": str(len(self._hosts)),
            "ROLE_WORLD_SIZE": str(len(self._seats)),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "PACELINE_STORE_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self._attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(spec.max_restarts),
            "TORCHELASTIC_RUN_ID": spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get(
                "TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"
            ),
            **(self.remaining.variables() if self.remaining is not None else {}),
        }

    def _announce_restart(self, spec: WorkerSpec) -> None:
        """Print which hosts the next attempt uses, and how many restarts are used up."""
        changes = self.remaining.take_changes() if self.remaining is not None else ""
        used = f" (restart {spec.max_restarts - self._remaining_restarts} of {spec.max_restarts})"
        self.output.say(
            f"paceline: {changes or 'the job restarts'} from the last checkpoint"
            f"{used if self.cause is not None else ''}\n"
        )

    def _readmit_hosts(self) -> None:
        """Have the ranks stop with a checkpoint when lost hosts have returned. Ranks that can't
        stop continue without these hosts until the next attempt.
        """
        if self.remaining is None or self._returned_hosts or self.early_stop_deadline is not None:
            return
        makes_room = bool(self.ranks) and all(rank.makes_room for rank in self.ranks)
        self._returned_hosts = self.remaining.announce_returned(
            makes_room or self.can_stop_early, self.output.say
        )
        if self._returned_hosts:
            self._warn_ranks(MAKE_ROOM_SIGNAL if makes_room else signal.SIGUSR1)

    def _use_remaining_hosts(self, remaining: RemainingHosts, spec: WorkerSpec) -> None:
        """Use the remaining hosts for the next attempt, and renumber the ranks."""
        self.ranks, self._hosts, self._seats = (
            [],
            remaining.hosts,
            make_seats(remaining.ranks_per_host),
        )
        spec.local_world_size = len(self._seats)
        handler = spec.rdzv_handler
        assert isinstance(handler, Rendezvous)
        handler.shutdown()  # the store may be on an excluded host
        handler.host = self._hosts[0]
        self.output.close()
        self.start_output()

    def start_output(self) -> None:
        """Read and show the output of the ranks of this attempt."""
        out, err = sys.stdout.buffer, sys.stderr.buffer
        self.output = RankOutput(
            len(self._seats), out, err, self.handle_rank_message, self.guarded.take_line
        )
        for host in self._hosts:
            host.set_output(self.output)
            host.set_peers(self._hosts)

    def _forward(self) -> None:
        """Forward the user's signals, such as a scheduler's warning, to the ranks."""
        while self.pending_signals:
            kind = self.pending_signals.pop(0)
            self._returned_hosts = []  # ranks that stop now are not restarted
            if kind == signal.SIGTERM:
                self.output.say(
                    "paceline: SIGTERM: the ranks write a checkpoint and stop within "
                    f"{EARLY_STOP_TIMEOUT_S:.0f} s. A second SIGTERM ends them at once.\n"
                )
                self._warn_ranks()
                continue
            self.output.say(f"paceline: {signal.Signals(kind).name} is forwarded to the ranks\n")
            self._warn_ranks(kind)

    @property
    def can_stop_early(self) -> bool:
        """Whether a warning makes all ranks write a checkpoint and stop."""
        return bool(self.ranks) and all(rank.stops_on_warning for rank in self.ranks)

    @property
    def stopped_at_step(self) -> int | None:
        """Step of the checkpoint with which all ranks have stopped before the end, or None."""
        steps = [rank.stopped_at_step for rank in self.ranks]
        return steps[0] if steps and None not in steps else None

    def defer_termination(self, number: int) -> bool:
        """Return whether SIGTERM is forwarded as a warning instead of ending the job: only the
        first one, and only if all ranks can stop early.
        """
        if (
            number != signal.SIGTERM
            or self.early_stop_deadline is not None
            or not self.can_stop_early
        ):
            return False
        self.early_stop_deadline = time.monotonic() + EARLY_STOP_TIMEOUT_S
        self.pending_signals.append(number)
        return True

    def _warn_ranks(self, kind: int = signal.SIGUSR1) -> None:
        """Send a signal to all ranks; on SIGUSR1 they write a checkpoint and stop, if they can."""
        for rank in self.ranks:
            if rank.running:
                self._signal(rank, kind)

    def _poll_hosts(self) -> None:
        """Tell hosts whether ranks can stop early; check whether a scheduler ends the job."""
        if self.can_stop_early != self._announced_can_stop_early:
            self._announced_can_stop_early = self.can_stop_early
            for host in self._hosts:
                host.set_can_stop_early(self._announced_can_stop_early)
        if any(host.termination_requested for host in self._hosts):
            self.defer_termination(signal.SIGTERM)
        if self.early_stop_deadline is not None and time.monotonic() > self.early_stop_deadline:
            raise TerminatedError(signal.SIGTERM)

    def _signal(self, rank: RankStatus, kind: int) -> None:
        self._hosts[self._seats[rank.rank].host].signal(rank.rank, kind)

    def _host_name_if_several(self, seat: Seat) -> str:
        several = len(self._hosts) > 1 or (self.remaining is not None and self.remaining.is_reduced)
        return self._hosts[seat.host].name if several else ""

    def _collect_exits(self) -> None:
        """Take note of which ranks have ended."""
        for host in self._hosts:
            for number, status, at in host.take_exits():
                rank = self.ranks[number] if number < len(self.ranks) else None
                if rank is not None and rank.running:
                    rank.exit_code, rank.ended_at = status, at
                    rank.host_failure = host.exit_reason(number)

    def handle_rank_message(self, number: int, message: dict[str, Any]) -> None:
        """Handle a rank's message to the launcher; called from the output's thread."""
        rank = self.ranks[number] if number < len(self.ranks) else None
        self.guarded.take_message(number, message)
        if rank is not None:
            host = self._hosts[self._seats[number].host]
            rank.take_message(message, host.to_local_time)
            if rank.failed:
                self.output.hold_lines()
        if "ending" in message:
            self.defer_termination(signal.SIGTERM)
        elif "summary" in message:
            self.summary = message["summary"]
        elif "job_code" in message:
            self.job_code = message["job_code"]

    def _settle(self) -> None:
        """Wait briefly after a failure, because an earlier one may become known later."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < CONSEQUENCE_SETTLE_S:
            cause = first_failure(self.ranks)
            final = cause is None or not (cause.is_consequence or cause.left_others)
            if waited >= SETTLE_S and final:
                return
            time.sleep(0.01)
            self._collect_exits()

    def _end_unexited_ranks(self) -> None:
        """Kill ranks that finished but do not exit, once all others have exited."""
        running = [rank for rank in self.ranks if rank.running]
        if not running or any(rank.finished_at is None for rank in running):
            return
        if time.monotonic() - max(r.finished_at or 0.0 for r in running) > EXIT_TIMEOUT_S:
            for rank in running:
                if rank.exit_overdue:
                    continue
                rank.exit_overdue = True
                self.output.say(
                    f"paceline: rank {rank.rank} finished its script but did not exit within "
                    f"{EXIT_TIMEOUT_S:.0f} s, and was killed: its exit handlers have run, "
                    "destructors (__del__) may not have run. "
                    "HINT: close files and connections in the script\n"
                )
                self._signal(rank, signal.SIGKILL)


def watch(
    job: Job,
    hosts: Sequence[Host],
    seats: list[Seat],
    run: str,
    started: int,
    interrupt: Interrupt,
    fetch_records: Callable[[int], JobSnapshot | None],
    remaining: RemainingHosts | None = None,
) -> int:
    """Start the ranks, supervise them until they have ended, and return the exit code.

    Args:
        started: When the command began, ns of the monotonic clock.
        fetch_records: Fetches the tails of the ranks' records, and their stacks.
        remaining: Hosts that remain of a job on several nodes, or None.
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
    agent.interrupt, agent.remaining, agent.guarded = interrupt, remaining, GuardedJob(job.guard)
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
            write_summary(job.summary, job.words, agent.summary, job.guard)
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
