"""The file ``.metadata`` of torch.distributed.checkpoint: a pickle, read without an unpickler.

Even an unpickler that knows no functions lets a file of a few bytes use any amount of memory or
time: a large number in its memo, a length before the bytes, keys of tuples of tuples. So the
opcodes that PyTorch writes are interpreted here, and others are errors. Objects become records of
their fields.
"""

import pickletools
from collections.abc import Callable
from typing import Any

import torch

from ..pickle_stack import HANDLERS, GlobalName, PickleError, PickleStack, constant

MAX_OPCODES = 50_000_000
MAX_OBJECTS = 10_000_000  # some ten for each piece of a tensor
_MODULE = "torch.distributed.checkpoint"
_RECORDS = {
    *(
        f"{_MODULE}.metadata {name}"
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "BytesStorageMetadata"),
            *("TensorStorageMetadata", "ChunkStorageMetadata", "TensorProperties"),
        )
    ),
    f"{_MODULE}.filesystem _StorageInfo",
}
_IGNORED = {
    *(f"{_MODULE}.metadata _MEM_FORMAT_ENCODING", "torch.serialization _get_layout"),
    *("pathlib PosixPath", "pathlib WindowsPath", "pathlib._local PosixPath"),
}
_SIZE = "torch Size"


class Record:
    """The fields of an object. Records are compared by identity, as their fields come later."""

    __slots__ = ("state",)

    def __init__(self) -> None:
        self.state: Any = None

    def get(self, name: str) -> Any:
        """Return a field; None if there is none of this name."""
        return self.state.get(name) if isinstance(self.state, dict) else None


def read_records(data: bytes) -> Record:
    """Return the object in the content of a ``.metadata`` file.

    Raises:
        PickleError: PyTorch does not write such a file, or it exceeds a limit.
    """
    machine = _Machine()
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data), 1):
            handler = _HANDLERS.get(opcode.name)
            if handler is None:
                raise PickleError(f"it has the opcode {opcode.name}")
            if count > MAX_OPCODES or machine.objects > MAX_OBJECTS:
                raise PickleError(f"over {MAX_OPCODES:,} opcodes or {MAX_OBJECTS:,} objects")
            handler(machine, argument)
        (found,) = machine.stack
    except PickleError:
        raise
    except (ValueError, IndexError, KeyError, AttributeError, TypeError):
        raise PickleError("it is malformed") from None
    if not isinstance(found, Record):
        raise PickleError("it is no record")
    return found


class _Machine(PickleStack):
    """Stack and memo of an unpickler, with records for the objects."""

    def __init__(self) -> None:
        super().__init__()
        self.objects = 0

    def push_object(self, value: Any) -> None:
        self.objects += 1
        self.stack.append(value)

    def memoize(self, _: Any) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def push_global(self, name: str) -> None:
        module, _, attribute = name.partition(" ")
        dtype = getattr(torch, attribute, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            self.push(dtype)
        elif name in _RECORDS or name in _IGNORED or name == _SIZE:
            self.push(GlobalName(name))
        else:
            raise PickleError(f"it names {name[:80]!r}")

    def stack_global(self, _: Any) -> None:
        module, attribute = self.pop(2)
        if not isinstance(module, str) or not isinstance(attribute, str):
            raise PickleError("it is malformed")
        self.push_global(f"{module} {attribute}")

    def new_object(self, _: Any) -> None:
        kind, arguments = self.pop(2)
        if kind.name not in _RECORDS or arguments != ():
            raise PickleError(f"it makes an object of {kind.name[:80]!r}")
        self.push_object(Record())

    def reduce(self, _: Any) -> None:
        function, arguments = self.pop(2)
        if function.name == _SIZE:
            (sizes,) = arguments
            self.push(sizes)
        elif function.name in _IGNORED:
            self.push(None)
        else:
            raise PickleError(f"it calls {function.name[:80]!r}")

    def build(self, _: Any) -> None:
        (state,) = self.pop(1)
        if not isinstance(self.stack[-1], Record) or not isinstance(state, dict | tuple):
            raise PickleError("it has fields of a value that is no record")
        self.stack[-1].state = state

    def set_items(self, items: list[Any]) -> None:
        own = self.stack[-1]
        if not isinstance(own, dict) or len(items) % 2:
            raise PickleError("it sets items of a value that is no dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, str | Record):  # others may take long to hash
                raise PickleError(f"it has a key of type {type(key).__name__}")
            own[key] = value


def _tuple(count: int) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.push_object(tuple(machine.pop(count)))


def _nothing(_: _Machine, _argument: Any) -> None:
    pass


_HANDLERS: dict[str, Callable[[Any, Any], None]] = {
    **HANDLERS,
    **dict.fromkeys(("FRAME", "STOP"), _nothing),
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE"), _Machine.push),
    "EMPTY_DICT": lambda machine, _: machine.push_object({}),
    "EMPTY_LIST": lambda machine, _: machine.push_object([]),
    "EMPTY_TUPLE": constant(()),
    "TUPLE1": _tuple(1),
    "TUPLE2": _tuple(2),
    "TUPLE3": _tuple(3),
    "TUPLE": lambda machine, _: machine.push_object(tuple(machine.pop_mark())),
    "MEMOIZE": _Machine.memoize,
    "GLOBAL": _Machine.push_global,
    "STACK_GLOBAL": _Machine.stack_global,
    "NEWOBJ": _Machine.new_object,
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
}
