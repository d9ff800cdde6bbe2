"""Architecture rules: which folder may import which, and what starts without torch."""

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from imports import modules_imported, statements

import paceline

SOURCE = Path(paceline.__file__).parent
# From the top layer down; a layer imports only layers below it in this list.
FLOORS = [
    *("cli", "compat", "study", "predict", "launch", "world", "parallel", "optim", "comm"),
    *("data", "checkpoint", "deploy", "report", "analyze", "knobs", "cost", "cluster"),
    *("observe", "record", "security"),
]
MODULES = sorted(p for p in SOURCE.rglob("*.py") if p.parent != SOURCE)


def floor_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def floors_imported(path: Path) -> set[str]:
    """Return the layers of paceline that a module imports, also inside its functions."""
    return {parts[0] for parts in modules_imported(path, SOURCE)} & set(FLOORS)


def circle_in(folder: Path) -> list[str]:
    """Return the entries of a folder (files and subfolders) that import each other in a cycle."""
    inside = folder.relative_to(SOURCE).parts
    entries = {p.stem for p in folder.iterdir() if p.suffix == ".py" or p.is_dir()} - {"__init__"}
    imports: dict[str, set[str]] = {entry: set() for entry in entries}
    for path in folder.rglob("*.py"):
        entry = path.relative_to(folder).with_suffix("").parts[0]
        if entry == "__init__":
            continue
        for parts in modules_imported(path, SOURCE):
            if parts[: len(inside)] == inside and len(parts) > len(inside):
                imports[entry] |= {parts[len(inside)]} & entries - {entry}
    while leaves := {entry for entry, others in imports.items() if not others}:
        imports = {e: others - leaves for e, others in imports.items() if e not in leaves}
    return sorted(imports)


def test_every_folder_has_a_layer():
    folders = {p.name for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders <= set(FLOORS)


def test_page_of_the_architecture_lists_every_folder():
    """Layers in the order in which they import, each with its subfolders."""
    page = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)/` \|(.*)$", page, re.MULTILINE))
    assert [name for name in rows if name in FLOORS] == FLOORS
    rows["launch"] += "".join(f"`{name}/`" for name in rows)  # it has a table of its own
    folders = {path.relative_to(SOURCE).parts[:2] for path in MODULES}
    missing = [
        f"{floor}/{folder}"
        for floor, folder in sorted(folders)
        if not folder.endswith(".py") and f"`{folder}/" not in rows[floor]
    ]
    assert not missing


def test_imports_go_only_to_lower_layers():
    wrong = {}
    for path in MODULES:
        own = FLOORS.index(floor_of(path))
        if above := [name for name in floors_imported(path) if FLOORS.index(name) < own]:
            wrong[str(path.relative_to(SOURCE))] = above
    assert not wrong, "modules that import from a floor above their own"


FOLDERS = sorted({path.parent for path in SOURCE.rglob("*.py")})


def test_no_import_cycles_in_a_folder():
    circles = {str(folder.relative_to(SOURCE)): circle_in(folder) for folder in FOLDERS}
    assert not {folder: circle for folder, circle in circles.items() if circle}


def test_import_cycle_is_detected(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "below.py").write_text("from .c import x\n")
    (tmp_path / "a" / "c.py").write_text("def f():\n    from ..a import below\n")
    (tmp_path / "a" / "above.py").write_text("from .c import x\n")
    assert circle_in(tmp_path / "a") == ["above", "below", "c"]


MAX_FILES = 18  # per folder, without its subfolders


@pytest.mark.parametrize("top", ["src", "tests", "benchmarks", "docs", "examples"])
def test_number_of_files_per_folder_is_limited(top):
    root = SOURCE.parents[1]
    listed = subprocess.run(
        ["git", "ls-files", top], cwd=root, capture_output=True, text=True, check=True
    )
    count = Counter(str(Path(line).parent) for line in listed.stdout.splitlines())
    assert not {folder: files for folder, files in count.items() if files > MAX_FILES}


def test_names_of_test_files_differ():
    """pytest imports them as top-level modules."""
    tests = SOURCE.parents[1] / "tests"
    count = Counter(path.name for path in tests.rglob("test_*.py"))
    assert not {name for name, files in count.items() if files > 1}


def test_import_of_higher_layer_is_detected(tmp_path, monkeypatch):
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
def test_launcher_and_reports_do_not_import_torch(module):
    code = f"import sys, paceline.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_names_that_scripts_import_from_paceline_exist():
    """Of benchmarks, examples, docs and tests, some of which run only in the slow tiers."""
    root = Path(__file__).resolve().parents[1]
    scripts = [
        p
        for part in ("benchmarks", "examples", "docs", "tests")
        for p in (root / part).rglob("*.py")
    ]
    missing = {
        f"{script.relative_to(root)}: {node.module}.{alias.name}"
        for script in scripts
        for node in statements(ast.parse(script.read_bytes()))
        if isinstance(node, ast.ImportFrom) and not node.level and node.module
        if node.module.partition(".")[0] == "paceline"
        for alias in node.names
        if not exists(node.module, alias.name)
    }
    assert not missing


def exists(module: str, name: str) -> bool:
    try:
        found = importlib.import_module(module)
        return hasattr(found, name) or bool(importlib.import_module(f"{module}.{name}"))
    except ImportError:
        return False
