"""Joining the ranks, and leaving them without a hang."""

import datetime
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..comm import backend
from ..record.collectives import RecordedGroup
from ..record.leaving import guard
from ..record.recorder import Recorder

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Place:
    """Who this process is among the ranks. ``alone``: nobody started it as a rank."""

    rank: int
    size: int
    local_rank: int
    alone: bool


def place(environment: dict[str, str]) -> Place:
    """From torchrun's variables; a process without them is a world of one."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return Place(0, 1, 0, alone=True)
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        text = environment.get(name, environment.get("RANK", "") if name == "LOCAL_RANK" else "")
        if not text.isdigit():
            raise ValueError(
                f"paceline.init: the environment has {name}={text or 'nothing'} beside "
                f"RANK={environment.get('RANK')} and WORLD_SIZE={environment.get('WORLD_SIZE')}. "
                "HINT: start with `paceline run` or torchrun, or unset them to run alone"
            )
        numbers[name] = int(text)
    rank, size = numbers["RANK"], numbers["WORLD_SIZE"]
    if rank >= size:
        raise ValueError(
            f"paceline.init: RANK={rank} is not below WORLD_SIZE={size}. HINT: ranks count from 0"
        )
    return Place(rank, size, numbers["LOCAL_RANK"], alone=False)


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


def join(who: Place, recorder: Recorder, timeout: float) -> None:
    """Make the default process group, unless the script has made it already."""
    if who.alone or dist.is_initialized():
        return
    backend.register(recorder)
    try:
        dist.init_process_group(
            backend.NAME,
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
        if isinstance(error, ValueError):
            raise ValueError(
                f"paceline.init: {error}. HINT: start with `paceline run` or torchrun"
            ) from None
        raise


def leave() -> None:
    """Give the process group back so that the interpreter can end."""
    if not dist.is_initialized():
        return
    group = dist.group.WORLD
    if isinstance(group, RecordedGroup):
        group.settle(seconds=5.0)
    guard(dist.distributed_c10d)
    dist.destroy_process_group()
