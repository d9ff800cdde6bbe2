"""The line profile of a rank on disk: ``rank-N.profile``, a JSON file beside the rank's ring.

A profile has tables that refer to each other by position: ``frames`` (lines of the user's code),
``stacks`` (chains of frames, innermost first, with the activity of the thread) and ``samples``.
Times are in nanoseconds; those of ``samples`` count from ``start_ns``, which is on the clock of the
ring's events. docs/reference/formats/record-format.md describes the fields.
"""

import json
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from ....security.files import open_regular

PROFILE_VERSION = 1
MAX_PROFILE_BYTES = 16 << 20
MAX_SAMPLES = 1 << 16
MAX_STACKS = 1 << 13
MAX_FRAMES = 1 << 13  # distinct lines
MAX_CHAIN = 48  # frames of one stack, the innermost ones
MAX_COLLECTIVE_SITES = 1 << 10  # places that call collectives
MAX_WORKERS = 64  # loader workers of one rank
MAX_TEXT_CHARS = 300  # of a file name, a function or a line of code

_TimeNs = Annotated[int, Meta(ge=0, lt=1 << 60)]
_Index = Annotated[int, Meta(ge=0, lt=1 << 16)]
_Count = Annotated[int, Meta(ge=0, lt=1 << 53)]


class Activity(StrEnum):
    """What a thread does in the innermost line of the user's code on its stack."""

    PYTHON = "python"  # the interpreter itself
    LIBRARY = "library"  # a function of a library other than torch
    TORCH = "torch"  # an operator or a function of torch
    FILE = "file"  # a file or an output is read, written, opened or searched
    WAIT = "wait"  # sleep, or wait for a lock, a queue, a thread, a process or a connection
    COLLECTIVE = "collective"  # a function of torch.distributed


class CollectiveKind(StrEnum):
    """What a collective carries."""

    GRADIENT = "gradient"
    PARAMETER = "parameter"  # or a shard of it
    BUFFER = "buffer"  # of a module, as running statistics
    METRIC = "metric"  # a few numbers outside of a backward
    OBJECT = "object"  # Python objects as bytes
    BARRIER = "barrier"  # nothing
    OTHER = "other"


class Stack(TypedDict):
    """A chain of frames, and what the thread did. what: a function, or a path."""

    frames: Annotated[list[_Index], Meta(max_length=MAX_CHAIN)]
    activity: Activity
    what: str


class WorkerTime(TypedDict):
    """Time of all loader workers in one stack. on_core_ns: the part with use of a core."""

    stack: _Index
    samples: _Count
    ns: _TimeNs
    on_core_ns: _TimeNs


class CollectiveSite(TypedDict):
    """A call site of collectives. bytes: Of all calls, as in the events."""

    kind: CollectiveKind
    stack: _Index
    count: _Count
    bytes: _Count


class LineProfile(TypedDict):
    """One rank's line profile.

    Attributes:
        interval_ns: Mean time from a sample to the time at which the next one is due.
        frames: File, line, function and code.
        samples: Time, delay of the sample after it was due, stack, and since the sample before:
            time on a core, time of waiting for a core, time of collecting garbage.
        lost: Samples beyond MAX_SAMPLES.
        executions: Frame, and how often its line was executed in one step; only of some frames.
        workers: Loader workers that were sampled.
        worker_ns: Sampled time of all of them, including waits for work.
        collective_sites: Places that called collectives in the sampled steps; absent without.
        collectives: Group, number (as in the record's events) and place of each call.
    """

    version: Annotated[int, Meta(ge=1, le=PROFILE_VERSION)]
    interval_ns: _TimeNs
    start_ns: _TimeNs
    frames: Annotated[list[tuple[str, _Count, str, str]], Meta(max_length=MAX_FRAMES)]
    stacks: Annotated[list[Stack], Meta(max_length=MAX_STACKS)]
    samples: Annotated[
        list[tuple[_TimeNs, _TimeNs, _Index, _TimeNs, _TimeNs, _TimeNs]],
        Meta(max_length=MAX_SAMPLES),
    ]
    lost: _Count
    executions: Annotated[list[tuple[_Index, _Count]], Meta(max_length=MAX_FRAMES)]
    workers: _Count
    worker_ns: _TimeNs
    worker_times: Annotated[list[WorkerTime], Meta(max_length=MAX_STACKS)]
    collective_sites: NotRequired[
        Annotated[list[CollectiveSite], Meta(max_length=MAX_COLLECTIVE_SITES)]
    ]
    collectives: NotRequired[
        Annotated[list[tuple[_Index, _Count, _Index]], Meta(max_length=MAX_SAMPLES)]
    ]


def write_json(path: Path, value: Any) -> None:
    """Write a new JSON file of at most MAX_PROFILE_BYTES into the job's folder."""
    text = json.dumps(value, separators=(",", ":")).encode()
    if len(text) > MAX_PROFILE_BYTES:
        return
    part = path.with_name(f"{path.name}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    with open(open_regular(part, flags, follow_links=False, owner=os.geteuid()), "wb") as file:
        file.write(text)
    os.replace(part, path)
