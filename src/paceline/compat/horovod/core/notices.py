"""What ranks of a process set tell each other beside their meetings, in the job's store.

A rank that waits in a meeting can't ask the others why they do not come. So ranks that wait long
write what they wait for, and ranks that leave write that they have left.
"""

import contextlib
import json
from collections.abc import Sequence
from typing import Any

from ....security.files import InvalidFileError
from ....security.schema import parse_json

MAX_NAMES = 64  # of waiting operations, in one notice


class Notices:
    """The notices of one process set.

    Args:
        store: A store of torch.distributed, for this set; None without other ranks.
        rank: Global rank of this process.
        members: Global ranks.
    """

    def __init__(self, store: Any, rank: int, members: Sequence[int]) -> None:
        self._store, self._rank, self._members = store, rank, list(members)
        self._written: list[str] = []

    def write_waiting(self, names: Sequence[str]) -> None:
        """Write the names of operations that this rank waits for, if they have changed."""
        shown = sorted(names)[:MAX_NAMES]
        if shown != self._written:
            self._written = shown
            self._set(f"waiting/{self._rank}", json.dumps(shown))

    def read_waiting(self) -> dict[int, list[str]]:
        """Return the names that each rank has written, by global rank."""
        found = {}
        for member in self._members:
            try:
                data = self._get(f"waiting/{member}") or b"[]"
                found[member] = parse_json(data, list[str], f"the notice of rank {member}")
            except InvalidFileError:
                found[member] = []
        return found

    def write_left(self) -> None:
        """Write that this rank takes part in no further meeting."""
        self._set(f"left/{self._rank}", "1")

    def read_left(self) -> list[int]:
        """Return the global ranks that have left."""
        return [member for member in self._members if self._get(f"left/{member}") is not None]

    # The store's host may be lost, and the store is closed at the end of the job.

    def _set(self, key: str, value: str) -> None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                self._store.set(key, value)

    def _get(self, key: str) -> bytes | None:
        if self._store is not None:
            with contextlib.suppress(RuntimeError):
                return bytes(self._store.get(key)) if self._store.check([key]) else None
        return None
