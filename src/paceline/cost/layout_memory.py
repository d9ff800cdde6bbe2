"""Predicted memory of one rank in each layout, from the memory of one process's step.

The input is what one process holds after each operation of a step (``StepMemory``); the output is
the peak of a rank when the same step runs as data parallel (DDP), or with sharded optimizer states
(zero1), gradients (zero2) or parameters (zero3), as FSDP2 holds them. All sizes are bytes.
The sharded layouts follow FSDP2's rules for what is gathered. benchmarks/layouts compares the peaks
with measurements (memory_prediction.py, memory_of_layouts.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal

from ..plurals import counted
from .layout import Layout

# in the order of their communication a step
LAYOUTS = (Layout(), Layout(zero=1), Layout(zero=2), Layout(zero=3))
Phase = Literal["forward", "backward", "optimizer"]
WORDS = {  # of the categories, for people
    "parameters": "parameters",
    "buffers": "buffers",
    "gradients": "gradients",
    "optimizer_states": "optimizer states",
    "activations": "activations",
    "temporary": "workspace",
    "unsharded": "unsharded blocks",
}


@dataclass(frozen=True)
class MemoryByCategory:
    """Bytes that a rank holds at one time."""

    parameters: int = 0
    buffers: int = 0
    gradients: int = 0
    optimizer_states: int = 0  # with the optimizer's temporary tensors
    activations: int = 0  # with the step's inputs
    temporary: int = 0  # gradients of activations, and temporary tensors of backward
    unsharded: int = 0  # gathered parameters and unreduced gradients of blocks

    @property
    def total(self) -> int:
        """Bytes of all categories."""
        return sum(asdict(self).values())


@dataclass(frozen=True)
class MemorySample:
    """Memory after one operation of a step."""

    module: str
    phase: Phase
    memory: MemoryByCategory
    line: str = ""  # of the script, such as "train.py:31"


@dataclass(frozen=True)
class StepMemory:
    """Memory of one process over a step; ``blocks`` are bytes of parameters by block's name.

    Blocks are the units that FSDP2 gathers; parameters outside of them form the root's unit.
    ``gradient_bytes`` are those of all gradients after backward.
    """

    samples: Sequence[MemorySample]
    blocks: Mapping[str, int]
    gradient_bytes: int


@dataclass(frozen=True)
class LayoutMemory:
    """Predicted peak of a rank, and where in the step it is.

    ``layout``: with ``recompute``, if activations are computed again.
    """

    layout: Layout
    ranks: int
    module: str
    phase: Phase
    memory: MemoryByCategory
    line: str = ""

    @property
    def name(self) -> str:
        """The layout as tables and messages name it: "zero3 + recompute"."""
        return str(self.layout)

    @property
    def axes(self) -> str:
        """The layout without recomputation: "zero3"."""
        return str(self.layout.without_options)

    @property
    def place(self) -> str:
        """Where in the step the peak is: "backward of Net.layers.3, train.py:31"."""
        module = f" of {self.module}" if self.module else ""
        return f"{self.phase}{module}{f', {self.line}' if self.line else ''}"


@dataclass(frozen=True)
class LayoutChoice:
    """The layout that ``choose_layout`` takes, and why."""

    predicted: LayoutMemory
    reason: str


def predict_layout(
    step: StepMemory, layout: Layout, ranks: int, *, accumulate: int = 1
) -> LayoutMemory:
    """Return the peak of a rank in a layout.

    Args:
        layout: ``recompute`` says how ``step`` recomputes activations; it is stated in the result.
        accumulate: Batches of one optimizer step. All layouts keep gradients between them: DDP
            in addition to its buckets, zero1 whole ones, zero2 and zero3 shards.

    Raises:
        ValueError: the layout divides models or samples, ``ranks`` is below 1, or the step has no
            samples.
    """
    _check(layout, ranks)
    if not step.samples:
        raise ValueError("the step has no samples. HINT: trace a step that runs operations")
    kept = step.gradient_bytes if accumulate > 1 else 0
    if layout.zero == 2 or (layout.zero == 1 and accumulate == 1):
        held = _held_by_gathering(step, ranks, kept, keep=True)
    elif layout.zero == 3:
        held = _held_by_gathering(step, ranks, kept, keep=False)
    else:
        held = [_held_whole(step, s, layout, ranks, kept) for s in step.samples]
    pairs = zip(held, step.samples, strict=True)
    memory, at = max(pairs, key=lambda pair: pair[0].total)
    return LayoutMemory(layout, ranks, at.module, at.phase, memory, at.line)


def predict_layouts(
    kept: StepMemory,
    recomputed: StepMemory | None,
    ranks: int,
    *,
    recompute: str = "blocks",
    accumulate: int = 1,
    allowed: Sequence[Layout] = LAYOUTS,
) -> list[LayoutMemory]:
    """Return the peaks of all layouts, the fastest layout first; one rank has only "data".

    Args:
        kept: A step that keeps its activations.
        recomputed: The same step with recomputation; None to leave these layouts out.
        allowed: The layouts to predict.
    """
    layouts = [layout for layout in LAYOUTS if layout in allowed] if ranks > 1 else LAYOUTS[:1]
    cases = [(kept, layout) for layout in layouts]
    if recomputed is not None:
        cases += [(recomputed, replace(layout, recompute=recompute)) for layout in layouts]
    return [predict_layout(step, layout, ranks, accumulate=accumulate) for step, layout in cases]


def choose_layout(predicted: Sequence[LayoutMemory], limit_bytes: int) -> LayoutChoice:
    """Return the first layout whose peak is within a limit.

    Args:
        predicted: From ``predict_layouts``: the fastest layout first.

    Raises:
        ValueError: no layout fits; the message says the least peak and its largest category.
    """
    for i, candidate in enumerate(predicted):
        if candidate.memory.total <= limit_bytes:
            larger = [f"{p.name} {size_text(p.memory.total)}" for p in predicted[:i]]
            why = (
                f"{candidate.name} needs {size_text(candidate.memory.total)} of "
                f"{size_text(limit_bytes)}"
            )
            faster = f"; too large: {', '.join(larger)}" if larger else ""
            return LayoutChoice(candidate, why + faster)
    least = min(predicted, key=lambda p: p.memory.total)
    raise ValueError(
        f"no layout fits {size_text(limit_bytes)} on {counted(least.ranks, 'rank')}: the least is "
        f"{size_text(least.memory.total)} with {least.name}, of it {largest_category(least)}, in "
        f"{least.place}. HINT: use a smaller batch or more ranks"
    )


def largest_category(predicted: LayoutMemory) -> str:
    """Return size and name of the largest category of a peak: "9.5 MiB activations"."""
    sizes = asdict(predicted.memory)
    largest = max(sizes, key=lambda name: sizes[name])
    return f"{size_text(sizes[largest])} {WORDS[largest]}"


def size_text(size: int) -> str:
    """Return bytes as MiB or GiB."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _held_whole(
    step: StepMemory, sample: MemorySample, layout: Layout, ranks: int, kept: int
) -> MemoryByCategory:
    """Return what a rank holds that has whole parameters and gradients.

    Args:
        kept: Bytes of gradients of the batches before, which wait for the last one.
    """
    m = sample.memory
    if ranks == 1:
        return replace(m, gradients=max(m.gradients, kept))
    buckets = step.gradient_bytes  # which live all the time
    if not layout.zero:
        # the last backward copies the gradients into the buckets
        return replace(m, gradients=buckets + (kept if sample.phase != "optimizer" else 0))
    return replace(
        m,
        gradients=buckets,
        parameters=_part(m.parameters, ranks),
        optimizer_states=_part(m.optimizer_states, ranks),
        unsharded=m.parameters + 2 * max(step.blocks.values(), default=0),
    )


def _held_by_gathering(
    step: StepMemory, ranks: int, kept: int, *, keep: bool
) -> list[MemoryByCategory]:
    """Return what a rank holds that keeps shards, and gathers the parameters of a block.

    Args:
        kept: Bytes of whole gradients of the batches before, of which each rank has a shard.
        keep: Whether a gathered block stays whole from its forward to the end of its backward.
    """
    found, before_backward = [], 0
    for sample in step.samples:
        m = sample.memory
        if sample.phase != "backward":
            before_backward = m.gradients
        found.append(
            replace(
                m,
                parameters=_part(m.parameters, ranks),
                gradients=_part(max(m.gradients, kept), ranks),
                optimizer_states=_part(m.optimizer_states, ranks),
                unsharded=_unsharded(step, sample, m.gradients - before_backward, keep=keep),
            )
        )
    return found


def _unsharded(step: StepMemory, sample: MemorySample, reduced: int, *, keep: bool) -> int:
    """Return the bytes of gathered parameters and unreduced gradients.

    FSDP2 gathers the next block while one computes, and keeps the root's unit between forward and
    backward. In backward a block has its gradients and the input of the reduce-scatter.

    Args:
        reduced: Bytes of gradients that this backward has reduced; their blocks are sharded again.
    """
    if sample.phase == "optimizer":
        return 0
    parameters = sample.memory.parameters
    blocks = sorted(step.blocks.values(), reverse=True)
    root = max(parameters - sum(blocks), 0)
    two_blocks = min(parameters, root + sum(blocks[:2]))
    gathered = max(parameters - max(reduced, 0), two_blocks) if keep else two_blocks
    if sample.phase == "forward":
        return gathered
    return gathered + 2 * max(root, *blocks[:1], 0)


def _part(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _check(layout: Layout, ranks: int) -> None:
    if layout.divided_axes:
        raise ValueError(
            f"layout={str(layout)!r}: the memory of layouts with {layout.divided_axes[0]} is not "
            f"predicted yet. HINT: use one of {', '.join(map(str, LAYOUTS))}"
        )
    if ranks < 1:
        raise ValueError(f"ranks={ranks} is below 1. HINT: give the number of ranks")
