"""Samples as groups of members, as in a WebDataset: ``000012.jpg`` and ``000012.cls`` are one."""

import io
import os
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np

from ....security.text import printable
from ...format.decode import parse_npy
from ...format.shard_format import ArraySpec
from ..source import ARRAYS, IMAGES, LoadedSample, Source, extension_from_magic, label_field
from . import Sample

LABELS = ("cls", "y.npy")  # a class, or an array
NAME = "name"
SHOWN = 10
MAX_CLASS_BYTES = 4096


class MemberSource(Source):
    """Samples that consist of members.

    groups: the key of each sample, and its members by extension ("jpg", "cls"; "" without one).
    labels: the extension of the label's member; by default one of LABELS.

    Raises ValueError if it is ambiguous which member is the sample.
    """

    def __init__(
        self, description: str, groups: Iterable[tuple[str, dict[str, Any]]], labels: str | None
    ) -> None:
        super().__init__()
        self.description = description
        self._keys: list[str] = []
        self._data: list[Any] = []  # places of each sample, its label and its name
        self._extensions: list[str] = []
        other: set[str] = set()
        for key, members in groups:
            label = labels or next(
                (extension for extension in LABELS if extension in members), None
            )
            if labels is not None and labels not in members:
                there = f"{printable(key)} has no .{labels}; it has {_list_extensions(members)}"
                raise ValueError(f"{description}: {there}")
            data = [extension for extension in members if extension not in (label, NAME)]
            best = [extension for extension in data if _kind(extension) != "files"] or data
            if len(best) != 1:
                raise ValueError(
                    f"{description}: {printable(key)} has {_list_extensions(members)}. HINT: keep "
                    "one "
                    "member beside .cls, name the extension of the label (--labels cls), or use "
                    "MODULE:FUNCTION as SOURCE"
                )
            other |= set(data) - set(best)
            place = (members[best[0]], members[label] if label else None, members.get(NAME))
            if self._data and (place[1] is None) != (self._data[0][1] is None):
                missing, there = (key, self._keys[0])[:: 1 if place[1] is None else -1]
                raise ValueError(
                    printable(f"{description}: {missing} has no label, but {there} has one")
                )
            self._keys.append(key)
            self._extensions.append(best[0])
            self._data.append(place)
            self._label_extension = label or ""
        if not self._data:
            raise ValueError(f"{description} contains no samples")
        self.has_names = True
        self._read_label_kind()
        kinds = {_kind(extension) for extension in set(self._extensions)}
        if kinds == {"files"} and not self._extensions[0]:
            kinds = {_kind(extension_from_magic(self.content(self._data[0][0]))[1:])}
        if len(kinds) > 1:
            raise ValueError(
                f"{description} contains {' and '.join(sorted(kinds))}. HINT: pack each kind as a "
                "dataset of its own"
            )
        self.kind = kinds.pop()
        if other:
            some = printable(", ".join(sorted(other)[:SHOWN]))
            self.notes.append(f"members with these extensions are left out: {some}")

    @abstractmethod
    def content(self, place: Any) -> bytes:
        """Return the bytes of a member. Raises OSError or ValueError."""

    def __len__(self) -> int:
        return len(self._data)

    def load(self, i: int) -> LoadedSample:
        data, label, _ = self._data[i]
        content = self.content(data)
        value = None if label is None else self._label(self.content(label))
        extension = (
            f".{self._extensions[i].rpartition('.')[2].lower()}" if self._extensions[i] else ""
        )
        loaded = LoadedSample(
            content, value, self.name(i), extension or extension_from_magic(content)
        )
        if loaded.extension in ARRAYS:
            loaded.data = parse_npy(content)
        return loaded

    def name(self, i: int) -> str:
        with_names = self._data[i][2]
        return (
            self.content(with_names).decode(errors="replace")
            if with_names is not None
            else self._keys[i]
        )

    def _read_label_kind(self) -> None:
        """Set the kind of the labels by the first one, and number class names."""
        place = self._data[0][1]
        if place is None:
            return
        if self._label_extension.endswith("npy"):
            first = parse_npy(self.content(place))
            self.label = label_field(first.dtype.name, first.shape, self.description)
            return
        self.label = "class"
        if not _is_integer(self.content(place)):
            words = {_text(self.content(label)) for _, label, _ in self._data}
            self.classes = sorted(words)
        self._numbers = {name: number for number, name in enumerate(self.classes)}

    def _label(self, content: bytes) -> Any:
        if isinstance(self.label, ArraySpec):
            return parse_npy(content)
        text = _text(content)
        if not self._numbers:
            return int(text[:MAX_CLASS_BYTES])
        if text not in self._numbers:
            raise ValueError(f"its label has changed: {printable(text[:SHOWN])!r}")
        return self._numbers[text]


def sample_members(with_names: bool, sample: Sample) -> Iterator[tuple[str, bytes]]:
    """Yield (extension, content) of the members of a sample to write."""
    if isinstance(sample.data, bytes):
        yield sample.extension[1:], sample.data
    else:
        yield "npy", _npy(sample.data)
    if isinstance(sample.label, np.ndarray):
        yield "y.npy", _npy(sample.label)
    elif sample.label is not None:
        yield "cls", str(sample.label).encode()
    if with_names:
        yield NAME, os.fsencode(sample.name)


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _kind(extension: str) -> str:
    last = f".{extension.rpartition('.')[2].lower()}"
    return "images" if last in IMAGES else "arrays" if last in ARRAYS else "files"


def _is_integer(content: bytes) -> bool:
    try:
        int(content)
    except ValueError:
        return False
    return True


def _text(content: bytes) -> str:
    if len(content) > MAX_CLASS_BYTES:
        raise ValueError(
            f"its class name has {len(content):,} bytes; the maximum is {MAX_CLASS_BYTES:,}. "
            "HINT: --labels cls, or the extension of another member"
        )
    return content.decode(errors="replace").strip()


def _list_extensions(members: Collection[str]) -> str:
    some = ", ".join(f".{extension}" for extension in sorted(members)[:SHOWN])
    more = f" and {len(members) - SHOWN:,} more" if len(members) > SHOWN else ""
    return printable(some) + more
