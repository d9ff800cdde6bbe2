"""Read which modules of paceline a module imports."""

import ast
from pathlib import Path


def modules_imported(path: Path, source: Path) -> set[tuple[str, ...]]:
    """Return the modules of paceline that a file imports, also inside its functions.

    Each module is a tuple of the parts of its name below the package ``source``, such as
    ("record", "ring", "states"). The last part may be a name inside a module.
    """
    package = ["paceline", *path.relative_to(source).with_suffix("").parts][:-1]
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
