"""Failures of the recorder's hooks: reported once each, and never raised into a script."""

import functools
from collections.abc import Callable
from typing import ParamSpec

from ..ring.header_schema import MAX_FAILURE_CHARS
from ..ring.launcher_messages import notify
from ..ring.recorder import update_all_headers

_P = ParamSpec("_P")

failed_hooks: dict[str, str] = {}  # hooks that are off, and the exception of each


def report_failure(hook: str, error: Exception) -> None:
    """Warn that a hook has failed and is off from now on; once for each hook.

    The record's header has the failures as well, for the report.
    """
    if hook in failed_hooks:
        return
    failed_hooks[hook] = type(error).__name__
    try:
        failed_hooks[hook] = f"{type(error).__name__}: {error}"[:MAX_FAILURE_CHARS]
        notify(
            f"warning: Paceline's hook of {hook} failed and is off ({failed_hooks[hook]}). "
            "The script continues; its record is incomplete\n"
        )
        update_all_headers(failed_hooks=dict(failed_hooks))
    except Exception:  # an error without text, a closed stderr: must not fail the script either
        pass


def noting(hook: str) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """Return a decorator of functions that note what a script does, for a hook.

    An exception in such a function is reported, and it does nothing from then on.
    """

    def decorate(note: Callable[_P, None]) -> Callable[_P, None]:
        @functools.wraps(note)
        def call(*args: _P.args, **options: _P.kwargs) -> None:
            if hook in failed_hooks:
                return
            try:
                note(*args, **options)
            except Exception as error:
                report_failure(hook, error)

        return call

    return decorate
