"""Numbers for stacks and their frames, as they are stored in a line profile."""

import linecache

from .activity import Described, Place
from .sidecar import MAX_FRAMES, MAX_STACKS, MAX_TEXT_CHARS, Stack

OTHER_STACKS: Described = ((), "python", "other stacks")  # type: ignore[assignment]


class StackTable:
    """The distinct stacks that a sampler saw. A full table counts further ones as one stack."""

    def __init__(self) -> None:
        self._stacks: dict[Described, int] = {}
        self._frames: dict[Place, int] = {}

    def number_of(self, described: Described) -> int:
        """Return the number of a stack, a new one if it is not known."""
        number = self._stacks.get(described)
        if number is not None:
            return number
        full = len(self._stacks) >= MAX_STACKS - 1
        if full or len(self._frames) + len(described[0]) > MAX_FRAMES:
            return self._stacks.setdefault(OTHER_STACKS, len(self._stacks))
        for place in described[0]:
            self._frames.setdefault(place, len(self._frames))
        return self._stacks.setdefault(described, len(self._stacks))

    def frame_number(self, place: Place) -> int | None:
        """Return the number of a frame that is on a known stack."""
        return self._frames.get(place)

    @property
    def places(self) -> list[Place]:
        return list(self._frames)

    @property
    def described(self) -> list[Described]:
        return list(self._stacks)

    def frames(self) -> list[tuple[str, int, str, str]]:
        """Return the frames for the file, with their lines of code."""
        return [
            (
                file[-MAX_TEXT_CHARS:],
                line,
                function[-MAX_TEXT_CHARS:],
                linecache.getline(file, line).strip()[:MAX_TEXT_CHARS],
            )
            for file, line, function in self._frames
        ]

    def stacks(self) -> list[Stack]:
        """Return the stacks for the file."""
        return [
            {"frames": [self._frames[place] for place in places], "activity": kind, "what": what}
            for places, kind, what in self._stacks
        ]
