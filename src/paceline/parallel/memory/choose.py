"""Choose the fastest layout whose predicted memory fits: ``layout="auto"``."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...cost.layout import Layout
from ...cost.layout_memory import (
    LAYOUTS,
    LayoutChoice,
    LayoutMemory,
    StepMemory,
    choose_layout,
    predict_layout,
    predict_layouts,
)
from ..distribute import kinds_for
from .fake_model import trace_model
from .setup import ForwardInputs, ModelSetup


def predict_setup(
    setup: ModelSetup,
    inputs: ForwardInputs | None,
    ranks: int,
    recompute: str | None = None,
    allowed: Sequence[Layout] = LAYOUTS,
) -> list[LayoutMemory]:
    """Return the predicted peaks of a model in its layouts, the fastest layout first.

    Layouts with recomputation come last. They are left out where there is nothing to recompute:
    no inputs, or no repeated blocks.

    Args:
        inputs: Arguments of its forward; None to predict without activations.
        recompute: How the model recomputes in any case: "blocks" or "selective".
        allowed: The layouts to predict.

    Raises:
        ValueError: The model's step can't be traced.
    """
    has_blocks = inputs is not None and setup.has_recomputable_blocks()
    kept = trace_model(setup, inputs)
    recomputed = trace_model(setup, inputs, recompute or "blocks") if has_blocks else None
    found = predict_layouts(
        kept,
        recomputed,
        ranks,
        recompute=recompute or "blocks",
        accumulate=setup.accumulate,
        allowed=allowed,
        predict=_predict,
    )
    if recompute is not None and recomputed is not None:
        return [one for one in found if one.layout.recompute]
    return found


def _predict(step: StepMemory, layout: Layout, ranks: int, accumulate: int) -> LayoutMemory:
    """Return the peak as the layout's last strategy predicts it: shards or replicas."""
    return kinds_for(layout)[-1].predict_memory(step, layout, ranks, accumulate=accumulate)


def choose_for_all_ranks(
    predict: Callable[[], list[LayoutMemory]],
    limit_bytes: int,
    gather: Callable[[Any, Any], list[Any]],
) -> LayoutChoice:
    """Return the same choice on all ranks: the one that fits the rank with least room. Collective.

    Args:
        predict: Returns this rank's predictions, of the same layouts on all ranks.
        limit_bytes: What this rank may take.
        gather: Returns the values of all ranks; its second argument is their type.

    Raises:
        ValueError: On all ranks: a rank's step can't be traced, or no layout fits.
    """
    answer: str | tuple[int, list[LayoutMemory]]
    try:
        answer = limit_bytes, predict()
    except ValueError as error:
        answer = str(error)
    answers = gather(answer, str | tuple[int, list[LayoutMemory]])
    problems = [one for one in answers if isinstance(one, str)]
    if problems:
        raise ValueError(problems[0])
    limits, predictions = zip(*answers, strict=True)
    largest = [
        max(of_layout, key=lambda one: one.memory.total)
        for of_layout in zip(*predictions, strict=True)
    ]
    return choose_layout(largest, min(limits))


def held_bytes(setup: ModelSetup, layout: Layout, ranks: int) -> int:
    """Return what a rank holds at the beginning of a backward, without activations.

    Raises:
        ValueError: The model or its optimizer can't be traced.
    """
    step = trace_model(setup, None)
    before_optimizer = StepMemory(
        [sample for sample in step.samples if sample.phase != "optimizer"],
        step.blocks,
        step.gradient_bytes,
    )
    predicted = predict_layout(before_optimizer, layout, ranks, accumulate=setup.accumulate)
    return replace(predicted.memory, activations=0).total
