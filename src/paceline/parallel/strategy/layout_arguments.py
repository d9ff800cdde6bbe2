"""The arguments of ``world.distribute`` that a layout has as well."""

import difflib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...cost.layout import HOST, OFFLOADS, Layout

AUTO = "auto"  # the fastest layout that fits
SHARD_OVER = ("job", HOST)


def parse_layout(layout: str | Layout) -> Layout | None:
    """Return the value of ``layout``; None for "auto".

    Raises:
        ValueError: It is no layout.
    """
    if layout == AUTO:
        return None
    if isinstance(layout, Layout):
        return layout
    try:
        return Layout.parse(layout)
    except ValueError as error:
        raise ValueError(f"world.distribute: {error}") from None


def with_arguments(
    layout: Layout, shard_over: str, offload: str | None, recompute: str | None
) -> Layout:
    """Return the layout with the arguments that it has as well.

    Raises:
        ValueError: An unknown value, one that the layout does not have, or one that contradicts
            the layout.
    """
    _check_value("shard_over", shard_over, SHARD_OVER)
    _check_value("offload", offload, (None, *OFFLOADS))
    if shard_over == HOST and not layout.zero:
        raise needs_sharding("shard_over", shard_over, layout)
    if offload == "parameters" and not layout.zero:
        raise needs_sharding("offload", offload, layout)
    given = {
        "shards": HOST if shard_over == HOST else None,
        "offload": offload,
        "recompute": recompute,
    }
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if getattr(layout, name) not in (None, value):
            argument = "shard_over" if name == "shards" else name
            raise ValueError(
                f"world.distribute: {argument}={value!r} contradicts layout={str(layout)!r}. "
                f"HINT: leave {argument} out"
            )
    changes: dict[str, Any] = given
    return replace(layout, **changes)


def needs_sharding(name: str, value: Any, layout: Layout) -> ValueError:
    """Return the error for an argument that only sharded layouts have."""
    return ValueError(
        f"world.distribute: {name}={value!r} needs a layout that shards, and layout is "
        f"{str(layout.without_options)!r}. HINT: layout='zero3', or leave {name} out"
    )


def _check_value(name: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        texts = [str(value) for value in allowed]
        near = difflib.get_close_matches(str(value), texts, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"world.distribute: {name} must be one of {', '.join(map(repr, allowed))}; this is "
            f"{value!r}. HINT: {name}={allowed[texts.index(near)]!r}"
        )
