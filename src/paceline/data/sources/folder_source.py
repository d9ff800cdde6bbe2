"""A folder of files as a source, with labels from class folders, from a CSV, or none."""

import csv
import os
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from ...security.files import InvalidFileError, open_regular, read_regular
from ...security.text import printable
from ..boundary import Boundary
from ..format.meta_schema import ArraySpec
from ..format.shard_format import create_new_file, write_atomically
from .bounded_read import OpenFile, read_head, read_sample_file
from .content import extension_of, kind_of
from .source import LoadedSample, Source
from .text_labels import float32_label, interpret_labels

MAX_LISTING_BYTES_IN_MEMORY = 16 << 20  # a longer listing is read line by line
# In the work folder: one line per sample, and the byte offsets where the lines end.
LISTING_FILE, LINE_ENDS_FILE = "listing", "listing.ends"
SHOWN = 3
Inode = tuple[int, int]  # device and number
MAX_LINKS_TO_FOLDER = 64
MAX_LINE_BYTES = 1 << 20  # of a CSV of labels
MAX_KIND_PROBES = 16  # extensions of which a file is read when the source is opened
# Names of columns, of which the first line of a CSV is a heading. Only their letters count.
_FILE_WORDS = ("file", "image", "img", "sample", "path")
FILE_HEADINGS = {"id", "name", "key"} | {
    word + end for word in _FILE_WORDS for end in ("", "s", "name", "names", "path", "paths", "id")
}
LABEL_HEADINGS = {"label", "labels", "class", "classname", "classid", "target", "category", "y"}


class FolderSource(Source):
    """Files of a folder and its subfolders; hidden files are left out.

    labels: a CSV with a file, and its label or several numbers, in each line. Without it, the class
    of a file is its first folder; files outside of class folders have no label.

    The list of samples is kept in the work folder and reused when packing is continued. Raises
    ValueError for a folder without files or with both images and arrays, and for a CSV with lines
    that have no label.
    """

    has_names = True

    def __init__(
        self, folder: Path, labels: Path | None, work: Path, follow_links: bool = False
    ) -> None:
        super().__init__()
        self._boundary = Boundary(folder, follow_links)
        self.folder, self.description, self._prefix = folder, str(folder), os.path.join(folder, "")
        self._listing = work / LISTING_FILE
        entries = (
            _ClassFolders(folder, self._boundary)
            if labels is None
            else _LabelTable(folder, labels, self._boundary)
        )
        if _read_line_ends(work) is None:
            _write_listing(entries, work)
        self.label, self.classes = entries.label, entries.classes
        self.notes = entries.notes
        found = _read_line_ends(work)
        if found is None:
            raise InvalidFileError(self._listing, "has changed while it was written")
        self._ends = found
        self._file = OpenFile(self._listing)
        small = os.fstat(self._file.fd).st_size <= MAX_LISTING_BYTES_IN_MEMORY
        self._lines = read_regular(self._listing, MAX_LISTING_BYTES_IN_MEMORY) if small else None
        if not len(self._ends):
            raise ValueError(
                f"{folder} contains no files to pack. HINT: choose a folder of samples"
            )
        self.first_names: dict[str, str] = {}  # of each extension
        self.kind = self._kind()

    def __len__(self) -> int:
        return len(self._ends)

    def load(self, i: int) -> LoadedSample:
        label_text, name = self._entry(i)
        data = read_sample_file(os.path.join(self._prefix, name), self._boundary)
        if not data:
            raise ValueError("the file is empty")
        label: Any = None
        if isinstance(self.label, ArraySpec):
            numbers = [float32_label(number) for number in label_text.split(",")]
            label = np.stack(numbers).reshape(self.label.shape)
        elif label_text:
            label = int(label_text)
        return LoadedSample(data, label, name)

    def name(self, i: int) -> str:
        return self._entry(i)[1]

    def close(self) -> None:
        self._file.close()

    def _entry(self, i: int) -> tuple[str, str]:
        """Return the text of a sample's label, and its path."""
        start, end = int(self._ends[i - 1]) if i else 0, int(self._ends[i])
        if self._lines is None:
            line = os.pread(self._file.fd, end - start, start)
        else:
            line = self._lines[start:end]
        label_text, _, name = os.fsdecode(line).rstrip("\n").partition("\t")
        return label_text, name

    def _kind(self) -> str:
        """Return the kind of the files, by their extensions and by the content of the first file of
        each. Looks at some thousand names only, as there may be millions."""
        step = max(len(self) // 4096, 1)
        for i in range(0, len(self), step):
            name = self.name(i)
            self.first_names.setdefault(os.path.splitext(name)[1].lower(), name)
        kinds: dict[str, str] = {}
        # Packing compares each sample with this kind.
        for extension, name in islice(self.first_names.items(), MAX_KIND_PROBES):
            kinds.setdefault(kind_of(extension_of(self._head(name), extension)), name)
        if len(kinds) > 1:
            some = ", ".join(f"{printable(name)} ({kind})" for kind, name in sorted(kinds.items()))
            raise ValueError(
                f"{self.folder} contains files of several kinds: {some}. HINT: pack each kind from "
                "a folder of its own, or name the files to pack in a CSV (--labels)"
            )
        return next(iter(kinds))

    def _head(self, name: str) -> bytes:
        """Return the first bytes of a file, or b"" if it can't be read, which packing reports."""
        path = self.folder / name
        return read_head(path) if self._boundary.contains(path) else b""


class _ClassFolders:
    """Entries with class folders: the first folder in a file's path is its class."""

    def __init__(self, folder: Path, boundary: Boundary) -> None:
        self.folder, self.notes, self._boundary = folder, list[str](), boundary
        with os.scandir(folder) as found:
            self.classes = sorted(
                entry.name for entry in found if entry.is_dir() and not entry.name.startswith(".")
            )
        self.label: ArraySpec | str | None = "class" if self.classes else None

    def each(self) -> Iterator[tuple[str, str]]:
        """Yield (label, path below the folder)."""
        alone, numbers = 0, {name: number for number, name in enumerate(self.classes)}
        for name in files_below(self.folder, self._boundary):
            first, _, rest = name.partition("/")
            if not rest and self.classes:
                alone += 1
                continue
            yield (str(numbers[first]) if rest else ""), name
        if alone:
            self.notes.append(f"{alone:,} files outside of class folders are left out")


class _LabelTable:
    """Entries of a CSV: each line has a file and its label."""

    def __init__(self, folder: Path, table: Path, boundary: Boundary) -> None:
        self.folder, self.table, self.notes = folder, table, list[str]()
        self._boundary = boundary
        self._columns, self._lines, missing = 0, 0, []
        for number, (name, label_text) in self._read():
            self._lines += 1
            self._columns = self._columns or len(label_text)
            if len(label_text) != self._columns or not all(label_text):
                missing.append(f"{printable(name)} (line {number})")
        if missing:
            more = f" and {len(missing) - SHOWN:,} more" if len(missing) > SHOWN else ""
            raise ValueError(
                f"{table} has no label for {', '.join(missing[:SHOWN])}{more}. HINT: add a label "
                "to each line, or remove these lines"
            )
        if not self._lines:
            raise ValueError(
                f"{table} names no files. HINT: write a file and its label in each line"
            )
        found = interpret_labels(
            str(table),
            lambda: (label for _, (_, label_text) in self._read() for label in label_text),
        )
        self.label, self.classes = found.label, found.classes
        self.notes += [found.note] if found.note else []
        if self._columns > 1:
            self.label = ArraySpec("float32", (self._columns,))
            if self.classes:
                raise ValueError(
                    f"{table} has words in {self._columns} columns of labels. HINT: use one column "
                    "of classes, or columns of numbers"
                )

    def _read(self) -> Iterator[tuple[int, tuple[str, list[str]]]]:
        """Yield (line number, (file, labels)) without the heading."""
        try:
            with open(open_regular(self.table), newline="", encoding="utf-8-sig") as file:
                for number, row in enumerate(csv.reader(_lines(file)), 1):
                    if not row or (number == 1 and self._is_heading(row)):
                        continue
                    label_text = [label.strip() for label in row[1:]]
                    yield number, (row[0].strip(), label_text or [""])
        except (OSError, csv.Error, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ValueError(
                f"{self.table} can't be read as a CSV: {reason}. HINT: save it as UTF-8 text, with "
                "lines FILE,LABEL"
            ) from None

    def _is_heading(self, row: list[str]) -> bool:
        """Return whether the first line is a heading. Raises ValueError if it may be a line whose
        file does not exist."""
        first = row[0].strip()
        if os.path.exists(self.folder / first):
            return False
        named = _letters(first) in FILE_HEADINGS or (
            not os.path.splitext(first)[1]
            and any(_letters(heading) in LABEL_HEADINGS for heading in row[1:])
        )
        if not named and not first.startswith("#"):
            raise ValueError(
                f"{self.table} names in line 1 the file {printable(first)}, which is not in "
                f"{self.folder}. HINT: correct it; if the line is a heading, begin it with #; "
                "separate columns by commas"
            )
        return True

    def each(self) -> Iterator[tuple[str, str]]:
        numbers = {name: str(number) for number, name in enumerate(self.classes)}
        inside = set[str]()  # folders, as there may be millions of files
        for number, (name, label_text) in self._read():
            parent = os.path.dirname(name)
            if parent not in inside and self._boundary.contains(self.folder / parent):
                inside.add(parent)
            elif parent not in inside:
                self._boundary.check(self.folder / name, f"{self.table}, line {number},")
            label = ",".join(label_text)
            yield (numbers.get(label, label) if self.label == "class" else label), name
        others = sum(1 for _ in files_below(self.folder, self._boundary)) - self._lines
        if self.table.resolve().is_relative_to(self.folder.resolve()):
            others -= 1
        if others > 0:
            self.notes.append(
                f"{others:,} files of {self.folder} have no line in the CSV and are left out"
            )


def _letters(heading: str) -> str:
    return "".join(letter for letter in heading.lower() if letter.isalpha())


def files_below(folder: Path, boundary: Boundary) -> Iterator[str]:
    """Yield the paths of files below a folder, sorted within each folder; hidden ones are left out.
    Links to folders are followed, but not in circles.

    Raises:
        ValueError: A link leads out of the boundary, or a folder is reached by more than
            MAX_LINKS_TO_FOLDER links: links that lead to each other would be followed endlessly.
    """
    waiting: list[tuple[str, tuple[Inode, ...], bool]] = [("", (_inode(folder.stat()),), False)]
    link_counts = Counter[Inode]()
    while waiting:
        below, above, linked = waiting.pop()
        with os.scandir(folder / below) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        folders = []
        for entry in entries:
            if entry.name.startswith("."):
                continue
            name = f"{below}/{entry.name}" if below else entry.name
            link = entry.is_symlink()
            if link:
                boundary.check(entry.path, f"the link {folder / name}")
            if not entry.is_dir():
                yield name
                continue
            if not (link and _contains_itself(entry.path, folder / below)):
                inode = _inode(entry.stat())
                if inode in above:
                    continue
                if linked or link:
                    link_counts[inode] += 1
                    if link_counts[inode] > MAX_LINKS_TO_FOLDER:
                        raise ValueError(
                            f"{printable(os.fspath(folder / name))}: more than "
                            f"{MAX_LINKS_TO_FOLDER} links lead to this folder. HINT: remove links "
                            "that lead to each other"
                        )
                folders.append((name, (*above, inode), linked or link))
        waiting += reversed(folders)


def _inode(status: os.stat_result) -> Inode:
    return status.st_dev, status.st_ino


def _contains_itself(link: str, folder: Path) -> bool:
    """Return whether a link leads back to a folder that contains it."""
    return folder.resolve().is_relative_to(Path(link).resolve())


def _lines(file: TextIO) -> Iterator[str]:
    """Yield the lines of a CSV; raise csv.Error for one too long to be held in memory."""
    while line := file.readline(MAX_LINE_BYTES):
        if len(line) == MAX_LINE_BYTES:
            raise csv.Error(f"a line has {MAX_LINE_BYTES:,} characters or more")
        yield line


def _read_line_ends(work: Path) -> "np.ndarray[Any, Any] | None":
    """Return the end offsets of the listing's lines; None if it is missing or damaged."""
    try:
        with open(open_regular(work / LINE_ENDS_FILE), "rb") as file:
            ends = np.fromfile(file, np.int64)
        fd = open_regular(work / LISTING_FILE)
    except OSError:
        return None
    size = os.fstat(fd).st_size
    os.close(fd)
    whole = (ends[-1] if len(ends) else 0) == size and bool((np.diff(ends, prepend=0) > 0).all())
    return ends if whole else None


def _write_listing(entries: "_ClassFolders | _LabelTable", work: Path) -> None:
    """Write the listing of samples, atomically."""
    at, ends = 0, array("q")
    part = work / f"{LISTING_FILE}.part"
    try:
        with create_new_file(part) as file:
            for label_text, name in entries.each():
                if "\n" in name or "\n" in label_text:
                    raise ValueError(
                        f"{name!r} can't be packed: its name contains a line break. HINT: rename it"
                    )
                line = os.fsencode(f"{label_text}\t{name}\n")
                file.write(line)
                at += len(line)
                ends.append(at)
        (work / LINE_ENDS_FILE).unlink(missing_ok=True)  # belongs to an older listing
        part.replace(work / LISTING_FILE)
        write_atomically(work / LINE_ENDS_FILE, ends.tobytes())
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise
