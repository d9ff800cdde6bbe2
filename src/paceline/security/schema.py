"""Check parsed JSON and TOML against a type before it is used.

A schema is a dataclass, a TypedDict or any other type that msgspec converts to, with ranges as
``Annotated[int, msgspec.Meta(ge=0)]``. Keys that are not in a schema are ignored.
"""

import json
from typing import Annotated, Any, TypeVar

import msgspec

from .files import InvalidFileError, Name, read_regular
from .text import printable, printable_tree

T = TypeVar("T")

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Size = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]

MAX_PARSED_BYTES = 256 << 20
# CPython's memory for what a character of JSON begins or separates: lists, dicts and strings of
# three bytes of text take up to 40 times their size. Measured, and rounded up.
JSON_COSTS = {b"[": 96, b"{": 240, b":": 64, b'"': 28, b",": 40}


def check_parsed_size(
    data: bytes, costs: dict[bytes, int], max_parsed_bytes: int, file: Name
) -> None:
    """Estimate the memory of parsed text before it is parsed.

    Args:
        costs: Bytes of memory for each occurrence of a character.

    Raises:
        InvalidFileError: It may be more than ``max_parsed_bytes``.
    """
    text_bytes = len(data) * (2 if data.isascii() else 8)
    size = text_bytes + sum(cost * data.count(mark) for mark, cost in costs.items())
    if size > max_parsed_bytes:
        raise InvalidFileError(
            file,
            f"would take up to {size:,} bytes of memory, more than the limit of "
            f"{max_parsed_bytes:,}",
        )


def load_json(data: bytes, file: Name, max_parsed_bytes: int = MAX_PARSED_BYTES) -> Any:
    """Parse JSON that others may have written, with limited memory.

    Args:
        file: Source of the data, for the error message.
        max_parsed_bytes: Limit of the estimated memory of the result.

    Raises:
        InvalidFileError: It is not JSON, or would take too much memory.
    """
    check_parsed_size(data, JSON_COSTS, max_parsed_bytes, file)
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidFileError(file, f"can't be read as JSON: {error}") from None


def check(tree: Any, schema: type[T], file: Name, *, escape: bool = True) -> T:
    """Convert ``tree`` (dicts, lists, numbers, strings) to the type ``schema``.

    Args:
        file: Source of the tree, for the error message.
        escape: Whether to make its strings printable; False for paths that are to be opened.

    Raises:
        InvalidFileError: The tree does not match; the reason names the key.
    """
    try:
        return msgspec.convert(printable_tree(tree) if escape else tree, schema)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        # The message contains the position in the file: At `$.shards[0].bytes`.
        reason = printable(str(error)).replace("`", "")
        raise InvalidFileError(file, f"does not match its format: {reason}") from None


def parse_json(
    data: bytes,
    schema: type[T],
    file: Name,
    *,
    escape: bool = True,
    max_parsed_bytes: int = MAX_PARSED_BYTES,
) -> T:
    """``load_json`` and ``check``. Raises InvalidFileError."""
    return check(load_json(data, file, max_parsed_bytes), schema, file, escape=escape)


def read_json(
    path: Name,
    schema: type[T],
    max_bytes: int,
    *,
    dir_fd: int | None = None,
    escape: bool = True,
    max_parsed_bytes: int = MAX_PARSED_BYTES,
) -> T:
    """Read a JSON file of at most ``max_bytes``.

    Raises:
        InvalidFileError: Same as for ``parse_json``, or the file is larger.
        OSError: Same as for ``files.open_regular``.
    """
    data = read_regular(path, max_bytes, dir_fd=dir_fd)
    return parse_json(data, schema, path, escape=escape, max_parsed_bytes=max_parsed_bytes)
