"""Parsed JSON and TOML, checked against a type before anything uses it.

A schema is a dataclass, a TypedDict or any other type that msgspec converts to, with ranges as
``Annotated[int, msgspec.Meta(ge=0)]``. Keys that a schema does not know are left out.
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
    """Return ``tree`` (dicts, lists, numbers, texts) as ``schema``.

    Args:
        file: Where it is from, for the error.
        escape: Whether its texts become printable. Not for paths that are to be opened.

    Raises:
        InvalidFileError: It does not fit; the reason names the key.
    """
    try:
        return msgspec.convert(printable_tree(tree) if escape else tree, schema)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        # At `$.shards[0].bytes` is where a reader looks for it in the file.
        reason = printable(str(error)).replace("`", "")
        raise InvalidFileError(file, f"says what its format does not allow: {reason}") from None


def parse_json(data: bytes, schema: type[T], file: Name, *, escape: bool = True) -> T:
    """Parse JSON and ``check`` it. Raises InvalidFileError for what is no JSON, too."""
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
        InvalidFileError: As ``parse_json``, or where it is larger.
        OSError: As ``files.open_regular``.
    """
    data = read_regular(path, max_bytes, dir_fd=dir_fd, follow_links=follow_links, owner=owner)
    return parse_json(data, schema, path, escape=escape)
