"""Memory of a script's own training step in each layout: ``paceline run --show-memory``.

The script runs as one rank until its third optimizer step. The models that it gives to
``world.distribute`` or DistributedDataParallel get parameters without data (fake tensors), so that
no forward computes and no model needs memory. Batches, and what does not depend on a parameter,
are real. A value that the script reads, such as ``loss.item()``, is 1.
"""

import contextlib
import os
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._pytree import tree_leaves

from ...cost.layout import Layout
from ...cost.layout_memory import LAYOUTS, LayoutMemory, StepMemory, predict_layouts
from ..blocks import nbytes_of, recomputed_blocks
from ..fake_tensors import READS_VALUES, OneFakeMode
from ..memory_budget import available_bytes, budget_bytes
from ..placement import Autocast, empty_as
from ..recompute.recomputation import recompute_blocks
from ..sharded.optimizer_parameters import replace_parameters
from .setup import ModelSetup, ScriptLimits
from .trace import (
    TRACED_STEPS,
    StepTracker,
    step_memory,
)

VARIABLE = "PACELINE_SHOW_MEMORY"  # ranks to predict for, and those of a node: "8:4"
NO_MODEL = (
    "no model was given to world.distribute or DistributedDataParallel. Models that a script "
    "shards itself (FSDP) are not traced. HINT: model, optimizer = world.distribute(model, "
    "optimizer)"
)

_survey: "MemorySurvey | None" = None


@dataclass(frozen=True)
class _Entry:
    setup: ModelSetup
    limits: ScriptLimits


class MemorySurvey:
    """Trace of the first steps of a script.

    Attributes:
        ranks: Number of ranks to predict for.
        ranks_of_node: The largest number of them on a node.
    """

    def __init__(self, ranks: int, ranks_of_node: int, show: "Show") -> None:
        """Trace from now on.

        Args:
            show: Called with the predictions, the fastest layout first.
        """
        self.ranks, self.ranks_of_node = ranks, ranks_of_node
        self._show = show
        self._mode = OneFakeMode(allow_non_fake_inputs=True)
        self._tracker = StepTracker(answers_values=True)
        self._is_tracing = self._has_run = False
        self._entries: list[_Entry] = []
        self._optimizers: list[Optimizer] = []
        # An id may be used again after its parameter was freed, so each has a reference.
        self._replaced: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []
        self._steps: Counter[int] = Counter()  # by id of the optimizer
        self._kept: StepMemory | None = None  # traced without recomputation
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]

    @property
    def device(self) -> torch.device:
        """The device of the largest model."""
        entry = max(self._entries, key=lambda entry: nbytes_of(entry.setup.model))
        return entry.setup.device

    @property
    def available_bytes(self) -> int:
        """The bytes that a rank may take: the script's budget, else what it has."""
        available = available_bytes(self.device, self.ranks_of_node)
        budgets = [e.limits.memory_budget for e in self._entries if e.limits.memory_budget]
        return min((budget_bytes(budget, self.device) for budget in budgets), default=available)

    @property
    def problems(self) -> dict[Layout, str]:
        """Why layouts are impossible, by layout."""
        return {key: why for e in self._entries for key, why in e.limits.problems.items()}

    def add(self, setup: ModelSetup, limits: ScriptLimits) -> None:
        """Replace the tensors of a model by tensors without data, and trace its steps."""
        model, optimizer = setup.model, setup.optimizer
        self._entries.append(_Entry(setup, limits))
        self._replace_tensors(model, setup.device)
        if optimizer is not None:
            self._add_optimizer(optimizer)
        self._tracker.track_external(model)
        if not self._is_tracing:
            # not in the first forward: the tracker counts how modules are entered and left
            self._is_tracing = True
            self._tracker.__enter__()
        if setup.autocast_dtype is not None:
            model.forward = Autocast(model.forward, setup.device.type, setup.autocast_dtype)
        model.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)

    def script_ended(self) -> None:
        """Report a script that has ended before its step was traced; raises ValueError."""
        self._stop()
        steps = min(self._steps.values(), default=0)
        reason = (
            NO_MODEL
            if not self._entries
            else f"the script has ended after {steps} of {TRACED_STEPS + 1} optimizer steps. "
            "HINT: use more batches or epochs"
        )
        raise ValueError(f"--show-memory: {reason}")

    def explain(self, error: BaseException) -> str | None:
        """Return why the step can't be traced; None for errors that have another cause."""
        text = str(error)
        is_read = isinstance(error, READS_VALUES) or any(
            phrase in text for phrase in ("FakeTensor", "numpy() is not supported", "data pointer")
        )
        if not is_read or not self._entries:
            return None
        return (
            f"--show-memory: the training step reads the values of a tensor "
            f"({text.strip().splitlines()[0][:200] if text.strip() else type(error).__name__}), "
            "and its tensors have none. HINT: leave it out of the first "
            f"{TRACED_STEPS + 1} steps, such as: if step > {TRACED_STEPS}"
        )

    def _replace_tensors(self, model: nn.Module, device: torch.device) -> None:
        fakes: dict[int, torch.Tensor] = {}
        owned = [
            (module, name, tensor)
            for module in model.modules()
            for name, tensor in [*module._parameters.items(), *module._buffers.items()]
            if tensor is not None
        ]
        for module, name, tensor in owned:
            if id(tensor) not in fakes:
                with self._mode:
                    fakes[id(tensor)] = empty_as(tensor, device)
                self._replaced.append((weakref.ref(tensor), fakes[id(tensor)]))
            setattr(module, name, fakes[id(tensor)])  # nn.LSTM has a list of its parameters

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        """Let an optimizer hold the parameters without data; its states lose theirs."""
        if any(optimizer is known for known in self._optimizers):
            return
        self._optimizers.append(optimizer)
        originals = [(ref(), fake) for ref, fake in self._replaced]
        replace_parameters(optimizer, {id(t): fake for t, fake in originals if t is not None})
        with self._mode:
            for state in optimizer.state.values():
                for name, value in state.items():
                    if torch.is_tensor(value) and value.dim():
                        state[name] = empty_as(value, value.device)
        self._tracker.track_external(optimizer)

    def _before_forward(self, _: nn.Module, args: Any, options: Any) -> None:
        inputs = [leaf for leaf in tree_leaves((args, options)) if torch.is_tensor(leaf)]
        self._tracker.track_external(*inputs)
        if not self._has_run:
            self._has_run = True
            self._tracker.ignore_activations(sum(t.untyped_storage().nbytes() for t in inputs))

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not self._entries:
            self._stop()
            raise ValueError(f"--show-memory: {NO_MODEL}")
        self._add_optimizer(optimizer)

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._steps[id(optimizer)] += 1
        steps = min(self._steps[id(known)] for known in self._optimizers)
        if steps == TRACED_STEPS and self._kept is None:
            self._kept = self._memory()
            if not self._recompute():
                self._finish(None)
        elif steps > TRACED_STEPS:
            self._finish(self._memory())

    def _memory(self) -> StepMemory:
        """Return the memory of the steps that were traced, and begin anew."""
        samples, self._tracker.samples = self._tracker.samples, []
        return step_memory(samples, [(e.setup.model, e.setup.blocks) for e in self._entries])

    def _recompute(self) -> bool:
        """Let the blocks recompute from now on; return whether there are any."""
        found = False
        for entry in self._entries:
            names = entry.setup.recomputed_blocks
            if recomputed_blocks(entry.setup.model, names):
                found = True
                recompute_blocks(entry.setup.model, self._way, None, names, lambda _: None)
        return found

    @property
    def _way(self) -> str:
        """How blocks recompute: as the script wants, else "blocks"."""
        ways = [entry.limits.recompute for entry in self._entries]
        return "selective" if "selective" in ways else "blocks"

    def _finish(self, recomputed: StepMemory | None) -> None:
        """Show the predictions and end the script; raises SystemExit."""
        assert self._kept is not None
        self._stop()
        accumulate = max(entry.setup.accumulate for entry in self._entries)
        per_node = any(entry.limits.per_node for entry in self._entries)
        found = predict_layouts(
            self._kept,
            recomputed,
            self.ranks_of_node if per_node else self.ranks,
            recompute=self._way,
            accumulate=accumulate,
            allowed=[layout for layout in LAYOUTS if layout not in self.problems],
        )
        fixed = any(entry.limits.recompute in ("blocks", "selective") for entry in self._entries)
        if fixed and recomputed is not None:
            found = [layout for layout in found if layout.layout.recompute]
        self._show(found, self)
        raise SystemExit(0)

    def _stop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._is_tracing:
            self._is_tracing = False
            self._tracker.__exit__(None, None, None)


Show = Callable[[list[LayoutMemory], MemorySurvey], None]


def start_survey(show: Show) -> MemorySurvey:
    """Trace this process's training, for as many ranks as the environment says."""
    global _survey
    ranks, _, ranks_of_node = os.environ[VARIABLE].partition(":")
    _survey = MemorySurvey(int(ranks), int(ranks_of_node), show)
    _trace_data_parallel(_survey)
    return _survey


def current_survey() -> MemorySurvey | None:
    """Return the survey of this process, if there is one."""
    return _survey


def _trace_data_parallel(survey: MemorySurvey) -> None:
    """Let DistributedDataParallel only pass calls on to its module, which is traced."""

    def construct(self: Any, module: nn.Module, *_: Any, **__: Any) -> None:
        nn.Module.__init__(self)
        self.module = module
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        survey.add(ModelSetup(module, None, device), ScriptLimits())

    def forward(self: Any, *args: Any, **options: Any) -> Any:
        return self.module(*args, **options)

    def train(self: Any, mode: bool = True) -> Any:
        return nn.Module.train(self, mode)

    replaced: dict[str, Any] = {"__init__": construct, "forward": forward, "train": train}
    replaced["register_comm_hook"] = lambda *_, **__: None
    replaced["join"] = lambda *_, **__: contextlib.nullcontext()
    for name, function in replaced.items():
        setattr(DistributedDataParallel, name, function)
