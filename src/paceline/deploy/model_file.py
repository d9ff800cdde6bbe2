"""Write a model file: a manifest as JSON and sections of data, with the SHA-256 of each.

``native/src/artifact.c`` reads it, and describes the layout.
"""

import hashlib
import json
import struct
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from ..security.outputs import write_output

MAGIC = b"\x89PCLN\r\n\x1a"
FORMAT_VERSION = 1
ALIGNMENT = 64
HEADER = struct.Struct("<8sIIQ32s8x")


# Programs of ``torch.export`` without operators that change a tensor in place.


def without_changes(exported: ExportedProgram) -> ExportedProgram:
    """Return a program in which each change in place is a new value, also in later uses of the
    tensor and of its views.

    Raises:
        ValueError: The model changes its inputs or its buffers, which belong to the caller and to
            all calls, or an operator has no form without a change.
    """
    if not _changes(exported):
        return exported
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = exported.run_decompositions({})  # no operator is taken apart
    except Exception as error:  # of any kind
        raise ValueError(
            f"the model changes tensors in place: {type(error).__name__}: {str(error)[:2000]} "
            "HINT: operators that return a new tensor, as x = x + 1 for x += 1"
        ) from error
    signature = exported.graph_signature
    if signature.user_inputs_to_mutate:
        raise ValueError("the model changes an input in place. HINT: x = x.clone() before that")
    if signature.buffers_to_mutate or signature.parameters_to_mutate:
        raise ValueError(
            "the model changes its buffers or parameters in evaluation mode. HINT: let it return "
            "what has to be kept between calls"
        )
    if left := _changes(exported):
        raise ValueError(f"the operator {left[0]} changes a tensor in place")
    return exported


def _changes(exported: ExportedProgram) -> list[str]:
    """Return the operators that change values in place: all such ones but detach_."""
    return [
        str(node.target)
        for node in exported.graph.nodes
        if isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and node.target is not torch.ops.aten.detach_.default
    ]


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def encode_model_file(manifest: Mapping[str, Any], sections: Mapping[str, bytes]) -> bytes:
    """Return the content of a model file. Each section becomes an entry of manifest["sections"]."""
    entries: list[dict[str, Any]] = [
        {"name": name, "offset": 0, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in sections.items()
    ]
    text = b""
    while True:  # offsets depend on the length of the manifest, which depends on them
        at = HEADER.size + len(text)
        for entry in entries:
            at = _padded(at)
            entry["offset"] = at
            at += entry["bytes"]
        new = json.dumps({**manifest, "sections": entries}, allow_nan=False, indent=1).encode()
        new = new.ljust(len(text))  # never shorter than the last one, so that this ends
        done = len(new) == len(text)
        text = new
        if done:
            break
    content = bytearray(
        HEADER.pack(MAGIC, FORMAT_VERSION, len(text), at, hashlib.sha256(text).digest())
    )
    content += text
    for data in sections.values():
        content += bytes(_padded(len(content)) - len(content)) + data
    return bytes(content)


def write_model_file(path: Path, manifest: Mapping[str, Any], sections: Mapping[str, bytes]) -> int:
    """Write a model file, completely or not at all. Return its bytes. Raises OSError."""
    content = encode_model_file(manifest, sections)
    write_output(path, content)
    return len(content)
