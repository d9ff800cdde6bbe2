"""Describe a thread's stack: its lines of the user's code, and what the innermost one does.

A function of C has no frame. If a thread is inside of one, the innermost frame is at the
instruction that called it, and the text of that call names it. Local variables are not read: up to
Python 3.12 that would keep the script's tensors alive.
"""

import dis
import linecache
import re
import sys
import sysconfig
from itertools import islice
from types import CodeType, FrameType, ModuleType
from typing import Any

from ...ring.stack_sampler import LIBRARY_PREFIXES, code_line
from .sidecar import MAX_CHAIN, MAX_FRAMES, MAX_STACKS, MAX_TEXT_CHARS, Activity, Stack

MAX_KNOWN_CALLS = 1 << 14  # instructions whose description is kept
_COMMANDS = sysconfig.get_path("scripts") + "/"  # the file of the command paceline is no user code
_PACKAGE = __name__.partition(".")[0]
# Modules whose functions only pass a call on.
_PASSING_MODULES = ("contextlib", "functools", "typing", "abc", "collections", "importlib")
_WAITING_MODULES = (
    *("threading", "queue", "subprocess", "select", "selectors", "socket", "ssl", "asyncio"),
    *("multiprocessing", "concurrent.futures", "signal", "sched"),
)
_FILE_MODULES = (
    *("pathlib", "io", "_pyio", "codecs", "gzip", "bz2", "lzma", "_compression", "zipfile"),
    *("tarfile", "shutil", "tempfile", "genericpath", "posixpath", "glob", "os", "mmap", "posix"),
    *("fileinput", "logging"),
)
_FILE_CALLS = frozenset(
    (
        *("open", "read", "readline", "readlines", "readinto", "read1", "write"),
        *("writelines", "flush", "fsync", "read_bytes", "read_text", "write_bytes"),
        *("write_text", "fromfile", "tofile", "listdir", "scandir", "stat", "exists"),
        *("isfile", "iterdir", "print"),
    )
)
_WAITING_CALLS = frozenset(
    ("sleep", "acquire", "wait", "communicate", "recv", "result", "poll", "waitpid")
)
_BUILTIN_TYPES = (dict, list, str, bytes, bytearray, set, tuple, int, float)
# Instructions in which a thread releases the interpreter lock only inside of a library.
_OPERATORS = (
    *("BINARY_OP", "BINARY_SUBSCR", "BINARY_SLICE", "STORE_SUBSCR", "STORE_SLICE", "COMPARE_OP"),
    *("UNARY_NEGATIVE", "UNARY_INVERT", "CONTAINS_OP"),
)
_DOTTED_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_INNER = re.compile(r"(\.<locals>)?(\.?<(genexpr|listcomp|setcomp|dictcomp)>)+$")
_METHOD = re.compile(r"\.\s*([A-Za-z_]\w*)$")

Place = tuple[str, int, str]  # file, line, function
Described = tuple[tuple[Place, ...], Activity, str]


class StackDescriber:
    """Describes stacks; keeps what it finds out about code objects and instructions.

    root: Code of the outermost function to describe.
    """

    def __init__(self, root: CodeType | None = None) -> None:
        self._root = root
        self._is_user_code: dict[CodeType, bool] = {}
        self._calls: dict[tuple[CodeType, int], tuple[Activity, str]] = {}

    def describe(self, frame: FrameType) -> Described:
        """Return the lines of the user's code, innermost first, the activity, and what it is of.

        The last is a function, or "" for Python itself.
        """
        # First the positions of all frames: the thread may run again while they are looked up.
        snapshot = []
        at: FrameType | None = frame
        while at is not None:
            snapshot.append((at, at.f_lasti))
            at = at.f_back
        places: list[Place] = []
        library: list[FrameType] = []  # frames inside of the innermost line of the user's code
        for at, offset in snapshot:
            if at.f_code is self._root or len(places) == MAX_CHAIN:
                break
            if self._is_users(at.f_code):
                line = code_line(at.f_code, offset)
                places.append((at.f_code.co_filename, line, function_name(at.f_code)))
            elif not places:
                library.append(at)
        activity, what = self._activity(frame, snapshot[0][1], library)
        return tuple(places), activity, what[:MAX_TEXT_CHARS]

    def _is_users(self, code: CodeType) -> bool:
        known = self._is_user_code.get(code)
        if known is None:
            known = not code.co_filename.startswith((*LIBRARY_PREFIXES, _COMMANDS))
            self._is_user_code[code] = known
        return known

    def _activity(
        self, frame: FrameType, offset: int, library: list[FrameType]
    ) -> tuple[Activity, str]:
        names = [(_module(inner), inner.f_code) for inner in library]
        names = [name for name in names if not _is_of(name[0], (_PACKAGE,)) or ".comm." in name[0]]
        if not names:
            return self._called(frame, offset)
        for module, code in reversed(names):
            if _is_of(module, _CALL_LOGGERS) and module != names[0][0]:
                continue
            if _is_of(module, ("torch.distributed", f"{_PACKAGE}.comm")):
                return Activity.COLLECTIVE, _function(module, code)
        for module, code in names:
            if code.co_name == "backward" and module in ("torch._tensor", "torch.autograd"):
                return Activity.TORCH, "backward"
        module, code = names[0]
        if module.startswith("torch.utils.data"):  # the loader; it is innermost only for moments
            return Activity.PYTHON, _function(module, code)
        called, what = self._called(frame, offset) if frame is library[0] else (Activity.PYTHON, "")
        named = next(
            (_function(m, c) for m, c in reversed(names) if not _is_of(m, _NO_NAMES)), what
        )
        if called in (Activity.WAIT, Activity.FILE) or _is_of(module, _WAITING_MODULES):
            kind = called if called != Activity.PYTHON else Activity.WAIT
            kind = Activity.WAIT if _is_of(module, _WAITING_MODULES) else kind
            return kind, named or _function(module, code)
        if _is_of(module, _FILE_MODULES):
            return Activity.FILE, _function(module, code)
        if _is_of(module, ("torch",)):
            shown = next((name for name in names if not _is_of(name[0], _TORCH_INTERNAL)), names[0])
            return Activity.TORCH, _function(*shown)
        if called == Activity.TORCH:
            return called, what
        return Activity.LIBRARY, named or _function(module, code)

    def _called(self, frame: FrameType, offset: int) -> tuple[Activity, str]:
        """Return what the instruction of a frame at ``offset`` calls."""
        key = (frame.f_code, offset)
        known = self._calls.get(key)
        if known is None:
            if len(self._calls) >= MAX_KNOWN_CALLS:
                self._calls.clear()
            known = self._calls[key] = _describe_instruction(frame, offset)
        return known


# Calls around an operator or a module, which name neither.
_TORCH_INTERNAL = ("torch._ops", "torch.autograd.profiler", "torch.utils._contextlib", "torch._C")
_CALL_LOGGERS = ("torch.distributed.c10d_logger",)  # around each function of torch.distributed
_NO_NAMES = (*_PASSING_MODULES, "torch")


def function_name(code: CodeType) -> str:
    """Return the qualified name of a function; that of the function around a comprehension."""
    return _INNER.sub("", code.co_qualname) or "<module>"


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_of(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def _function(module: str, code: CodeType) -> str:
    return f"{module}.{code.co_qualname}"


def _describe_instruction(frame: FrameType, offset: int) -> tuple[Activity, str]:
    code = frame.f_code
    name = dis.opname[code.co_code[offset]] if offset >= 0 else ""
    if name in _OPERATORS:
        return (Activity.LIBRARY if _uses_only_numpy(frame) else Activity.TORCH), ""
    if not name.startswith(("CALL", "PRECALL")):
        return Activity.PYTHON, ""
    text = _text_of_call(code, offset)
    if not text:
        return Activity.PYTHON, ""
    parts = text.split(".")
    module, is_known = _resolve(frame, parts)
    last = parts[-1]
    if _is_of(module, ("torch.distributed",)):
        return Activity.COLLECTIVE, f"{module}.{last}"
    if (module == "time" and last == "sleep") or (not is_known and last in _WAITING_CALLS):
        return Activity.WAIT, text
    if last in _FILE_CALLS or _is_of(module, _FILE_MODULES):
        return Activity.FILE, text
    if is_known:
        if _is_of(module, ("torch",)):
            return Activity.TORCH, f"{module}.{last}"
        is_library = module not in ("", "builtins", "__main__") and _is_library(module)
        return (Activity.LIBRARY, f"{module}.{last}") if is_library else (Activity.PYTHON, "")
    if len(parts) > 1 and _is_tensor_method(last):
        if _uses_only_numpy(frame):
            return Activity.LIBRARY, f"numpy.ndarray.{last}"
        return Activity.TORCH, f"Tensor.{last}"
    return Activity.PYTHON, ""


def _text_of_call(code: CodeType, offset: int) -> str:
    """Return the name that an instruction calls, as written in the source: "self.file.read".

    What is not a plain name is left out: "?.sum" for "(a + b).sum".
    """
    try:
        line, end_line, start, end = next(islice(code.co_positions(), offset // 2, None))
    except (StopIteration, ValueError):
        return ""
    if line is None or start is None or end is None:
        return ""
    source = linecache.getline(code.co_filename, line).encode()
    text = source[start : end if line == end_line else None].decode(errors="replace")
    depth, bracket = 0, -1  # of the call: the last one that is in no other
    for at, sign in enumerate(text):
        if sign == "(" and depth == 0:
            bracket = at
        depth += (sign in "([{") - (sign in ")]}")
    called = text[:bracket].strip() if bracket > 0 else ""
    if _DOTTED_NAME.fullmatch(called):
        return called
    method = _METHOD.search(called)
    return f"?.{method[1]}" if method else ""


def _resolve(frame: FrameType, parts: list[str]) -> tuple[str, bool]:
    """Return the module that has a global function, and whether the name is a global one.

    Attributes are read of modules and classes only.
    """
    found: Any = frame.f_globals.get(parts[0])
    if found is None:
        return ("builtins", True) if parts[0] in frame.f_builtins else ("", False)
    owner = ""
    for name in parts[1:]:
        if not isinstance(found, ModuleType | type):
            return "", False
        owner = found.__name__ if isinstance(found, ModuleType) else found.__module__
        found = vars(found).get(name)
    if isinstance(found, ModuleType):
        return found.__name__, True
    module = getattr(found, "__module__", None)
    return (module if isinstance(module, str) else owner), bool(owner) or callable(found)


def _is_library(module: str) -> bool:
    file = getattr(sys.modules.get(module.partition(".")[0]), "__file__", None)
    return file is not None and file.startswith(LIBRARY_PREFIXES)  # a built-in one has no file


def _is_tensor_method(name: str) -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch.Tensor, name):
        return False
    return not any(hasattr(kind, name) for kind in _BUILTIN_TYPES)


def _uses_only_numpy(frame: FrameType) -> bool:
    """Return whether a function's code names numpy's module and not torch's."""
    found = set()
    for name in frame.f_code.co_names:
        value = frame.f_globals.get(name)
        if isinstance(value, ModuleType):
            found.add(value.__name__.partition(".")[0])
    return "numpy" in found and "torch" not in found


# Numbers for stacks and their frames, as they are stored in a line profile.


OTHER_STACKS: Described = ((), "python", "other stacks")  # type: ignore[assignment]


class StackTable:
    """The distinct stacks that a sampler saw. A full table counts further ones as one stack."""

    def __init__(self) -> None:
        self._stacks: dict[Described, int] = {}
        self._frames: dict[Place, int] = {}

    def number_of(self, described: Described) -> int:
        """Return the number of a stack, a new one if it is not known."""
        number = self._stacks.get(described)
        if number is not None:
            return number
        full = len(self._stacks) >= MAX_STACKS - 1
        if full or len(self._frames) + len(described[0]) > MAX_FRAMES:
            return self._stacks.setdefault(OTHER_STACKS, len(self._stacks))
        for place in described[0]:
            self._frames.setdefault(place, len(self._frames))
        return self._stacks.setdefault(described, len(self._stacks))

    def frame_number(self, place: Place) -> int | None:
        """Return the number of a frame that is on a known stack."""
        return self._frames.get(place)

    @property
    def places(self) -> list[Place]:
        return list(self._frames)

    @property
    def described(self) -> list[Described]:
        return list(self._stacks)

    def frames(self) -> list[tuple[str, int, str, str]]:
        """Return the frames for the file, with their lines of code."""
        return [
            (
                file[-MAX_TEXT_CHARS:],
                line,
                function[-MAX_TEXT_CHARS:],
                linecache.getline(file, line).strip()[:MAX_TEXT_CHARS],
            )
            for file, line, function in self._frames
        ]

    def stacks(self) -> list[Stack]:
        """Return the stacks for the file."""
        return [
            {"frames": [self._frames[place] for place in places], "activity": kind, "what": what}
            for places, kind, what in self._stacks
        ]
