"""References of HDF5 files to other files: external links, raw values in other files (external
storage), and virtual datasets.

The HDF5 library searches a file in several places. All that exist are checked before any value is
read, as well as the files that those refer to.
"""

import glob
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ....security.files import open_regular
from ....security.text import printable
from ...boundary import Boundary
from . import import_format_package

# Environment variables with folders in which HDF5 searches.
PREFIXES = ("HDF5_EXT_PREFIX", "HDF5_EXTFILE_PREFIX", "HDF5_VDS_PREFIX")


def check_dataset(data: Any, description: str, boundary: Boundary) -> None:
    """Check all files that the values of an open dataset may be read from.

    Raises:
        ValueError: One is outside of the boundary, or is not a regular file.
    """
    _check(set(_files_of(data, description)), boundary)


def check_file(path: Path, boundary: Boundary) -> None:
    """Check all files that any link or dataset of a file refers to. Raises the same errors."""
    _check(set(_files_in(path)), boundary)


def stored_bytes(data: Any) -> int:
    """Return the size on disk of the values of an open dataset; at most, for those in other files,
    the size of these files."""
    size = os.stat(data.file.filename).st_size
    size = 0 if data.external or data.is_virtual else min(data.id.get_storage_size(), size)
    others = {os.path.realpath(file) for file, _ in _files_of(data, "")}
    return size + sum(os.stat(file).st_size for file in others if os.path.exists(file))


def _check(waiting: set[tuple[str, str]], boundary: Boundary) -> None:
    """Check (file, referrer) and all files that those refer to."""
    seen = set[str]()
    while waiting:
        file, referrer = waiting.pop()
        boundary.check(file, referrer)
        try:
            os.close(open_regular(file))
        except FileNotFoundError:  # a link to nowhere; values are then read as fill values
            continue
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{referrer} has its values in {printable(file)}, which can't be read: {error}"
            ) from None
        real = os.path.realpath(file)
        if real not in seen:
            seen.add(real)
            waiting |= set(_files_in(Path(file)))


def _files_in(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (file, referrer) for all links and datasets of a file; none if it is not HDF5."""
    h5py = import_format_package("h5py")
    try:
        file = h5py.File(path, "r")
    except OSError:  # raw values
        return
    with file:
        links, datasets = list[tuple[str, Any]](), list[Any]()
        file.visititems_links(lambda name, link: links.append((name, link)))
        file.visititems(lambda _, item: datasets.append(item) if hasattr(item, "shape") else None)
        for name, link in links:
            if isinstance(link, h5py.ExternalLink):
                referrer = f"{path}:{name}"
                yield from _candidates([glob.escape(link.filename)], path, referrer)
        for item in datasets:
            yield from _files_of(item, f"{path}:{item.name.lstrip('/')}")


def _files_of(data: Any, description: str) -> Iterator[tuple[str, str]]:
    """Yield (file, referrer) for the files that a dataset refers to."""
    path = Path(os.fsdecode(data.file.filename))
    patterns = {glob.escape(os.fsdecode(name)) for name, *_ in data.external or ()}
    for source in data.virtual_sources() if data.is_virtual else ():
        if source.file_name == ".":  # this file, in which the source may be behind a link
            yield str(path), description
        else:
            patterns |= {glob.escape(source.file_name), _virtual_pattern(source.file_name)}
    yield from _candidates(sorted(patterns), path, description)


def _virtual_pattern(name: str) -> str:
    """Return the pattern of the file names of a virtual dataset: %b is the number of a block."""
    parts = re.findall(r"%.|[^%]+|%", name, re.DOTALL)
    return "".join(
        "%" if part == "%%" else "*" if part[0] == "%" else glob.escape(part) for part in parts
    )


def _candidates(patterns: list[str], path: Path, referrer: str) -> Iterator[tuple[str, str]]:
    """Yield the existing files that HDF5 may open for file names in the file ``path``."""
    folders = [str(path.parent), str(path.resolve().parent), os.getcwd()]
    for variable in PREFIXES:
        folders += [
            prefix.replace("${ORIGIN}", folders[0])
            for prefix in os.environ.get(variable, "").split(":")
            if prefix
        ]
    for pattern in patterns:
        for folder in folders:
            # Of a file that does not exist, HDF5 also searches the last part of its name.
            for one in (pattern, os.path.basename(pattern)):
                place = os.path.join(glob.escape(folder), one)
                yield from ((file, referrer) for file in glob.iglob(place, include_hidden=True))
