"""What a rank says to its launcher through the status pipe (record.tell), one JSON line each.

The pipe is open in the user's script as well, and in all processes that it starts: a line may hold
anything.
"""

from typing import Annotated, TypedDict

import msgspec

from ...security.files import InvalidFileError
from ...security.schema import Count, parse_json

MAX_MESSAGE_BYTES = 64 << 20  # the longest is a report, some KB a rank

ExitCode = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class RankMessage(TypedDict, total=False):
    """One message: one of these, and ``at`` and ``code`` with an exception."""

    say: str
    exception: str
    at: Seconds
    code: ExitCode
    finished: ExitCode
    leaves: bool
    ending: bool
    left: Count
    summary: str


def message_of(line: bytes) -> RankMessage:
    """Return the message in a line.

    Raises:
        InvalidFileError: The line is none that Paceline writes.
    """
    # Not escaped: what a rank has Paceline say has its own colours, which are sorted out there.
    message = parse_json(line, RankMessage, "the status pipe", escape=False)
    if "exception" in message and not {"at", "code"} <= message.keys():
        raise InvalidFileError("the status pipe", "has an exception without its time and code")
    return message
