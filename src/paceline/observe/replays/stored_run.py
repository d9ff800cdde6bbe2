"""What the ranks store of a run for a replay: batches, and the parameters before the first step."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ...security.folders import Folder
from ..generators import saved_generators
from ..observation import Observation
from ..optimization.models import Model
from ..optimization.parameters import Shard, clean_name, named_parameters, shard_of
from ..samples.loaders import OpenPass

BATCHES, INITIAL = "batches", "initial"  # folders
BESIDE_BATCH_BYTES = 16 << 10  # of a stored batch: states of generators, names

_save, _load = (inspect.unwrap(one) for one in (torch.save, torch.load))  # not observed


class StoredRun:
    """Stores this rank's part of a run.

    Args:
        observation: Its settings have the folder and the limit.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        settings, size = observation.settings, max(observation.facts.size, 1)
        self._folder = Path(settings.folder)
        self._left = (settings.keeps_mib << 20) // size  # bytes

    def add_batch(self, opened: OpenPass, number: int, batch: Any) -> None:
        """Store a batch that a loader has returned, while there is room."""
        leaves = [one for one in tree_leaves(batch) if isinstance(one, torch.Tensor)]
        self._left -= sum(one.nbytes for one in leaves) + BESIDE_BATCH_BYTES
        if self._left < 0:
            self._left = -1
            return
        rank = self._observation.facts.rank
        place = (opened.loader.key, opened.facts.number, number)
        content = (tree_map(_plain, batch), saved_generators())
        self._write(batch_path(self._folder, place, rank), content)

    def add_initial(self, model: Model) -> None:
        """Store the parameters and buffers of a model before its first training forward."""
        rank, root = self._observation.facts.rank, model.module()
        if root is None or (rank and not model.facts.is_sharded):
            return
        state: dict[str, tuple[list[int], int, torch.Tensor]] = {}
        for name, tensor in _state(root):
            shard = shard_of(tensor)
            if isinstance(shard, Shard):
                state[name] = (shard.shape, shard.offset, _plain(shard.values).reshape(-1).clone())
        size = sum(values.nbytes for _, _, values in state.values())
        if size > self._left:
            self._observation.add_unseen("the initial parameters: larger than the limit")
            return
        self._left -= size
        self._write(self._folder / INITIAL / f"{model.facts.key}-{rank}.pt", state)

    def _write(self, path: Path, content: Any) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        with (
            Folder.make(path.parent, exist_ok=True) as folder,
            folder.replacing(path.name) as new,
            open(new.fd, "wb", closefd=False) as file,
        ):
            _save(content, file)


def batch_path(folder: Path, place: tuple[int, int, int], rank: int) -> Path:
    """Return the file of a rank's batch. place: loader, pass and number in the pass."""
    loader, pass_number, number = place
    return folder / BATCHES / f"{loader}-{pass_number}-{number}-{rank}.pt"


def batch_paths(folder: Path, place: tuple[int, int, int], ranks: list[int]) -> list[Path]:
    """Return the files of the batches that some ranks have stored for a place."""
    paths = [batch_path(folder, place, rank) for rank in ranks]
    return [path for path in paths if path.exists()]


def load_batch(path: Path) -> tuple[Any, dict[str, Any]]:
    """Return a stored batch, and the states of the generators when the script received it."""
    batch, states = _read(path)
    return batch, states


def restore_initial(folder: Path, model: Model) -> str:
    """Set a model's parameters and buffers to those of the stored run.

    Returns:
        The reason if it is not possible, else "".
    """
    parts = [_read(one) for one in sorted((folder / INITIAL).glob(f"{model.facts.key}-*.pt"))]
    root = model.module()
    if not parts or root is None:
        return "no initial parameters were stored"
    with torch.no_grad():
        for name, tensor in _state(root):
            found = [part[name] for part in parts if name in part]
            shape = found[0][0] if found else None
            if shape is None or list(tensor.shape) != shape:
                return f"{name} is another parameter on one rank: {list(tensor.shape)}, {shape}"
            pieces = {offset: values for _, offset, values in found}
            whole = torch.cat([pieces[offset] for offset in sorted(pieces)])
            part = shard_of(tensor)
            if isinstance(part, str):
                return f"{name}: {part}"
            end = part.offset + part.values.numel()
            part.values.copy_(whole[part.offset : end].reshape(part.values.shape))
    return ""


def perturb(root: nn.Module, last_bits: float) -> None:
    """Change the last bits of a module's parameters at random.

    Another order of additions changes values as little. What depends on it (which of two almost
    equal values is the maximum, the sign before a ReLU) then differs as well.

    last_bits: Largest relative change, in roundings of the dtype.
    """
    generator = torch.Generator().manual_seed(0)
    for _, parameter in named_parameters(root):
        part = shard_of(parameter)
        if isinstance(part, Shard) and part.values.is_floating_point():
            noise = 2 * torch.rand(part.values.shape, generator=generator) - 1
            scale = last_bits * torch.finfo(part.values.dtype).eps
            with torch.no_grad():
                part.values.mul_((1 + scale * noise.double()).to(part.values))


def _state(root: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from named_parameters(root)
    for name, buffer in root.named_buffers():
        yield clean_name(name), buffer


def _plain(value: Any) -> Any:
    """Return a copy of a tensor in host memory; other values as they are."""
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def _read(path: Path) -> Any:
    # A batch may consist of the script's own classes. Only this user can have written the file.
    with Folder.open(path.parent) as folder, open(folder.open_file(path.name), "rb") as file:
        return _load(file, weights_only=False)
