"""Why a file could not be used, as one line of an error message."""

from .files import InvalidFileError
from .text import printable


def reason_of(error: Exception) -> str:
    """Return what an error says beside the name of its file, printable and in one line."""
    if isinstance(error, InvalidFileError):
        return printable(error.reason)
    if isinstance(error, OSError) and error.strerror:
        return printable(error.strerror)
    return printable(str(error))
