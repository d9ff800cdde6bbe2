"""Knob of the layout: how the models of ``world.distribute`` are divided over the ranks."""

import atexit
import sys
from typing import ClassVar

from ...cost.layout import Layout
from ..apply import KnobResult

NAME = "layout"


class _Requested:
    """The layout that was requested for this process."""

    value: ClassVar[Layout | None] = None
    turned: ClassVar[KnobResult | None] = None


def set_layout(value: str, turned: KnobResult) -> None:
    """Set the layout of all models that the script gives to ``world.distribute``."""
    _Requested.value, _Requested.turned = Layout.parse(value), turned
    atexit.register(_report_unused, turned)


def _report_unused(turned: KnobResult) -> None:
    """Report a layout that no model got, at the end of a script without an error."""
    if not turned.set and getattr(sys, "last_value", None) is None:
        turned.not_done(
            "the script does not call world.distribute. HINT: model, optimizer = "
            "world.distribute(model, optimizer)"
        )


def requested_layout() -> Layout | None:
    """Return the layout in place of the script's; None: as the script says."""
    if _Requested.turned is not None:
        _Requested.turned.done()
    return _Requested.value
