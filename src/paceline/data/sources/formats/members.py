"""Samples as groups of members, as in a WebDataset: ``000012.jpg`` and ``000012.cls`` are one."""

import io
import os
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np

from ....security.text import printable
from ...format.npy import parse_npy
from ..content import extension_of, kind_of
from ..source import LoadedSample, Source, label_field
from ..text_labels import interpret_labels
from . import Sample

LABELS = ("cls", "y.npy")  # a class, or an array
NAME = "name"
SHOWN = 10
MAX_CLASS_BYTES = 4096
MAX_KIND_PROBES = 16  # extensions of which a sample is read when the source is opened


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
        self._label_extension = ""
        self._left_out: set[str] = set()
        problem = ""
        for key, members in groups:
            # A key that is there again explains why a member seems to be missing.
            problem = problem or self._add(key, members, labels)
        if problem:
            raise ValueError(f"{description}: {problem}")
        if not self._data:
            raise ValueError(f"{description} contains no samples")
        self.has_names = True
        self._read_label_kind()
        firsts: dict[str, int] = {}
        for i, extension in enumerate(self._extensions):
            firsts.setdefault(extension, i)
        probes = list(firsts.items())[:MAX_KIND_PROBES]
        kinds = {
            kind_of(extension_of(self.content(self._data[i][0]), _last(extension)))
            for extension, i in probes
        }
        if len(kinds) > 1:
            raise ValueError(
                f"{description} contains {' and '.join(sorted(kinds))}. HINT: pack each kind as a "
                "dataset of its own"
            )
        self.kind = kinds.pop()
        if self._left_out:
            some = printable(", ".join(sorted(self._left_out)[:SHOWN]))
            self.notes.append(f"members with these extensions are left out: {some}")

    def _add(self, key: str, members: dict[str, Any], labels: str | None) -> str:
        """Add a sample; return why it can't be one, or ""."""
        shown, extensions = printable(key), _list_extensions(members)
        label = labels or next((extension for extension in LABELS if extension in members), None)
        if labels is not None and labels not in members:
            return f"{shown} has no .{labels}; it has {extensions}"
        data = [extension for extension in members if extension not in (label, NAME)]
        best = [extension for extension in data if _kind(extension) != "files"] or data
        if len(best) != 1:
            return (
                f"{shown} has {extensions}. HINT: keep one member beside .cls, name the extension "
                "of the label (--labels cls), or use MODULE:FUNCTION as SOURCE"
            )
        self._left_out |= set(data) - set(best)
        place = (members[best[0]], members[label] if label else None, members.get(NAME))
        if self._data and label != (self._label_extension or None):
            first = printable(self._keys[0])
            if label and self._label_extension:
                return f"the label of {first} is .{self._label_extension}, that of {shown} .{label}"
            missing, there = (shown, first)[:: 1 if label is None else -1]
            return f"{missing} has no label, but {there} has one"
        self._keys.append(key)
        self._extensions.append(best[0])
        self._data.append(place)
        self._label_extension = label or ""
        return ""

    @abstractmethod
    def content(self, place: Any) -> bytes:
        """Return the bytes of a member. Raises OSError or ValueError."""

    def __len__(self) -> int:
        return len(self._data)

    def load(self, i: int) -> LoadedSample:
        data, label, _ = self._data[i]
        content = self.content(data)
        value = None if label is None else self._label(label)
        extension = extension_of(content, _last(self._extensions[i]))
        return LoadedSample(content, value, self.name(i), extension)

    def name(self, i: int) -> str:
        place = self._data[i][2]
        return self._keys[i] if place is None else self.content(place).decode(errors="replace")

    def _read_label_kind(self) -> None:
        """Set the kind of the labels; that of texts is decided by all of them."""
        place = self._data[0][1]
        if place is None:
            return
        if self._label_extension.endswith("npy"):
            first = parse_npy(self.content(place))
            self.label = label_field(first.dtype.name, first.shape, self.description)
            return
        self._texts = interpret_labels(self.description, self._label_texts)
        self.label, self.classes = self._texts.label, self._texts.classes
        self.notes += [self._texts.note] if self._texts.note else []

    def _label(self, place: Any) -> Any:
        content = self.content(place)
        if self._label_extension.endswith("npy"):
            return parse_npy(content)
        return self._texts.value(_text(content))

    def _label_texts(self) -> Iterator[str]:
        for key, (_, place, _) in zip(self._keys, self._data, strict=True):
            try:
                yield _text(self.content(place))
            except ValueError as error:
                raise ValueError(f"{self.description}: {printable(key)}: {error}") from None


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
    return kind_of(_last(extension))


def _last(extension: str) -> str:
    """Return the last part of "seg.PNG" as ".png"; "" if there is none."""
    return f".{extension.rpartition('.')[2].lower()}" if extension else ""


def _text(content: bytes) -> str:
    if len(content) > MAX_CLASS_BYTES:
        raise ValueError(
            f"its class name has {len(content):,} bytes; the maximum is {MAX_CLASS_BYTES:,}. "
            "HINT: --labels cls, or the extension of another member"
        )
    text = content.decode("utf-8-sig", errors="replace").strip()
    if not text:
        raise ValueError("its label is empty")
    return text


def _list_extensions(members: Collection[str]) -> str:
    some = ", ".join(f".{extension}" for extension in sorted(members)[:SHOWN])
    more = f" and {len(members) - SHOWN:,} more" if len(members) > SHOWN else ""
    return printable(some) + more
