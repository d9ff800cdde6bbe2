"""webdataset: tar files whose members follow one another by sample. Nothing is unpacked: members
are read at their places."""

import os
import tarfile
from collections.abc import Iterator
from io import BytesIO
from itertools import chain, count
from pathlib import Path
from typing import Any

from ....security.text import printable
from ..bounded_read import OpenFile, read_at
from . import About, Sample, classes_beside, write_classes
from .members import Members, members_of


def source(path: Path, name: str, labels: str | None) -> "Tars":
    if name:
        raise ValueError(f"{path}:{name}: a webdataset has no names. HINT: --labels END, as cls")
    return Tars(path, labels)


PIECE = 1 << 20  # bytes that are read at once
MAX_HEADER_BYTES = 1 << 20  # of a member's long name, or of its extended header


class Tars(Members):
    """A tar file, or a folder of them. Where a member lies: (tar, offset, length)."""

    def __init__(self, path: Path, labels: str | None) -> None:
        self.paths = sorted(path.glob("*.tar")) if path.is_dir() else [path]
        self._files = [OpenFile(one) for one in self.paths]
        super().__init__(str(path), self._groups(), labels)
        if self.label == "class":
            self.classes = self.classes or classes_beside(path)

    def content(self, where: Any) -> bytes:
        tar, offset, length = where
        data = read_at(self._files[tar].fd, length, offset)
        if len(data) < length:
            raise ValueError(f"{self.paths[tar]}: is truncated at byte {offset + len(data):,}")
        return data

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _at_end(self, number: int, at: int) -> None:
        """tarfile takes a damaged header for the end: from there on there are zeros only."""
        path, end = self.paths[number], at
        while data := os.pread(self._files[number].fd, PIECE, end):
            if data.count(0) < len(data):
                raise ValueError(f"{path}: no tar member at byte {at:,}. HINT: copy it again")
            end += len(data)
        if end - at < tarfile.BLOCKSIZE:
            raise ValueError(f"{path}: is truncated: it has no end mark. HINT: copy it again")
        if end - at > 2 * tarfile.BLOCKSIZE + tarfile.RECORDSIZE:
            self.notes.append(f"{path}: {end - at:,} zeros at its end: members may be missing")

    def _groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, path in enumerate(self.paths):
            key, members = "", dict[str, Any]()
            file: Any = _Forward(self._files[number].fd)
            try:
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    while (one := tar.next()) is not None:
                        # It would keep all of them, maybe millions; typeshed knows no members.
                        tar.members.clear()  # type: ignore[attr-defined]
                        if not one.isreg():
                            continue
                        if one.issparse():
                            raise tarfile.ReadError(f"{printable(one.name)} is a sparse file")
                        own, end = _cut(one.name)
                        if own != key and members:
                            yield key, members
                            members = {}
                        key = own
                        members[end] = (number, one.offset_data, one.size)
                    self._at_end(number, tar.offset)
            except ValueError:
                raise
            except Exception as error:  # tarfile raises whatever a damaged header leads it to
                raise ValueError(
                    f"{path}: can't be read as a tar: {printable(str(error))}. HINT: copy it "
                    "again; a compressed one (.tar.gz) has to be unpacked"
                ) from None
            if members:
                yield key, members


class _Forward:
    """A tar file as tarfile reads it: only forwards, as sizes that are negative lead it backwards
    without end, and no more at a time than a header may have."""

    def __init__(self, fd: int) -> None:
        self._fd, self._at, self._furthest = fd, 0, 0
        self.name, self.mode = "", "rb"

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        if whence != os.SEEK_SET or not self._furthest - 1 <= offset < 1 << 62:
            raise tarfile.ReadError(f"a member whose size leads to byte {offset}")
        self._at = self._furthest = offset
        return offset

    def read(self, size: int = -1) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        data = read_at(self._fd, size, self._at)
        self._at += len(data)
        self._furthest = max(self._furthest, self._at)
        return data

    def close(self) -> None:
        return None


def _cut(name: str) -> tuple[str, str]:
    """Key and end, at the first dot behind the last slash."""
    folder, slash, file = name.rpartition("/")
    stem, _, end = file.partition(".")
    return f"{folder}{slash}{stem}", end


def write(path: Path, about: About, samples: Iterator[Sample]) -> None:
    """A folder of tars of about ``shard_bytes``."""
    path.mkdir()
    numbered = enumerate(samples)
    for tars in count():
        first = next(numbered, None)
        if first is None:
            break
        with tarfile.open(path / f"{tars:06}.tar", "w") as tar:
            for k, sample in chain([first], numbered):
                for end, content in members_of(about.meta.names, sample):
                    one = tarfile.TarInfo(f"{k:09}.{end}")
                    one.size = len(content)
                    tar.addfile(one, BytesIO(content))
                    tar.getmembers().clear()
                if tar.offset >= about.shard_bytes:
                    break
    write_classes(path, about)
