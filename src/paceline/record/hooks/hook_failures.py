"""Failures of the recorder's hooks: reported once each, and never raised into a script."""

from ..ring.launcher_messages import notify
from ..ring.recorder import update_all_headers

_failures: dict[str, str] = {}  # by hook: the exception


def has_failed(hook: str) -> bool:
    """Return whether a hook has failed before, and is therefore off."""
    return hook in _failures


def report_failure(hook: str, error: Exception) -> None:
    """Warn that a hook has failed and is off from now on; once for each hook.

    The record's header has the failures as well, for the report.
    """
    if hook in _failures:
        return
    _failures[hook] = f"{type(error).__name__}: {error}"[:200]
    try:
        notify(
            f"warning: Paceline's hook of {hook} failed and is off ({_failures[hook]}). "
            "The script goes on; its record is incomplete\n"
        )
        update_all_headers(failed_hooks=dict(_failures))
    except Exception:  # a closed stderr must not fail the script either
        pass
