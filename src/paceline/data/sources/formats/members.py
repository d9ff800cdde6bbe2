"""Samples as groups of members, as in a webdataset: ``000012.jpg`` and ``000012.cls`` are one."""

import io
import os
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np

from ....security.text import printable
from ...format.decode import parse_npy
from ...format.shard_format import ArraySpec
from ..source import ARRAYS, IMAGES, Loaded, Source, by_magic, label_field
from . import Sample

LABELS = ("cls", "y.npy")  # a class, or an array
NAME = "name"
SHOWN = 10
MAX_CLASS_BYTES = 4096


class Members(Source):
    """groups: a sample's key, and its members by their ends ("jpg", "cls"; "" for one without).
    labels: the end of the member that is the label; by default one of LABELS.

    Raises ValueError where it is not clear what a sample is.
    """

    def __init__(
        self, told: str, groups: Iterable[tuple[str, dict[str, Any]]], labels: str | None
    ) -> None:
        super().__init__()
        self.told = told
        self._keys: list[str] = []
        self._data: list[Any] = []  # where each sample is, its label and its name
        self._ends: list[str] = []
        other: set[str] = set()
        for key, members in groups:
            label = labels or next((end for end in LABELS if end in members), None)
            if labels is not None and labels not in members:
                there = f"{printable(key)} has no .{labels}; it has {_some(members)}"
                raise ValueError(f"{told}: {there}")
            data = [end for end in members if end not in (label, NAME)]
            best = [end for end in data if _kind(end) != "files"] or data
            if len(best) != 1:
                raise ValueError(
                    f"{told}: {printable(key)} has {_some(members)}. HINT: one member beside a "
                    ".cls, or --labels and the end of the label's; else MODULE:FUNCTION"
                )
            other |= set(data) - set(best)
            where = (members[best[0]], members[label] if label else None, members.get(NAME))
            if self._data and (where[1] is None) != (self._data[0][1] is None):
                missing, there = (key, self._keys[0])[:: 1 if where[1] is None else -1]
                raise ValueError(printable(f"{told}: {missing} has no label, and {there} has one"))
            self._keys.append(key)
            self._ends.append(best[0])
            self._data.append(where)
            self._label_end = label or ""
        if not self._data:
            raise ValueError(f"{told}: holds no samples")
        self.named = True
        self._labelled()
        kinds = {_kind(end) for end in set(self._ends)}
        if kinds == {"files"} and not self._ends[0]:
            kinds = {_kind(by_magic(self.content(self._data[0][0]))[1:])}
        if len(kinds) > 1:
            raise ValueError(f"{told}: holds {' and '.join(sorted(kinds))}. HINT: a set a kind")
        self.kind = kinds.pop()
        if other:
            some = printable(", ".join(sorted(other)[:SHOWN]))
            self.notes.append(f"members that are left out: {some}")

    @abstractmethod
    def content(self, where: Any) -> bytes:
        """A member's. Raises OSError or ValueError."""

    def __len__(self) -> int:
        return len(self._data)

    def load(self, i: int) -> Loaded:
        data, label, _ = self._data[i]
        content = self.content(data)
        told = None if label is None else self._label(self.content(label))
        end = f".{self._ends[i].rpartition('.')[2].lower()}" if self._ends[i] else ""
        loaded = Loaded(content, told, self.name(i), end or by_magic(content))
        if loaded.end in ARRAYS:
            loaded.data = parse_npy(content)
        return loaded

    def name(self, i: int) -> str:
        named = self._data[i][2]
        return self.content(named).decode(errors="replace") if named is not None else self._keys[i]

    def _labelled(self) -> None:
        """What labels are, by the first; words are numbered."""
        where = self._data[0][1]
        if where is None:
            return
        if self._label_end.endswith("npy"):
            first = parse_npy(self.content(where))
            self.label = label_field(first.dtype.name, first.shape, self.told)
            return
        self.label = "class"
        if not _is_number(self.content(where)):
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


def members_of(named: bool, sample: Sample) -> Iterator[tuple[str, bytes]]:
    """(end, content) of a sample that is written."""
    if isinstance(sample.data, bytes):
        yield sample.end[1:], sample.data
    else:
        yield "npy", _npy(sample.data)
    if isinstance(sample.label, np.ndarray):
        yield "y.npy", _npy(sample.label)
    elif sample.label is not None:
        yield "cls", str(sample.label).encode()
    if named:
        yield NAME, os.fsencode(sample.name)


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    made = io.BytesIO()
    np.save(made, array, allow_pickle=False)
    return made.getvalue()


def _kind(end: str) -> str:
    last = f".{end.rpartition('.')[2].lower()}"
    return "images" if last in IMAGES else "arrays" if last in ARRAYS else "files"


def _is_number(content: bytes) -> bool:
    try:
        int(content)
    except ValueError:
        return False
    return True


def _text(content: bytes) -> str:
    if len(content) > MAX_CLASS_BYTES:
        raise ValueError(f"a class name of {len(content):,} bytes. HINT: --labels END, as cls")
    return content.decode(errors="replace").strip()


def _some(members: Collection[str]) -> str:
    some = ", ".join(f".{end}" for end in sorted(members)[:SHOWN])
    more = f" and {len(members) - SHOWN:,} more" if len(members) > SHOWN else ""
    return printable(some) + more
