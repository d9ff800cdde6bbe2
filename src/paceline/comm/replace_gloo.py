"""Shared memory in place of gloo, for scripts that request the backend gloo.

It is used by ``paceline run --exchange paceline`` and by the knob ``exchange``.
"""

import os
from typing import Any

from ..knobs.knob import KnobResult
from ..knobs.tuning import VARIABLE, Tuning
from ..record.hooks.taps import NEW_GROUP, Function


def exchange(by: str, turned: KnobResult) -> None:
    """Set how groups communicate.

    by: "paceline" replaces gloo in all gloo groups that the script creates. "gloo" uses gloo also
    in the groups that Paceline creates.
    """
    if by == "gloo":
        os.environ["PACELINE_EXCHANGE"] = "gloo"
        turned.done()
        return

    def grouped(
        make: Function, size: int, rank: int, members: list[int], *args: Any, **options: Any
    ) -> Any:
        import torch.distributed.distributed_c10d as c10d

        group, store = make(size, rank, members, *args, **options)
        backend = str(args[0] if args else options.get("backend", "")).lower()
        if group is not c10d.GroupMember.NON_GROUP_MEMBER and "gloo" in backend:
            given = args[1] if len(args) > 1 else options["store"]
            group = _faster(c10d, group, given, options.get("timeout"), members, turned)
        return group, store

    NEW_GROUP.around(grouped)


def algorithm(name: str, turned: KnobResult) -> None:
    """Set the algorithm of all-reduces between hosts, for groups that are created from now on."""
    os.environ["PACELINE_ALGORITHM"] = name
    turned.done()


def _faster(
    c10d: Any, group: Any, store: Any, timeout: Any, members: list[int], turned: KnobResult
) -> Any:
    """Return the group with shared memory below it; torch's registration of it is unchanged."""
    from ..record.hooks.collectives import RecordedGroup
    from ..record.hooks.torch_patches import replace_group
    from . import replica_check
    from .backend import over_memory, store_of_use
    from .shared_memory_group import SharedMemoryGroup

    replica_check.look()
    name = str(c10d._world.pg_names[group])
    inner = group.inner if isinstance(group, RecordedGroup) else group
    prefixed = store_of_use(c10d.PrefixStore(f"paceline/shared/{name}", store), inner.size())
    faster, why = over_memory(inner, prefixed, timeout or c10d.default_pg_timeout, members)
    if why:
        turned.not_done(why)
        return group
    assert isinstance(faster, SharedMemoryGroup)
    faster.instead_of_gloo = VARIABLE in os.environ and Tuning.loads(os.environ[VARIABLE]).gloo
    turned.done()
    if isinstance(group, RecordedGroup):
        group.inner = faster
        return group
    replace_group(c10d, group, faster)
    return faster
