"""The source files of a script: its own and those of the local modules that it imports.

Nothing is imported. Local modules are those in the script's folder (of a module that ``-m`` starts:
in its package and the working directory). Installed packages are only named.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from .job import Job, source_file

MAX_FILES = 400  # more are not read
_IMPORT = re.compile(
    r"^[ \t]*(?:from[ \t]+(?P<of>\.*[\w.]*)[ \t]+import[ \t]+(?P<names>\([^)]*\)|[^\n]*)"
    r"|import[ \t]+(?P<modules>[^\n]*))",
    re.MULTILINE,
)
_NAME = re.compile(r"[\w.]+")
_HOROVOD = re.compile(
    r"^[^#\n]*\b(?:from[ \t]+horovod\b|import[ \t][^#\n]*\bhorovod\b|HOROVOD_[A-Z])"
    r"|^[ \t]*(?:from[ \t]+ddl[ \t]+import\b|import[ \t](?:[^#\n]*,)?[ \t]*ddl\b)",
    re.MULTILINE,
)


@dataclass(frozen=True)
class ScriptSource:
    """The source files of a script.

    Attributes:
        texts: Text of each file; the script's own comes first.
        packages: Top-level names of the installed packages that the files import, without those
            of the standard library.
        complete: Whether all local modules were read.
    """

    texts: dict[Path, str]
    packages: frozenset[str]
    complete: bool


def read_source(name: str, module: bool) -> ScriptSource:
    """Read the files of a script, or of a module that ``-m`` starts.

    Raises:
        ValueError: There is no such script or module.
    """
    texts: dict[Path, str] = {}
    packages: set[str] = set()
    for file in _read_files(name, module):
        if len(texts) == MAX_FILES:
            return ScriptSource(texts, frozenset(packages), False)
        texts[file.path] = file.text
        packages |= file.packages
    return ScriptSource(texts, frozenset(packages), True)


def uses_horovod(job: Job) -> bool:
    """Return whether the script or a local module imports horovod or ddl, or names variables of
    Horovod.
    """
    files = islice(_read_files(job.name, job.module), MAX_FILES)
    return any(_HOROVOD.search(file.text) for file in files)


def names_gpus(job: Job) -> bool:
    """Return whether the script or a local module names devices "cuda"."""
    files = islice(_read_files(job.name, job.module), MAX_FILES)
    return any("cuda" in file.text for file in files)


@dataclass(frozen=True)
class _File:
    path: Path
    text: str
    packages: set[str]  # that it imports


def _read_files(name: str, module: bool) -> Iterator[_File]:
    """Yield the script and each local module, read only when the next one is asked for."""
    script = source_file(name, module)
    folders = [script.parent]
    if module:  # the folder that contains the top-level package comes first
        levels = name.count(".") + (script.name == "__main__.py")
        folders = [script.parents[levels], Path.cwd()]
    seen: set[Path] = set()
    pending = [script]
    while pending:
        path = pending.pop().resolve()
        if path in seen:
            continue
        seen.add(path)
        try:
            text = path.read_text(errors="replace")
        except OSError:
            continue
        packages: set[str] = set()
        for imported, below in _imports(text):
            found = _local_files(imported, below, path, folders)
            pending += found
            top = imported.partition(".")[0]
            if top and not found and top not in sys.stdlib_module_names:
                packages.add(top)
        yield _File(path, text, packages)


def _imports(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each imported module, and the names that are imported from it."""
    for found in _IMPORT.finditer(text):
        if found["modules"] is not None:
            for part in found["modules"].partition("#")[0].split(","):
                if name := _NAME.match(part.strip()):
                    yield name[0], []
        else:
            names = re.sub(r"#[^\n]*", "", found["names"]).strip("()\\ \t\n").split(",")
            yield found["of"], [part.split()[0] for part in names if part.split()]


def _local_files(imported: str, below: list[str], path: Path, folders: list[Path]) -> list[Path]:
    """Return the files of an imported local module and of the packages that contain it."""
    relative = len(imported) - len(imported.lstrip("."))
    if relative:
        folders = [path.parents[relative - 1]] if relative <= len(path.parents) else []
    parts = [part for part in imported.split(".") if part]
    found: list[Path] = []
    for folder in folders:
        names = [parts[:i] for i in range(1, len(parts) + 1)] + [[*parts, name] for name in below]
        for name in names:
            place = folder.joinpath(*name)
            files = (place.with_name(f"{place.name}.py"), place / "__init__.py")
            found += [file for file in files if file.is_file()]
        if relative and (folder / "__init__.py").is_file():
            found.append(folder / "__init__.py")
        if found or (parts and (folder / parts[0]).is_dir()):
            break
    return found
