"""WebDataset: tar files in which the members of a sample follow one another. Nothing is unpacked:
members are read at their offsets."""

import os
import tarfile
from collections.abc import Collection, Iterator
from io import BytesIO
from itertools import chain, count
from pathlib import Path
from typing import Any

from ....plurals import counted
from ....security.text import printable
from ...boundary import Boundary
from ..bounded_read import OpenFile, read_at
from . import (
    ExportInfo,
    Sample,
    check_compression,
    data_files,
    read_class_names,
    write_classes,
)
from .members import MemberSource, sample_members


def source(path: Path, name: str, labels: str | None, boundary: Boundary) -> "WebDatasetSource":
    if name:
        raise ValueError(f"{path}:{name}: a WebDataset has no named arrays. HINT: --labels cls")
    return WebDatasetSource(path, labels)


CHUNK_BYTES = 1 << 20
MAX_HEADER_BYTES = 1 << 20  # of a member's long name, or of its extended header


class WebDatasetSource(MemberSource):
    """A tar file, or a folder of them. Place of a member: (tar, offset, length)."""

    def __init__(self, path: Path, labels: str | None) -> None:
        self.paths = data_files(path)
        self._files = [OpenFile(member) for member in self.paths]
        super().__init__(str(path), self._groups(), labels)
        if self.label == "class":
            self.classes = self.classes or read_class_names(path)

    def content(self, place: Any) -> bytes:
        tar, offset, length = place
        data = read_at(self._files[tar].fd, length, offset)
        if len(data) < length:
            raise ValueError(f"{self.paths[tar]} is truncated at byte {offset + len(data):,}")
        return data

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _check_new(
        self, path: Path, name: str, end: str, members: Collection[str], earlier: Collection[str]
    ) -> None:
        """Check that a member is not there twice, and follows the others of its sample."""
        if end in members or end in earlier:
            raise ValueError(
                f"{path} contains {printable(name)} twice. HINT: rename one in the tar"
            )
        if earlier:
            raise ValueError(
                f"{path}: {printable(name)} does not follow the other members of its sample. HINT: "
                "write the tar with sorted names: tar --sort=name -cf NEW.tar FOLDER"
            )

    def _check_end(self, number: int, at: int) -> None:
        """Check that only zeros follow: tarfile takes a damaged header for the end."""
        path, end = self.paths[number], at
        while data := os.pread(self._files[number].fd, CHUNK_BYTES, end):
            if data.count(0) < len(data):
                raise ValueError(f"{path} has no tar member at byte {at:,}. HINT: copy it again")
            end += len(data)
        if end - at < tarfile.BLOCKSIZE:
            raise ValueError(f"{path} is truncated: it has no end mark. HINT: copy it again")
        if end - at > 2 * tarfile.BLOCKSIZE + tarfile.RECORDSIZE:
            self.notes.append(f"{path} ends with {end - at:,} zeros: members may be missing")

    def _groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        for number, path in enumerate(self.paths):
            key, members, seen = "", dict[str, Any](), dict[str, frozenset[str]]()
            extensions = dict[frozenset[str], frozenset[str]]()  # of most samples they are equal
            file: Any = _ForwardFile(self._files[number].fd)
            links = 0
            try:
                with tarfile.open(fileobj=file, mode="r:") as tar:
                    while (member := tar.next()) is not None:
                        # tarfile would keep millions of members; typeshed lacks this attribute.
                        tar.members.clear()  # type: ignore[attr-defined]
                        links += member.issym() or member.islnk()
                        if not member.isreg() or _is_hidden(member.name):
                            continue
                        if member.issparse():
                            raise tarfile.ReadError(f"{printable(member.name)} is a sparse file")
                        sample_key, end = _split_name(member.name)
                        if sample_key != key and members:
                            yield key, members
                            ends = frozenset(members)
                            seen[key] = extensions.setdefault(ends, ends)
                            members = {}
                        key = sample_key
                        self._check_new(path, member.name, end, members, seen.get(key, ()))
                        members[end] = (number, member.offset_data, member.size)
                    self._check_end(number, tar.offset)
                if links:
                    self.notes.append(
                        f"{path}: {counted(links, 'link')} left out. HINT: tar --dereference "
                        "--hard-dereference stores files in their place"
                    )
            except ValueError:
                raise
            except Exception as error:  # tarfile raises whatever a damaged header leads it to
                check_compression(path)
                raise ValueError(
                    f"{path} can't be read as a tar: {printable(str(error))}. HINT: copy it again"
                ) from None
            if members:
                yield key, members


class _ForwardFile:
    """A tar file opened for tarfile: it only reads forwards, as negative sizes would lead it
    backwards in an endless loop, and never more at once than a header may have."""

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


def _is_hidden(name: str) -> bool:
    """Return whether a name has a hidden part, as ._0.png of macOS: as in folders, left out."""
    return any(part.startswith(".") and part not in (".", "..") for part in name.split("/"))


def _split_name(name: str) -> tuple[str, str]:
    """Split a member's name into key and extension, at the first dot after the last slash."""
    folder, slash, file = name.rpartition("/")
    stem, _, end = file.partition(".")
    return f"{folder}{slash}{stem}", end


def write(path: Path, info: ExportInfo, samples: Iterator[Sample]) -> None:
    """Write a folder of tar files of about ``shard_bytes``."""
    path.mkdir(exist_ok=True)
    numbered = enumerate(samples)
    for tars in count():
        first = next(numbered, None)
        if first is None:
            break
        with tarfile.open(path / f"{tars:06}.tar", "w") as tar:
            for k, sample in chain([first], numbered):
                for end, content in sample_members(info.meta.names, sample):
                    member = tarfile.TarInfo(f"{k:09}.{end}")
                    member.size = len(content)
                    tar.addfile(member, BytesIO(content))
                    tar.getmembers().clear()
                if tar.offset >= info.shard_bytes:
                    break
    write_classes(path, info)
