"""Let this process be one rank of a job whose other ranks do not exist.

Each process group that the script or Paceline creates is an ``EqualRanksGroup``, for every backend,
and the rendezvous is a store in this process.
"""

import functools
import os
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ...record.hooks.import_hooks import after_import
from ...record.hooks.taps import Function, around
from .calls import CallLog

VARIABLE = "PACELINE_REHEARSED_RANK"
BACKEND = "rehearsal"
_SCHEMES = ("env", "tcp", "file")


def is_rehearsed() -> bool:
    """Return whether this process is a rank of ``paceline run --rehearse``."""
    return VARIABLE in os.environ


def install(log: CallLog) -> None:
    """Replace process groups and rendezvous, now or when the script imports torch.distributed.

    Called before the recorder's hooks are installed, so that records have what the script called.
    """
    after_import(
        {
            "torch.distributed.distributed_c10d": functools.partial(_replace_groups, log),
            "torch.distributed.rendezvous": _replace_rendezvous,
        }
    )


def _replace_rendezvous(module: Any) -> None:
    def rendezvous(url: str, **_: Any) -> Iterator[tuple[Any, int, int]]:
        from .lone_store import LoneStore

        given = parse_qs(urlsplit(url).query)
        rank = int(given.get("rank", [os.environ["RANK"]])[0])
        yield LoneStore(), rank, int(given.get("world_size", [os.environ["WORLD_SIZE"]])[0])

    for scheme in _SCHEMES:
        module._rendezvous_handlers[scheme] = rendezvous


def _replace_groups(log: CallLog, c10d: Any) -> None:
    asked: list[str] = []  # the backend that the script has named

    def create(options: Any, _: Any) -> Any:
        from .equal_ranks import EqualRanksGroup

        members = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        name = str(options.group_id)
        return EqualRanksGroup(options.group_rank, members, name, asked[-1], log)

    c10d.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])

    def helper(
        make: Function,
        size: int,
        rank: int,
        members: list[int],
        backend: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        asked.append(str(backend))
        options.pop("device_id", None)  # of a GPU, which the rehearsal does not use
        if options.get("backend_options") is not None:  # of another backend
            options["backend_options"] = None
        try:
            group, store = make(size, rank, members, BACKEND, *args, **options)
        finally:
            asked.pop()
        if group is not c10d.GroupMember.NON_GROUP_MEMBER:
            # what dist.get_backend and the configuration of later groups say
            world = c10d._world
            world.pg_map[group] = (c10d.Backend(str(backend)), world.pg_map[group][1])
            world.pg_backend_config[group] = str(c10d.BackendConfig(c10d.Backend(str(backend))))
        return group, store

    around(c10d, "_new_process_group_helper", helper)
