"""Build the folder of a case: a copy of a script, with a fault injected."""

import ast
import string
from dataclasses import dataclass
from pathlib import Path

from injectors import MARK, Injector, marks_in

HERE = Path(__file__).parent
SCRIPTS = {path.stem: path for path in sorted((HERE / "scripts").glob("*.py"))}
# Scripts without marks, of the tests of the recorder; only modules beside them can be injected.
ZOO = HERE.parents[1] / "tests" / "record" / "zoo"
ENDLESS = ("--steps", "1000000")
ZOO_ARGUMENTS = {
    "plain_loop": ("--steps", "1000000", "--depth", "8"),
    "by_hand": (*ENDLESS, "--batch", "1024"),
    "accelerate_script": (*ENDLESS, "--batch", "1024"),
}
SCRIPTS |= {f"zoo-{name}": path for name in ZOO_ARGUMENTS for path in ZOO.rglob(f"{name}.py")}
MODULE = "common"


@dataclass(frozen=True)
class Built:
    """A script in the folder of a case.

    Attributes:
        script: Path of the copy.
        arguments: Arguments of the script.
        injected: Ranges of lines with injected code, by file name: the first and the last.
    """

    script: Path
    arguments: tuple[str, ...]
    injected: dict[str, list[tuple[int, int]]]

    def watched(self) -> list[str]:
        """Return the ranges of lines as options of clock.py."""
        folder = self.script.parent
        return [
            f"{folder / name}:{first}-{last}"
            for name, ranges in self.injected.items()
            for first, last in ranges
        ]


def build(
    folder: Path,
    script: str,
    injector: Injector | None,
    amount: float,
    around_step: tuple[str, str, str] = ("", "", ""),
) -> Built:
    """Write a script into a folder, with a fault injected or without any.

    ``around_step``: lines that a peer needs after the imports, where a step begins, and where it
    ends, after what is injected there.
    """
    source = SCRIPTS[script].read_text()
    path = folder / "train.py"
    injected: dict[str, list[tuple[int, int]]] = {}
    points = dict(injector.points) if injector else {}
    values = {"amount": said(injector, amount), "folder": str(folder)} if injector else {}
    if injector and injector.module:
        text = string.Template(injector.module).substitute(values).lstrip("\n")
        (folder / f"{MODULE}.py").write_text(text)
        injected[f"{MODULE}.py"] = [(1, len(text.splitlines()))]
        points["top"] = f"import {MODULE}\n" + points.get("top", "")
    if around_step[0]:
        points["top"] = around_step[0] + points.get("top", "")
        points["batch"] = around_step[1] + points.get("batch", "")
        points["step"] = points.get("step", "").rstrip() + "\n" + around_step[2]
        values["model"] = _model_of(marks_in(source))
    lines, ranges = _with_points(source, points, values)
    if injector and injector.points:
        injected[path.name] = ranges
    path.write_text("\n".join(lines) + "\n")
    ast.parse(path.read_text())
    stem = script.removeprefix("zoo-")
    return Built(path, ZOO_ARGUMENTS.get(stem, ()) if script != stem else (), injected)


def _model_of(marks: dict[str, dict[str, str]]) -> str:
    """Return the expression of the script's model at its steps."""
    return marks.get("step", {}).get("model") or marks.get("model", {}).get("model", "None")


def said(injector: Injector, amount: float) -> str:
    return f"{max(1, round(amount))}" if injector.whole else f"{amount:.6g}"


def _with_points(
    source: str, points: dict[str, str], values: dict[str, str]
) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the lines of a script with injected lines instead of marks, and the injected ranges.

    Raises:
        KeyError: A mark lacks a name that the injected text needs.
    """
    top, marks = _end_of_imports(source), marks_in(source)
    lines: list[str] = []
    ranges: list[tuple[int, int]] = []

    def inject(text: str, indent: str, names: dict[str, str]) -> None:
        filled = string.Template(text).substitute(values | names).strip("\n").splitlines()
        ranges.append((len(lines) + 1, len(lines) + len(filled)))
        lines.extend(indent + line if line else line for line in filled)

    for number, line in enumerate(source.splitlines(), 1):
        mark = MARK.match(line)
        if mark is None:
            lines.append(line)
        elif mark[2] in points:
            inject(points[mark[2]], mark[1], marks[mark[2]])
        if number == top and "top" in points:
            inject(points["top"], "", {})
    return lines, ranges


def _end_of_imports(source: str) -> int:
    """Return the last line of the imports at the beginning of a script."""
    last = 0
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            last = node.end_lineno or last
        elif last:
            break
    return last
