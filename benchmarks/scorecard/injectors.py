"""What an injector is, and how the injectors of one half are loaded.

An injector is text that is put into a copy of a script, at the places that the script marks
(``# <step model=net loss=loss>``), in a module beside it, or around the command that runs it.
"""

import importlib.util
import re
import string
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
HALVES = {"open": HERE / "open_half", "kept-out": HERE / "kept_out"}
MARK = re.compile(r"^( *)# <([a-z-]+)((?: \w+=\S+)*)>$", re.MULTILINE)


@dataclass(frozen=True)
class Injector:
    """One way to inject a kind of fault.

    In texts, ``$amount`` is the calibrated strength, ``$folder`` a folder for the case, and
    ``$NAME`` is what the script's mark gives for NAME.

    Attributes:
        kind: Name in KINDS.
        way: Name of the way of injection.
        start: First amount that is tried.
        points: Lines to insert, by mark. "top" is after the script's imports.
        module: Source of a module beside the script, which it imports after its other imports.
        around: Context manager, given amount and case folder, in which the script runs.
        files: Function that writes files to the folder that it is given, once per case.
        command: Words in front of the command that runs the script.
        environment: Environment variables of the command.
        needs: Regular expression that the script has to contain.
        never: Regular expression that the script must not contain.
        whole: Whether amounts are integers.
        fixed: Whether the amount is always ``start``.
        most: Maximum amount.
        most_share: Maximum share of a step to calibrate to.
        own_threads: Whether the command's option ``--threads 1`` is left out.
        steady: Whether the fault takes the same time in each step, or in each N-th (4, 5 or 2).
    """

    kind: str
    way: str
    start: float = 1.0
    points: dict[str, str] = field(default_factory=dict)
    module: str = ""
    around: Callable[[float, Path], AbstractContextManager] | None = None
    files: Callable[[Path], None] | None = None
    command: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    needs: str = ""
    never: str = ""
    whole: bool = False
    fixed: bool = False
    most: float = 1e9
    most_share: float = 0.45
    own_threads: bool = False
    steady: bool = True

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.way}"

    def fits(self, source: str) -> bool:
        """Whether a script has all marks and properties that the injector needs."""
        marks = marks_in(source)
        for point, text in self.points.items():
            if point == "top":
                continue
            if point not in marks:
                return False
            if names_in(text) - {"amount", "folder"} - set(marks[point]):
                return False
        if self.never and re.search(self.never, source):
            return False
        return not self.needs or re.search(self.needs, source) is not None


def marks_in(source: str) -> dict[str, dict[str, str]]:
    """Return the expressions of each mark of a script, by name."""
    return {
        found[2]: dict(pair.split("=", 1) for pair in found[3].split())
        for found in MARK.finditer(source)
    }


def names_in(text: str) -> set[str]:
    return set(string.Template(text).get_identifiers())


def load_half(half: str) -> list[Injector]:
    """Return the injectors of "open" or "kept-out".

    Raises:
        ValueError: An injector is there twice, or is not of a known kind.
    """
    from kinds import KINDS

    found: dict[str, Injector] = {}
    for path in sorted(HALVES[half].glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"{half.replace('-', '_')}_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for one in module.INJECTORS:
            if one.name in found or one.kind not in KINDS:
                raise ValueError(f"{path}: {one.name} is not of a known kind, or there twice")
            found[one.name] = one
    return list(found.values())


# Parts of modules beside a script.

EACH_SAMPLE = '''
import functools

from torch.utils.data import DataLoader, IterableDataset

_plain_init = DataLoader.__init__


def _with_extra(dataset, extra):
    """Give the dataset's class a subclass that does more for each sample."""
    plain = type(dataset)
    if getattr(plain, "has_extra", False):
        return
    members = {"has_extra": True}
    if isinstance(dataset, IterableDataset):
        def __iter__(self):
            for number, sample in enumerate(plain.__iter__(self)):
                extra(number)
                yield sample
        members["__iter__"] = __iter__
    else:
        def __getitem__(self, index):
            extra(int(index))
            return plain.__getitem__(self, index)
        members["__getitem__"] = __getitem__
        if hasattr(plain, "__getitems__"):
            def __getitems__(self, rows):
                for row in rows:
                    extra(int(row))
                return plain.__getitems__(self, rows)
            members["__getitems__"] = __getitems__
    dataset.__class__ = type(plain.__name__, (plain,), members)
'''
HAS_LOADER = r"DataLoader\(|Trainer\("
