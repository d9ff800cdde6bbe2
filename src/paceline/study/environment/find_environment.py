"""The environment to pack, and its dependencies outside its folder.

The environment is the venv or conda environment of this process. Whatever it uses outside its
folder must be present on a node in addition to the packed file.
"""

import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ...cost.machine.units import join_words
from ...security.schema import read_json

MAX_URL_BYTES = 1 << 16


@dataclass
class DirectUrl:
    """direct_url.json of a package that pip installed from a folder or URL."""

    url: str = ""
    dir_info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Environment:
    """A venv or conda environment.

    Attributes:
        prefix: Folder of the environment.
        files: Number of regular files.
        bytes: Total size of the regular files; hard links count once.
        outside: Descriptions of dependencies outside the folder.
    """

    prefix: Path
    files: int
    bytes: int
    outside: tuple[str, ...]

    @property
    def interpreter(self) -> str:
        return str(self.prefix / "bin" / "python")


def find_environment() -> Environment:
    """Return the environment of this process.

    Raises:
        ValueError: This is the system's Python, which has no separate folder.
    """
    prefix, base = Path(sys.prefix), Path(sys.base_prefix)
    if prefix == base and not (prefix / "conda-meta").is_dir():
        raise ValueError(
            f"--pack-env: {sys.executable} is not in a virtual environment: {prefix} belongs "
            "to the system and is not packed. HINT: python -m venv ENV && ENV/bin/pip install "
            "torch paceline, then ENV/bin/paceline check --pack-env"
        )
    sizes: dict[tuple[int, int], int] = {}
    count = 0
    for path in regular_files(prefix):
        found = path.lstat()
        sizes[found.st_dev, found.st_ino] = found.st_size  # hard links count once
        count += 1
    return Environment(prefix, count, sum(sizes.values()), tuple(_outside(prefix, base)))


def regular_files(folder: Path) -> Iterator[Path]:
    """Yield every regular file under a folder."""
    folders = [os.fspath(folder)]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    yield Path(entry.path)


def _outside(prefix: Path, base: Path) -> Iterator[str]:
    if base != prefix:
        yield f"the base Python with its standard library: {base}"
    given = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    away = [folder for folder in given if not _in(folder, prefix)]
    if away:
        yield f"folders of PYTHONPATH: {join_words(away)}"
    editable = dict(_editable(prefix))
    if editable:
        named = [f"{name} ({folder})" for name, folder in editable.items()]
        yield f"editable installs: {join_words(named)}"
    known = {*given, *editable.values()}
    others = [folder for folder in _searched(prefix, base) if not _under(folder, known)]
    if others:
        yield f"folders that modules come from: {join_words(others)}"
    links = [*_links(prefix, base)]
    if links:
        yield f"targets of symbolic links: {join_words(links)}"


def _in(path: str, folder: Path) -> bool:
    return Path(path).resolve().is_relative_to(folder.resolve())


def _under(path: str, folders: set[str]) -> bool:
    return any(_in(path, Path(folder)) for folder in folders)


def _editable(prefix: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the source folder of each editable install."""
    for path in sorted(prefix.glob("lib/python*/site-packages/*.dist-info/direct_url.json")):
        try:
            direct_url = read_json(path, DirectUrl, MAX_URL_BYTES)
        except (OSError, ValueError):
            continue
        if direct_url.dir_info.get("editable") and direct_url.url.startswith("file://"):
            yield (
                path.parent.name.partition("-")[0],
                unquote(direct_url.url.removeprefix("file://")),
            )


def _searched(prefix: Path, base: Path) -> list[str]:
    """Return other folders on the module search path, from .pth files or system site-packages."""
    own = str(Path(sys.argv[0]).resolve().parent)
    found = [
        folder for folder in sys.path if os.path.isabs(folder) and folder not in (own, os.getcwd())
    ]
    version = f"python{sys.version_info[0]}{sys.version_info[1]}.zip"
    standard = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    return [
        folder
        for folder in dict.fromkeys(found)
        if not _in(folder, prefix)
        and not folder.endswith(version)
        and (not _under(folder, standard) or "site-packages" in folder)
        and os.path.isdir(folder)
        and folder != str(base)
    ]


def _links(prefix: Path, base: Path) -> Iterator[str]:
    """Yield each folder that symbolic links outside the environment point to, once.

    Links to the base Python are left out: the interpreter itself is such a link.
    """
    seen = set()
    for folder, folders, names in os.walk(prefix):
        for name in (*names, *folders):
            path = os.path.join(folder, name)
            if os.path.islink(path):
                target = os.path.dirname(os.path.realpath(path))
                if not _in(target, prefix) and not _in(target, base) and target not in seen:
                    seen.add(target)
                    yield target
