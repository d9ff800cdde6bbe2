"""``torch.distributed``'s backend "paceline": PyTorch's own backends behind the recorded seam.

Registered through torch's own interface for backends, so subgroups go through it as well.
gloo serves the CPU and NCCL the GPU; the exchange's own algorithms will sit here too.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from ..record.agree import agreement, announce
from ..record.collectives import RecordedGroup, measure_entry
from ..record.recorder import Recorder

NAME = "paceline"


def register(recorder: Recorder) -> None:
    """Make ``init_process_group("paceline")`` and its subgroups known; again is harmless."""
    if NAME.upper() in dist.Backend._plugins:
        return

    def create(options: Any, _backend_options: Any) -> dist.ProcessGroup:
        if not recorder.enabled:
            return _plain_group(options)
        key = announce(options.store, str(options.group_id))
        group = _plain_group(options)
        measure_entry(recorder)
        checks = agreement(group, options.store, key)
        return RecordedGroup(group, str(options.group_id), recorder, checks)

    dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu", "cuda"])


def _plain_group(options: Any) -> dist.ProcessGroup:
    """What ``init_process_group("cpu:gloo,cuda:nccl")`` would have made."""
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    group = dist.ProcessGroup(options.store, rank, size)
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    gloo = dist.ProcessGroupGloo(PrefixStore("gloo/", options.store), rank, size, timeout=timeout)
    gloo._set_sequence_number_for_group()
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    if torch.cuda.is_available() and dist.is_nccl_available():
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(PrefixStore("nccl/", options.store), rank, size, nccl_options)
        nccl._set_sequence_number_for_group()
        group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        group._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)
    group._set_group_name(options.group_id)
    return group
