"""A log of each rank's loops, compared between ranks.

Ranks that leave a loop alone, or validate alone, then call other collectives than the rest. The
error of that collective names only the collective. So each rank publishes in the job's store where
it has left a loop and which validation passes it has begun, and the error message says how ranks
differ. Validation on some ranks may also cause no error. Therefore ranks compare their passes at an
epoch's end, by a collective.
"""

import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any

from ...comm.members.exchange_objects import all_gather_objects
from ...parallel.mesh import Mesh
from ...record.hooks.error_messages import find_peer_gone, script_line
from ...security.schema import parse_json

READ_TIMEOUT_S = 3.0  # for the other ranks' entries, after an error
# The last loop that was left, and its line; number and last pass of each kind.
_Entry: Any = tuple[tuple[str, str], dict[str, tuple[int, str]]]
_DISAGREEMENTS = ("ranks disagree about collective", "ranks call different collectives")
_PASSES = {  # by kind of a pass: the effect of one on some ranks only, and the way out
    "validation": (
        "although each rank has a part of its samples",
        "call world.batches(validation) on all ranks; world.meter() sums over their parts",
    ),
    "unsharded": (
        "while the other ranks wait",
        "validate on all ranks, with world.shard(loader, every_sample_once=True)",
    ),
}


class LoopLog:
    """The loops of one rank.

    Args:
        store: Store in which they are published; None: nothing is published.
        compares: Whether ranks compare their passes at the end of an epoch.

    Attributes:
        left: The last loop that this rank left before its end, and the script's line; "" if none.
        passes: For "validation" and "unsharded" loaders: number of passes, and the last one.
    """

    def __init__(self, mesh: Mesh, store: Any, compares: bool, warn: Callable[[str], None]) -> None:
        self.mesh, self.compares, self.warn = mesh, compares, warn
        self.rank, self.size = mesh.rank, mesh.size
        self._store = store if mesh.size > 1 else None
        self.left = ("", "")
        self._leaving: tuple[str, str] | None = None
        self._warnings: list[str] = []  # about the loop that is being left
        self.passes: dict[str, tuple[int, str]] = dict.fromkeys(_PASSES, (0, ""))

    def leave(self, what: str, where: str, line: str) -> None:
        """Note that the script leaves a loop before its end, at or after this line.

        An exception leaves loops as well, which is not visible here. So it is published only when
        the script continues. Of nested loops that are left together, the innermost counts.
        """
        self._leaving = self._leaving or (f"{what} {where}", line)

    def warn_later(self, message: str) -> None:
        """Warn about a loop that is being left, if the script continues after it."""
        self._warnings.append(message)

    def go_on(self) -> None:
        """Publish the loop that was left, now that the script continues after it."""
        for message in self._warnings:
            self.warn(message)
        self._warnings.clear()
        if self._leaving:
            self.left, self._leaving = self._leaving, None
            self._publish()

    def begin_pass(self, kind: str, loader: str) -> None:
        """Note that a pass of this kind begins."""
        self.go_on()
        number, _ = self.passes[kind]
        self.passes[kind] = (number + 1, f"{loader} ({script_line()})")
        self._publish()

    def _publish(self) -> None:
        if self._store is not None:
            entry = json.dumps([self.left, self.passes])
            with contextlib.suppress(RuntimeError):  # the job is ending
                self._store.set(f"loops/{self.rank}", entry)

    def compare(self) -> None:
        """Compare the passes of an epoch. Collective.

        Raises ValueError on all ranks where not all of them have validated.
        """
        self.go_on()
        if self.size == 1 or not self.compares:
            return
        # From the ranks themselves: in the store, those ahead may have begun the next epoch's pass.
        entries = all_gather_objects((self.left, self.passes), _Entry)
        if message := (
            self._describe_left(entries) or self._describe_passes(entries, "validation")
        ):
            raise ValueError(message)
        if message := self._describe_passes(entries, "unsharded"):
            self.warn(message)

    def explain(self, error: BaseException) -> str | None:
        """Return how the ranks' loops differ, for an error about a collective; else None."""
        text = str(error).removeprefix("Got the following error when running the callback: ")
        is_disagreement = any(phrase in text for phrase in _DISAGREEMENTS)
        if not is_disagreement and not find_peer_gone(text):
            return None
        entries: list[Any] = []
        # The store may be that of a rank or host that is gone: reading it must not block the exit.
        reader = threading.Thread(target=lambda: entries.extend(self._read()), daemon=True)
        reader.start()
        reader.join(READ_TIMEOUT_S)
        if len(entries) != self.size:
            return None
        # A rank that is gone may have failed in the loop that this rank has just left.
        has_left = bool(entries[self.rank][0][0])
        difference = self._describe_left(entries) if is_disagreement or not has_left else ""
        if is_disagreement:
            difference = difference or self._describe_passes(entries, "validation")
        return f"{difference}\n{text.strip().splitlines()[0]}" if difference else None

    def _read(self) -> list[Any]:
        """Return the entries of all ranks; [] where the store is gone."""
        entries: list[Any] = []
        if self._store is None:
            return entries
        try:
            for rank in range(self.size):
                key = f"loops/{rank}"
                is_known = self._store.check([key])
                entry: Any = (("", ""), {})
                entries.append(parse_json(self._store.get(key), _Entry, key) if is_known else entry)
        except (RuntimeError, ValueError):
            return []
        return entries

    def _describe_left(self, entries: list[Any]) -> str:
        left = [entry[0][0] for entry in entries]
        first = next((text for text in left if text and left.count(text) < len(left)), "")
        if not first:
            return ""
        ranks = [rank for rank, text in enumerate(left) if text == first]
        others = [rank for rank in range(len(left)) if rank not in ranks]
        line = entries[ranks[0]][0][1]
        return (
            f"{self.mesh.named(ranks)} left {first} ({line}), {self.mesh.named(others)} did not. "
            "HINT: `if world.any(condition): break` makes the same decision on all ranks"
        )

    def _describe_passes(self, entries: list[Any], kind: str) -> str:
        passes = [entry[1].get(kind, (0, "")) for entry in entries]
        max_passes, text = max((number, text) for number, text in passes)
        ranks = [rank for rank, (number, _) in enumerate(passes) if number == max_passes]
        if len(ranks) == len(passes):
            return ""
        effect, way_out = _PASSES[kind]
        return (
            f"only {self.mesh.named(ranks)} iterated over {text} with world.batches, {effect}. "
            f"HINT: {way_out}"
        )
