"""Export of a model's weights from a checkpoint of any layout, for programs without Paceline.

Nothing is converted into a checkpoint of Paceline, which also has optimizers and positions. A
script loads weights by ``model.load_state_dict`` before ``world.distribute``.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import checkpoint_folder
from .checkpoint_folder import write_tensors
from .manifest import MANIFEST, DamagedCheckpointError
from .other_formats import (
    is_dcp_folder,
    load_dcp,
    load_torch_file,
    read_safetensors,
    write_safetensors,
)
from .saver import load_checkpoint
from .shard_content import verify_checkpoint
from .sharded_tensor import SavedTensor, whole

SUFFIXES = (".safetensors", ".pt", ".pth")
FILES: dict[str, Callable[[Path], Mapping[str, Any]]] = {
    ".safetensors": read_safetensors,
    **dict.fromkeys((".pt", ".pth", ".bin", ".ckpt"), load_torch_file),
}


@dataclass(frozen=True)
class ExportReport:
    """What was exported.

    Attributes:
        checkpoint: Folder of the checkpoint, or file.
        step: Its training step; None where it does not say.
        tensors: Number of tensors.
        elements: Number of their elements.
        bytes: Size of the written file.
        left_out: Names of values that are no tensors.
    """

    checkpoint: str
    step: int | None
    tensors: int
    elements: int
    bytes: int
    left_out: list[str]


def export_model(
    source: Path, dest: Path, model: int | None = None, prefix: str = ""
) -> ExportReport:
    """Write the weights of one model to a file, under the names of the plain model.

    Args:
        source: A checkpoint, the newest valid one of a folder of them, a folder of
            torch.distributed.checkpoint, or a file of torch.save or safetensors.
        dest: New file; .safetensors, or .pt or .pth for ``torch.load(weights_only=True)``.
        prefix: Only tensors whose names begin with it, which is removed from the names.
        model: Number of the model in the order of ``world.distribute``; None for the only one.

    Raises:
        ValueError: Source, destination or number of the model are wrong.
        DamagedCheckpointError: A file of the checkpoint is missing or damaged; it is named.
        OSError: The file can't be written.
    """
    if dest.suffix not in SUFFIXES:
        raise ValueError(
            f"{dest} must end with one of {', '.join(SUFFIXES)}. "
            f"HINT: {dest.with_suffix('.safetensors')}"
        )
    if os.path.lexists(dest):
        raise ValueError(f"{dest} exists. HINT: remove it, or choose another name")
    folder, step, tensors, left_out = _tensors_of(source, model, prefix)
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            _check_layout(name, tensor, dest)
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}

    def read(name: str) -> torch.Tensor:
        return whole(tensors[name])

    if dest.suffix == ".safetensors":
        size = write_safetensors(dest, shapes, read)
    else:
        copies = {
            id(tensor): whole(tensor) for tensor in tensors.values()
        }  # tied weights stay tied
        size = write_tensors(dest, {name: copies[id(tensor)] for name, tensor in tensors.items()})
    elements = sum(torch.Size(shape).numel() for shape, _ in shapes.values())
    return ExportReport(str(folder), step, len(tensors), elements, size, left_out)


def load_model_state(
    source: Path, number: int | None = None, prefix: str = ""
) -> tuple[Path, int | None, dict[str, torch.Tensor]]:
    """Return folder or file, training step and the whole tensors of one model, saved in any layout.

    Args:
        number: Number of the model in the order of ``world.distribute``; None for the only one.
        source, prefix: Same as for ``export_model``.

    Raises:
        ValueError: Source or number of the model are wrong, or no name begins with ``prefix``.
        DamagedCheckpointError: A file of the checkpoint is missing or damaged; it is named.
    """
    if not os.path.lexists(source):
        raise ValueError(f"{source} does not exist. HINT: the checkpoint=... of world.epochs")
    folder, step, tensors, _ = _tensors_of(source, number, prefix)
    return folder, step, {name: whole(tensor) for name, tensor in tensors.items()}


def _tensors_of(
    source: Path, model: int | None, prefix: str
) -> tuple[Path, int | None, dict[str, torch.Tensor | SavedTensor], list[str]]:
    """Return folder or file, training step, tensors, and names of values that are no tensors."""
    folder, step, state = _model_state(source, model)
    state = {name.removeprefix(prefix): v for name, v in state.items() if name.startswith(prefix)}
    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor | SavedTensor)}
    if not tensors:
        under = f" whose names begin with {prefix}" if prefix else ""
        raise ValueError(f"{folder} contains no tensors{under}. HINT: choose another folder")
    return folder, step, tensors, [name for name in state if name not in tensors]


def _model_state(source: Path, model: int | None) -> tuple[Path, int | None, Mapping[str, Any]]:
    if source.is_file():
        if source.suffix not in FILES:
            raise ValueError(
                f"{source} must be a folder, or a file that ends with one of {', '.join(FILES)}. "
                "HINT: rename a file of torch.save to .pt"
            )
        if model is not None:
            raise ValueError(f"--model {model}: {source} is one file. HINT: --prefix NAME.")
        return source, None, FILES[source.suffix](source)
    if is_dcp_folder(source):
        return source, None, load_dcp(source)
    folder = find_checkpoint(source)
    shared, _, manifest = load_checkpoint(folder)
    models = shared.get("models") if isinstance(shared, dict) else None
    if not isinstance(models, list) or not models:
        raise ValueError(f"{folder} contains no model. HINT: pass one to world.distribute")
    if model is None and len(models) > 1:
        raise ValueError(
            f"{folder} contains {len(models)} models. HINT: --model 0 is the first one that the "
            "script passed to world.distribute"
        )
    if not 0 <= (model or 0) < len(models):
        raise ValueError(
            f"--model {model} does not exist: {folder} contains {len(models)}. HINT: --model 0"
        )
    state = models[model or 0]
    if not isinstance(state, dict) or not all(isinstance(name, str) for name in state):
        raise DamagedCheckpointError(folder, "contains no state_dict of a model")
    return folder, manifest.get("step"), state


def _check_layout(name: str, tensor: torch.Tensor, dest: Path) -> None:
    """Raise ValueError if a file of this kind can't store the layout of a tensor."""
    if tensor.is_nested:
        raise ValueError(
            f"{name} is a nested tensor, which can't be converted. HINT: save its parts, "
            "tensor.unbind(), as tensors of their own"
        )
    if tensor.layout is not torch.strided and dest.suffix == ".safetensors":
        raise ValueError(
            f"{name} is a sparse tensor ({tensor.layout}), which can't be stored in a safetensors "
            "file. HINT: choose a file name that ends with .pt, or save tensor.to_dense()"
        )


def find_checkpoint(source: Path) -> Path:
    """Return a verified checkpoint: ``source``, or the newest one in it.

    Raises:
        ValueError: There is none.
        DamagedCheckpointError: It is damaged; the error names the file.
    """
    folder = source
    if not (source / MANIFEST).exists():
        found = checkpoint_folder.list_checkpoints(source)
        if not found and not source.name.startswith("step-"):
            raise ValueError(
                f"{source} contains no checkpoint. HINT: give a folder step-NNNNNNNN, or the "
                "checkpoint=... of world.epochs"
            )
        folder = found[0] if found else source
    verify_checkpoint(folder)
    return folder
