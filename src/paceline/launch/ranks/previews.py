"""The rank of ``paceline run --rehearse`` and ``--show-memory``, and what it prints.

A rehearsal runs the script as ranks of a job, one after the other. Each rehearsed rank is a process
of its own, forked from this one, whose process groups are ``EqualRanksGroup``s. Nothing of the
job's other ranks exists.
"""

import io
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from rich.console import Group

from ...analyze.rehearsal.axis_traffic import groups_of
from ...analyze.rehearsal.facts import (
    DATA,
    MEASURED_STEP,
    REHEARSED_STEPS,
    Failure,
    MemoryFacts,
    RankFacts,
    Rehearsal,
    RehearsalRequest,
    representatives,
)
from ...analyze.rehearsal.mismatches import find_mismatches
from ...comm.rehearsal.calls import CallLog, KeptResult, RanksDifferError
from ...comm.rehearsal.cuda_on_cpu import MISSING_GPU
from ...comm.rehearsal.rehearsed_rank import VARIABLE as RANK_VARIABLE
from ...comm.rehearsal.rehearsed_rank import RehearsalLimitError
from ...observe.attach import current_recorder
from ...record.hooks import error_messages, taps
from ...record.hooks.error_messages import line_of_error, summarize_error
from ...record.ring.launcher_messages import notify, send_to_launcher
from ...record.ring.recorder import Recorder
from ...report.console import PlainConsole
from ...report.document import Block
from ...report.terminal.draw import draw
from ...report.terminal.previews import rehearsal_blocks, rehearsal_json
from ...security.files import write_all
from ...security.schema import parse_json
from ..layout import make_seats

if TYPE_CHECKING:
    from ...cost.layout_memory import LayoutMemory
    from ...parallel.memory.survey import MemorySurvey

VARIABLE = "PACELINE_REHEARSE"  # a RehearsalRequest as JSON
FAILS, CANNOT = 1, 2  # exit codes: ranks would fail, or the rehearsal has a limit
Finish = Callable[[int], NoReturn]
MAX_OUTPUT_BYTES = 1 << 20  # of a failed rank, which is printed
# Of the launcher, which is not there for rehearsed ranks.
_NOT_INHERITED = ("PACELINE_RECORD", "PACELINE_STORE_PORT", "TORCH_DIST_INIT_BARRIER")


# Watch a rehearsed rank: end it after its second optimizer step, and collect what it did.

MAX_OPTIMIZER_STEPS = 64  # of a script whose training steps are not recognized


class RehearsalWatch:
    """Notes of one rehearsed rank."""

    def __init__(self, rank: int, size: int, log: CallLog) -> None:
        self.rank, self.size, self.log = rank, size, log
        self._samples = 0
        self._memory = MemoryFacts()
        self._facts: RankFacts | None = None
        self._optimizers: dict[int, Any] = {}
        self._steps: Counter[int] = Counter()  # by id of the optimizer

    def install(self) -> None:
        """Follow the steps that the recorder counts, in this process."""
        taps.around(Recorder, "end_of_step", self._end_step)
        taps.on_step(after=self._note_step)

    def _end_step(self, end: Callable[[Recorder], None], recorder: Recorder) -> None:
        if recorder.step == MEASURED_STEP:
            self._samples = recorder.samples
        end(recorder)
        self._optimizers.clear()  # those of the next step: some only step once, for a check
        self.log.step = recorder.step
        if recorder.step >= REHEARSED_STEPS:
            self._end()

    def _note_step(self, optimizer: Any, *_: Any) -> None:
        self._optimizers[id(optimizer)] = optimizer  # a reference: ids are used again
        self._steps[id(optimizer)] += 1
        if not self.log.is_closed:
            self._memory = _bytes_of(list(self._optimizers.values()))
        if self._steps[id(optimizer)] >= MAX_OPTIMIZER_STEPS:
            self._end()

    def _end(self) -> None:
        """End the script after its second step; raises SystemExit."""
        if self.log.is_closed:
            return
        self._facts = self._collect()
        self.log.is_closed = True
        raise SystemExit(0)

    def facts(self, code: int) -> RankFacts:
        """Return what the rank did, after its script has ended with this exit code."""
        if self._facts is not None:
            return self._facts
        found = self._collect()
        if not code:
            return found
        error = getattr(sys, "last_value", None)
        unknown = found.has_unknown and not isinstance(error, RanksDifferError)
        return replace(found, failure=_failure(error, code), has_unknown=unknown)

    def _collect(self) -> RankFacts:
        recorder = current_recorder()
        header = recorder.header if recorder is not None else {}
        mesh: dict[str, Any] = header.get("mesh") or {}
        axes = [(str(name), int(extent)) for name, extent in mesh.get("axes", [])]
        labels = dict(mesh.get("groups", {}))
        if [name for name, _ in axes] == [DATA]:
            labels[""] = DATA  # a group of all ranks
        groups = groups_of(self.log.groups, self.size, labels, _descriptions())
        return RankFacts(
            self.rank,
            axes,
            str(header.get("layout", "")),
            groups,
            list(self.log.calls),
            self.log.step,
            self._samples,
            MemoryFacts(
                self._memory.parameters,
                self._memory.gradients,
                self._memory.optimizer_states,
                _process_peak(),
            ),
            has_unknown=self.log.has_unknown,
        )


def _failure(error: BaseException | None, code: int) -> Failure:
    if error is None:
        return Failure(f"exit code {code}")
    if isinstance(error, SystemExit):
        return Failure(f"sys.exit({error.code!r})", line_of_error(error))
    chain = list[BaseException]()
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    is_limit = any(
        isinstance(each, RehearsalLimitError) or any(text in str(each) for text in MISSING_GPU)
        for each in chain
    )
    return Failure(summarize_error(error), line_of_error(error), is_limit)


def _descriptions() -> dict[str, str]:
    """Return PyTorch's descriptions of process groups, by name."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None:
        return {}
    return {str(name): str(group.group_desc) for group, name in c10d._world.pg_names.items()}


def _bytes_of(optimizers: list[Any]) -> MemoryFacts:
    """Return the bytes of what optimizers train, on this rank."""
    import torch

    from ...optim.whole_norms import local_part

    def total(tensors: Any) -> int:
        each = {id(t): t for t in tensors if isinstance(t, torch.Tensor)}
        return sum(local_part(t).nbytes for t in each.values())

    parameters = [p for o in optimizers for group in o.param_groups for p in group["params"]]
    states = [s for o in optimizers for s in o.state.values() if isinstance(s, dict)]
    return MemoryFacts(
        total(parameters),
        total(p.grad for p in parameters),
        total(value for state in states for value in state.values()),
    )


def _process_peak() -> int:
    """Return the largest resident memory of this process without pages of files, in bytes."""
    found: dict[str, int] = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmHWM", "RssFile", "RssShmem"):
            found[name] = int(value.split()[0]) * 1024
    return max(found.get("VmHWM", 0) - found.get("RssFile", 0) - found.get("RssShmem", 0), 0)


@dataclass
class Outcome:
    """What a rehearsed rank reports to this process."""

    facts: RankFacts
    kept: list[KeptResult] = field(default_factory=list)


def rehearse(run: Callable[[], int], finish: Finish) -> int:
    """Rehearse the job of this process's environment, and print the result.

    Return the exit code of this process; the launcher gets that of the job.

    Args:
        run: Runs the script, and returns its exit code.
        finish: Ends a rehearsed rank with its exit code.
    """
    text = os.environ.pop(VARIABLE)
    request = parse_json(text.encode(), RehearsalRequest, VARIABLE)
    log, found = CallLog(), list[RankFacts]()
    waiting = [0]
    while waiting:
        rank = waiting.pop(0)
        outcome = _run_rank(rank, request, log, run, finish)
        log.learn(outcome.facts, outcome.kept)
        found.append(outcome.facts)
        if outcome.facts.failure is not None:
            break
        if rank == 0:
            waiting = representatives(request.ranks, outcome.facts.axes)[1:]
    rehearsal = Rehearsal(request, found)
    _print_preview(rehearsal_json(rehearsal), rehearsal_blocks(rehearsal))
    failure = rehearsal.failed.failure if rehearsal.failed is not None else None
    if failure is not None and failure.is_limit:
        code = CANNOT
    else:
        code = FAILS if failure is not None or find_mismatches(found) else 0
    return 0 if send_to_launcher(job_code=code) else code


def _print_preview(summary: dict[str, Any], blocks: list[Block]) -> None:
    """Print the blocks, and send the JSON to the launcher."""
    send_to_launcher(summary=json.dumps(summary))
    text = io.StringIO()
    terminal = os.environ.get("PACELINE_TTY") == "1"
    width = int(os.environ.get("PACELINE_WIDTH", 0)) or 100
    PlainConsole(file=text, force_terminal=terminal, width=width).print(Group(*draw(blocks)))
    notify(text.getvalue())


def _run_rank(
    rank: int, request: RehearsalRequest, log: CallLog, run: Callable[[], int], finish: Finish
) -> Outcome:
    """Run one rank in a new process, and return what it reports."""
    report, output = os.memfd_create("paceline-rehearsal"), os.memfd_create("paceline-output")
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        finish(_be_rank(rank, request, log, run, (report, output)))
    _, status = os.waitpid(pid, 0)
    data, shown = _content(report), _content(output)
    os.close(report)
    os.close(output)
    if data:
        outcome = parse_json(data, Outcome, f"the report of rank {rank}")
    else:
        outcome = Outcome(RankFacts(rank, failure=Failure(_ended(status))))
    if outcome.facts.failure is not None:
        sys.stderr.write(shown[-MAX_OUTPUT_BYTES:].decode(errors="replace"))
    facts = replace(outcome.facts, seconds=round(time.monotonic() - started, 3))
    return replace(outcome, facts=facts)


def _content(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return os.pread(fd, size, 0) if size < 1 << 30 else b""


def _ended(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"the process has ended with exit code {code}"
    name = signal.Signals(-code).name
    cause = " (probably because memory ran out)" if name == "SIGKILL" else ""
    return f"the process was ended by {name}{cause}"


def _be_rank(
    rank: int,
    request: RehearsalRequest,
    log: CallLog,
    run: Callable[[], int],
    files: tuple[int, int],
) -> int:
    """Run the script as a rank, in the forked process, and return its exit code."""
    from ...comm.rehearsal.rehearsed_rank import install

    report, output = files
    try:
        if rank:  # the output of rank 0 is that of the job
            os.dup2(output, 1)
            os.dup2(output, 2)
        _set_environment(rank, request)
        log.rank = rank
        install(log)
        if request.names_gpus:
            from ...comm.rehearsal import cuda_on_cpu

            cuda_on_cpu.install()
        watch = RehearsalWatch(rank, request.ranks, log)
        watch.install()
        code = run()
        facts = watch.facts(code)
        outcome = Outcome(facts, log.kept)
        write_all(report, json.dumps(msgspec.to_builtins(outcome)).encode())
    except BaseException as error:
        sys.stderr.write(f"paceline: the rehearsal of rank {rank} failed: {error!r}\n")
        sys.stderr.flush()
        os._exit(CANNOT)
    return code


def _set_environment(rank: int, request: RehearsalRequest) -> None:
    size, seat = request.ranks, make_seats([host.ranks for host in request.hosts])[rank]
    for name in _NOT_INHERITED:
        os.environ.pop(name, None)
    numbers = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": size,
        "LOCAL_RANK": seat.local_rank,
        "LOCAL_WORLD_SIZE": seat.local_size,
        "GROUP_RANK": seat.host,
        "GROUP_WORLD_SIZE": sum(given.ranks > 0 for given in request.hosts),
    }
    os.environ.update({name: str(number) for name, number in numbers.items()})
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        CUDA_VISIBLE_DEVICES="",
        HIP_VISIBLE_DEVICES="",
        PACELINE_ATTACH="1",
        PACELINE_AGREE="0",
        PACELINE_TELLS="launcher",
    )
    os.environ[RANK_VARIABLE] = str(rank)


def start_showing_memory() -> "MemorySurvey":
    """Trace the memory of the script that this process is about to run (``--show-memory``)."""
    from ...parallel.memory.survey import start_survey

    survey = start_survey(_show_memory)
    error_messages.explanations.append(survey.explain)
    return survey


def _show_memory(predicted: "list[LayoutMemory]", survey: "MemorySurvey") -> None:
    from ...report.terminal.previews import memory_blocks, memory_json

    available = survey.available_bytes
    blocks = memory_blocks(predicted, available, survey.problems)
    _print_preview(memory_json(predicted, available), blocks)
