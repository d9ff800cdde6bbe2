"""Storage speed of a folder: large files written and read, small files created and read.

All files are in a temporary subfolder that is removed at the end. Write times include fsync. Before
reading, the kernel is asked to drop the files from the page cache, and the result is checked.
"""

import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

from ....cluster.topology.local_resources import IN_MEMORY, file_system_type
from ....cost.machine.machine_file import BANDWIDTH, FILES, Figure, Storage
from ....security.removal import TemporaryFolder
from . import page_cache
from .device_speed import rate
from .host_facts import free_space

CHUNK = 4 << 20
LARGEST = 128 << 20  # maximum bytes of a file
LONG_ENOUGH = 0.1  # seconds of one file above which the size no longer grows
FILES_MOST = 64  # maximum number of large files
SMALL, IN_FOLDER, FOLDERS = 4096, 100, 20  # bytes of a small file, files per folder, folders
LEAST_FREE = 64 << 20
UNKNOWN_FREE = 4 << 30  # assumed where a file system does not report its free space
DROPPED = 0.02  # maximum cached fraction of a file that counts as dropped from the page cache


@dataclass(frozen=True)
class Written:
    """A large file, its size in bytes, and the seconds that writing it took."""

    path: Path
    size: int
    seconds: float


def storage(folder: Path, seconds: float) -> Storage:
    """Measure the storage of a folder as seen from this host.

    Args:
        folder: An existing folder.
        seconds: Approximate time for each of writing, reading and small files.

    Raises:
        ValueError: The folder does not exist, is not writable or is full.
    """
    free = free_space(folder)
    if not folder.is_dir():
        raise ValueError(f"--data {folder}: {_missing(folder)}. HINT: give one that all hosts have")
    if free is not None and free < LEAST_FREE:
        raise ValueError(
            f"--data {folder} has {free / 2**20:.1f} MiB free, and the measurement needs "
            f"{LEAST_FREE >> 20} MiB. HINT: free space, or give another folder"
        )
    try:
        own = TemporaryFolder(".paceline-check-", folder)
    except OSError as error:
        raise ValueError(
            f"--data {folder} can't be written to: {error.strerror}. HINT: give a folder that you "
            "may write to, or leave --data out"
        ) from None
    try:
        return _measured(folder, own.path, UNKNOWN_FREE if free is None else free, seconds)
    except OSError as error:
        raise ValueError(
            f"--data {folder}: {error.strerror} while measuring. HINT: check the quota of the "
            "folder and the state of its server"
        ) from None
    finally:
        own.remove()


def _missing(folder: Path) -> str:
    return "is not a folder" if folder.exists() else "does not exist on this host"


def _measured(folder: Path, own: Path, free: int, seconds: float) -> Storage:
    filesystem = file_system_type(folder)
    written = _write(own, free // 10, seconds)
    write = Figure.of([file.size / file.seconds for file in written], BANDWIDTH)
    parts = [page_cache.drop_files([file.path]) for file in written]
    read = Figure.of(_read(written, seconds), BANDWIDTH)
    cached_read = Figure.of(_read(written[-1:] * 5, seconds / 4), BANDWIDTH)
    for file in written:
        file.path.unlink()
    create, small_read = _small(own, seconds)
    return Storage(
        str(folder),
        filesystem,
        _of_cache(filesystem, parts),
        read,
        write,
        cached_read,
        create,
        small_read,
    )


def _of_cache(filesystem: str, resident: list[float | None]) -> str:
    """Return "in" if files were read partly from the page cache, "out" if not, or "unknown"."""
    known = [part for part in resident if part is not None]
    if filesystem in IN_MEMORY or (known and max(known) > DROPPED):
        return "in"
    own_cache = filesystem.partition(".")[0] in page_cache.OWN_CACHE
    return "unknown" if own_cache or len(known) < len(resident) else "out"


def _write(own: Path, room: int, seconds: float) -> list[Written]:
    """Write files until the time or the space is used up.

    The size doubles until writing one file takes LONG_ENOUGH.
    """
    data, size = os.urandom(CHUNK), CHUNK
    found: list[Written] = []
    used, end = 0, time.perf_counter() + seconds
    while len(found) < FILES_MOST and used + size <= room:
        path = own / f"large-{len(found)}"
        start = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            for _ in range(size // CHUNK):
                file.write(data)
            os.fsync(file.fileno())
        found.append(Written(path, size, time.perf_counter() - start))
        used += size
        if found[-1].seconds < LONG_ENOUGH and size < LARGEST:
            size *= 2
        elif time.perf_counter() > end:
            break
    # The first files are small, and their times are mostly the latency of the disk.
    return [file for file in found if 4 * file.size >= found[-1].size]


def _read(files: list[Written], seconds: float) -> list[float]:
    """Return the bytes per second of each file, until the time is used up."""
    buffer, found = memoryview(bytearray(CHUNK)), []
    end = time.perf_counter() + seconds
    for written in files:
        start = time.perf_counter()
        with written.path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
        found.append(written.size / (time.perf_counter() - start))
        if time.perf_counter() > end:
            break
    return found


def _small(own: Path, seconds: float) -> tuple[Figure, Figure]:
    """Return the rates of creating and of reading files of 4 KiB, one value for each subfolder.

    Files are created as when an archive is unpacked, without fsync. When they are read, their
    directory entries are still cached.
    """
    data, times = os.urandom(SMALL), []
    folders: list[Path] = []
    end = time.perf_counter() + seconds / 2
    while len(folders) < FOLDERS and (time.perf_counter() < end or not folders):
        folder = own / f"small-{len(folders)}"
        start = time.perf_counter()
        folder.mkdir()
        for number in range(IN_FOLDER):
            (folder / str(number)).write_bytes(data)
        times.append(time.perf_counter() - start)
        folders.append(folder)
    create = rate(IN_FOLDER, times, FILES)
    paths = [folder / str(number) for folder in folders for number in range(IN_FOLDER)]
    page_cache.drop_files(paths)
    random.Random(0).shuffle(paths)
    times, end = [], time.perf_counter() + seconds / 2
    for first in range(0, len(paths), IN_FOLDER):
        start = time.perf_counter()
        for path in paths[first : first + IN_FOLDER]:
            path.read_bytes()
        times.append(time.perf_counter() - start)
        if time.perf_counter() > end:
            break
    return create, rate(IN_FOLDER, times, FILES)
