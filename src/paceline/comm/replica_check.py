"""Check that DDP's replicas are of the same model.

When replicas are created, the name, dtype and shape of every parameter and buffer are compared.
Otherwise, different parameters would be reduced together without an error: torch compares only the
shapes, and names a parameter only by its number.
"""

import hashlib
import json
from typing import Any

import torch
import torch.distributed as dist

from ..plurals import named_ranks
from ..record.hooks.collectives import RecordedGroup
from ..record.hooks.taps import Tap
from .shared_memory_group import SharedMemoryGroup

LENGTH = 32  # bytes of a digest
Rows = list[list[str]]  # name and description of each parameter and buffer, in their order
_REPLICAS = "torch.nn.parallel.distributed"
_looking = False


def look() -> None:
    """Check the replicas that are created from now on."""
    global _looking
    if not _looking:
        _looking = True
        # the last call before torch's own collectives
        Tap(_REPLICAS, "DistributedDataParallel._build_params_for_reducer").after(
            lambda _, replica: compare(replica.module, replica.process_group)
        )


def compare(model: torch.nn.Module, group: Any) -> None:
    """Compare a model over the ranks of a group.

    Groups that are not Paceline's, and models with parameters on other devices than the CPU, are
    not checked.

    Raises:
        ValueError: The models differ. It is raised on all ranks, and the message names the first
            parameter that differs, with its dtype and shape on each rank.
    """
    inner = group.inner if isinstance(group, RecordedGroup) else group
    if not isinstance(group, (RecordedGroup, SharedMemoryGroup)) or _elsewhere(model):
        return
    rows = _rows(model)
    text = json.dumps(rows).encode()
    digest = hashlib.blake2b(text, digest_size=LENGTH).digest()
    if len(set(_gathered(inner, digest, LENGTH))) == 1:
        return
    length = max(map(int, _gathered(inner, b"%20d" % len(text), 20)))
    each = [json.loads(rows) for rows in _gathered(inner, text.ljust(length), length)]
    raise ValueError(differing(each, dist.get_process_group_ranks(group)))


def differing(each: list[Rows], ranks: list[int]) -> str:
    """Return the error message for models that differ; ``each`` has one entry per rank."""
    at = next(i for i in range(max(map(len, each))) if len({_at(rows, i) for rows in each}) > 1)
    sides: dict[tuple[str, str], list[int]] = {}
    for rank, rows in zip(ranks, each, strict=True):
        sides.setdefault(_at(rows, at), []).append(rank)
    names = {name for name, _ in sides}
    first = f"{next(iter(names))} is" if len(names) == 1 else f"tensor {at} is"
    variants = ", ".join(
        f"{what if len(names) == 1 or not name else f'{name} ({what})'} on {named_ranks(members)}"
        for (name, what), members in sides.items()
    )
    return (
        f"the models for DistributedDataParallel differ between ranks: {first} {variants}. HINT: "
        "build the same model on all ranks, independent of the rank, files and data"
    )


def _at(rows: Rows, i: int) -> tuple[str, str]:
    return (rows[i][0], rows[i][1]) if i < len(rows) else ("", "missing")


def _elsewhere(model: torch.nn.Module) -> bool:
    return any(parameter.device.type != "cpu" for parameter in model.parameters())


def _rows(model: torch.nn.Module) -> Rows:
    """Return the rows of what DDP synchronizes: parameters that are trained, and buffers."""
    trained = [(name, t) for name, t in model.named_parameters() if t.requires_grad]
    return [
        [name, f"{str(t.dtype).removeprefix('torch.')} of {_shape(t)}"]
        for name, t in (*trained, *model.named_buffers())
        if name not in getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    ]


def _shape(tensor: torch.Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "one number"


def _gathered(group: Any, data: bytes, length: int) -> list[bytes]:
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    assert len(mine) == length
    every = [torch.empty(length, dtype=torch.uint8) for _ in range(group.size())]
    group.allgather([every], [mine]).wait()
    return [bytes(row.tolist()) for row in every]
