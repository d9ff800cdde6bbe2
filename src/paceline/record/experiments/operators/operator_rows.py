"""Profile the operators of a rank's last steps, and write the sums to a file beside its record.

The layout of the file (rank-N.operators) is in docs/reference/formats/record-format.md; the reader
is analyze/records/operator_file.py.
"""

import json
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ....security.files import open_regular
from ...ring.ring import OPERATORS_SUFFIX
from ..rung import PROFILE_USED, PROFILE_WARM_UP, PROFILED_STEPS
from .call_sites import Line, code_of
from .calls import Call, Step, correct_times
from .machine_limits import measure_dispatch, measure_limits
from .operator_profile import OperatorProfiler

FORMAT_VERSION = 1
MAX_ROWS = 4096  # of the file: those that take longest


@dataclass
class _Row:
    """Sums over the calls of one operator at one line, in one module and phase."""

    shapes: str = ""
    longest_s: float = 0.0  # of the call with these shapes
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    most: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, call: Call) -> None:
        self.sums["calls"] += 1
        self.sums["seconds"] += call.seconds
        self.sums["flops"] += call.flops
        self.sums["bytes"] += call.bytes
        self.sums["small_calls"] += call.small
        self.sums["small_s"] += call.seconds * call.small
        self.sums["repeated_s"] += call.seconds * call.repeated
        self.sums["unused_s"] += call.seconds * call.unused
        self.sums["unneeded_s"] += call.seconds * call.unneeded
        self.sums["float64_s"] += call.seconds * call.wide
        self.sums["padded_s"] += call.seconds * call.padding
        self.most["output_bytes"] = max(self.most["output_bytes"], call.output_bytes)
        self.most["growth"] = max(self.most["growth"], call.growth)
        self.most["widens"] = max(self.most["widens"], float(call.widens))
        self.most["pads"] = max(self.most["pads"], float(call.pads))
        self.most["random"] = max(self.most["random"], float(call.random))
        if call.seconds > self.longest_s:
            self.longest_s, self.shapes = call.seconds, call.shapes


class OperatorRun:
    """The profile of one rank: begun after the measured steps, written after the last step."""

    def __init__(self, optimizers: Iterable[Any], step_s: float, core_wait: float = 1.0) -> None:
        """Args:
        optimizers: Those that have stepped so far.
        step_s: Duration of a step without the profile, in seconds.
        core_wait: Factor by which waits for a core lengthen the computation of these steps.
        """
        self._step_s, self._core_wait = step_s, core_wait
        self._optimizers = optimizers
        self._profiler: OperatorProfiler | None = None
        self._device = "cpu"
        self._began = time.perf_counter()

    def start(self) -> None:
        """Begin the profile; called between two steps."""
        if torch.cuda.is_initialized():
            self._device = "cuda"
        self._cost = measure_dispatch(self._device)
        self._profiler = OperatorProfiler(self._device, self._optimized)
        self._profiler.start()

    def _parameters(self) -> list[torch.Tensor]:
        return [
            parameter
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    def _optimized(self) -> set[int]:
        """Return the ids of all parameters of optimizers; none if they are shards (FSDP)."""
        parameters = self._parameters()
        plain = all(type(one) in (torch.nn.Parameter, torch.Tensor) for one in parameters)
        return set(map(id, parameters)) if plain else set()

    def after_step(self) -> bool:
        """End a profiled step; return whether it was the last one."""
        assert self._profiler is not None
        self._profiler.after_step()
        return len(self._profiler.steps) > PROFILED_STEPS

    def finish(self) -> dict[str, Any]:
        """End the profile; return the content of the file."""
        assert self._profiler is not None
        steps = self._profiler.stop()[PROFILE_WARM_UP:][:PROFILE_USED]
        correct_times(steps, self._cost, self._device)
        return {
            "version": FORMAT_VERSION,
            "steps": len(steps),
            "step_s": self._step_s,
            "core_wait": self._core_wait if self._device == "cpu" else 1.0,
            "profiled_step_s": sum(step.seconds for step in steps) / max(len(steps), 1),
            "device": self._device,
            "dispatch_s": self._cost.dispatch_s,
            "compiled": _is_compiled(),
            "failure": self._profiler.failure,
            "parameter_bytes": self._parameter_bytes(),
            "limits": measure_limits(self._device),
            **sum_rows(steps),
            "whole_s": time.perf_counter() - self._began,
        }

    def _parameter_bytes(self) -> dict[str, int]:
        """Return the bytes of the parameters that optimizers update, by dtype."""
        found: dict[str, int] = defaultdict(int)
        for one in self._parameters():
            found[str(one.dtype).removeprefix("torch.")] += one.nbytes
        return dict(found)


def _key(call: Call) -> tuple[Line, str, str, str, str]:
    return call.line, call.module, call.name, call.phase, call.copy


def _remove_stalls(steps: list[Step]) -> None:
    """Set the time of each call to its median over the steps, where steps have the same calls.

    A call that another program interrupts takes many times as long.
    """
    by_key: list[dict[Any, list[Call]]] = []
    for step in steps:
        by_key.append(defaultdict(list))
        for call in step.calls:
            by_key[-1][_key(call)].append(call)
    for key, calls in by_key[0].items() if by_key else ():
        each = [found.get(key, []) for found in by_key]
        if all(len(one) == len(calls) for one in each):
            for same in zip(*each, strict=True):
                seconds = statistics.median(call.seconds for call in same)
                for call in same:
                    call.seconds = seconds


def sum_rows(steps: list[Step]) -> dict[str, Any]:
    """Return the lines of the script and one row per operator; all sums are per step."""
    _remove_stalls(steps)
    rows: dict[tuple[Line, str, str, str, str], _Row] = defaultdict(_Row)
    for step in steps:
        for call in step.calls:
            rows[_key(call)].add(call)
    ordered = sorted(rows.items(), key=lambda item: -item[1].sums["seconds"])
    listed, rest = ordered[:MAX_ROWS], ordered[MAX_ROWS:]
    numbers: dict[Line, int] = {}
    count = max(len(steps), 1)
    found = [
        {
            "line": numbers.setdefault(line, len(numbers)),
            "module": module[:200],
            "operator": name[:100],
            "phase": phase,
            "copy": copy,
            "shapes": row.shapes[:200],
            **{key: value / count for key, value in row.sums.items()},
            **row.most,
        }
        for (line, module, name, phase, copy), row in listed
    ]
    lines = [
        {"file": line[0], "line": line[1], "function": line[2], "code": code_of(line)}
        for line in numbers
    ]
    left_out = sum(row.sums["seconds"] for _, row in rest) / count
    return {"lines": lines, "operators": found, "left_out_s": left_out}


def write_rows(ring: Path, content: dict[str, Any]) -> None:
    """Write the file beside a rank's ring."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    fd = open_regular(
        ring.with_suffix(OPERATORS_SUFFIX), flags, follow_links=False, owner=os.geteuid()
    )
    with open(fd, "w") as file:
        json.dump(content, file)


def _is_compiled() -> bool:
    """Return whether the script runs code that torch.compile compiled."""
    dynamo: Any = sys.modules.get("torch._dynamo.utils")
    return bool(dynamo and dynamo.counters["stats"].get("unique_graphs"))
