"""Proof that each connection of a gloo group leads to a rank of the job.

gloo accepts every connection that names the next number, and authenticates nobody: another process
can take the place of a rank in one connection. The store of a job that ``paceline run`` has started
admits only processes of the job's user. So its ranks share a key in it, and send each other a keyed
hash over each connection, before anything else.
"""

import functools
import hashlib
import hmac
import os
import secrets
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllToAllOptions, PrefixStore

from ...plurals import named_ranks
from ...record.ring.launcher_messages import notify
from ..shared.open_group import agree

PROOF_BYTES = 32
# For the proofs of all ranks, after they have connected; of each attempt to connect.
PROOF_TIMEOUTS = tuple(timedelta(seconds=seconds) for seconds in (2, 4, 8, 16, 32))


def is_store_private() -> bool:
    """Return whether the job's store admits only processes of the job's user."""
    return "PACELINE_STORE_PORT" in os.environ


def connect_gloo(
    make: "Callable[[Any], dist.ProcessGroupGloo]", store: Any, rank: int, size: int
) -> "dist.ProcessGroupGloo":  # quoted: torch.distributed may be importing this module
    """Make a gloo group whose connections all lead to ranks of the job.

    All ranks connect at the same time, so that other processes have little time to find their
    ports. If one takes a place nevertheless, all ranks connect again, on other ports.

    Args:
        make: Makes the group in a store.
        store: Store of the group.

    Raises:
        RuntimeError: Another process has taken a place in each attempt.
    """
    if size == 1 or not is_store_private():
        return make(store)
    reason = ""
    for attempt, timeout in enumerate(PROOF_TIMEOUTS):
        attempt_store = PrefixStore(f"attempt/{attempt}/", store)
        agree(attempt_store, "begin", rank, size, "", "")
        group = make(attempt_store)
        own_reason = _missing_proof(group, attempt_store, timeout)
        reason = agree(attempt_store, "proved", rank, size, own_reason, "")
        if not reason:
            return group
        if rank == 0:
            notify(f"paceline: gloo connects again: {reason}\n")
    raise RuntimeError(f"gloo can't connect the ranks of this job: {reason}")


def check_groups(c10d: Any) -> None:
    """Have gloo groups that a script creates itself prove that their members are ranks of the job.

    Argument: the module ``torch.distributed.distributed_c10d``.
    """
    original = c10d._new_process_group_helper

    @functools.wraps(original)
    def helper(size: int, rank: int, members: list[int], *args: Any, **options: Any) -> Any:
        group, store = original(size, rank, members, *args, **options)
        cpu, name = torch.device("cpu"), str(args[0] if args else options.get("backend"))
        is_member = group is not c10d.GroupMember.NON_GROUP_MEMBER
        # Groups of the backend "paceline" have done it (``connect_gloo``).
        if not is_member or name.lower() == "paceline" or cpu not in group._device_types:
            return group, store
        backend = group._get_backend(cpu)
        backend = getattr(backend, "wrapped_pg", backend)  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
        if isinstance(backend, dist.ProcessGroupGloo):
            prove(backend, store, options.get("timeout"))
        return group, store

    if is_store_private():
        c10d._new_process_group_helper = helper


def prove(backend: Any, store: Any, timeout: timedelta | None) -> None:
    """Prove membership to all ranks of the group, and check their proofs. Collective.

    Raises:
        RuntimeError: A connection does not lead to a rank of the job.
    """
    is_lazy = os.environ.get("TORCH_GLOO_LAZY_INIT")  # then ranks have not met yet
    limit = timeout if is_lazy and timeout else PROOF_TIMEOUTS[-1]
    if reason := _missing_proof(backend, store, limit):
        raise RuntimeError(f"gloo can't connect the ranks of this job: {reason}")


def _missing_proof(backend: Any, store: Any, timeout: timedelta) -> str:
    """Exchange proofs over each connection; return what is wrong, or ""."""
    rank, size = backend.rank(), backend.size()
    if rank == 0:
        store.set("membership", secrets.token_hex(PROOF_BYTES))
    key = store.get("membership")

    def row(pairs: list[tuple[int, int]]) -> list[bytes]:
        return [hmac.digest(key, f"{sender}>{to}".encode(), hashlib.sha256) for sender, to in pairs]

    sent = b"".join(row([(rank, to) for to in range(size)]))
    received = torch.zeros(size * PROOF_BYTES, dtype=torch.uint8, device="cpu")
    options = AllToAllOptions()
    options.timeout = timeout
    own = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
    try:
        backend.alltoall_base(received, own, [], [], options).wait()
    except RuntimeError as error:
        return f"rank {rank}: no proof of membership ({str(error).strip().splitlines()[0]})"
    expected = row([(sender, rank) for sender in range(size)])
    chunks = received.numpy().tobytes()
    wrong = [
        sender
        for sender, proof in enumerate(expected)
        if not hmac.compare_digest(chunks[sender * PROOF_BYTES :][:PROOF_BYTES], proof)
    ]
    if wrong:
        return f"another process has taken the place of {named_ranks(wrong)} at rank {rank}"
    return ""
