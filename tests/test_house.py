"""The house: which folder may import which, and what starts without torch."""

import ast
import subprocess
import sys
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


def floors_imported(path: Path) -> set[str]:
    """Floors of paceline that a module imports, inside its functions too."""
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
        found |= {name.split(".")[1] for name in names if name.startswith("paceline.")}
    return found & set(FLOORS)


def test_every_folder_is_a_floor_of_the_house():
    folders = {p.name for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders <= set(FLOORS)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_run_down_the_house_only(path):
    own = FLOORS.index(floor_of(path))
    above = [name for name in floors_imported(path) if FLOORS.index(name) < own]
    assert not above, f"{path.name} on floor {FLOORS[own]} imports {above} from above it"


def test_the_checker_sees_an_import_up_the_house(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    (tmp_path / "record").mkdir()
    module = tmp_path / "record" / "ring.py"
    module.write_text("def f():\n    from ..world import World\n")
    assert floors_imported(module) == {"world"}


@pytest.mark.parametrize(
    "module",
    [
        *("cli", "launch.local", "launch.several", "launch.on_host", "report.terminal"),
        *("analyze.report", "cluster.host", "cluster.who", "comm.meet"),
    ],
)
def test_the_launcher_and_reports_start_without_torch(module):
    code = f"import sys, paceline.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
