"""``paceline check --pack-env``: compare ``import torch`` from an environment and from one file.

Each is measured twice: the first import after its files were dropped from the page cache, and
repeated imports.
"""

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ...cost.import_cost import Load, Packed
from ...cost.machine.machine_file import SECONDS, Figure
from ..probe.measure import page_cache
from ..probe.measure.import_time import Timed, import_torch, timed
from .find_environment import Environment, find_environment, regular_files
from .mount_packed import CannotMountError, Mounted, mount_file, unpack_file
from .pack_environment import SQUASHFS, choose_format, describe, pack, ready

ROUNDS = 3
NOT_ROOM = 1.1  # space on disk per byte of files: folders and partly filled blocks need space too


def pack_environment(file: Path | None) -> Packed:
    """Pack the environment of this process into a file, and measure ``import torch`` from both.

    Args:
        file: File to write; None chooses env.squashfs or env.tar in the working directory.

    Raises:
        ValueError: The environment can't be packed, the file can't be written, or torch can't be
            imported from the environment.
    """
    target = choose_format(file)
    own = find_environment()
    ready(own, target)
    with _ended_gently():
        with describe("import torch from the environment"):
            # One import first: it completes __pycache__, and fails early if torch is missing.
            file_of_torch = timed(own.interpreter).file
            _inside(file_of_torch, own.prefix, "HINT: pip install torch in this environment")
            own = find_environment()
            known = import_torch(1, own.interpreter)
            before = _loads(own.interpreter, own.prefix, [*regular_files(own.prefix)])
        with describe(f"packing {own.files:,} files into {target.name}") as step:
            seconds = pack(own, target, step)
        how, place, load, notes = _used(own, target)
    return Packed(
        str(own.prefix),
        page_cache.filesystem_type(own.prefix),
        own.files,
        own.bytes,
        own.outside,
        known.calls,
        known.counted_by,
        before,
        str(target),
        page_cache.filesystem_type(target.parent),
        target.stat().st_size,
        seconds,
        how,
        place,
        load,
        tuple(notes),
    )


Use = tuple[str, Figure | None, Load | None, list[str]]


def _used(own: Environment, file: Path) -> Use:
    """Measure imports from the file: mounted if possible, else unpacked."""
    notes: list[str] = []
    if file.suffix in SQUASHFS:
        try:
            with describe(f"import torch from {file.name}, mounted"):
                return *_from_mounts(file), notes
        except CannotMountError as why:
            notes.append(
                f"{file.name} can't be mounted on this host: {why}. It was unpacked instead"
            )
    try:
        with describe(f"import torch from {file.name}, unpacked"):
            return *_from_unpacked(own, file), notes
    except CannotMountError as why:
        notes = [note.replace(" It was unpacked instead", "") for note in notes]
        notes.append(
            f"{file.name} can't be unpacked on this host: {why}. It was not measured and is kept"
        )
    return "", None, None, notes


def _from_mounts(file: Path) -> tuple[str, Figure, Load]:
    """Measure with a new mount in each round, because its page cache is empty."""
    places: list[Mounted] = []
    firsts, others = [], []
    kept = 0.0
    for _ in range(ROUNDS):
        kept = max(kept, drop_from_cache([file]) or 0.0)
        with mount_file(file) as place:
            places.append(place)
            firsts.append(_timed(place))
            others.append(_timed(place))
    known = _visible(file.parent)
    load = _load(firsts, others, kept if known else None)
    return places[0].how, Figure.of([place.seconds for place in places], SECONDS), load


def _from_unpacked(own: Environment, file: Path) -> tuple[str, Figure, Load]:
    drop_from_cache([file])
    with unpack_file(file, int(NOT_ROOM * own.bytes)) as place:
        firsts = [_timed(place)]
        others = [_timed(place) for _ in range(ROUNDS)]
    return place.how, Figure.of([place.seconds], SECONDS), _load(firsts, others, None)


def _timed(place: Mounted) -> Timed:
    found = timed(str(place.folder / "bin" / "python"))
    _inside(
        found.file,
        place.folder,
        "HINT: unset PYTHONPATH; a .pth file or a link in it may lead out of the environment",
    )
    return found


def _loads(interpreter: str, prefix: Path, files: list[Path]) -> Load:
    firsts, others, kept = [], [], None
    for _ in range(ROUNDS):
        kept = drop_from_cache(files)
        firsts.append(timed(interpreter))
        others.append(timed(interpreter))
    return _load(firsts, others, kept if _visible(prefix) else None)


def _load(firsts: list[Timed], others: list[Timed], kept: float | None) -> Load:
    def figure(values: Iterable[float]) -> Figure:
        return Figure.of(values, SECONDS)

    first, repeated = (figure(one.seconds for one in some) for some in (firsts, others))
    return Load(first, repeated, figure(one.busy_s for one in others), kept)


def _visible(folder: Path) -> bool:
    """Return whether the page cache is the only cache of a folder's file system on this host."""
    return page_cache.filesystem_type(folder).partition(".")[0] not in page_cache.OWN_CACHE


def drop_from_cache(files: Iterable[Path]) -> float | None:
    """Drop files from the page cache; return the fraction of their bytes that stays cached.

    None if the fraction is unknown for all files.
    """
    size = kept = 0.0
    synced: set[int] = set()
    for path in files:
        try:
            with path.open("rb") as file:
                own = os.fstat(file.fileno())
                if own.st_dev not in synced:  # dirty pages can't be dropped
                    page_cache.flush_page(file.fileno())
                    synced.add(own.st_dev)
                page_cache.drop_from_cache(file.fileno())
                part = page_cache.resident_share(file.fileno())
        except OSError:  # the file was removed, or is not readable for this user
            continue
        if part is not None:
            size += own.st_size
            kept += part * own.st_size
    return kept / size if size else None


def _inside(file: str, folder: Path, hint: str) -> None:
    if not Path(file).resolve().is_relative_to(folder.resolve()):
        raise ValueError(
            f"--pack-env: torch is imported from {file}, outside of {folder}: there is nothing to "
            f"compare. {hint}"
        )


@contextmanager
def _ended_gently() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into exceptions, so that temporary files and mounts are removed."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {n: signal.signal(n, lambda number, _: sys.exit(128 + number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
