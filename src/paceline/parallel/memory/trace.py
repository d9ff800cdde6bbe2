"""Trace the memory of a training step with fake tensors: no data, no device.

Stands on FakeTensorMode and on MemTracker and ModTracker of torch.distributed._tools. MemTracker
alone reports the peak of one layout; the peak of another layout can be elsewhere in the step, so
``StepTracker`` takes a sample after each operation. FSDPMemTracker is not used: it needs a process
group and a trace for each layout.

Limit: memory that an operation allocates inside itself is not predicted. On the CPU that is
oneDNN's workspace of nn.LSTM (without oneDNN the prediction is exact), and probably workspace of
a convolution or transposed convolution. benchmarks/layouts/memory_prediction.py shows both misses.
"""

import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed._tools.mod_tracker import ModTracker
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from ...cost.layout_memory import MemoryByCategory, MemorySample, Phase, StepMemory
from ...record.hooks.error_messages import script_line
from ..blocks import gathered_blocks
from ..fake_tensors import READS_VALUES, OneFakeMode

# MemTracker's names of categories; others ("Other": the step's inputs) count as activations.
FIELDS = {
    "Parameter": "parameters",
    "Buffer": "buffers",
    "Gradient": "gradients",
    "Optstate": "optimizer_states",
    "Temp": "temporary",
}
TRACED_STEPS = 2  # the first one creates the optimizer's states
_EQUAL = torch.ops.aten.equal.default
_NO_HOOKS = (RemovableHandle(OrderedDict()),) * 2  # in place of MemTracker's
_READS = (torch.ops.aten._local_scalar_dense.default, _EQUAL)


@dataclass(frozen=True)
class TrainingStep:
    """Models, optimizers and inputs of a training step, and the function that runs the step."""

    models: Sequence[torch.nn.Module]
    optimizers: Sequence[Optimizer]
    inputs: Sequence[torch.Tensor]
    run: Callable[[], None]
    blocks: Sequence[str] | None = None  # as in ``world.distribute``


def trace_step(build: Callable[[], TrainingStep]) -> StepMemory:
    """Return the memory of a step after each of its operations.

    Args:
        build: makes the models, optimizers and inputs. It runs under FakeTensorMode, so its
            tensors have shapes and dtypes and no data: it must not read values (``.item()``).

    Raises:
        ValueError: the step reads the value of a tensor.
    """
    with OneFakeMode(), warnings.catch_warnings():
        # A deep copy of a module reads the pointers of its tensors, which decides nothing here.
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
        step = build()
        tracker = StepTracker()
        tracker.track_external(*step.models, *step.optimizers, *step.inputs)
        try:
            with tracker:
                for _ in range(TRACED_STEPS):
                    step.run()
        except READS_VALUES as error:
            raise ValueError(
                f"the step reads values of a tensor ({error}), which fake tensors do not have."
                " HINT: leave .item(), print(loss) and shapes that depend on data out of the step"
            ) from error
        return step_memory(tracker.samples, [(model, step.blocks) for model in step.models])


def step_memory(
    samples: Sequence[MemorySample],
    models: Sequence[tuple[torch.nn.Module, Sequence[str] | None]],
) -> StepMemory:
    """Return the memory of a step from its samples, its models and the names of their blocks."""
    blocks: dict[str, int] = {}
    for number, (model, names) in enumerate(models):
        found = blocks_of(model, names)
        blocks |= {f"{number}.{name}": size for name, size in found.items()}
    trained = {p for model, _ in models for p in model.parameters() if p.requires_grad}
    return StepMemory(samples, blocks, sum(p.nbytes for p in trained))


def blocks_of(model: torch.nn.Module, names: Sequence[str] | None = None) -> dict[str, int]:
    """Return the bytes of the parameters of each block that a sharded layout gathers, by name.

    A block around another one has the parameters outside of that.

    Args:
        names: As ``blocks`` of ``world.distribute``.
    """
    blocks: dict[str, int] = {}
    inside: set[torch.nn.Parameter] = set()
    for name in gathered_blocks(model, names):
        own = set(model.get_submodule(name).parameters()) - inside
        inside |= own
        blocks[name] = sum(p.nbytes for p in own)
    return {name: size for name, size in blocks.items() if size}


class StepTracker(MemTracker):
    """MemTracker that keeps a sample after each operation.

    Args:
        answers_values: Answer a read of a fake tensor's value with 1. Otherwise it is an error.
    """

    def __init__(self, *, answers_values: bool = False) -> None:
        super().__init__()
        self._answers_values = answers_values
        self.samples: list[MemorySample] = []
        self._ignored = 0  # bytes
        self._modules = ModTracker()
        self._in_optimizer = False
        self._entered = 0  # a dispatch mode is entered again around an operation
        self._handles: list[Any] = []

    def __enter__(self) -> "StepTracker":
        """Begin tracking."""
        if not self._entered:
            self._modules.__enter__()
            self._handles = [
                register_optimizer_step_pre_hook(lambda *_: self._set_in_optimizer(True)),
                register_optimizer_step_post_hook(lambda *_: self._set_in_optimizer(False)),
            ]
        self._entered += 1
        super().__enter__()
        return self

    def __exit__(self, *args: Any) -> None:
        """End tracking."""
        super().__exit__(*args)
        self._entered -= 1
        if not self._entered:
            for handle in self._handles:
                handle.remove()
            self._handles = []
            self._modules.__exit__(*args)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and sample the memory after it."""
        if self._answers_values and func in _READS and isinstance(args[0], FakeTensor):
            return _answer(func, args[0])
        result = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if result is not NotImplemented:
            self._sample()
        return result

    def _pre_fw_hook(self, module: torch.nn.Module, inputs: Any) -> None:
        """Allow root modules that are called again: a GAN's critic, and the next step.

        MemTracker raises there, because its statistics of a module are those of one call. Its
        bytes by category, which the samples take, do not depend on them.
        """
        inside = self._modules.parents - {"Global", type(module).__name__}
        if not inside and not self._modules.is_bw:
            self.memory_tracking.pop(module, None)
        super()._pre_fw_hook(module, inputs)

    def _track_module_params_and_buffers(
        self, module: torch.nn.Module, install_grad_hooks: bool = True
    ) -> tuple[int, int]:
        """Allow frozen parameters, on which MemTracker can't put its hooks for gradients."""
        handles = self._param_to_grad_hook_handles
        for parameter in module.parameters():
            if not parameter.requires_grad:
                handles.setdefault(parameter, _NO_HOOKS)
            elif handles.get(parameter) is _NO_HOOKS:  # trained from now on
                del handles[parameter]
        return super()._track_module_params_and_buffers(module, install_grad_hooks)

    def _update_peak_stats(self, peak_state: Any) -> None:
        """Do nothing: MemTracker's peaks, of each module after each operation, are not used."""

    def ignore_activations(self, except_bytes: int) -> None:
        """Leave out tensors that exist now, such as a dataset, except for this many bytes."""
        self.samples = []
        self._ignored = max(self._sizes()["activations"] - except_bytes, 0)

    def _set_in_optimizer(self, inside: bool) -> None:
        self._in_optimizer = inside

    def _sizes(self) -> Counter[str]:
        """Return the bytes of each category now."""
        sizes: Counter[str] = Counter()
        for snapshot in self.get_tracker_snapshot("current").values():
            for category, size in snapshot.items():
                name = str(getattr(category, "value", category))
                if name != "Total":
                    sizes[FIELDS.get(name, "activations")] += size
        sizes["activations"] = max(sizes["activations"] - self._ignored, 0)
        return sizes

    def _sample(self) -> None:
        phase: Phase = "backward" if self._modules.is_bw else "forward"
        names = self._modules.parents - {"Global"}
        module = "" if self._in_optimizer else max(names, key=lambda n: n.count("."), default="")
        self.samples.append(
            MemorySample(
                module,
                "optimizer" if self._in_optimizer else phase,
                MemoryByCategory(**self._sizes()),
                script_line(),
            )
        )


def _answer(func: Any, tensor: torch.Tensor) -> bool | int | float:
    """Return a value for a read of a fake tensor."""
    if func is _EQUAL:
        return False
    if tensor.dtype == torch.bool:
        return True
    return 1.0 if tensor.is_floating_point() else 1
