"""Observe losses, backwards, clipping, gradient scalers and the steps of optimizers."""

import functools
import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ...record.hooks import taps
from ...record.hooks.taps import Function, Tap
from ...record.hooks.training_loop import is_stepping
from ..facts.ranks import RankFacts
from ..facts.samples import Phase
from ..facts.steps import BackwardFacts, ClipFacts, OptimizerFacts, StepFacts
from ..observation import Observation
from ..user_lines import is_called_by, user_line
from .models import Model, Models

# Loss functions


_LOSSES = "the loss functions"
# Functions of torch.nn.functional, each with whether a class index stands for a target.
LOSSES = {
    **dict.fromkeys(("cross_entropy", "nll_loss", "multi_margin_loss"), True),
    **dict.fromkeys(
        (
            *("binary_cross_entropy", "binary_cross_entropy_with_logits", "mse_loss", "l1_loss"),
            *("smooth_l1_loss", "huber_loss", "kl_div", "poisson_nll_loss", "gaussian_nll_loss"),
            *("ctc_loss", "hinge_embedding_loss", "margin_ranking_loss", "soft_margin_loss"),
            *("multilabel_margin_loss", "multilabel_soft_margin_loss", "cosine_embedding_loss"),
            *("triplet_margin_loss", "linear_cross_entropy"),
        ),
        False,
    ),
}


class Losses:
    """The loss functions of this process.

    Args:
        observation: Receives the values.
    """

    def __init__(self, observation: Observation) -> None:
        self._observation = observation

    def install(self) -> None:
        """Subscribe to the functions; the loss modules of torch call them."""
        for name, has_indices in LOSSES.items():
            note = functools.partial(self._note, has_indices)
            tap = Tap("torch.nn.functional", name, is_optional=True, is_traced=True)
            tap.wrap(self._observation.outermost(_LOSSES, after=note))

    def _note(self, has_indices: bool, value: Any, *args: Any, **options: Any) -> None:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return
        observation = self._observation
        target: Any = options.get("target", args[1] if len(args) > 1 else None)
        elements, class_weight = target.numel() if isinstance(target, torch.Tensor) else 0, 0.0
        if has_indices and elements and not target.is_floating_point():
            counted = target[target != options.get("ignore_index", -100)]
            elements = counted.numel()
            weight: Any = options.get("weight", args[2] if len(args) > 2 else None)
            if isinstance(weight, torch.Tensor) and weight.ndim == 1:
                class_weight = float(weight.detach()[counted].sum())
        observation.loss = float(value.detach().sum()) if value.numel() else None
        observation.reduction = str(options.get("reduction", "mean"))
        observation.elements, observation.class_weight = elements, class_weight

    def note_output(self, model: Model, output: Any) -> None:
        """Note the attribute ``loss`` of a model's output."""
        loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad:
            self._observation.loss = float(loss.detach())


# Clipping


_CLIPPING = "the clipping of gradients"


class Clipping:
    """The calls of ``clip_grad_norm_`` and ``clip_grad_value_`` since the last step.

    Args:
        observation: Receives the rows of gradients.
        models: Know the names of parameters.

    Attributes:
        skips: Whether the gradients of these parameters are not complete in a replay, and so not
            to be clipped.
    """

    def __init__(self, observation: Observation, models: Models) -> None:
        self._observation, self._models = observation, models
        self._clips: list[ClipFacts] = []
        self.skips: Callable[[list[torch.Tensor]], bool] = lambda parameters: False

    def take(self) -> list[ClipFacts]:
        """Return the calls since the last step, and forget them."""
        found, self._clips = self._clips, []
        return found

    def clip(self, function: Function, *args: Any, **options: Any) -> Any:
        """Call a function that clips gradients, and note them before and afterwards."""
        observation = self._observation
        if not observation.is_observed:
            return function(*args, **options)
        signature = inspect.signature(function)
        parameters_name, limit_name = list(signature.parameters)[:2]
        call = signature.bind(*args, **options)
        given, limit = call.arguments[parameters_name], call.arguments[limit_name]
        listed = [given] if isinstance(given, torch.Tensor) else list(given)
        call.arguments[parameters_name] = listed
        if observation.guarded(_CLIPPING, self.skips)(listed):
            call.arguments[limit_name] = math.inf
            return function(*call.args, **call.kwargs)
        note = observation.guarded(_CLIPPING, self._rows)
        before = note(listed)
        norm = function(*call.args, **call.kwargs)
        observation.guarded(_CLIPPING, self._note)(before, note(listed), limit, norm)
        return norm

    def _rows(self, parameters: list[torch.Tensor]) -> dict[str, int]:
        return self._models.add_rows(
            (name, parameter.grad)
            for parameter in parameters
            if (name := self._models.name_of(parameter)) and parameter.grad is not None
        )

    def _note(
        self, before: dict[str, int] | None, after: dict[str, int] | None, limit: Any, norm: Any
    ) -> None:
        # The norm of sharded gradients is a DTensor, whose value needs a collective.
        value = float(norm) if norm is not None and not hasattr(norm, "placements") else None
        self._clips.append(ClipFacts(user_line(), float(limit), value, before or {}, after or {}))


# Batches of backwards


def share_batches(backwards: list[BackwardFacts], facts: RankFacts) -> None:
    """Give each backward one batch if as many were read at once as backwards followed.

    Batches of an evaluation may have been read before them.
    """
    read = backwards[0].batches if backwards else []
    if len(backwards) < 2 or any(one.batches != read for one in backwards):
        return
    fetched = facts.without_evaluated(read)
    if len(fetched) == len(backwards):
        for one, batch in zip(backwards, fetched, strict=True):
            one.batches = [batch]


_BACKWARD, _STEP = "the backward", "the optimizer step"
# Steps without gradients and with a learning rate of 0, so that optimizers have a state to load.
_MAKES_STATES = "/torch/distributed/checkpoint/state_dict.py"
_SCALER = "the gradient scaler"


class Steps:
    """The optimizers of this process, and what happens between their steps.

    Args:
        observation: Receives the facts.
        models: Know the names of parameters.

    Attributes:
        before_step, after_step: Called with the optimizer, and after a step also with its facts.
        on_optimizer, on_backward, after_backward: Called for a new optimizer, and before and after
            a backward.
    """

    def __init__(self, observation: Observation, models: Models) -> None:
        self._observation, self._models = observation, models
        self.before_step: list[Callable[[Optimizer], None]] = []
        self.after_step: list[Callable[[Optimizer, StepFacts], None]] = []
        self.on_optimizer: list[Callable[[], None]] = []
        self.on_backward: list[Callable[[], None]] = []
        self.after_backward: list[Callable[[], None]] = []
        self.optimizers: WeakIdKeyDictionary = WeakIdKeyDictionary()  # facts by optimizer
        self._counts: dict[int, int] = {}  # steps by key of optimizer
        self.clipping = Clipping(observation, models)
        self._running: Callable[[], Optimizer | None] = lambda: None
        self._step: StepFacts | None = None
        self._step_scale: float | None = None  # within GradScaler.step
        self._backwards_before = 0
        # Of a replay that accumulates: the weight of a backward, and whether the step of the
        # optimizer is held back.
        self.weight: Callable[[BackwardFacts], float] = lambda backward: 1.0
        self.is_held: Callable[[], bool] = lambda: False

    def install(self) -> None:
        """Subscribe to backwards, optimizers and gradient scalers."""
        observation = self._observation
        taps.BACKWARD.around(self._observed_backward)
        taps.on_step(observation.observed(_STEP, self._before), self._after_hook)
        taps.OPTIMIZER.after(observation.guarded(_STEP, self._note_made))
        for tap in taps.CLIPPING:
            tap.around(self.clipping.clip)
        taps.SCALE_LOSS.after(observation.observed(_SCALER, self._note_scale))
        taps.SCALED_STEP.around(self._scaled_step)

    # Backwards

    def _observed_backward(self, run: taps.Function, *args: Any, **kwargs: Any) -> Any:
        observation = self._observation
        if observation.backward is not None or not observation.is_observed:
            return run(*args, **kwargs)
        is_returned = not kwargs.get("accumulate_grad")
        if is_returned and not observation.guarded(_BACKWARD, self._are_of_training)(args):
            return run(*args, **kwargs)
        return self._run_backward(run, args, kwargs, is_returned)

    def _are_of_training(self, args: Any) -> bool:
        """Return whether ``torch.autograd.grad`` computes gradients that an optimizer may use.

        Those of a few parameters, or of gradients, are for something else.
        """
        creates_graph, inputs = args[3:5]
        names = [self._models.name_of(one) for one in inputs if isinstance(one, torch.Tensor)]
        model = self._models.last
        if creates_graph or model is None:
            return False
        every = [one for one in model.facts.parameters if one.requires_grad]
        return 2 * sum(name is not None for name in names) >= max(len(every), len(names), 1)

    def _run_backward(
        self, run: Callable[..., Any], args: Any, kwargs: Any, is_returned: bool
    ) -> Any:
        observation, guarded = self._observation, self._observation.guarded
        backward = guarded(_BACKWARD, self._begin_backward)(args, is_returned)
        observation.backward = backward
        weight = guarded(_BACKWARD, self.weight)(backward) if backward is not None else None
        if weight is not None and weight != 1:
            backward.root *= weight
            args = (args[0], tuple(weight * one for one in args[1]), *args[2:])
        try:
            return run(*args, **kwargs)
        finally:
            observation.backward = None
            guarded(_BACKWARD, self._end_backward)()

    def _begin_backward(self, args: Any, is_returned: bool) -> BackwardFacts:
        observation, model = self._observation, self._models.last
        self._models.gradients.forget_cleared()
        batches = observation.unassigned or observation.last_batches
        observation.last_batches, observation.unassigned = batches, []
        observation.phase = Phase.TRAINING
        roots = args[0] if args else ()
        roots = (roots,) if isinstance(roots, torch.Tensor) else tuple(roots)
        values = [float(one.detach()) for one in roots if one.numel() == 1]
        backward = BackwardFacts(
            line=user_line(),
            model=model.facts.key if model is not None else -1,
            batches=list(batches),
            root=sum(values) if len(values) == len(roots) else math.nan,
            loss=observation.loss,
            scale=observation.scale,
            is_syncing=model.is_syncing if model is not None else True,
            reduction=observation.reduction,
            elements=observation.elements,
            class_weight=observation.class_weight,
            autocast=model.autocast if model is not None else "",
            is_returned=is_returned,
        )
        observation.backwards.append(backward)
        for call in self.on_backward:
            call()
        return backward

    def _end_backward(self) -> None:
        observation = self._observation
        self._models.gradients.note_taken()
        observation.loss, observation.scale = None, 1.0
        observation.reduction, observation.elements = "", 0
        observation.class_weight = 0.0
        for call in self.after_backward:
            call()

    # Optimizers

    def _note_made(self, _: None, optimizer: Optimizer, *__: Any, **___: Any) -> None:
        self._note_optimizer(optimizer)

    def _note_optimizer(self, optimizer: Optimizer) -> None:
        if optimizer in self.optimizers or not self._observation.is_observed:
            return
        facts = OptimizerFacts(
            key=len(self._observation.facts.optimizers),
            class_name=type(optimizer).__name__,
            line=user_line(),
            parameters=[],
            initial_rates=_rates(optimizer),
        )
        for call in self.on_optimizer:
            call()
        self.optimizers[optimizer] = facts
        self._observation.facts.optimizers.append(facts)
        for name, parameter in self.parameters(optimizer):
            if name.startswith("?"):
                self._models.gradients.loose.setdefault(parameter, name)
            self._models.gradients.hook(parameter)

    @property
    def is_stepping(self) -> bool:
        """Whether an optimizer's step runs."""
        return self._step is not None

    def key_of(self, optimizer: Optimizer) -> int:
        """Return the key of an optimizer."""
        self._note_optimizer(optimizer)
        return int(self.optimizers[optimizer].key)

    def count_of(self, key: int) -> int:
        """Return the number of steps so far of the optimizer with this key."""
        return self._counts.get(key, 0)

    def parameters(self, optimizer: Optimizer) -> list[tuple[str, torch.Tensor]]:
        """Return the parameters of an optimizer, each with "MODEL KEY/NAME".

        One of no model has the name "?OPTIMIZER KEY.NUMBER".
        """
        key = self.optimizers[optimizer].key
        every = [one for group in optimizer.param_groups for one in group["params"]]
        return [
            (self._models.name_of(parameter) or f"?{key}.{number}", parameter)
            for number, parameter in enumerate(every)
        ]

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        running = self._running()
        if running is not None and (running is not optimizer) and is_stepping(running):
            return  # an optimizer inside another one's step
        if self.is_held() or is_called_by(_MAKES_STATES):
            self._running, self._step = (lambda: None), None
            return
        self._note_optimizer(optimizer)
        self._models.is_inside = False  # a module whose forward contains the training loop
        self._running = weakref.ref(optimizer)
        self._backwards_before = len(self._observation.backwards)
        self._step = self._new_step(optimizer)
        files = self._observation.facts.files[-1:]
        if not self._step.index or any(one.step == self._observation.step for one in files):
            self._step.state = self._state_rows(optimizer)
        self._step.before = self._models.add_rows(self.parameters(optimizer))
        self._add_gradients(optimizer, self._step)
        for call in self.before_step:
            call(optimizer)

    def _new_step(self, optimizer: Optimizer) -> StepFacts:
        facts = self.optimizers[optimizer]
        facts.parameters = self._grouped_names(optimizer)
        return StepFacts(
            index=self.count_of(facts.key),
            optimizer=facts.key,
            line=user_line(),
            learning_rates=_rates(optimizer),
            scale=self._step_scale or 1.0,
            momenta=[momentum_of(group) for group in optimizer.param_groups],
        )

    def _grouped_names(self, optimizer: Optimizer) -> list[list[str]]:
        names = iter([name for name, _ in self.parameters(optimizer)])
        return [[next(names) for _ in group["params"]] for group in optimizer.param_groups]

    def _add_gradients(self, optimizer: Optimizer, step: StepFacts) -> None:
        step.gradients = self._models.add_rows(
            (name, parameter.grad)
            for name, parameter in self.parameters(optimizer)
            if parameter.grad is not None
        )

    def _state_rows(self, optimizer: Optimizer) -> dict[str, int]:
        return self._models.add_rows(
            (f"{number} {key}", value)  # the parameter may have no name yet
            for number, (_, parameter) in enumerate(self.parameters(optimizer))
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        )

    def _after_hook(self, optimizer: Optimizer, *_: Any) -> None:
        if self._observation.is_observed and self._running() is optimizer:
            self._observation.guarded(_STEP, self._after)(optimizer)

    def _after(self, optimizer: Optimizer) -> None:
        self._running = lambda: None
        step, self._step = self._step, None
        if step is None:
            return
        if len(self._observation.backwards) != self._backwards_before:  # in a closure
            self._add_gradients(optimizer, step)
        self._end_step(optimizer, step)

    def _end_step(self, optimizer: Optimizer, step: StepFacts) -> None:
        observation = self._observation
        step.backwards, observation.backwards = observation.backwards, []
        share_batches(step.backwards, observation.facts)
        step.clips = self.clipping.take()
        lines = observation.change_lines
        step.gradient_lines, step.value_lines = list(lines["gradient"]), list(lines["parameter"])
        lines["gradient"].clear()
        lines["parameter"].clear()
        step.parameters = self._models.add_rows(self.parameters(optimizer))
        step.buffers = self._models.add_rows(self._models.buffers())
        self._counts[step.optimizer] = step.index + 1
        observation.facts.steps.append(step)
        for call in self.after_step:
            call(optimizer, step)

    # Gradient scalers

    def _scaled_step(
        self, step: taps.Function, scaler: Any, optimizer: Any, *args: Any, **options: Any
    ) -> Any:
        observation = self._observation
        if not observation.is_observed:
            return step(scaler, optimizer, *args, **options)
        self._step_scale = observation.guarded(_SCALER, _scale_of)(scaler)
        steps = observation.step
        try:
            result = step(scaler, optimizer, *args, **options)
        finally:
            self._step_scale = None
        if observation.step == steps and observation.is_observed:
            observation.guarded(_SCALER, self._note_skipped)(scaler, optimizer)
        return result

    def _note_scale(self, _: Any, scaler: Any, *__: Any, **___: Any) -> None:
        self._observation.scale = _scale_of(scaler)

    def _note_skipped(self, scaler: Any, optimizer: Any) -> None:
        self._note_optimizer(optimizer)
        step = self._new_step(optimizer)
        step.scale, step.is_skipped = _scale_of(scaler), True
        self._add_gradients(optimizer, step)
        self._end_step(optimizer, step)


def _scale_of(scaler: Any) -> float:
    return float(scaler.get_scale()) if scaler.is_enabled() else 1.0


def momentum_of(group: dict[str, Any]) -> float:
    """Return the momentum of a parameter group, which some schedules change."""
    return float(group["betas"][0] if "betas" in group else group.get("momentum", math.nan))


def _rates(optimizer: Optimizer) -> list[float]:
    return [float(group.get("lr", math.nan)) for group in optimizer.param_groups]
