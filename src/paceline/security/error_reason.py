"""Return the reason why a file could not be used, as one line of an error message."""

from .files import InvalidFileError
from .text import printable


def error_reason(error: Exception) -> str:
    """Return the message of an error without the file's name, printable and on one line."""
    if isinstance(error, InvalidFileError):
        return printable(error.reason)
    if isinstance(error, OSError) and error.strerror:
        return printable(error.strerror)
    return printable(str(error))
