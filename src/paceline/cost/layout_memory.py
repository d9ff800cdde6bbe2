"""Predicted memory of one rank in each layout, from the memory of one process's step.

The input is what one process holds after each operation of a step (``StepMemory``); the output is
the peak of a rank when the same step runs as data parallel (DDP), or with sharded optimizer states
(zero1), gradients (zero2) or parameters (zero3), as FSDP2 holds them. All sizes are bytes.
Only the peak of one process was compared with measurements (benchmarks/layouts). The sharded
layouts follow FSDP2's rules for what is gathered, and were not compared.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

Layout = Literal["data", "zero1", "zero2", "zero3"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)  # in the order of their communication a step
Phase = Literal["forward", "backward", "optimizer"]


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
    """Predicted peak of a rank, and where in the step it is."""

    layout: Layout
    ranks: int
    module: str
    phase: Phase
    memory: MemoryByCategory


@dataclass(frozen=True)
class LayoutChoice:
    """The layout that ``choose_layout`` takes, and why."""

    predicted: LayoutMemory
    reason: str


def bytes_per_parameter(layout: Layout, ranks: int, *, master_copy: bool = False) -> float:
    """Return Adam's bytes a parameter on each rank, without activations and unsharded blocks.

    Args:
        master_copy: 16-bit parameters with a 32-bit copy (ZeRO, arXiv 1910.02054), and not 32-bit
            parameters, with or without autocast.
    """
    _check(layout, ranks)
    whole, sharded = {
        True: {"data": (16, 0), "zero1": (4, 12), "zero2": (2, 14), "zero3": (0, 16)},
        False: {"data": (16, 0), "zero1": (8, 8), "zero2": (4, 12), "zero3": (0, 16)},
    }[master_copy][layout]
    return whole + sharded / ranks


def predict_layout(step: StepMemory, layout: Layout, ranks: int) -> LayoutMemory:
    """Return the peak of a rank in a layout.

    Raises:
        ValueError: the layout is unknown, ``ranks`` is below 1, or the step has no samples.
    """
    _check(layout, ranks)
    if not step.samples:
        raise ValueError("the step has no samples. HINT: trace a step that runs operations")
    held = ((_held(step, s, layout, ranks), s) for s in step.samples)
    memory, at = max(held, key=lambda pair: pair[0].total)
    return LayoutMemory(layout, ranks, at.module, at.phase, memory)


def choose_layout(step: StepMemory, ranks: int, limit_bytes: int) -> LayoutChoice:
    """Return the layout with the least communication whose peak is within a limit.

    Raises:
        ValueError: no layout fits; the message says the least peak and its largest category.
    """
    predicted = [predict_layout(step, layout, ranks) for layout in LAYOUTS]
    for i, candidate in enumerate(predicted):
        if candidate.memory.total <= limit_bytes:
            larger = [f"{p.layout} needs {_mib(p.memory.total)}" for p in predicted[:i]]
            why = f"{candidate.layout} needs {_mib(candidate.memory.total)} of {_mib(limit_bytes)}"
            return LayoutChoice(candidate, "; ".join([why, *larger]))
    least = min(predicted, key=lambda p: p.memory.total)
    sizes = asdict(least.memory)
    largest = max(sizes, key=lambda name: sizes[name])
    raise ValueError(
        f"no layout fits {_mib(limit_bytes)} on {ranks} ranks: {least.layout} needs"
        f" {_mib(least.memory.total)}, of it {_mib(sizes[largest])} {largest.replace('_', ' ')}, in"
        f" the {least.phase} of {least.module or 'the step'}."
        " HINT: use a smaller batch, recomputation or more ranks"
    )


def _held(step: StepMemory, sample: MemorySample, layout: Layout, ranks: int) -> MemoryByCategory:
    """Return what a rank holds at a sample's time in a layout."""
    m = sample.memory
    gradients = m.gradients if ranks == 1 else step.gradient_bytes  # buckets live all the time
    if layout == "data":
        return _with(m, gradients=gradients)
    states = _part(m.optimizer_states, ranks)
    if layout == "zero1":
        return _with(m, gradients=gradients, optimizer_states=states)
    return _with(
        m,
        parameters=_part(m.parameters, ranks),
        gradients=_part(m.gradients, ranks),
        optimizer_states=states,
        unsharded=_unsharded(step, sample, keep=layout == "zero2"),
    )


def _unsharded(step: StepMemory, sample: MemorySample, *, keep: bool) -> int:
    """Return the bytes of gathered parameters and unreduced gradients.

    FSDP2 gathers the next block while one computes, and keeps the root's unit between forward and
    backward. In backward a block has its gradients beside the input of the reduce-scatter.
    """
    if sample.phase == "optimizer":
        return 0
    parameters = sample.memory.parameters
    blocks = sorted(step.blocks.values(), reverse=True)
    root = parameters - sum(blocks)
    gathered = parameters if keep else min(parameters, root + sum(blocks[:2]))
    if sample.phase == "forward":
        return gathered
    return gathered + 2 * max(root, *blocks[:1], 0)


def _with(m: MemoryByCategory, **changed: int) -> MemoryByCategory:
    return MemoryByCategory(**{**asdict(m), **changed})


def _part(size: int, ranks: int) -> int:
    return -(-size // ranks)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _check(layout: str, ranks: int) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown. HINT: use one of {', '.join(LAYOUTS)}")
    if ranks < 1:
        raise ValueError(f"ranks={ranks} is below 1. HINT: give the number of ranks")
