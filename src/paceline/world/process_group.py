"""Joining the ranks, and leaving them without a hang."""

import datetime
import os
import secrets
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from ..cluster.rank_identity import Place, hosts_of, job_key, launched_by, tell_others
from ..cluster.topology.network_interfaces import is_here, links
from ..comm import backend
from ..comm.network_interface import settle
from ..comm.pmi import from_rank_0
from ..comm.rendezvous import Appointment, meet
from ..comm.shared_group import SharedGroup
from ..record.hooks.collectives import RecordedGroup
from ..record.hooks.group_shutdown import patch_destroy_process_group
from ..record.ring.recorder import Recorder

MEET_SECONDS = 600.0  # for ranks that have not started yet; the timeout, if it is shorter
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def device_of(local_rank: int, wanted: str | None) -> torch.device:
    """The rank's device: the GPU of its local rank where there are GPUs, else the CPU."""
    if wanted not in (None, "cuda"):
        return torch.device(wanted)
    if not torch.cuda.is_available():
        if wanted == "cuda":
            raise ValueError(
                "paceline.init(device='cuda'): PyTorch sees no GPU here. HINT: device=None takes "
                "a GPU where there is one"
            )
        return torch.device("cpu")
    devices = torch.cuda.device_count()
    if local_rank >= devices:
        raise ValueError(
            f"paceline.init: local rank {local_rank} has no GPU of its own, this host has "
            f"{devices}. HINT: at most {devices} ranks a host, or paceline.init(device='cpu')"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def precision_of(name: str, device: torch.device) -> torch.dtype | None:
    if name not in PRECISIONS:
        raise ValueError(
            f"paceline.init: precision={name!r} is not known. HINT: one of {list(PRECISIONS)}"
        )
    if name == "fp16" and device.type != "cuda":
        raise ValueError(
            f"paceline.init: precision='fp16' needs a GPU, this rank computes on {device.type}. "
            "HINT: precision='bf16'"
        )
    return PRECISIONS[name]


def join(who: Place, recorder: Recorder, timeout: float) -> str:
    """Make the default process group, unless the script has made it already; for people, how
    many ranks there are, who started them, and by which network they reach each other, where
    that had to be found out."""
    if who.alone or dist.is_initialized():
        return ""
    backend.record(recorder)
    tell_others(who)
    network = ""
    try:
        store = _store(who, timeout)
        if not os.environ.get("PACELINE_STATUS") and who.local_size != who.size:
            network = settle(PrefixStore("network", store), who.rank, who.size, timeout)
        dist.init_process_group(
            backend.NAME,
            store=store,
            rank=who.rank,
            world_size=who.size,
            timeout=datetime.timedelta(seconds=timeout),
        )
    except (dist.DistNetworkError, RuntimeError, ValueError) as error:
        address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
        if "EADDRINUSE" in str(error) or "in use" in str(error):
            raise ValueError(
                f"paceline.init: port {port} on {address} (MASTER_PORT) is in use. "
                "HINT: another port, or `paceline run`, which finds a free one"
            ) from None
        if isinstance(error, ValueError) and not str(error).startswith("paceline.init"):
            raise ValueError(
                f"paceline.init: {error}. HINT: start with `paceline run` or torchrun"
            ) from None
        raise
    started = launched_by(dict(os.environ))
    same = started is not None and (started.rank, started.size) == (who.rank, who.size)
    source = started.source if same and started is not None else who.source
    return f"{who.size} ranks ({source}), network {network}" if network else ""


def _store(who: Place, timeout: float) -> Any:
    """The ranks' store: at MASTER_ADDR and MASTER_PORT where these are given, else where the
    launcher's own means lead."""
    given = os.environ
    if given.get("MASTER_PORT") and given.get("MASTER_ADDR"):
        wait = datetime.timedelta(seconds=timeout)
        pairs = rendezvous("env://", rank=who.rank, world_size=who.size, timeout=wait)
        return next(iter(pairs))[0]
    variables = dict(given)
    started = launched_by(variables) or who
    # Open MPI gives its ranks a random number that nobody else knows.
    key = job_key(variables, started) + given.get("OMPI_MCA_orte_precondition_transports", "")
    hosts = hosts_of(variables, started)
    one_host = who.local_size == who.size
    if who.rank and started.source in ("Slurm", "PALS"):
        hosts = hosts[:1]  # rank 0 is on the first; other launchers' lists are of where it may be
    elif who.rank and not who.local_rank:
        hosts = [host for host in hosts if not is_here(host)]  # or our local rank were higher
    if given.get("MASTER_ADDR"):
        hosts = [given["MASTER_ADDR"]]
    elif not hosts and not one_host and "PMI_FD" in given:
        own = ",".join(link.address for link in links())
        mine = f"{own};{secrets.token_hex(8)}"
        said = from_rank_0(given, who.rank, "paceline", mine, min(timeout, MEET_SECONDS))
        addresses, _, key = said.partition(";")
        hosts = addresses.split(",")
    if not (hosts or one_host):
        raise ValueError(
            f"paceline.init: rank {who.rank} of {who.size} ({who.source}) does not know where "
            "rank 0 is. HINT: MASTER_ADDR=HOST MASTER_PORT=PORT, the same for all ranks"
        )
    return meet(Appointment(who.rank, who.size, hosts, key, one_host), min(timeout, MEET_SECONDS))


def leave() -> None:
    """Give the process group back so that the interpreter can end."""
    if not dist.is_initialized():
        return
    group = dist.group.WORLD
    if isinstance(group, RecordedGroup | SharedGroup):
        group.settle(seconds=5.0)
    patch_destroy_process_group(dist.distributed_c10d)
    dist.destroy_process_group()
