"""The ``torch.distributed`` backend "paceline", below the recording of collectives.

It is registered with torch as a backend, so torch also uses it for subgroups. Ranks on one host
exchange CPU tensors through shared memory (comm.shared), ranks on several hosts through a hierarchy
on top of it (comm.hosts). gloo does what these do not support, and NCCL is used for GPU tensors.
"""

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ..record.hooks.collective_check import announce_check, make_check
from ..record.hooks.collectives import RecordedGroup, measure_wrapper_cost
from ..record.ring.launcher_messages import notify
from ..record.ring.recorder import Recorder, update_all_headers
from . import replica_check
from .hosts.open_hierarchy import open_hierarchy
from .members.membership import connect_gloo
from .shared.c_kernel import CKernel
from .shared.messages import Messages
from .shared.open_group import DISABLED_BY_USER, ON_SEVERAL_HOSTS, open_kernel
from .shared.torch_kernel import TorchKernel
from .shared_memory_group import SharedMemoryGroup

NAME = "paceline"
# Longer timeouts overflow the clocks of PyTorch's stores and of gloo, which count nanoseconds.
MAX_TIMEOUT = timedelta(days=10_000)

_recorder: Recorder | None = None  # records the groups that are created from now on


def record(recorder: Recorder) -> None:
    """Set the recorder of the groups that are created from now on."""
    global _recorder
    _recorder = recorder


def create(options: Any, _backend_options: Any) -> dist.ProcessGroup:
    """Create a group for ``init_process_group("paceline")`` and ``new_group``.

    paceline/__init__.py registers this function with torch.
    """
    recorder = _recorder
    replica_check.look()
    if recorder is None or not recorder.enabled:
        return _faster(_plain_group(options), options)
    key = announce_check(options.store, str(options.group_id))
    group = _plain_group(options)
    measure_wrapper_cost(recorder)
    checks = make_check(group, options.store, key)
    return RecordedGroup(_faster(group, options), str(options.group_id), recorder, checks)


def _faster(group: dist.ProcessGroup, options: Any) -> dist.ProcessGroup:
    """Return the group over shared memory if possible, else the group itself.

    It passes the tensors of GPUs on to NCCL.

    Each reason for the fallback is printed once, unless the user has disabled shared memory.
    """
    store = PrefixStore("shared/", options.store)
    group, why = over_memory(group, store, options.timeout, options.global_ranks_in_group)
    if why not in ("", DISABLED_BY_USER) and group.rank() == 0:
        _warn_fallback(why)
    return group


@functools.cache
def _warn_fallback(reason: str) -> None:
    notify(f"paceline: ranks exchange through gloo: {reason}\n")


def over_memory(
    group: dist.ProcessGroup, store: Any, timeout: timedelta, names: Sequence[int] = ()
) -> tuple[dist.ProcessGroup, str]:
    """Return the group with CPU collectives over shared memory, and an empty string.

    Between hosts, collectives use the hierarchy on top of shared memory. If neither is possible,
    return the unchanged group and the reason.

    Args:
        timeout: Time that a rank waits for another one in a collective; 0 for no limit, as in gloo.
        names: Global ranks of the group's members.
    """
    seconds = min(timeout or MAX_TIMEOUT, MAX_TIMEOUT).total_seconds()
    kernel: Any
    kernel, why = open_kernel(store, group.rank(), group.size(), seconds, names)
    if why == ON_SEVERAL_HOSTS:
        between = PrefixStore("hosts/", store)
        kernel, why = open_hierarchy(between, group.rank(), group.size(), seconds, names)
    if kernel is None:
        return group, why
    update_all_headers(exchange=NAME)
    messages = None
    if isinstance(kernel, CKernel | TorchKernel):  # all ranks are on this node
        ranks = list(names) or list(range(group.size()))
        shared = PrefixStore("messages/", store)
        messages = Messages(shared, group.rank(), ranks, kernel.is_alive, seconds, _step)
    return SharedMemoryGroup(group, kernel, seconds, _step, messages), ""


def _step() -> str:
    """Return the prefix of error messages: the current step, or empty without a recorder."""
    return f"step {_recorder.step}: " if _recorder is not None and _recorder.enabled else ""


def _plain_group(options: Any) -> dist.ProcessGroup:
    """Create the group that ``init_process_group("cpu:gloo,cuda:nccl")`` would create."""
    rank, size = options.group_rank, options.group_size
    timeout = min(options.timeout, MAX_TIMEOUT)
    group = dist.ProcessGroup(options.store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    gloo = connect_gloo(
        lambda store: dist.ProcessGroupGloo(store, rank, size, timeout=timeout),
        PrefixStore("gloo/", options.store),
        rank,
        size,
    )
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl_options: Any = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout or MAX_TIMEOUT  # 0 is no limit for gloo, and none for NCCL
        nccl_options.is_high_priority_stream = False
        # by which NCCL's watchdog and its flight recorder name the group
        nccl_options.global_ranks_in_group = list(options.global_ranks_in_group)
        nccl_options.group_name = options.group_id
        nccl = dist.ProcessGroupNCCL(PrefixStore("nccl/", options.store), rank, size, nccl_options)
        nccl._set_sequence_number_for_group()
        group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
    group._set_group_name(options.group_id)
    return group
