"""Knobs of the division of models over ranks, in place of what the script gives world.distribute.

The layout; and for pipelines the micro-batches, the schedule, and which modules each stage holds.
"""

from dataclasses import replace
from typing import Any

from ..cost.layout import Layout
from .knob import KnobResult, request, requested

LAYOUT = "layout"
BALANCE = "pipeline-balance"
PIPELINE_FIELDS = {"micro-batches": "micro_batches", "pipeline-schedule": "schedule"}  # of a Layout


def set_layout(value: str, turned: KnobResult) -> None:
    """Set the layout of all models that the script gives to ``world.distribute``."""
    request(
        Layout.parse(value),
        turned,
        "the script does not call world.distribute. HINT: model, optimizer = "
        "world.distribute(model, optimizer)",
    )


def set_pipeline_option(value: Any, turned: KnobResult) -> None:
    """Set micro-batches, schedule or balance of all pipelines."""
    request(
        value, turned, "the script gives world.distribute no layout with stages. HINT: layout='pp2'"
    )


def with_pipeline_settings(
    layout: Layout, options: dict[str, Any]
) -> tuple[Layout, dict[str, Any]]:
    """Return a layout and the options of ``world.distribute`` with the settings.

    Layouts without stages are returned as they are.
    """
    if layout.pp == 1:
        return layout, options
    values = {field: requested(name) for name, field in PIPELINE_FIELDS.items()}
    changed = replace(layout, **{field: x for field, x in values.items() if x is not None})
    balance = requested(BALANCE)
    return changed, options if balance is None else {**options, "balance": balance}
