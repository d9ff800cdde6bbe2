"""Read a rank's line profile (rank-N.profile), which is untrusted input."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...record.experiments.lines.sidecar import (
    MAX_PROFILE_BYTES,
    Activity,
    CollectiveKind,
    LineProfile,
)
from ...record.ring.header_schema import MAX_TIME_NS, without_line_breaks
from ...security.files import InvalidFileError
from ...security.schema import read_json

SAMPLE_FIELDS = ("at", "late", "stack", "ran", "delayed", "garbage")
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SampledLine:
    """A line of the user's code."""

    file: str
    line: int
    function: str
    code: str

    def evidence(self, share: float, inside: str = "") -> dict[str, object]:
        """Return the line as the evidence of a cause has it, same as ``losses.lines_in``.

        Args:
            share: Of the time of the cause.
            inside: Function of a library, or path, that the line used.
        """
        return {
            "file": self.file,
            "line": self.line,
            "function": self.function,
            "inside": inside,
            "code": self.code,
            "share": share,
        }


@dataclass(frozen=True)
class SampledStack:
    """A chain of lines by their numbers, innermost first, and what the innermost one did.

    what: A function of a library, or a path; "" for Python itself.
    """

    lines: tuple[int, ...]
    activity: Activity
    what: str


@dataclass(frozen=True)
class CollectiveSite:
    """A call site of collectives: what they carry, and the number of its stack."""

    kind: CollectiveKind
    stack: int
    bytes_per_call: float


@dataclass(frozen=True)
class RankLines:
    """The line profile of one rank.

    Attributes:
        at: Time of each sample (ns, on the clock of the record's events).
        weight: Time that each sample stands for (ns).
        stack: Number of its stack.
        core_wait, garbage, off_core: Share of the time since the previous sample in which the
            thread waited for a core, collected garbage, or used no core.
        executions: By line, how often it was executed in one step.
        worker_ns: Sampled time of all workers, with their waits for work.
        worker_times: Stack and time of all workers in it (ns).
        collective_sites: Places that call collectives.
        collectives: Group, number and place of each call, one row per call.
    """

    lines: list[SampledLine]
    stacks: list[SampledStack]
    at: Ints
    weight: Ints
    stack: Ints
    core_wait: npt.NDArray[np.float64]
    garbage: npt.NDArray[np.float64]
    off_core: npt.NDArray[np.float64]
    executions: dict[int, int]
    worker_ns: int
    worker_times: list[tuple[int, int]]
    collective_sites: list[CollectiveSite] = field(default_factory=list)
    collectives: Ints = field(default_factory=lambda: np.empty((0, 3), np.int64))


def read_rank_lines(path: Path) -> RankLines:
    """Return the line profile in a file.

    Raises:
        InvalidFileError: The file is not a valid profile.
        OSError: The file can't be opened.
    """
    found: Any = read_json(path, LineProfile, MAX_PROFILE_BYTES)
    lines = [SampledLine(*without_line_breaks(frame)) for frame in found["frames"]]
    stacks = [
        SampledStack(tuple(stack["frames"]), stack["activity"], without_line_breaks(stack["what"]))
        for stack in found["stacks"]
    ]
    rows = np.array(found["samples"], np.int64).reshape(-1, len(SAMPLE_FIELDS))
    of = dict(zip(SAMPLE_FIELDS, rows.T, strict=True))
    numbers = [number for stack in stacks for number in stack.lines]
    numbers += [number for number, _ in found["executions"]]
    used = [times["stack"] for times in found["worker_times"]]
    used += [site["stack"] for site in found.get("collective_sites", [])]
    sites = [
        CollectiveSite(site["kind"], site["stack"], site["bytes"] / max(site["count"], 1))
        for site in found.get("collective_sites", [])
    ]
    collectives = np.array(found.get("collectives", []), np.int64).reshape(-1, 3)
    largest = int(of["at"].max(initial=0)) + found["start_ns"]
    if (
        max(numbers, default=-1) >= len(lines)
        or max([*used, int(of["stack"].max(initial=-1))]) >= len(stacks)
        or int(collectives[:, 2].max(initial=-1)) >= len(sites)
        or largest >= MAX_TIME_NS
        or int(of["late"].max(initial=0)) + found["interval_ns"] >= MAX_TIME_NS >> 16
    ):
        raise InvalidFileError(path, "is damaged: it refers to a line, a stack or a time without")
    since = np.maximum(np.diff(of["at"], prepend=0), 1).astype(np.float64)
    core_wait = np.clip(of["delayed"] / since, 0, 1)
    garbage = np.clip(of["garbage"] / since, 0, 1 - core_wait)
    return RankLines(
        lines=lines,
        stacks=stacks,
        at=of["at"] + found["start_ns"],
        weight=of["late"] + found["interval_ns"],
        stack=of["stack"],
        core_wait=core_wait,
        garbage=garbage,
        off_core=np.clip(1 - (of["ran"] + of["delayed"]) / since, 0, 1),
        executions=dict(found["executions"]),
        worker_ns=found["worker_ns"],
        worker_times=[(times["stack"], times["ns"]) for times in found["worker_times"]],
        collective_sites=sites,
        collectives=collectives,
    )
