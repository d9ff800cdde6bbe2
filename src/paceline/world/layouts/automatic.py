"""``layout="auto"`` and the budget of ``recompute="auto"``, from the predicted memory of a rank."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...cost.layout import Layout
from ...cost.layout_memory import LAYOUTS, LayoutChoice
from ...parallel.memory.setup import ForwardInputs, ModelSetup
from ...parallel.memory_budget import GIB, budget_bytes

Check = Callable[[Layout, ModelSetup], None]  # raises ValueError where a layout does not fit
Gather = Callable[[Any, Any], list[Any]]  # a value of each rank, of this type


@dataclass(frozen=True)
class MemoryOptions:
    """Options of ``world.distribute`` that decide the memory of a rank.

    Attributes:
        layout: The layout; None for "auto".
        recompute: How blocks recompute.
        memory_budget: GiB that a rank may take, for ``recompute="auto"``.
        held_gib: The part of the budget that parameters, gradients and optimizer states take.
        message: Why "auto" has chosen the layout; else "".
        predicted_bytes: Peak of a rank with activations, if it was predicted.
    """

    layout: Layout | None
    recompute: str | None
    memory_budget: float | None
    held_gib: float = 0.0
    message: str = ""
    predicted_bytes: int | None = None


def resolve_automatic(
    asked: MemoryOptions,
    setup: ModelSetup,
    example_inputs: Any,
    ranks: int,
    check: Check,
    gather: Gather,
) -> MemoryOptions:
    """Return the options with a layout, which has the recomputation. Collective for "auto".

    Args:
        asked: The options of the script.
        ranks: Number of ranks over which the model would be sharded.

    Raises:
        ValueError: No layout fits, or the memory of the model can't be predicted.
    """
    layout, recompute, budget, message = asked.layout, asked.recompute, asked.memory_budget, ""
    predicted: int | None = None
    if layout is None:
        problems = layout_problems(setup, check)
        usable = [layout for layout in LAYOUTS if layout not in problems]
        choice = _choose_layout(setup, example_inputs, recompute, budget, usable, ranks, gather)
        layout = choice.predicted.layout
        recompute = recompute or layout.recompute
        message = f"layout='auto': {choice.reason}"
        if example_inputs is not None:
            predicted = choice.predicted.memory.total
            message += ". The loss function is left out; paceline run --show-memory includes it"
        else:
            message += (
                ". Activations are left out. HINT: world.distribute(model, optimizer, "
                "layout='auto', example_inputs=(x,))"
            )
        budget = budget if recompute == "auto" else None
        layout = replace(layout, recompute=recompute)
    if recompute != "auto" or budget is None:  # without a budget, what the first forward leaves
        return MemoryOptions(layout, recompute, budget, message=message, predicted_bytes=predicted)
    from ...parallel.memory.choose import held_bytes

    check(layout, setup)  # a layout that does not fit is an error of its own
    gib = budget_bytes(budget, setup.device) / GIB
    held = held_bytes(setup, layout.without_options, ranks) / GIB
    return MemoryOptions(layout, recompute, gib, held, message, predicted)


def layout_problems(setup: ModelSetup, check: Check) -> dict[Layout, str]:
    """Return the layouts that the model or the other options of ``world.distribute`` rule out.

    Raises:
        ValueError: No layout is possible.
    """
    problems: dict[Layout, str] = {}
    for layout in LAYOUTS:
        try:
            check(layout, setup)
        except ValueError as error:
            problems[layout] = str(error)
    if len(problems) == len(LAYOUTS):
        raise ValueError(next(iter(problems.values())))
    return problems


def _choose_layout(
    setup: ModelSetup,
    example_inputs: Any,
    recompute: str | None,
    memory_budget: float | None,
    usable: Sequence[Layout],
    ranks: int,
    gather: Gather,
) -> LayoutChoice:
    """Return the fastest layout that fits, the same on all ranks. Collective.

    Raises:
        ValueError: No layout fits, or the model's step can't be traced.
    """
    from ...parallel.memory.choose import choose_for_all_ranks, predict_setup

    limit = budget_bytes(memory_budget, setup.device)
    inputs = ForwardInputs.parse(example_inputs)
    way = recompute if recompute in ("blocks", "selective") else None
    try:
        return choose_for_all_ranks(
            lambda: predict_setup(setup, inputs, ranks, way, usable), limit, gather
        )
    except ValueError as error:
        raise ValueError(f"world.distribute: layout='auto': {error}") from None
