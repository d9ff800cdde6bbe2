"""LMDB with one key per member, grouped as in a WebDataset (``000012.jpg``, ``000012.cls``); keys
without extension are one sample each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...boundary import Boundary
from . import ExportInfo, Sample, convert_library_errors, import_format_package
from .members import MemberSource, sample_members

CLASSES = b"__classes__"
# Keys of common recipes: counts, and labels of image-000000001 as label-000000001.
COUNTS = (b"length", b"len", b"size", b"count", b"num-samples", b"num_samples", b"nsamples")
MAX_COUNT_BYTES = 64
LABEL = b"label-"
MAP_BYTES = 1 << 40  # of address space, not of disk
SAMPLES_PER_TRANSACTION = 1000


def source(path: Path, name: str, labels: str | None, boundary: Boundary) -> "LMDBSource":
    if name:
        raise ValueError(
            f"{path}:{name}: named databases in an LMDB are not supported. HINT: {path}"
        )
    return LMDBSource(path, labels)


class LMDBSource(MemberSource):
    """An LMDB file, or a folder with data.mdb in it. Place of a member: its key."""

    def __init__(self, path: Path, labels: str | None) -> None:
        lmdb = import_format_package("lmdb")
        file = path / "data.mdb" if path.is_dir() else path
        options = {"readonly": True, "lock": False, "subdir": path.is_dir(), "readahead": False}
        try:
            self._database = lmdb.open(str(path), **options)
        except lmdb.Error as error:
            raise ValueError(f"{path} can't be read as LMDB: {error}") from None
        # The file is mapped: reading beyond its end would raise a signal.
        size, least = file.stat().st_size, self._page_count() * self._database.stat()["psize"]
        if size < least:
            raise ValueError(
                f"{path} is truncated: it has {size:,} bytes of {least:,}. HINT: copy it again"
            )
        super().__init__(str(path), self._groups(), labels)
        if self.label == "class" and not self.classes:
            self.classes = self._read_value(CLASSES).decode().splitlines()

    def content(self, place: Any) -> bytes:
        with convert_library_errors(self.description), self._database.begin() as transaction:
            found: bytes | None = transaction.get(place)
        if found is None:
            raise ValueError(f"the key {place!r} no longer exists")
        return found

    def close(self) -> None:
        self._database.close()

    def _page_count(self) -> int:
        return int(self._database.info()["last_pgno"]) + 1

    def _read_value(self, key: bytes) -> bytes:
        with self._database.begin() as transaction:
            return bytes(transaction.get(key) or b"")

    def _groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        last, members = "", dict[str, Any]()
        seen, key_count = 0, int(self._database.stat()["entries"])
        with self._database.begin() as transaction:
            lookup = transaction.cursor()
            for key in transaction.cursor().iternext(keys=True, values=False):
                seen += 1
                if seen > key_count:  # damaged pages that point at each other never end
                    break
                if key.startswith(b"__"):  # counts and lists, which common recipes store so
                    continue
                if key.lower() in COUNTS and len(transaction.get(key)) <= MAX_COUNT_BYTES:
                    self.notes.append(f"the key {key.decode()} is left out: it is no sample")
                    continue
                number = key.rpartition(b"-")[2]
                if key == LABEL + number and any(map(lookup.set_key, _numbered(number))):
                    continue
                folder, slash, file = _key_text(key).rpartition("/")
                stem, _, end = file.partition(".")
                sample_key = f"{folder}{slash}{stem}"
                if members and (sample_key != last or not end):
                    yield last, members
                    members = {}
                last = sample_key
                members[end] = bytes(key)
                if key in _numbered(number) and lookup.set_key(LABEL + number):
                    members["cls"] = LABEL + number
        if seen != key_count:
            more = "more than " if seen > key_count else f"{seen:,} of "
            raise ValueError(
                f"{self._database.path()} contains {more}{key_count:,} keys. HINT: copy it again"
            )
        if members:
            yield last, members


def _numbered(number: bytes) -> tuple[bytes, bytes]:
    """Return the keys of the image whose label is LABEL + number."""
    return b"image-" + number, b"img-" + number


def _key_text(key: bytes) -> str:
    """Return a key as text; one that is not printable text as hexadecimal digits."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return key.hex()
    return text if text.isprintable() else key.hex()


def write(path: Path, info: ExportInfo, samples: Iterator[Sample]) -> None:
    """Write a folder with data.mdb, in the order of the keys."""
    lmdb = import_format_package("lmdb")
    path.mkdir(exist_ok=True)
    database = lmdb.open(str(path), map_size=MAP_BYTES, metasync=False, sync=False)
    try:
        transaction = database.begin(write=True)
        for k, sample in enumerate(samples):
            for end, content in sample_members(info.meta.names, sample):
                transaction.put(f"{k:09}.{end}".encode(), content)
            if k % SAMPLES_PER_TRANSACTION == SAMPLES_PER_TRANSACTION - 1:
                transaction.commit()
                transaction = database.begin(write=True)
        if info.meta.classes:
            transaction.put(CLASSES, "\n".join(info.meta.classes).encode())
        transaction.commit()
        database.sync(True)
    finally:
        database.close()
    (path / "lock.mdb").unlink(missing_ok=True)
