"""Joining the process group, and leaving it without a hang."""

import datetime
import os
import secrets
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ..cluster.rank_identity import (
    RankIdentity,
    job_key,
    launched_by,
    rank_0_hosts,
    set_torchrun_variables,
)
from ..cluster.topology.network_interfaces import is_local_host, network_links
from ..comm import backend
from ..comm.rendezvous import RendezvousSpec, agree_on_interface, from_rank_0, join
from ..comm.shared_memory_group import SharedMemoryGroup
from ..plurals import counted
from ..record.hooks.collectives import RecordedGroup
from ..record.hooks.group_shutdown import patch_destroy_process_group
from ..record.ring.recorder import Recorder

RENDEZVOUS_TIMEOUT_S = 600.0  # for ranks that have not started yet; the timeout, if it is shorter
AUTOCAST_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def select_device(local_rank: int, wanted: str | None) -> torch.device:
    """Return the rank's device, and make it the current one: a GPU if there are any, else the CPU.

    It is the GPU with the number of the local rank. Where one GPU is visible it is this one: some
    launchers show each rank only its own.
    """
    device = torch.device(wanted or "cuda")
    if device.type != "cuda":
        return device
    if not torch.cuda.is_available():
        if wanted is not None:
            raise ValueError(
                f"paceline.init: device={wanted!r} needs a GPU, and PyTorch finds none on "
                f"{socket.gethostname()}. HINT: device=None uses a GPU if there is one, else the "
                "CPU"
            )
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    if device.index is not None and device.index >= devices:
        raise ValueError(
            f"paceline.init: device={wanted!r} does not exist, because {socket.gethostname()} has "
            f"{counted(devices, 'GPU')}. HINT: device='cuda' selects the GPU of the local rank"
        )
    index = device.index if device.index is not None else local_rank if devices > 1 else 0
    if index >= devices:
        raise ValueError(
            f"paceline.init: there is no GPU for local rank {local_rank}, because "
            f"{_ranks_per_node(devices)}"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _ranks_per_node(devices: int) -> str:
    return (
        f"{socket.gethostname()} has {counted(devices, 'GPU')}. HINT: start at most "
        f"{counted(devices, 'rank')} per node, or paceline.init(device='cpu')"
    )


def check_own_gpu(device: torch.device, local_rank: int, store: Any) -> None:
    """Raise ValueError if another rank has the same GPU, which NCCL refuses later.

    Args:
        store: The store of this attempt; None without other ranks.
    """
    if device.type != "cuda" or store is None or not uses_nccl(dist.group.WORLD):
        return
    identifier = gpu_identifier(device)
    if identifier and store.add(f"gpu/{identifier}", 1) > 1:
        # Which of the two comes second is chance.
        raise ValueError(
            f"paceline.init: local rank {local_rank} has the same GPU as another rank, because "
            f"{_ranks_per_node(torch.cuda.device_count())}"
        )


def gpu_identifier(device: torch.device) -> str:
    """Return the UUID of a GPU; "" if PyTorch does not report it."""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def uses_nccl(group: Any) -> bool:
    """Return whether a process group exchanges tensors of GPUs by NCCL."""
    cuda = torch.device("cuda")
    return cuda in group._device_types and group._get_backend(cuda).name().lower() == "nccl"


def autocast_dtype(name: str, device: torch.device) -> torch.dtype | None:
    if name not in AUTOCAST_DTYPES:
        raise ValueError(
            f"paceline.init: precision must be one of {', '.join(map(repr, AUTOCAST_DTYPES))}; "
            f"this is {name!r}. HINT: precision='fp32'"
        )
    if name == "fp16" and device.type != "cuda":
        raise ValueError(
            f"paceline.init: precision='fp16' needs a GPU; this rank computes on {device.type}. "
            "HINT: precision='bf16'"
        )
    return AUTOCAST_DTYPES[name]


def join_process_group(identity: RankIdentity, recorder: Recorder, timeout: float) -> str:
    """Create the default process group, unless the script has created it already.

    Return a text for people: number of ranks, launcher and network, where the network had to be
    found; otherwise "".
    """
    if identity.alone or dist.is_initialized():
        return ""
    backend.record(recorder)
    timeout = min(timeout, backend.MAX_TIMEOUT.total_seconds())
    set_torchrun_variables(identity)
    network = ""
    try:
        store = _store(identity, timeout)
        if not os.environ.get("PACELINE_STATUS") and identity.local_size != identity.size:
            network = agree_on_interface(
                PrefixStore("network", store), identity.rank, identity.size, timeout
            )
        dist.init_process_group(
            backend.NAME,
            store=store,
            rank=identity.rank,
            world_size=identity.size,
            timeout=datetime.timedelta(seconds=timeout),
        )
    except (dist.DistNetworkError, RuntimeError, ValueError) as error:
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise ValueError(
                f"paceline.init: port {port} on {address} (MASTER_PORT) is in use. "
                "HINT: set MASTER_PORT to another port, or start with `paceline run`, which "
                "chooses a free one"
            ) from None
        if isinstance(error, ValueError) and not str(error).startswith("paceline.init"):
            hint = "" if "HINT: " in str(error) else ". HINT: start with `paceline run` or torchrun"
            raise ValueError(f"paceline.init: {error}{hint}") from None
        raise
    started = launched_by(dict(os.environ))
    same = started is not None and (started.rank, started.size) == (identity.rank, identity.size)
    source = started.source if same and started is not None else identity.source
    return f"{counted(identity.size, 'rank')} ({source}), network {network}" if network else ""


def _store(identity: RankIdentity, timeout: float) -> Any:
    """Return the ranks' store.

    It is at MASTER_ADDR and MASTER_PORT where both are set, else where the launcher's own variables
    lead.
    """
    environment = os.environ
    if environment.get("MASTER_PORT") and environment.get("MASTER_ADDR"):
        timeout_delta = datetime.timedelta(seconds=timeout)
        pairs = rendezvous(
            "env://", rank=identity.rank, world_size=identity.size, timeout=timeout_delta
        )
        return next(iter(pairs))[0]
    variables = dict(environment)
    started = launched_by(variables) or identity
    # Open MPI gives its ranks a random number that only they know.
    key = job_key(variables, started) + environment.get("OMPI_MCA_orte_precondition_transports", "")
    hosts = rank_0_hosts(variables, started)
    one_host = identity.local_size == identity.size
    if identity.rank and started.source in ("Slurm", "PALS"):
        hosts = hosts[:1]  # rank 0 is on the first; lists of other launchers say where it may be
    elif identity.rank and not identity.local_rank:
        # rank 0 is not on this host, as its local rank would be lower
        hosts = [host for host in hosts if not is_local_host(host)]
    if environment.get("MASTER_ADDR"):
        hosts = [environment["MASTER_ADDR"]]
    elif not hosts and not one_host and "PMI_FD" in environment:
        addresses_text = ",".join(link.address for link in network_links())
        own_value = f"{addresses_text};{secrets.token_hex(8)}"
        value = from_rank_0(
            environment, identity.rank, "paceline", own_value, min(timeout, RENDEZVOUS_TIMEOUT_S)
        )
        addresses, _, key = value.partition(";")
        hosts = addresses.split(",")
    if not (hosts or one_host):
        raise ValueError(
            f"paceline.init: rank {identity.rank} of {identity.size} ({identity.source}) "
            "does not know the address of rank 0. HINT: set MASTER_ADDR=HOST and "
            "MASTER_PORT=PORT, the same on all ranks"
        )
    return join(
        RendezvousSpec(identity.rank, identity.size, hosts, key, one_host),
        min(timeout, RENDEZVOUS_TIMEOUT_S),
    )


def attempt_store() -> Any:
    """Return the job's store prefixed for this attempt, so that a restart finds no old keys."""
    if not dist.is_initialized():
        return None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.distributed_c10d._get_default_store()
    return PrefixStore(f"paceline/{attempt}", store)


def leave_process_group(failed: bool = False) -> None:
    """Destroy the process group so that the interpreter can end.

    Args:
        failed: The script has failed. A group of NCCL is aborted then: destroying it waits for its
            collectives, which other ranks may never enter.
    """
    if not dist.is_initialized():
        return
    group = dist.group.WORLD
    if failed and uses_nccl(group):
        dist.distributed_c10d._abort_process_group()
        return
    if isinstance(group, RecordedGroup | SharedMemoryGroup):
        group.settle(seconds=5.0)
    patch_destroy_process_group(dist.distributed_c10d)
    dist.destroy_process_group()
