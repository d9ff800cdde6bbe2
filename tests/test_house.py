"""The house: which folder may import which, and what starts without torch."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import paceline

SOURCE = Path(paceline.__file__).parent
# From the top floor down; imports run down this list only.
FLOORS = [
    *("cli", "study", "predict", "launch", "world", "parallel", "comm", "data", "checkpoint"),
    *("optim", "deploy", "report", "analyze", "knobs", "cost", "cluster", "record", "security"),
]
MODULES = sorted(p for p in SOURCE.rglob("*.py") if p.parent != SOURCE)


def floor_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def modules_imported(path: Path) -> set[tuple[str, ...]]:
    """Modules of paceline that a module imports, inside its functions too, as parts of their
    names below the package: ("record", "ring", "states")."""
    package = ["paceline", *path.relative_to(SOURCE).with_suffix("").parts][:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {tuple(name.split(".")[1:]) for name in names if name.startswith("paceline.")}
    return found


def floors_imported(path: Path) -> set[str]:
    """Floors of paceline that a module imports, inside its functions too."""
    return {parts[0] for parts in modules_imported(path)} & set(FLOORS)


def circle_in(folder: Path) -> list[str]:
    """Entries of a folder (files and subfolders) that import each other in a circle."""
    inside = folder.relative_to(SOURCE).parts
    entries = {p.stem for p in folder.iterdir() if p.suffix == ".py" or p.is_dir()} - {"__init__"}
    imports: dict[str, set[str]] = {entry: set() for entry in entries}
    for path in folder.rglob("*.py"):
        entry = path.relative_to(folder).with_suffix("").parts[0]
        if entry == "__init__":
            continue
        for parts in modules_imported(path):
            if parts[: len(inside)] == inside and len(parts) > len(inside):
                imports[entry] |= {parts[len(inside)]} & entries - {entry}
    while leaves := {entry for entry, others in imports.items() if not others}:
        imports = {e: others - leaves for e, others in imports.items() if e not in leaves}
    return sorted(imports)


def test_every_folder_is_a_floor_of_the_house():
    folders = {p.name for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders <= set(FLOORS)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_run_down_the_house_only(path):
    own = FLOORS.index(floor_of(path))
    above = [name for name in floors_imported(path) if FLOORS.index(name) < own]
    assert not above, f"{path.name} on floor {FLOORS[own]} imports {above} from above it"


FOLDERS = sorted({path.parent for path in SOURCE.rglob("*.py")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_circle_of_imports_in_a_folder(folder):
    assert not circle_in(folder)


def test_the_checker_sees_a_circle(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "below.py").write_text("from .c import x\n")
    (tmp_path / "a" / "c.py").write_text("def f():\n    from ..a import below\n")
    (tmp_path / "a" / "above.py").write_text("from .c import x\n")
    assert circle_in(tmp_path / "a") == ["above", "below", "c"]


MAX_FILES = 15  # of a folder, beside its subfolders


@pytest.mark.parametrize("top", ["src", "tests", "benchmarks", "docs", "examples"])
def test_folders_are_small(top):
    root = SOURCE.parents[1]
    listed = subprocess.run(
        ["git", "ls-files", top], cwd=root, capture_output=True, text=True, check=True
    )
    count = Counter(str(Path(line).parent) for line in listed.stdout.splitlines())
    assert not {folder: files for folder, files in count.items() if files > MAX_FILES}


def test_the_checker_sees_an_import_up_the_house(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / "record").mkdir()
    module = tmp_path / "record" / "ring.py"
    module.write_text("def f():\n    from ..world import World\n")
    assert floors_imported(module) == {"world"}


@pytest.mark.parametrize(
    "module",
    [
        *("cli", "launch.single_node", "launch.multi_node", "launch.host_agent"),
        *("report.terminal.run_report", "analyze.figures.report", "comm.rendezvous"),
        *("cluster.topology.local_resources", "cluster.rank_identity"),
    ],
)
def test_the_launcher_and_reports_start_without_torch(module):
    code = f"import sys, paceline.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
