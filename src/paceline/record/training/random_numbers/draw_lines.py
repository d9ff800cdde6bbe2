"""Find the line of the user's code that draws random numbers, by looking after each line."""

from collections.abc import Callable, Hashable

from ..line_tracer import LineTracer

MAX_EVENTS = 5000  # lines that are looked at


class DrawLines:
    """The lines that draw, by place.

    At each place the lines are found once, in an occurrence after the first one that drew.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, dict[str, str]] = {}  # line by generator
        self._done: set[Hashable] = set()
        self._place: Hashable = None
        self._states: Callable[[], dict[str, int]] = dict
        self._tracer = LineTracer(lambda: self._states(), self._note, MAX_EVENTS)

    def line(self, place: Hashable, generator: str) -> str:
        """Return the line that draws at a place, or ""."""
        return self._found.get(place, {}).get(generator, "")

    def start(self, place: Hashable, states: Callable[[], dict[str, int]]) -> None:
        """Begin to look at a place, if its lines are not known yet.

        states: Returns checksums of the generators.
        """
        if place in self._done or self._tracer.is_running:
            return
        self._states = states
        if self._tracer.start():
            self._done.add(place)
            self._place = place

    def stop(self) -> None:
        """End to look."""
        self._tracer.stop()

    def _note(self, generator: str, line: str, _: str) -> None:
        self._found.setdefault(self._place, {}).setdefault(generator, line)
