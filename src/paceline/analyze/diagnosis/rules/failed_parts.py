"""Parts of a diagnosis that could not be computed: they are left out and named."""

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class FailedParts:
    """Computes parts of a diagnosis, each of which may fail without the others.

    Attributes:
        notes: A note on each part that failed.
    """

    def __init__(self) -> None:
        self.notes: list[str] = []

    def compute(self, part: str, function: Callable[[], T], default: Any) -> T:
        """Return the result of ``function``, or ``default`` and a note if it fails.

        Args:
            part: What is computed, for the note.
            function: Computes it.
            default: Takes its place.
        """
        try:
            return function()
        # a mistake of Paceline about one figure must not lose the other figures
        except Exception as error:
            note = (
                f"{part}: left out, because Paceline failed to compute it "
                f"({type(error).__name__}: {str(error)[:200]}). HINT: please report this, with the "
                "output of paceline --version --verbose"
            )
            if note not in self.notes:
                self.notes.append(note)
            result: T = default
            return result


class NoFailedParts(FailedParts):
    """Raises the exception of a part that fails, for callers that compute only this part."""

    def compute(self, part: str, function: Callable[[], T], default: Any) -> T:
        return function()
