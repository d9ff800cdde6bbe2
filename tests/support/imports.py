"""Read Python source: which modules of paceline a module imports, and all modules of a folder."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path


def statements(tree: ast.AST, called: bool = True) -> Iterator[ast.AST]:
    """Yield all statements: a small part of the nodes of ``ast.walk``, in a tenth of its time.

    Without ``called``, only those that an import executes: none in functions or for type checkers.
    """
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if not called and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not called and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, name, ())


def texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name, relative to the folder, and the text of each Python file in it."""
    for path in sorted(folder.rglob("*.py")):
        yield str(path.relative_to(folder)), path.read_text()


@functools.cache
def modules_imported(path: Path, source: Path) -> frozenset[tuple[str, ...]]:
    """Return the modules of paceline that a file imports, also inside its functions.

    Each module is a tuple of the parts of its name below the package ``source``, such as
    ("record", "ring", "states"). The last part may be a name inside a module.
    """
    package = ["paceline", *path.relative_to(source).with_suffix("").parts][:-1]
    found: set[tuple[str, ...]] = set()
    for node in statements(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *(node.module or "").split(".")]).strip(".")
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {tuple(name.split(".")[1:]) for name in names if name.startswith("paceline.")}
    return frozenset(found)
