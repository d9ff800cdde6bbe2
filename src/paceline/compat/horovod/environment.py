"""Horovod's environment variables: which take effect, and which have no meaning in Paceline.

``settings()`` returns the values of the first kind. ``unused_lines()`` names the variables of the
second kind that are set, and why they have no effect. Variables that horovodrun sets for its own
processes (HOROVOD_RANK, HOROVOD_GLOO_RENDEZVOUS_ADDR, ...) and variables that only the build of
Horovod reads (HOROVOD_WITH_PYTORCH, ...) are not reported.
"""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...record.ring.launcher_messages import notify

DYNAMIC = "DYNAMIC"  # value of HOROVOD_TIMELINE: hvd.start_timeline names the file
LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


@dataclass(frozen=True)
class HorovodSettings:
    """Values of the environment variables that take effect.

    Attributes:
        fusion_bytes: Maximum size of the tensors that one collective exchanges together; 0: each
            tensor is exchanged alone.
        cycle_s: Time in which submitted tensors are collected before they are negotiated.
        cache_capacity: Maximum number of tensors whose agreement is remembered; 0: none.
        stall_check_s: Seconds that a tensor waits for other ranks before a warning; 0: no warning.
        stall_shutdown_s: Seconds that a tensor waits for other ranks before the job fails; 0:
            never.
        timeline: File of the timeline; "": none.
        timeline_cycles: Whether the timeline contains a mark for each cycle.
        fuses_groups: Whether a group of tensors may be exchanged together with other tensors.
        log_level: Least severe level of messages that are printed.
        autotune: Whether fusion threshold and cycle time are tuned during the run.
        autotune_log: File for the trials of the tuning; "": none.
    """

    fusion_bytes: int = 128 << 20
    cycle_s: float = 0.001
    cache_capacity: int = 1024
    stall_check_s: float = 60.0
    stall_shutdown_s: float = 0.0
    timeline: str = ""
    timeline_cycles: bool = False
    fuses_groups: bool = True
    log_level: str = "WARNING"
    autotune: bool = False
    autotune_log: str = ""

    def prints(self, level: str) -> bool:
        """Return whether messages of ``level`` (of LOG_LEVELS) are printed."""
        return LOG_LEVELS.index(level) >= LOG_LEVELS.index(self.log_level)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value) or value < 0:
        raise ValueError
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


def _flag(text: str) -> bool:
    switch = {"": False, "false": False, "true": True}.get(text.lower())
    return int(text) > 0 if switch is None else switch


def _flag_off(text: str) -> bool:
    return not _flag(text)


def _file(text: str) -> str:
    return "" if text == DYNAMIC else text


def _level(text: str) -> str:
    name = text.upper()
    if name not in LOG_LEVELS:
        raise ValueError
    return name


def _milliseconds(text: str) -> float:
    return _number(text) / 1000


@dataclass(frozen=True)
class _Variable:
    """One environment variable that takes effect.

    Attributes:
        field: The field of HorovodSettings that it sets.
        read: Return the value from the text, or raise ValueError.
        form: Valid values, for error messages.
        example: A valid value, for error messages.
    """

    field: str
    read: Callable[[str], Any]
    form: str
    example: str


_SWITCH = ("0 or 1", "1")

OBEYED: dict[str, _Variable] = {
    "HOROVOD_FUSION_THRESHOLD": _Variable(
        "fusion_bytes", _count, "a number of bytes, 0 or more", "134217728"
    ),
    "HOROVOD_CYCLE_TIME": _Variable("cycle_s", _milliseconds, "milliseconds, 0 or more", "1"),
    "HOROVOD_CACHE_CAPACITY": _Variable("cache_capacity", _count, "a number, 0 or more", "1024"),
    "HOROVOD_STALL_CHECK_TIME_SECONDS": _Variable(
        "stall_check_s", _number, "seconds, 0 or more", "60"
    ),
    "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": _Variable(
        "stall_shutdown_s", _number, "seconds, 0 or more", "120"
    ),
    "HOROVOD_TIMELINE": _Variable("timeline", _file, "a file name", "timeline.json"),
    "HOROVOD_TIMELINE_MARK_CYCLES": _Variable("timeline_cycles", _flag, *_SWITCH),
    "HOROVOD_DISABLE_GROUP_FUSION": _Variable("fuses_groups", _flag_off, *_SWITCH),
    "HOROVOD_AUTOTUNE": _Variable("autotune", _flag, *_SWITCH),
    "HOROVOD_AUTOTUNE_LOG": _Variable("autotune_log", str, "a file name", "autotune.csv"),
    "HOROVOD_LOG_LEVEL": _Variable("log_level", _level, f"one of {', '.join(LOG_LEVELS)}", "INFO"),
}
_STALL_CHECK_DISABLE = "HOROVOD_STALL_CHECK_DISABLE"
_DISABLE = _Variable("stall_check_s", _flag, *_SWITCH)

_ALGORITHM = "the exchange between nodes is always hierarchical; PACELINE_ALGORITHM selects another"
_TUNING = "the search is successive halving, which has a fixed number of steps"
_BACKEND = "paceline run --exchange selects the backend"
_INTERFACE = "GLOO_SOCKET_IFNAME selects the network interface"
_MPI = "Paceline does not use MPI"
_CCL = "Paceline does not use oneCCL"
_NCCL = "NCCL reads its own NCCL_* variables, and paceline run --settings sets them"
_ENDED = "ranks that have ended are noticed at once, and hangs by paceline run --hang-timeout"
_COPIES = "tensors are not copied in batches"

WITHOUT_EFFECT: dict[str, str] = {
    "HOROVOD_HIERARCHICAL_ALLREDUCE": _ALGORITHM,
    "HOROVOD_HIERARCHICAL_ALLGATHER": _ALGORITHM,
    "HOROVOD_TORUS_ALLREDUCE": _ALGORITHM,
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": _TUNING,
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": _TUNING,
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": _TUNING,
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": _TUNING,
    "HOROVOD_CONTROLLER": _BACKEND,
    "HOROVOD_CPU_OPERATIONS": _BACKEND,
    "HOROVOD_GLOO_IFACE": _INTERFACE,
    "HOROVOD_MPI_THREADS_DISABLE": _MPI,
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": _MPI,
    "HOROVOD_CCL_CACHE": _CCL,
    "HOROVOD_CCL_BGT_AFFINITY": _CCL,
    "HOROVOD_NUM_NCCL_STREAMS": _NCCL,
    "HOROVOD_ENABLE_ASYNC_COMPLETION": _NCCL,
    "HOROVOD_BATCH_D2D_MEMCOPIES": _COPIES,
    "HOROVOD_THREAD_AFFINITY": "paceline run --bind binds the threads of a rank to its cores",
    "HOROVOD_DISABLE_NVTX_RANGES": "no NVTX ranges are written",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "process sets can always be added",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": _ENDED,
    "HOROVOD_ELASTIC_TIMEOUT": _ENDED,
    "HOROVOD_ENABLE_XLA_OPS": "XLA is part of TensorFlow",
    "HOROVOD_LOG_HIDE_TIME": "messages have no time",
    "HOROVOD_LOG_TIMESTAMP": "messages have no time",
    "HOROVOD_START_TIMEOUT": "ranks start without a check of the hosts by horovodrun",
}


def settings(environment: Mapping[str, str] | None = None) -> HorovodSettings:
    """Return the settings in Horovod's environment variables, with Horovod's defaults.

    Args:
        environment: Environment variables; None: those of this process.

    Raises:
        ValueError: A variable has an invalid value.
    """
    given = os.environ if environment is None else environment
    found: dict[str, Any] = {}
    for name, variable in OBEYED.items():
        if name not in given:
            continue
        found[variable.field] = _value(name, given[name], variable)
    if _value(_STALL_CHECK_DISABLE, given.get(_STALL_CHECK_DISABLE, ""), _DISABLE):
        found["stall_check_s"] = found["stall_shutdown_s"] = 0.0
    return HorovodSettings(**found)


def _value(name: str, text: str, variable: _Variable) -> Any:
    try:
        return variable.read(text.strip())
    except ValueError:
        raise ValueError(
            f"{name}={text} must be {variable.form}. HINT: {name}={variable.example}, or unset it"
        ) from None


def unused_lines(environment: Mapping[str, str] | None = None) -> list[str]:
    """Return a line for each variable that is set and has no effect; each reason once.

    A variable that is set to 0 or "" asks for nothing, and is not reported.
    """
    given = os.environ if environment is None else environment
    names: dict[str, list[str]] = {}
    for name, reason in WITHOUT_EFFECT.items():
        if given.get(name, "").strip() not in ("", "0"):
            names.setdefault(reason, []).append(name)
    return [f"{', '.join(found)}: no effect, {reason}" for reason, found in names.items()]


def report_unused() -> None:
    """Name the variables without effect, once in a job. Called on rank 0."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        for line in unused_lines():
            notify(f"paceline: {line}\n")
