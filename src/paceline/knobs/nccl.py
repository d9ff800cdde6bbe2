"""Knobs of NCCL: environment variables that NCCL reads when it creates a communicator.

They are documented in NCCL's manual, "Environment Variables". Paceline tries each one in a
separate run (paceline diagnose --try) and never in a training job: NCCL aborts the communicator if
it does not support an algorithm or a protocol on these GPUs.
"""

import functools
import os
from typing import Any

from ..record.hooks.import_hooks import after_import
from .apply import KnobResult


def algorithm(name: str, turned: KnobResult) -> None:
    _set("NCCL_ALGO", name, turned)


def protocol(name: str, turned: KnobResult) -> None:
    _set("NCCL_PROTO", name, turned)


def channels(count: int, turned: KnobResult) -> None:
    _set("NCCL_MIN_NCHANNELS", str(count), turned)


def _set(variable: str, value: str, turned: KnobResult) -> None:
    """Set an NCCL environment variable, replacing a value from the environment.

    The result is reported after the script creates a process group.
    """
    os.environ[variable] = value

    def install(c10d: Any) -> None:
        make = c10d._new_process_group_helper

        @functools.wraps(make)
        def helper(size: int, rank: int, members: list[int], *args: Any, **options: Any) -> Any:
            made = make(size, rank, members, *args, **options)
            if _is_nccl(str(args[0] if args else options.get("backend", "")).lower()):
                turned.done()
            elif not turned.set:
                turned.not_done("the script does not use NCCL")
            return made

        c10d._new_process_group_helper = helper

    after_import({"torch.distributed.distributed_c10d": install})


def _is_nccl(backend: str) -> bool:
    """Return whether a group uses NCCL.

    torch selects it for GPUs if no backend is named, and so does the backend "paceline".
    """
    import torch

    named = "nccl" in backend or backend in ("", "none", "undefined", "paceline")
    return named and torch.cuda.is_available()
