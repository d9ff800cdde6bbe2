"""LMDB: a member a key, grouped as in a webdataset (``000012.jpg``, ``000012.cls``); of keys
without ends each is a sample."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from . import About, Sample, damage_told, needed
from .members import Members, members_of

CLASSES = b"__classes__"
TABLE_BYTES = 1 << 40  # of addresses, not of the disk
EACH = 1000  # samples a transaction


def source(path: Path, name: str, labels: str | None) -> "Pages":
    if name:
        raise ValueError(f"{path}:{name}: named tables are not read. HINT: {path}")
    return Pages(path, labels)


class Pages(Members):
    """A file, or a folder with data.mdb in it. Where a member lies: its key."""

    def __init__(self, path: Path, labels: str | None) -> None:
        lmdb = needed("lmdb")
        file = path / "data.mdb" if path.is_dir() else path
        options = {"readonly": True, "lock": False, "subdir": path.is_dir(), "readahead": False}
        try:
            self._pages = lmdb.open(str(path), **options)
        except lmdb.Error as error:
            raise ValueError(f"{path}: is no LMDB that can be read: {error}") from None
        # it is mapped: to read behind the file's end would be a signal
        size, least = file.stat().st_size, self._last() * self._pages.stat()["psize"]
        if size < least:
            raise ValueError(
                f"{path}: is truncated: {size:,} bytes of {least:,}. HINT: copy it again"
            )
        super().__init__(str(path), self._groups(), labels)
        if self.label == "class" and not self.classes:
            self.classes = self._told(CLASSES).decode().splitlines()

    def content(self, where: Any) -> bytes:
        with damage_told(self.told), self._pages.begin() as view:
            found: bytes | None = view.get(where)
        if found is None:
            raise ValueError(f"{where!r} has vanished")
        return found

    def close(self) -> None:
        self._pages.close()

    def _last(self) -> int:
        return int(self._pages.info()["last_pgno"]) + 1

    def _told(self, key: bytes) -> bytes:
        with self._pages.begin() as view:
            return bytes(view.get(key) or b"")

    def _groups(self) -> Iterator[tuple[str, dict[str, Any]]]:
        last, members = "", dict[str, Any]()
        seen, told = 0, int(self._pages.stat()["entries"])
        with self._pages.begin() as view:
            for key in view.cursor().iternext(keys=True, values=False):
                seen += 1
                if seen > told:  # pages that point at each other have no end
                    break
                if key.startswith(b"__"):  # counts and lists, as recipes have them
                    continue
                folder, slash, file = _named(key).rpartition("/")
                stem, _, end = file.partition(".")
                own = f"{folder}{slash}{stem}"
                if members and (own != last or not end):
                    yield last, members
                    members = {}
                last = own
                members[end] = bytes(key)
        if seen != told:
            more = "more than " if seen > told else f"{seen:,} of "
            raise ValueError(
                f"{self._pages.path()}: holds {more}{told:,} keys. HINT: copy it again"
            )
        if members:
            yield last, members


def _named(key: bytes) -> str:
    """A key as people read it; one that is no text as hexadecimal digits."""
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return key.hex()
    return text if text.isprintable() else key.hex()


def write(path: Path, about: About, samples: Iterator[Sample]) -> None:
    """A folder with data.mdb, in the order of the keys."""
    lmdb = needed("lmdb")
    path.mkdir()
    pages = lmdb.open(str(path), map_size=TABLE_BYTES, metasync=False, sync=False)
    try:
        view = pages.begin(write=True)
        for k, sample in enumerate(samples):
            for end, content in members_of(about.meta.names, sample):
                view.put(f"{k:09}.{end}".encode(), content)
            if k % EACH == EACH - 1:
                view.commit()
                view = pages.begin(write=True)
        if about.meta.classes:
            view.put(CLASSES, "\n".join(about.meta.classes).encode())
        view.commit()
        pages.sync(True)
    finally:
        pages.close()
    (path / "lock.mdb").unlink(missing_ok=True)
