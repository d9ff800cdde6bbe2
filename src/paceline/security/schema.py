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


def parse_json(data: bytes, schema: type[T], file: Name, *, escape: bool = True) -> T:
    """Parse JSON and ``check`` it. Raises InvalidFileError, also if it is not JSON."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidFileError(file, f"can't be read as JSON: {error}") from None
    return check(tree, schema, file, escape=escape)


def read_json(
    path: Name,
    schema: type[T],
    max_bytes: int,
    *,
    dir_fd: int | None = None,
    follow_links: bool = True,
    owner: int | None = None,
    escape: bool = True,
) -> T:
    """Read a JSON file of at most ``max_bytes``.

    Raises:
        InvalidFileError: Same as for ``parse_json``, or the file is larger.
        OSError: Same as for ``files.open_regular``.
    """
    data = read_regular(path, max_bytes, dir_fd=dir_fd, follow_links=follow_links, owner=owner)
    return parse_json(data, schema, path, escape=escape)
