"""Errors as the user sees them: the script's own lines, and not Paceline's inside."""

import sys
import traceback
from pathlib import Path
from types import TracebackType

_PACKAGE = str(Path(__file__).resolve().parent.parent)
_RUNNERS = ("<frozen runpy>",)


def _ours(filename: str) -> bool:
    return filename.startswith(_PACKAGE) or filename in _RUNNERS


def told(error: BaseException) -> str:
    """The traceback of ``error``; where Paceline refused the user's input (a ValueError raised
    in it), only the script's line and the message."""
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, ValueError) and frames and _ours(frames[-1].filename):
        own = [frame for frame in frames if not _ours(frame.filename)]
        place = f'  File "{own[-1].filename}", line {own[-1].lineno}\n' if own else ""
        code = f"    {own[-1].line}\n" if own and own[-1].line else ""
        return f"{place}{code}error: {error}\n"
    # What started the script stands on top of every traceback; it says nothing to the user.
    outer = error.__traceback__
    while outer is not None and _ours(outer.tb_frame.f_code.co_filename) and outer.tb_next:
        outer = outer.tb_next
    return "".join(traceback.format_exception(type(error), error, outer))


def install() -> None:
    """Show uncaught exceptions as ``told`` does, and remember that there was one."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            sys.stderr.write(told(error))

    sys.excepthook = hook
