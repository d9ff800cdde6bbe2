"""Knobs of NCCL: its own variables (NCCL's manual, "Environment Variables"), which it reads as a
communicator is made.

Each is tried in runs of its own (paceline diagnose --try) and never in a job that trains: with an
algorithm or a protocol that it does not have for these GPUs, NCCL ends the communicator."""

import functools
import os
from typing import Any

from ..record.hooks.import_hooks import after_import
from .apply import Turned


def algorithm(name: str, turned: Turned) -> None:
    _set("NCCL_ALGO", name, turned)


def protocol(name: str, turned: Turned) -> None:
    _set("NCCL_PROTO", name, turned)


def channels(count: int, turned: Turned) -> None:
    _set("NCCL_MIN_NCHANNELS", str(count), turned)


def _set(variable: str, value: str, turned: Turned) -> None:
    """Whatever the environment says; told once the script's first group is made."""
    os.environ[variable] = value

    def install(c10d: Any) -> None:
        make = c10d._new_process_group_helper

        @functools.wraps(make)
        def helper(size: int, rank: int, members: list[int], *args: Any, **options: Any) -> Any:
            made = make(size, rank, members, *args, **options)
            if _is_nccl(str(args[0] if args else options.get("backend", "")).lower()):
                turned.done()
            elif not turned.set:
                turned.not_done("the script's exchange is not NCCL's")
            return made

        c10d._new_process_group_helper = helper

    after_import({"torch.distributed.distributed_c10d": install})


def _is_nccl(backend: str) -> bool:
    """Without a word of the script's torch takes it for GPUs, if there are some."""
    import torch

    named = "nccl" in backend or backend in ("", "none", "undefined")
    return named and torch.cuda.is_available()
