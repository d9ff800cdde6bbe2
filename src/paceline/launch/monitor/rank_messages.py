"""Messages from a rank to its launcher through the status pipe, one line of JSON each.

``record.ring.launcher_messages`` writes them. The pipe is also open in the user's script and in all
processes that the script starts, so a line may contain anything.
"""

import signal
from typing import Annotated, TypedDict

import msgspec

from ...security.files import InvalidFileError
from ...security.schema import Count, parse_json
from ..guard.request import Row

MAX_MESSAGE_BYTES = 64 << 20  # the longest is a report, of some KB per rank
MAX_PARSED_MESSAGE_BYTES = 1 << 30
MAX_PLACE_CHARS = 200

# Asks ranks that have sent "makes_room" to keep their state and end, for a node that has returned.
# Not SIGUSR1: schedulers send that before a job ends, and the state lasts as long as the job.
MAKE_ROOM_SIGNAL = int(signal.SIGRTMIN) + 8

ExitCode = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class ModelMessage(TypedDict):
    """The parameters that a rank's optimizers train: see ``analyze.reference.series.Model``."""

    shapes: list[list[Count]]
    tensors: Count
    elements: Count
    sharded: bool


class RankMessage(TypedDict, total=False):
    """A message: one of these keys, with the keys that it needs (``NEEDED_KEYS``).

    ``logged`` has values of ``world.log``.
    """

    say: str
    exception: str
    at: Seconds
    code: ExitCode
    finished: ExitCode
    leaves: bool
    makes_room: bool
    ending: bool
    left: Count
    place: Annotated[str, msgspec.Meta(max_length=MAX_PLACE_CHARS)]
    summary: str
    job_code: ExitCode
    steps: list[Row]
    model: ModelMessage
    logged: dict[str, float]
    step: Count
    seen: Count


NEEDED_KEYS = {"exception": ("at", "code"), "logged": ("step", "seen")}


def message_of(line: bytes) -> RankMessage:
    """Return the message in a line.

    Raises:
        InvalidFileError: The line is not a valid message of Paceline.
    """
    # Not escaped: messages to print may contain colour codes, which for_terminal() filters later.
    message = parse_json(
        line,
        RankMessage,
        "the status pipe",
        escape=False,
        max_parsed_bytes=MAX_PARSED_MESSAGE_BYTES,
    )
    for name, needed in NEEDED_KEYS.items():
        if name in message and not all(key in message for key in needed):
            raise InvalidFileError("the status pipe", f"has {name} without {' and '.join(needed)}")
    return message
