"""What each stage does with a micro-batch: its events, and the values that cross its borders.

A value that several later stages use is relayed through the stages between: each border of two
neighbouring stages has all values that were made before it and are used after it. Inputs are on all
ranks, and never cross.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

from .trace import Change, Event, Ref, Trace


@dataclass(frozen=True)
class Wire:
    """A value that crosses a border.

    Attributes:
        value: Its number.
        is_changed: Whether the stage that receives it changes it in place.
    """

    value: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    is_changed: bool = False


@dataclass(frozen=True)
class StagePlan:
    """The part of one stage.

    Attributes:
        events: With their numbers in the whole forward.
        received, sent: Values from the stage before, and for the one after it.
        last_use: By the position of an event, values that no later one of the stage needs.
    """

    events: tuple[tuple[int, Event], ...]
    received: tuple[Wire, ...]
    sent: tuple[Wire, ...]
    last_use: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class ForwardPlan:
    """The parts of all stages, and the outputs of the last one.

    Attributes:
        wires: Of each border.
        spec, leaves: The outputs.
        output_values: Shape and dtype of each tensor of the outputs.
        changes: Of each parameter or buffer that it changes, where.
    """

    stages: tuple[StagePlan, ...]
    wires: tuple[tuple[Wire, ...], ...]
    spec: TreeSpec
    leaves: tuple[Any, ...]
    output_values: tuple[tuple[tuple[int, ...], torch.dtype] | None, ...]
    changes: Mapping[str, str]


def plan_forward(
    trace: Trace, held: Mapping[str, frozenset[int]], stages: int, has_example: bool
) -> ForwardPlan:
    """Give each event of a forward to a stage that holds its parameters.

    Raises:
        ValueError: Stages do not run one after the other, or share memory that one changes.
    """
    places = _places(trace, held, stages, has_example)
    uses = _last_uses(trace, places, stages)
    changed = _changed_after_border(trace, places, uses)
    wires = []
    for border in range(stages - 1):
        crossing = [
            n
            for n, value in enumerate(trace.values)
            if value.event is not None and places[value.event] <= border < uses.get(n, -1)
        ]
        wires.append(tuple(_wire(trace, n, (border + 1, n) in changed) for n in crossing))
    parts = []
    for stage in range(stages):
        own = [(n, e) for n, e in enumerate(trace.events) if places[n] == stage]
        sent = wires[stage] if stage < stages - 1 else ()
        received = wires[stage - 1] if stage else ()
        is_last = stage == stages - 1
        kept = {w.value for w in sent} | (set(_values(trace.leaves)) if is_last else set())
        parts.append(StagePlan(tuple(own), received, sent, _last_use(own, kept)))
    outputs = tuple(_output_value(trace, leaf) for leaf in trace.leaves)
    changes = {name: event.line for event in trace.events for name in event.changes}
    return ForwardPlan(tuple(parts), tuple(wires), trace.spec, trace.leaves, outputs, changes)


def _values(leaves: Sequence[Any]) -> list[int]:
    return [r.key for r in leaves if isinstance(r, Ref) and r.kind == "value"]


def _wire(trace: Trace, number: int, is_changed: bool) -> Wire:
    value = trace.values[number]
    return Wire(number, value.shape, value.dtype, value.requires_grad, is_changed)


def _output_value(trace: Trace, leaf: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    if not isinstance(leaf, Ref):
        return None
    if leaf.kind != "value":
        raise ValueError(
            f"pipeline: the model returns {leaf.key}, which is no result of its forward. HINT: "
            "read parameters and buffers from the model"
        )
    value = trace.values[leaf.key]
    return value.shape, value.dtype


def _places(
    trace: Trace, held: Mapping[str, frozenset[int]], stages: int, has_example: bool
) -> list[int]:
    """Return the stage of each event."""
    places, now = [], 0
    for event in trace.events:
        possible = set(range(now, stages))
        for name in event.tensors:
            possible &= held[name]
        for name in event.changes:
            if len(held[name]) > 1:
                raise ValueError(
                    f"pipeline: the forward changes {name}, which stages "
                    f"{' and '.join(map(str, sorted(held[name])))} use ({event.line}). HINT: use "
                    "the module once, or layout='data'"
                )
        if not possible:
            raise ValueError(_wrong_order(event, held, now, has_example))
        now = min(possible)
        places.append(now)
    return places


def _wrong_order(
    event: Event, held: Mapping[str, frozenset[int]], now: int, has_example: bool
) -> str:
    name = next((n for n in event.tensors if not held[n] & set(range(now, 1 << 20))), None)
    name = name or event.tensors[0]
    stage = " and ".join(map(str, sorted(held[name])))
    hint = (
        "the same order in each forward as for example_inputs; or layout='data'"
        if has_example
        else "world.distribute(..., example_inputs=(x,)), so that the stages follow the order in "
        "which the forward uses the parameters"
    )
    return (
        f"pipeline: {event.line} uses {name} of stage {stage} after parameters of stage {now}. "
        f"HINT: {hint}"
    )


def _last_uses(trace: Trace, places: Sequence[int], stages: int) -> dict[int, int]:
    """Return the last stage that uses each value."""
    uses: dict[int, int] = {}
    for event, place in zip(trace.events, places, strict=True):
        uses |= dict.fromkeys(event.values, place)
    return uses | dict.fromkeys(_values(trace.leaves), stages - 1)


def _last_use(own: Sequence[tuple[int, Event]], kept: set[int]) -> tuple[tuple[int, ...], ...]:
    seen, found = set(kept), []
    for _, event in reversed(own):
        used = {*event.values, *(v for v in event.results if v is not None)} - seen
        seen |= used
        found.append(tuple(used))
    return tuple(reversed(found))


def _changed_after_border(
    trace: Trace, places: Sequence[int], uses: Mapping[int, int]
) -> set[tuple[int, int]]:
    """Return the values that stages receive and change, as (stage, value).

    Raises:
        ValueError: A stage changes memory that another value of another stage shares.
    """
    found = set()
    for change in trace.changes:
        stage = places[change.event]
        from_before = [v for v in change.values if _is_received(trace, places, v, stage, uses)]
        inputs = [v for v in change.values if trace.values[v].event is None]
        later = [v for v in inputs if uses.get(v, -1) > stage or (from_before and v in uses)]
        if len(from_before) > 1 or later:
            raise ValueError(_shared_memory(trace, change, stage))
        found |= {(stage, v) for v in from_before}
    return found


def _is_received(
    trace: Trace, places: Sequence[int], value: int, stage: int, uses: Mapping[int, int]
) -> bool:
    made = trace.values[value].event
    return made is not None and places[made] < stage <= uses.get(value, -1)


def _shared_memory(trace: Trace, change: Change, stage: int) -> str:
    event = trace.events[change.event]
    return (
        f"pipeline: {event.name} in stage {stage} ({event.line}) changes a tensor in place that "
        "another stage uses as well. HINT: the operation that is not in place, such as x = x + y, "
        "or a clone() before it"
    )
