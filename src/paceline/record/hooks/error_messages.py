"""Error messages for the user: tracebacks without Paceline's internal frames."""

import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

_PACKAGE = str(Path(__file__).resolve().parents[2])
_RUNNERS = ("<frozen runpy>",)
_STANDARD_LIBRARY = os.path.dirname(os.__file__)

# Functions that return a better text for an exception, or None. Each part that knows more than the
# exception adds its own.
explanations: list[Callable[[BaseException], str | None]] = []
# Functions that return the exception of Paceline that another library has turned into one of its
# own, with a text of many lines; None for other exceptions.
causes: list[Callable[[BaseException], BaseException | None]] = []

# Parts of exception texts that a rank raises after a peer process has ended. Such a failure is a
# consequence of the peer's failure, not its cause.
PEER_GONE_PHRASES = (
    *("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "remote worker"),
    *("NCCL communicator was aborted", "remote process exited"),
)
# As above, in Paceline's own exception, which also names the peer's rank.
NAMED_PEER_GONE = "can't continue: rank"
_SHARED_GPU = "Duplicate GPU detected"  # in a line of NCCL's error


# First words of the text for a failure that only shows that another rank has ended.
PEER_GONE = "another rank has ended"
EXIT_CODE = "exit code "  # first words of the text for a rank that called sys.exit
MAX_DETAIL_CHARS = 200
_WRAPPED = re.compile(rf"(?:.*\w+Error: )?(.*{re.escape(NAMED_PEER_GONE)}.*)")
# Gloo adds its source file before the reason, and advice after it.
_OWN_WORDS = re.compile(r"^\[[^]]*\.(?:cc|cpp|h):\d+\] ?|\. This is typically .*")


def find_peer_gone(text: str) -> str | None:
    """Return the phrase in ``text`` which shows that another rank has ended, or None."""
    return next(
        (phrase for phrase in (*PEER_GONE_PHRASES, NAMED_PEER_GONE) if phrase in text), None
    )


def describe_peer_gone(error: BaseException) -> str | None:
    """Return one line about a failure that only shows that another rank has ended, or None.

    Exceptions of a collective are RuntimeErrors. An OSError with the same phrases is about another
    connection, of the script.
    """
    text = str(error)
    if not isinstance(error, RuntimeError) or find_peer_gone(text) is None:
        return None
    named = _WRAPPED.search(text)
    if named is not None:
        return named[1]
    lines = [line for line in text.splitlines() if find_peer_gone(line)]
    return f"{PEER_GONE} ({_OWN_WORDS.sub('', lines[0])[:MAX_DETAIL_CHARS]})"


def is_peer_gone(summary: str) -> bool:
    """Return whether a text of ``summarize_error`` only says that another rank has ended."""
    return summary.startswith(PEER_GONE) or NAMED_PEER_GONE in summary


def is_internal_file(filename: str) -> bool:
    """Return whether a file belongs to Paceline or to ``runpy``, which starts the script."""
    return filename.startswith(_PACKAGE) or filename in _RUNNERS


def is_library_file(filename: str) -> bool:
    """Return whether a file belongs to an installed library or to Python."""
    return "-packages" in filename or filename.startswith(("<", _STANDARD_LIBRARY))


def script_line() -> str:
    """Return the script's line that runs, such as "train.py:31"."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        is_internal_file(frame.f_code.co_filename) or is_library_file(frame.f_code.co_filename)
    ):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def line_of_error(error: BaseException) -> str:
    """Return the script's line that raised an exception, such as "train.py:31"; "" for none."""
    frames = _script_frames(traceback.extract_tb(error.__traceback__))
    return f"{os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def explain_error(error: BaseException) -> str | None:
    """Return the first explanation of an exception, or None."""
    every = (*explanations, _explain_shared_gpu)
    return next((text for explain in every if (text := explain(error))), None)


def _explain_shared_gpu(error: BaseException) -> str | None:
    """Explain NCCL's error for two ranks on one GPU; None for other errors."""
    line = next((text for text in str(error).splitlines() if text.startswith(_SHARED_GPU)), None)
    return line and (
        f"NCCL refuses two ranks on one GPU ({line.strip()}). HINT: start at most one rank for "
        "each GPU, and call torch.cuda.set_device(int(os.environ['LOCAL_RANK'])) before the first "
        "collective"
    )


def _cause_of(error: BaseException) -> BaseException | None:
    """Return the exception of Paceline that another library has turned into this one, or None."""
    return next((cause for find in causes if (cause := find(error)) is not None), None)


def summarize_error(error: BaseException) -> str:
    """Return the type of an exception and the first line of its text, or of its explanation.

    The text for an exception that only shows that another rank has ended has no type, but the line
    of the script.
    """
    cause = _cause_of(error) or error
    explanation = explain_error(cause)
    gone = None if explanation else describe_peer_gone(cause)
    if gone is not None:
        frames = _script_frames(traceback.extract_tb(error.__traceback__))
        place = f", in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
        return gone + place
    first = (explanation or str(cause)).strip().splitlines()[:1]
    return f"{type(cause).__name__}: {first[0]}" if first else type(cause).__name__


def format_error(error: BaseException) -> str:
    """Return the text that is shown for an uncaught exception.

    This is the traceback without the frames that started the script. Only the line of the script
    and the message are returned if Paceline raised a ValueError about the user's input, if the
    exception shows that another rank has ended, or if another library raised it because of an
    exception of Paceline. An explanation replaces the text of the exception.
    """
    frames = traceback.extract_tb(error.__traceback__)
    cause = _cause_of(error)
    is_of_user = isinstance(error, ValueError) and frames and is_internal_file(frames[-1].filename)
    text = explain_error(cause or error) or (str(error) if is_of_user else None)
    if text is None:
        text = describe_peer_gone(cause or error) or (str(cause) if cause is not None else None)
    if text is not None:
        return f"{_place(frames)}error: {text}\n"
    # Every traceback begins with the frames that started the script, which do not help the user.
    outer = error.__traceback__
    while (
        outer is not None and is_internal_file(outer.tb_frame.f_code.co_filename) and outer.tb_next
    ):
        outer = outer.tb_next
    return "".join(traceback.format_exception(type(error), error, outer))


def _place(frames: traceback.StackSummary) -> str:
    """Return the innermost frame that is neither in Paceline nor in an installed library."""
    own = _script_frames(frames)
    if not own:
        return ""
    code = f"    {own[-1].line}\n" if own[-1].line else ""
    return f'  File "{own[-1].filename}", line {own[-1].lineno}\n{code}'


def _script_frames(frames: traceback.StackSummary) -> list[traceback.FrameSummary]:
    return [frame for frame in frames if _is_of_script(frame.filename)]


def _is_of_script(filename: str) -> bool:
    """Return whether a file is the user's; "<string>" is (python -c), contextlib.py is not."""
    is_library = is_library_file(filename) and not filename.startswith("<")
    return not is_library and not is_internal_file(filename)


def install() -> None:
    """Install an exception hook that prints uncaught exceptions with ``format_error``."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
        else:
            sys.stderr.write(format_error(error))

    sys.excepthook = hook
