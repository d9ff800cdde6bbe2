"""Choose the fastest layout whose predicted memory fits: ``layout="auto"``."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

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
from ...data.sampling.sample_order import preserve_random_states
from ..placement import Autocast
from ..recompute.recomputation import recompute_blocks
from .setup import ForwardInputs, ModelSetup, copy_without_data
from .trace import TrainingStep, trace_step


def trace_model(
    setup: ModelSetup, inputs: ForwardInputs | None, recompute: str | None = None
) -> StepMemory:
    """Return the memory of a step of a model.

    Args:
        inputs: Arguments of its forward. None: the step has no forward, so that it holds
            parameters, gradients and optimizer states only.
        recompute: "blocks" or "selective"; None keeps all activations.

    Raises:
        ValueError: The model or optimizer can't be copied, or its step can't be traced.
    """
    with preserve_random_states():
        try:
            return trace_step(lambda: _step_of(setup, inputs, recompute))
        except ValueError:
            raise
        except Exception as error:  # of any code of the user's model
            first = str(error).strip().splitlines()[:1]
            raise ValueError(
                f"the memory of the {type(setup.model).__name__} can't be traced without data: "
                f"{type(error).__name__}{f': {first[0]}' if first else ''}. HINT: choose a layout, "
                "such as layout='zero3'"
            ) from error


def _step_of(
    setup: ModelSetup, inputs: ForwardInputs | None, recompute: str | None
) -> TrainingStep:
    """Return the step of a copy without data. Runs under a fake mode."""
    (model,), optimizers = copy_without_data(
        [setup.model], [setup.optimizer] if setup.optimizer is not None else [], setup.device
    )
    recompute_blocks(model, recompute, None, setup.recomputed_blocks, lambda _: None)
    if setup.autocast_dtype is not None:
        model.forward = Autocast(model.forward, setup.device.type, setup.autocast_dtype)
    given = inputs.without_data(setup.device) if inputs is not None else None

    def run() -> None:
        if given is None:
            outputs: Any = [p for p in model.parameters() if p.requires_grad]
        else:
            outputs = model(*given.args, **given.options)
        sum_of(tree_leaves(outputs)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        model.zero_grad()

    tensors = [t for t in tree_leaves(given and (given.args, given.options)) if torch.is_tensor(t)]
    return TrainingStep([model], optimizers, tensors, run, setup.blocks)


def sum_of(outputs: Iterable[Any]) -> torch.Tensor:
    """Return the sum of all elements of floating-point tensors with a gradient."""
    sums = [t.sum().float() for t in outputs if torch.is_tensor(t) and t.requires_grad]
    if not sums:
        raise ValueError(
            "no output of the model depends on a parameter. HINT: give inputs of a training step"
        )
    return torch.stack(sums).sum()


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
    )
    if recompute is not None and recomputed is not None:
        return [layout for layout in found if layout.layout.recompute]
    return found


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
    problems = [answer for answer in answers if isinstance(answer, str)]
    if problems:
        raise ValueError(problems[0])
    limits, predictions = zip(*answers, strict=True)
    largest = [
        max(of_layout, key=lambda layout: layout.memory.total)
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
