"""Check the pickle of a shard before torch loads it.

The unpickler of ``torch.load(weights_only=True)`` does not execute arbitrary code. But a file of a
few hundred bytes can make it use any amount of memory or time: ``bytearray(n)``,
``torch.FloatTensor(n)``, an encoding that doubles its input, tuples that contain the same tuple
several times, at each level. ``check_pickle`` interprets the opcodes on placeholders. It allows
only the objects that ``CheckpointSaver`` writes, with arguments that are bounded by the size of the
file.
"""

import math
import pickletools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .pickle_stack import HANDLERS, GlobalName, PickleError, PickleStack, constant

MAX_PICKLE_BYTES = 256 << 20
MAX_OPCODES = 10_000_000
MAX_TENSORS = 1_000_000
MAX_TUPLE_DEPTH = 200
MAX_KEY_PARTS = 10_000_000  # in all tuple keys, as hashing a tuple takes time for each part
MAX_EQUAL_HASHES = 64  # integers with the same hash; a dict of them takes quadratic time
MAX_SHORT_TEXT = 64  # characters; allowed functions take no longer strings as arguments
MAX_DIMENSIONS = 64

_STORAGES_OF_ITEM_BYTES = {
    1: ("Byte", "Char", "Bool", "QInt8", "QUInt8"),
    2: ("Short", "Half", "BFloat16"),
    4: ("Int", "Float", "QInt32"),
    8: ("Long", "Double", "ComplexFloat"),
    16: ("ComplexDouble",),
}
_STORAGES = {
    f"torch {name}Storage": size for size, of in _STORAGES_OF_ITEM_BYTES.items() for name in of
}
_STORAGES["torch.storage UntypedStorage"] = 1
_QSCHEMES = frozenset(
    f"torch per_{name}"
    for name in (
        *("tensor_affine", "tensor_symmetric", "channel_affine", "channel_symmetric"),
        "channel_affine_float_qparams",
    )
)


class _LongText:
    __slots__ = ("length",)

    def __init__(self, length: int) -> None:
        self.length = length


class _Tuple:
    __slots__ = ("depth", "items", "parts")

    def __init__(self, items: list[Any]) -> None:
        self.items = tuple(items)
        inner = [item for item in items if isinstance(item, _Tuple)]
        self.depth: int = 1 + max((item.depth for item in inner), default=0)
        self.parts: int = 1 + len(items) + sum(item.parts for item in inner)
        if self.depth > MAX_TUPLE_DEPTH:
            raise PickleError(f"tuples of over {MAX_TUPLE_DEPTH} levels")


class _Storage:
    __slots__ = ("count",)

    def __init__(self, count: int) -> None:
        self.count = count  # number of elements


_DICT, _ORDERED_DICT, _OTHER = object(), object(), object()


def check_pickle(data: bytes, records: Mapping[str, int], *, of_models: bool = False) -> None:
    """Check that a pickle contains only objects that ``CheckpointSaver`` writes.

    Args:
        data: Content of ``data.pkl``.
        records: Size in bytes of each tensor storage in the same archive, by its key.
        of_models: Also allow what the ``state_dict`` of an ``nn.Module`` contains: an OrderedDict
            with attributes, and parameters.

    Raises:
        PickleError: The pickle contains a disallowed opcode, global or argument, or exceeds a
            limit.
    """
    if len(data) > MAX_PICKLE_BYTES:
        raise PickleError(f"its data.pkl has {len(data):,} bytes, more than {MAX_PICKLE_BYTES:,}")
    machine = _Machine(len(data), records, of_models)
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(data), 1):
            if count > MAX_OPCODES:
                raise PickleError(f"its data.pkl has more than {MAX_OPCODES:,} opcodes")
            if opcode.name not in _HANDLERS:
                raise PickleError(f"its data.pkl has the opcode {opcode.name}")
            _HANDLERS[opcode.name](machine, argument)
    except PickleError:
        raise
    except (ValueError, IndexError, KeyError, AttributeError, TypeError):
        raise PickleError("its data.pkl is malformed") from None


class _Machine(PickleStack):
    """Stack and memo of an unpickler, with placeholders for the objects."""

    def __init__(self, size: int, records: Mapping[str, int], of_models: bool) -> None:
        super().__init__()
        self.records, self.of_models = records, of_models
        self.bytes_left = size
        self.set_items_left = MAX_OPCODES
        self.key_parts_left = MAX_KEY_PARTS
        self.tensors_left = MAX_TENSORS
        self.large_keys: dict[int, set[int]] = {}

    def text(self, value: str) -> None:
        self.stack.append(value if len(value) <= MAX_SHORT_TEXT else _LongText(len(value)))

    def set_items(self, items: list[Any]) -> None:
        if self.stack[-1] not in (_DICT, _ORDERED_DICT) or len(items) % 2:
            raise PickleError("its data.pkl sets items of a value that is not a dict")
        for key in items[::2]:
            self.key(key)

    def key(self, key: Any) -> None:
        """Limit the time that hashing a dict key or a set item takes."""
        if isinstance(key, _Tuple):
            self.key_parts_left -= key.parts
            if self.key_parts_left < 0:
                raise PickleError(f"keys of over {MAX_KEY_PARTS:,} parts")
            for item in key.items:
                if isinstance(item, _Tuple):
                    self.key_parts_left += item.parts
                self.key(item)
        elif type(key) is int and key.bit_length() > 60:
            same = self.large_keys.setdefault(hash(key), set())
            same.add(key)
            if len(same) > MAX_EQUAL_HASHES:
                raise PickleError("keys that were made to have the same hash value")

    def push_global(self, name: str) -> None:
        module, _, attribute = name.partition(" ")
        dtype = module == "torch" and isinstance(getattr(torch, attribute, None), torch.dtype)
        if not dtype and name not in _STORAGES and name not in _QSCHEMES and name not in _FUNCTIONS:
            raise PickleError(f"its data.pkl names {'.'.join(name.split(' '))[:80]!r}")
        self.stack.append(GlobalName(name))

    def push_storage(self, _: Any) -> None:
        kind, storage, key, location, count = self.stack.pop().items
        item_bytes = _STORAGES[storage.name]
        if kind != "storage" or not isinstance(location, str) or type(count) is not int:
            raise PickleError("its data.pkl has a malformed storage")
        if self.records.get(key) != count * item_bytes:
            raise PickleError("a storage has another size than its record")
        self.stack.append(_Storage(count))

    def reduce(self, _: Any) -> None:
        function, arguments = self.pop(2)
        self.stack.append(_FUNCTIONS[function.name](self, *arguments.items))

    def encode(self, text: Any, encoding: Any) -> Any:
        length = text.length if isinstance(text, _LongText) else len(text)
        self.bytes_left -= length
        if not isinstance(text, str | _LongText) or encoding != "latin1" or self.bytes_left < 0:
            raise PickleError("its data.pkl encodes a text that is not that of bytes")
        return _OTHER

    def make_set(self, items: Any) -> Any:
        self.set_items_left -= len(items)
        if not isinstance(items, list) or self.set_items_left < 0:
            raise PickleError("its data.pkl has a malformed set")
        for item in items:
            self.key(item)
        return _OTHER

    def ordered_dict(self) -> Any:
        # otherwise hooks of a tensor, always empty
        return _ORDERED_DICT if self.of_models else _OTHER

    def build(self, _: Any) -> None:
        (state,) = self.pop(1)
        if self.stack[-1] is not _ORDERED_DICT or state is not _DICT:
            raise PickleError("its data.pkl has attributes of a value that is no OrderedDict")

    def empty_bytes(self) -> Any:
        return _OTHER

    def complex(self, real: float, imaginary: float) -> Any:
        if type(real) is not float or type(imaginary) is not float:
            raise PickleError("its data.pkl has a malformed complex number")
        return _OTHER

    def shape(self, sizes: Any) -> Any:
        _dimensions(sizes)
        return _OTHER

    def short_arguments(self, text: Any, number: Any = 0) -> Any:
        if not isinstance(text, str) or type(number) is not int:
            raise PickleError("its data.pkl has a malformed device or layout")
        return _OTHER

    def tensor(self, storage: Any, _offset: Any, size: Any, *_: Any) -> Any:
        if not isinstance(storage, _Storage) or math.prod(_dimensions(size)) > storage.count:
            raise PickleError("a tensor is larger than its storage")
        return self.tensor_of_tensors()

    def parameter(self, data: Any, requires_grad: Any, _hooks: Any) -> Any:
        if not self.of_models or data is not _OTHER or type(requires_grad) is not bool:
            raise PickleError("its data.pkl has a malformed parameter")
        return self.tensor_of_tensors()

    def tensor_of_tensors(self, *_: Any) -> Any:
        self.tensors_left -= 1
        if self.tensors_left < 0:
            raise PickleError(f"more than {MAX_TENSORS:,} tensors")
        return _OTHER


def _dimensions(sizes: Any) -> tuple[int, ...]:
    if not isinstance(sizes, _Tuple) or len(sizes.items) > MAX_DIMENSIONS:
        raise PickleError("its data.pkl has a malformed shape")
    if not all(type(size) is int and 0 <= size < 1 << 63 for size in sizes.items):
        raise PickleError("its data.pkl has a malformed shape")
    return sizes.items


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "collections OrderedDict": _Machine.ordered_dict,
    "_codecs encode": _Machine.encode,
    "__builtin__ bytes": _Machine.empty_bytes,
    "__builtin__ set": _Machine.make_set,
    "__builtin__ complex": _Machine.complex,
    "torch Size": _Machine.shape,
    "torch device": _Machine.short_arguments,
    "torch.serialization _get_layout": _Machine.short_arguments,
    "torch._utils _rebuild_tensor_v2": _Machine.tensor,
    "torch._utils _rebuild_tensor_v3": _Machine.tensor,
    "torch._utils _rebuild_parameter": _Machine.parameter,
    "torch._utils _rebuild_qtensor": _Machine.tensor,
    "torch._utils _rebuild_sparse_tensor": _Machine.tensor_of_tensors,
    "torch._utils _rebuild_nested_tensor": _Machine.tensor_of_tensors,
}


def _push_tuple(count: int) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine.stack.append(_Tuple(machine.pop(count)))


def _push_marked(machine: _Machine, _: Any) -> None:
    items = _Tuple(machine.pop_mark())
    machine.stack.append(items)


def _stop(machine: _Machine, _: Any) -> None:
    machine.pop(1)


_HANDLERS: dict[str, Callable[[Any, Any], None]] = {
    **HANDLERS,
    "STOP": _stop,
    "BINUNICODE": _Machine.text,
    "EMPTY_DICT": constant(_DICT),
    "EMPTY_LIST": lambda machine, _: machine.push([]),
    "EMPTY_TUPLE": _push_tuple(0),
    "TUPLE1": _push_tuple(1),
    "TUPLE2": _push_tuple(2),
    "TUPLE3": _push_tuple(3),
    "TUPLE": _push_marked,
    "GLOBAL": _Machine.push_global,
    "BINPERSID": _Machine.push_storage,
    "REDUCE": _Machine.reduce,
    "BUILD": _Machine.build,
}
