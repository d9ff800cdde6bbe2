"""A folder of files as a source: class folders, a table of labels, or neither."""

import csv
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ...security.files import InvalidFileError, open_regular, read_regular
from ...security.text import printable
from ..format.shard_format import ArraySpec, create_new_file, write_atomically
from .bounded_read import OpenFile, read_sample_file
from .source import ARRAYS, IMAGES, Loaded, Source

KEPT_BYTES = 16 << 20  # of a listing, at most, in memory; a longer one is read line by line
LISTED, ENDS = "listing", "listing.ends"  # in the working folder: a line a sample, where it ends
SHOWN = 3
Inode = tuple[int, int]  # device and number
MAX_WAYS = 64  # links by which one folder may be reached
MAX_LINE_BYTES = 1 << 20  # of a table of labels


class FolderSource(Source):
    """labels: a CSV of a file, and its label or several numbers, in each line; without, a file's
    class is the first folder that it is in, and files that are in none have no label.

    Which samples there are is kept in the working folder, and is not looked for again where a
    pack goes on. Hidden files are left out. Raises ValueError for a folder without files, or in
    which images and arrays are mixed, and for a table with lines that have no label.
    """

    named = True

    def __init__(self, folder: Path, labels: Path | None, work: Path) -> None:
        super().__init__()
        self.folder, self.told, self._below = folder, str(folder), os.path.join(folder, "")
        self._listed = work / LISTED
        entries = _Classes(folder) if labels is None else _Table(folder, labels)
        if _ends(work) is None:
            _list(entries, work)
        self.label, self.classes = entries.label, entries.classes
        self.notes = entries.notes
        found = _ends(work)
        if found is None:
            raise InvalidFileError(self._listed, "has changed while it was written")
        self._ends = found
        self._file = OpenFile(self._listed)
        small = os.fstat(self._file.fd).st_size <= KEPT_BYTES
        self._lines = read_regular(self._listed, KEPT_BYTES) if small else None
        if not len(self._ends):
            raise ValueError(f"{folder}: has no files to pack. HINT: is it the right folder?")
        self.kind = self._kind()

    def __len__(self) -> int:
        return len(self._ends)

    def load(self, i: int) -> Loaded:
        label, name = self._entry(i)
        data = read_sample_file(name if name.startswith("/") else self._below + name)
        if not data:
            raise ValueError("the file is empty")
        if isinstance(self.label, ArraySpec):
            label = np.asarray(label, np.float32).reshape(self.label.shape)
        return Loaded(data, label, name)

    def name(self, i: int) -> str:
        return self._entry(i)[1]

    def close(self) -> None:
        self._file.close()

    def _entry(self, i: int) -> tuple[Any, str]:
        start, end = int(self._ends[i - 1]) if i else 0, int(self._ends[i])
        if self._lines is None:
            line = os.pread(self._file.fd, end - start, start)
        else:
            line = self._lines[start:end]
        told, _, name = os.fsdecode(line).rstrip("\n").partition("\t")
        if isinstance(self.label, ArraySpec):
            return [float(one) for one in told.split(",")], name
        return (int(told) if told else None), name

    def _kind(self) -> str:
        """By the files' ends. Only of some thousand, as there may be millions."""
        step = max(len(self) // 4096, 1)
        kinds: dict[str, str] = {}
        for i in range(0, len(self), step):
            name = self._entry(i)[1]
            end = os.path.splitext(name)[1].lower()
            kind = "images" if end in IMAGES else "arrays" if end in ARRAYS else "files"
            kinds.setdefault(kind, name)
        if len(kinds) > 1:
            some = ", ".join(f"{printable(name)} ({kind})" for kind, name in sorted(kinds.items()))
            raise ValueError(
                f"{self.folder}: files of several kinds: {some}. HINT: one folder, and one set, a "
                "kind; or a CSV with --labels that names the files that are meant"
            )
        return next(iter(kinds))


class _Classes:
    """Class folders: the first folder on a file's way."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.notes = folder, list[str]()
        with os.scandir(folder) as found:
            self.classes = sorted(
                entry.name for entry in found if entry.is_dir() and not entry.name.startswith(".")
            )
        self.label: ArraySpec | str | None = "class" if self.classes else None

    def each(self) -> Iterator[tuple[str, str]]:
        """(label, name below the folder)."""
        alone, numbers = 0, {name: number for number, name in enumerate(self.classes)}
        for name in files_below(self.folder):
            first, _, rest = name.partition("/")
            if not rest and self.classes:
                alone += 1
                continue
            yield (str(numbers[first]) if rest else ""), name
        if alone:
            self.notes.append(f"{alone:,} files are in no class folder, and are left out")


class _Table:
    """A CSV: the file, and its label."""

    def __init__(self, folder: Path, table: Path) -> None:
        self.folder, self.table, self.notes = folder, table, list[str]()
        kinds, self._columns, self._lines, missing = set(), 0, 0, []
        for number, (name, told) in self._read():
            self._lines += 1
            self._columns = self._columns or len(told)
            if len(told) != self._columns or not all(told):
                missing.append(f"{printable(name)} (line {number})")
            kinds |= {_kind(one) for one in told}
        if missing:
            more = f" and {len(missing) - SHOWN:,} more" if len(missing) > SHOWN else ""
            raise ValueError(
                f"{table}: no label for {', '.join(missing[:SHOWN])}{more}. HINT: a label in each "
                "line, or leave the lines out"
            )
        if not self._lines:
            raise ValueError(f"{table}: names no files. HINT: a file and its label in each line")
        self.classes: list[str] = []
        self.label: ArraySpec | str = ArraySpec(
            "float32", (self._columns,) if self._columns > 1 else ()
        )
        if self._columns == 1 and "float" not in kinds:
            self.label = "class"
            if "text" in kinds:
                self.classes = sorted({told[0] for _, (_, told) in self._read()})
        elif "text" in kinds:
            raise ValueError(
                f"{table}: words and numbers in {self._columns} columns of labels. HINT: one "
                "column of classes, or columns of numbers"
            )

    def _read(self) -> Iterator[tuple[int, tuple[str, list[str]]]]:
        """(line, (file, labels)), without a heading."""
        try:
            with open(open_regular(self.table), newline="") as file:
                for number, row in enumerate(csv.reader(_lines(file)), 1):
                    if not row or (number == 1 and not (self.folder / row[0]).exists()):
                        continue
                    told = [one.strip() for one in row[1:]]
                    yield number, (row[0].strip(), told or [""])
        except (OSError, csv.Error, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(f"{self.table}: no table that can be read: {reason}") from None

    def each(self) -> Iterator[tuple[str, str]]:
        numbers = {name: str(number) for number, name in enumerate(self.classes)}
        for _, (name, told) in self._read():
            yield (numbers.get(told[0], told[0]) if self.label == "class" else ",".join(told)), name
        others = sum(1 for _ in files_below(self.folder)) - self._lines
        if self.table.resolve().is_relative_to(self.folder.resolve()):
            others -= 1
        if others > 0:
            self.notes.append(f"{others:,} files of {self.folder} have no line, and are left out")


def _kind(told: str) -> str:
    try:
        number = float(told)
    except ValueError:
        return "text" if told else "float"
    return "whole" if number.is_integer() and told.lstrip("-").isdigit() else "float"


def files_below(folder: Path) -> Iterator[str]:
    """Files' names from the folder on, sorted in each of its folders; hidden ones left out. Links
    to folders are followed, but not in circles.

    Raises:
        ValueError: A folder is reached by more than MAX_WAYS links: links that lead to each other
            would have no end.
    """
    waiting: list[tuple[str, tuple[Inode, ...], bool]] = [("", (_inode(folder.stat()),), False)]
    ways = Counter[Inode]()
    while waiting:
        below, above, linked = waiting.pop()
        with os.scandir(folder / below) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        folders = []
        for entry in entries:
            if entry.name.startswith("."):
                continue
            name = f"{below}/{entry.name}" if below else entry.name
            if not entry.is_dir():
                yield name
                continue
            link = entry.is_symlink()
            if not (link and _holds(entry.path, folder / below)):
                own = _inode(entry.stat())
                if own in above:
                    continue
                if linked or link:
                    ways[own] += 1
                    if ways[own] > MAX_WAYS:
                        raise ValueError(
                            f"{printable(os.fspath(folder / name))}: more than {MAX_WAYS} links "
                            "lead to this folder. HINT: remove links that lead to each other"
                        )
                folders.append((name, (*above, own), linked or link))
        waiting += reversed(folders)


def _inode(status: os.stat_result) -> Inode:
    return status.st_dev, status.st_ino


def _holds(link: str, folder: Path) -> bool:
    """Whether a link leads back to where it is found."""
    return folder.resolve().is_relative_to(Path(link).resolve())


def _lines(file: TextIO) -> Iterator[str]:
    """Lines of a table, none of them longer than memory should hold."""
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise csv.Error(f"a line has {MAX_LINE_BYTES:,} characters or more")
        yield line


def _ends(work: Path) -> "np.ndarray[Any, Any] | None":
    """Return where lines of the listing end; None where there is none, or a damaged one."""
    try:
        with open(open_regular(work / ENDS), "rb") as file:
            ends = np.fromfile(file, np.int64)
        fd = open_regular(work / LISTED)
    except OSError:
        return None
    size = os.fstat(fd).st_size
    os.close(fd)
    whole = (ends[-1] if len(ends) else 0) == size and bool((np.diff(ends, prepend=0) > 0).all())
    return ends if whole else None


def _list(entries: "_Classes | _Table", work: Path) -> None:
    """Write down which samples there are; whole or not at all."""
    at, ends = 0, array("q")
    part = work / f"{LISTED}.part"
    try:
        with create_new_file(part) as file:
            for told, name in entries.each():
                if "\n" in name or "\n" in told:
                    raise ValueError(f"{name!r}: a file's name with a line break can't be packed")
                line = os.fsencode(f"{told}\t{name}\n")
                file.write(line)
                at += len(line)
                ends.append(at)
        (work / ENDS).unlink(missing_ok=True)  # of an older listing
        part.replace(work / LISTED)
        write_atomically(work / ENDS, ends.tobytes())
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
