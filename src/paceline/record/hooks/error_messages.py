"""Errors as the user sees them: the script's own lines, and not Paceline's inside."""

import sys
import traceback
from pathlib import Path
from types import TracebackType

_PACKAGE = str(Path(__file__).resolve().parents[2])
_RUNNERS = ("<frozen runpy>",)


# What a rank says whose peer has gone: its own failure only follows from that one's.
PEER_GONE_PHRASES = (
    *("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "remote worker"),
    *("NCCL communicator was aborted", "remote process exited"),
)
# The same, and whose.
NAMED_PEER_GONE = "can't go on: rank"


def find_peer_gone(text: str) -> str | None:
    """The phrase by which an exception's text says only that another rank has gone."""
    return next(
        (phrase for phrase in (*PEER_GONE_PHRASES, NAMED_PEER_GONE) if phrase in text), None
    )


def is_internal_file(filename: str) -> bool:
    """Whether a file is Paceline's, or what starts a script."""
    return filename.startswith(_PACKAGE) or filename in _RUNNERS


def summarize_error(error: BaseException) -> str:
    """Kind and first line of an exception."""
    first = str(error).strip().splitlines()[:1]
    return f"{type(error).__name__}: {first[0]}" if first else type(error).__name__


def format_error(error: BaseException) -> str:
    """The traceback of ``error``; where Paceline refused the user's input (a ValueError raised
    in it), only the script's line and the message."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ValueError) and frames and is_internal_file(frames[-1].filename):
        return f"{_place(frames)}error: {error}\n"
    phrase = find_peer_gone(str(error))
    if phrase == NAMED_PEER_GONE:
        return f"{_place(frames)}error: {error}\n"
    if phrase:  # the rest of gloo's and NCCL's text says no more
        return f"{_place(frames)}error: another rank has gone ({phrase})\n"
    # What started the script stands on top of every traceback; it says nothing to the user.
    outer = error.__traceback__
    while (
        outer is not None and is_internal_file(outer.tb_frame.f_code.co_filename) and outer.tb_next
    ):
        outer = outer.tb_next
    return "".join(traceback.format_exception(type(error), error, outer))


def _place(frames: traceback.StackSummary) -> str:
    """The innermost line that is neither Paceline's nor a library's."""
    own = [
        f for f in frames if not is_internal_file(f.filename) and "site-packages" not in f.filename
    ]
    if not own:
        return ""
    code = f"    {own[-1].line}\n" if own[-1].line else ""
    return f'  File "{own[-1].filename}", line {own[-1].lineno}\n{code}'


def install() -> None:
    """Show uncaught exceptions as ``told`` does, and remember that there was one."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            sys.stderr.write(format_error(error))

    sys.excepthook = hook
