"""Knobs of pipelines: micro-batches, schedule, and which modules each stage holds.

They replace options of the layout that the script (or the knob ``layout``) gives
``world.distribute``.
"""

import atexit
import sys
from dataclasses import replace
from typing import Any, ClassVar

from ...cost.layout import Layout
from ..apply import KnobResult


class _Requested:
    """The settings that were requested for this process, by the field of a layout or option."""

    values: ClassVar[dict[str, Any]] = {}
    turned: ClassVar[list[KnobResult]] = []


def set_micro_batches(count: int, turned: KnobResult) -> None:
    """Set the number of micro-batches of all pipelines."""
    _request("micro_batches", count, turned)


def set_schedule(name: str, turned: KnobResult) -> None:
    """Set the schedule of all pipelines."""
    _request("schedule", name, turned)


def set_balance(names: str, turned: KnobResult) -> None:
    """Set the modules with which stages begin."""
    _request("balance", names, turned)


def _request(field: str, value: Any, turned: KnobResult) -> None:
    if not _Requested.turned:
        atexit.register(_report_unused)
    _Requested.values[field] = value
    _Requested.turned.append(turned)


def _report_unused() -> None:
    """Report settings that no model got, at the end of a script without an error."""
    if getattr(sys, "last_value", None) is None:
        for one in _Requested.turned:
            if not one.set:
                one.not_done(
                    "the script gives world.distribute no layout with stages. HINT: layout='pp2'"
                )


def with_pipeline_settings(
    layout: Layout, options: dict[str, Any]
) -> tuple[Layout, dict[str, Any]]:
    """Return a layout and the options of ``world.distribute`` with the settings.

    Layouts without stages are returned as they are.
    """
    if layout.pp == 1 or not _Requested.values:
        return layout, options
    for turned in _Requested.turned:
        turned.done()
    values = dict(_Requested.values)
    balance = values.pop("balance", None)
    changed = replace(layout, **values)
    return changed, options if balance is None else {**options, "balance": balance}
