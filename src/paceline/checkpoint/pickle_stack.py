"""Stack and memo of an unpickler, for the readers of pickles that execute nothing.

``manifest`` puts placeholders on the stack, and ``other_formats`` the values themselves.
"""

import pickletools
from collections.abc import Callable, Mapping
from typing import Any

Handler = Callable[[Any, Any], None]  # of an opcode, with the stack and the opcode's argument


class PickleError(ValueError):
    """A pickle with content that neither ``CheckpointSaver`` nor PyTorch writes."""


class GlobalName:
    """A class or function that a pickle names; it is not looked up."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class PickleStack:
    """The stack, its marks and the memo. Subclasses say what tuples, items, globals and calls are.

    Attributes:
        subject: What the pickle is, in messages.
    """

    subject = "it"

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

    def interpret(self, data: bytes, handlers: Mapping[str, Handler], max_opcodes: int) -> None:
        """Call the handler of each opcode of a pickle.

        Raises:
            PickleError: The pickle has an opcode without handler or too many, or is malformed.
        """
        try:
            for count, (opcode, argument, _) in enumerate(pickletools.genops(data), 1):
                if count > max_opcodes:
                    raise PickleError(f"{self.subject} has more than {max_opcodes:,} opcodes")
                if opcode.name not in handlers:
                    raise PickleError(f"{self.subject} has the opcode {opcode.name}")
                handlers[opcode.name](self, argument)
        except PickleError:
            raise
        except (ValueError, IndexError, KeyError, AttributeError, TypeError):
            raise PickleError(f"{self.subject} is malformed") from None


def constant(value: Any) -> Handler:
    """Return the handler of an opcode that pushes always the same value."""
    return lambda machine, _: machine.push(value)


def _push_tuple(count: int) -> Handler:
    return lambda machine, _: machine.push_tuple(machine.pop(count))


HANDLERS: dict[str, Handler] = {
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
    **{
        name: _push_tuple(n) for n, name in enumerate(("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"))
    },
    "TUPLE": lambda machine, _: machine.push_tuple(machine.pop_mark()),
    "GLOBAL": lambda machine, name: machine.push_global(name),
    "REDUCE": lambda machine, _: machine.reduce(*machine.pop(2)),
    "BUILD": lambda machine, _: machine.build(*machine.pop(1)),
}
