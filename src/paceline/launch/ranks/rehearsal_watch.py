"""Watch a rehearsed rank: end it after its second optimizer step, and collect what it did."""

import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...analyze.rehearsal.axis_traffic import groups_of
from ...analyze.rehearsal.facts import (
    DATA,
    MEASURED_STEP,
    REHEARSED_STEPS,
    Failure,
    MemoryFacts,
    RankFacts,
)
from ...comm.rehearsal.calls import CallLog, RanksDifferError
from ...comm.rehearsal.cuda_on_cpu import MISSING_GPU
from ...comm.rehearsal.lone_store import RehearsalLimitError
from ...record.attach import current_recorder
from ...record.hooks.error_messages import line_of_error, summarize_error
from ...record.hooks.import_hooks import after_import
from ...record.ring.recorder import Recorder

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
        original = Recorder.end_of_step

        def end_of_step(recorder: Recorder) -> None:
            if recorder.step == MEASURED_STEP:
                self._samples = recorder.samples
            original(recorder)
            self._optimizers.clear()  # those of the next step: some only step once, for a check
            self.log.step = recorder.step
            if recorder.step >= REHEARSED_STEPS:
                self._end()

        recorder_class: Any = Recorder
        recorder_class.end_of_step = end_of_step
        after_import({"torch.optim.optimizer": self._watch_optimizers})

    def _watch_optimizers(self, module: Any) -> None:
        module.register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped(optimizer))

    def _stepped(self, optimizer: Any) -> None:
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
    one: BaseException | None = error
    while one is not None and one not in chain:
        chain.append(one)
        one = one.__cause__ or one.__context__
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
