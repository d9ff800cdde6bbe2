"""Stack and memo of an unpickler, for the readers of pickles that execute nothing.

``manifest`` puts placeholders on the stack, and ``formats/dcp_folder`` the values themselves.
"""

from collections.abc import Callable
from typing import Any


class PickleError(ValueError):
    """A pickle with content that neither ``CheckpointSaver`` nor PyTorch writes."""


class GlobalName:
    """A class or function that a pickle names; it is not looked up."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class PickleStack:
    """The stack, its marks and the memo."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def mark(self, _: Any) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def pop_mark(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop()
        return items

    def pop(self, count: int) -> list[Any]:
        return [self.stack.pop() for _ in range(count)][::-1]

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def put(self, number: int) -> None:
        self.memo[number] = self.stack[-1]

    def get(self, number: int) -> None:
        self.stack.append(self.memo[number])

    def append(self, items: list[Any]) -> None:
        if not isinstance(self.stack[-1], list):
            raise PickleError("it appends to a value that is not a list")
        self.stack[-1].extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Set items, alternately keys and values, of the topmost value."""
        raise NotImplementedError


def constant(value: Any) -> Callable[[PickleStack, Any], None]:
    """Return the handler of an opcode that pushes always the same value."""
    return lambda machine, _: machine.push(value)


# By opcode: what handles it, with the stack and the argument of the opcode.
HANDLERS: dict[str, Callable[[Any, Any], None]] = {
    "PROTO": lambda _machine, _argument: None,
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"), PickleStack.push),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), PickleStack.put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), PickleStack.get),
    "NONE": constant(None),
    "NEWTRUE": constant(True),
    "NEWFALSE": constant(False),
    "MARK": PickleStack.mark,
    "APPEND": lambda machine, _: machine.append(machine.pop(1)),
    "APPENDS": lambda machine, _: machine.append(machine.pop_mark()),
    "SETITEM": lambda machine, _: machine.set_items(machine.pop(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_mark()),
}
