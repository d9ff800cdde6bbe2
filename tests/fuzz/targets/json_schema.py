"""The schema check itself: arbitrary JSON against a schema with ranges."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from paceline.security.schema import Count, Size, parse_json


@dataclass
class Example:
    count: Count
    sizes: list[Size]
    more: dict[str, Any]


def seeds() -> Iterator[bytes]:
    yield b'{"count": 3, "sizes": [1, 2], "more": {"x": [1e400, null, "\\u001b[2J"]}}'


def run(data: bytes) -> None:
    found = parse_json(data, Example, "example.json")
    assert found.count >= 0
    assert all(size > 0 for size in found.sizes)
