"""Observe learning-rate schedulers and gradient scalers."""

import ast
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, FunctionType
from typing import Any

from torch.optim import Optimizer, lr_scheduler
from torch.utils.weak import WeakIdKeyDictionary

from ...record.hooks.taps import SCALER, UPDATE_SCALE, replace
from ..expressions import Scope, UnknownValueError, parsed, value_of
from ..facts.models import StateFacts
from ..facts.steps import SCHEDULE_END, OptimizerFacts, ScheduleFacts
from ..generators import kept_generators
from ..observation import Observation
from ..user_lines import is_users_file, place, user_line
from .steps import Steps

# Find functions of the script that return the learning rate of a step.
#
# A line that sets a learning rate leads to the call that computes it. If the function, called with
# the same arguments, returns the present learning rate, it can be evaluated for later steps.


SAME_RATE = 1e-9  # relative difference of equal learning rates
MAX_COUNT = 1 << 20  # of the number of a step


@dataclass(frozen=True)
class OwnSchedule:
    """A function that returns a learning rate.

    Attributes:
        name: Its name.
        line: Where it is called.
        rate: Returns the learning rate of a step.
    """

    name: str
    line: str
    rate: Callable[[int], float]


def own_schedule(rate_lines: list[str], optimizer: Optimizer) -> OwnSchedule | None:
    """Return the function that sets the learning rate of an optimizer; None if none is known.

    Args:
        rate_lines: Lines "FILE:LINE" that change learning rates.
        optimizer: Has the present learning rate.
    """
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    for line in rate_lines:
        for scope, file, at in _scopes(line):
            for call in _calls(file, at):
                found = _matching(call, scope, rates, place(file, call.lineno))
                if found is not None:
                    return found
    return None


def _scopes(line: str) -> Iterator[tuple[Scope, str, int]]:
    """Yield variables that a line may use, with its file and number: those of frames that run."""
    file, _, number = line.rpartition(":")
    path = os.path.abspath(file)
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if os.path.abspath(frame.f_code.co_filename) == path:
            yield Scope(frame.f_locals, frame.f_globals), frame.f_code.co_filename, int(number)
        frame = frame.f_back
    main = sys.modules.get("__main__")
    own = getattr(main, "__file__", None)
    if own is not None and os.path.abspath(own) == path:
        yield Scope({}, vars(main)), own, int(number)


def _calls(file: str, line: int) -> Iterator[ast.Call]:
    """Yield the calls that compute what is assigned in a line, also through a variable."""
    tree = parsed(file)
    assigned = [one for one in ast.walk(tree) if isinstance(one, ast.Assign)] if tree else []
    assigned = [one for one in assigned if one.lineno <= line]
    at = [one for one in assigned if line <= (one.end_lineno or one.lineno)]
    for statement in at:
        names = {one.id for one in ast.walk(statement.value) if isinstance(one, ast.Name)}
        before = [
            one
            for one in assigned
            if any(isinstance(to, ast.Name) and to.id in names for to in one.targets)
        ]
        for one in (statement, *sorted(before, key=lambda each: -each.lineno)):
            yield from (call for call in ast.walk(one.value) if isinstance(call, ast.Call))


def _matching(call: ast.Call, scope: Scope, rates: list[float], line: str) -> OwnSchedule | None:
    """Return the function of a call if it returns one of the learning rates."""
    try:
        function = value_of(call.func, scope)
        arguments = [value_of(one, scope) for one in call.args]
        named = {one.arg: value_of(one.value, scope) for one in call.keywords if one.arg}
    except UnknownValueError:
        return None
    if not isinstance(function, FunctionType) or not is_users_file(function.__code__.co_filename):
        return None
    for at, argument in enumerate(arguments):
        is_count = type(argument) is int and isinstance(call.args[at], ast.Name | ast.BinOp)
        if not is_count or not 0 <= argument <= MAX_COUNT:
            continue

        def rate(step: int, at: int = at) -> float:
            changed = [*arguments[:at], step, *arguments[at + 1 :]]
            return float(function(*changed, **named))

        with kept_generators():
            # The count may have advanced since, or several times in a step.
            values = [_or_nan(rate, one) for one in (argument, argument - 1)]
        if any(abs(v - each) <= SAME_RATE * each for v in values for each in rates if each > 0):
            return OwnSchedule(function.__name__, line, rate)
    return None


def _or_nan(rate: Callable[[int], float], step: int) -> float:
    try:
        return rate(step)
    except Exception:  # of the script's function
        return float("nan")


_HOOK = "the schedules"
# Attributes that count steps or epochs.
_LENGTHS = (
    *("T_max", "total_steps", "step_size", "milestones", "T_0", "T_mult", "total_iters"),
    *("step_size_up", "step_size_down", "_milestones", "patience", "num_warmup_steps"),
)
_VALUES = ("last_epoch", "best", "num_bad_epochs", "cooldown_counter")
MAX_LENGTH = 20_000  # steps of a schedule of functions
SAME = 1e-12  # relative difference of equal factors
MAX_STEPS = 512  # calls of a scheduler's step that are listed


class Schedules:
    """The learning-rate schedulers and gradient scalers of this process.

    Args:
        observation: Receives the facts.
        steps: Know the optimizers.
    """

    def __init__(self, observation: Observation, steps: Steps) -> None:
        self._observation, self._steps = observation, steps
        self._schedules: WeakIdKeyDictionary = WeakIdKeyDictionary()
        self._lines: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of scalers

    def install(self) -> None:
        """Subscribe to the schedulers of torch, and the gradient scaler."""
        base: Any = lr_scheduler.LRScheduler
        made = self._observation.outermost(_HOOK, after=self._note_schedule)
        stepped = self._observation.outermost(_HOOK, after=self._note_step)
        for kind in [one for one in vars(lr_scheduler).values() if isinstance(one, type)]:
            if issubclass(kind, base):
                if kind is base or ("__init__" in vars(kind) and not _calls_base(kind)):
                    replace(kind, "__init__", made)
                if "step" in vars(kind):
                    replace(kind, "step", stepped)
        SCALER.after(self._observation.guarded(_HOOK, self._note_scaler))
        UPDATE_SCALE.after(self._observation.observed(_HOOK, self._note_update))

    def _note_schedule(self, _: None, schedule: Any, *__: Any, **___: Any) -> None:
        if schedule in self._schedules:
            return
        optimizer = self._steps.optimizers.get(getattr(schedule, "optimizer", None) or schedule)
        facts = ScheduleFacts(
            class_name=type(schedule).__name__,
            line=user_line(),
            optimizer=optimizer.key if optimizer is not None else -1,
            lengths={},
        )
        self._schedules[schedule] = facts
        self._observation.facts.schedules.append(facts)

    def _note_step(self, _: Any, schedule: Any, *__: Any, **___: Any) -> None:
        facts = self._schedules.get(schedule)
        if facts is None:
            return
        facts.lengths = facts.lengths or _lengths(schedule)
        line = user_line()
        if line not in facts.step_lines:
            facts.step_lines.append(line)
        if len(facts.steps) < MAX_STEPS:
            facts.steps.append(self._observation.step)
        if hasattr(schedule, "num_bad_epochs"):
            self._add_state("schedule", facts.class_name, facts.line, _numbers(schedule), line)

    def _add_state(
        self, kind: str, name: str, line: str, values: dict[str, float], changed_by: str
    ) -> None:
        step = self._observation.step
        state = StateFacts(
            kind, name, line, step, values, changed_by=[changed_by] if changed_by else []
        )
        self._observation.facts.states.append(state)

    def complete(self) -> None:
        """Add the lengths of schedulers that were never stepped."""
        for schedule, facts in list(self._schedules.items()):
            facts.lengths = facts.lengths or _lengths(schedule)
            ends = [end_of(one) for one in vars(schedule).get("lr_lambdas", ())]
            if end := next(filter(None, ends), 0):
                facts.lengths[SCHEDULE_END] = [end]
            facts.peaks = _peaks(schedule)
        scheduled = {facts.optimizer for facts in self._schedules.values()}
        for optimizer, known in list(self._steps.optimizers.items()):
            if known.key not in scheduled and known.rate_lines:
                self._add_own(optimizer, known)

    def _add_own(self, optimizer: Any, known: OptimizerFacts) -> None:
        """Add a function of the script that returns the learning rates of steps."""
        own = own_schedule(known.rate_lines, optimizer)
        if own is not None and (end := end_of(own.rate)):
            steps = [
                at
                for at, x in enumerate(self._observation.facts.steps, 1)
                if x.optimizer == known.key
            ]
            lengths, lines = {SCHEDULE_END: [end]}, known.rate_lines[:1]
            peaks = [peak_of(own.rate)]
            facts = ScheduleFacts(own.name, own.line, known.key, lengths, lines, steps, peaks)
            self._observation.facts.schedules.append(facts)

    # Gradient scalers

    def _note_scaler(self, _: None, scaler: Any, *__: Any, **___: Any) -> None:
        self._lines[scaler] = user_line()
        self._add_scaler(scaler, "")

    def _note_update(self, _: None, scaler: Any, *__: Any, **___: Any) -> None:
        self._add_scaler(scaler, user_line())

    def _add_scaler(self, scaler: Any, changed_by: str) -> None:
        if scaler.is_enabled():
            values = {"scale": float(scaler.get_scale())}
            tracker: Any = getattr(scaler, "_growth_tracker", None)
            values["growth_tracker"] = float(tracker) if tracker is not None else 0.0
            line = self._lines.get(scaler, "")
            self._add_state("scaler", type(scaler).__name__, line, values, changed_by)


def _calls_base(kind: Any) -> bool:
    """Return whether the constructor calls that of ``LRScheduler``."""
    init = kind.__init__
    return "__class__" in init.__code__.co_freevars


def _lengths(schedule: Any) -> dict[str, list[int]]:
    """Return the numbers of steps or epochs that a scheduler was made with."""
    found: dict[str, list[int]] = {}
    for name in _LENGTHS:
        value = vars(schedule).get(name)
        if isinstance(value, int):
            found[name.strip("_")] = [value]
        elif isinstance(value, dict | list | tuple) and all(isinstance(x, int) for x in value):
            found[name.strip("_")] = [int(one) for one in value]
    for function in vars(schedule).get("lr_lambdas", ()):
        keywords = dict(getattr(function, "keywords", {}))
        cells = getattr(function, "__closure__", None) or ()
        code = getattr(function, "__code__", None)
        names = getattr(code, "co_freevars", ())
        around = getattr(function, "__globals__", {})
        keywords |= {name: around[name] for name in getattr(code, "co_names", ()) if name in around}
        for name, cell in zip(names, cells, strict=False):
            try:
                keywords[name] = cell.cell_contents
            except ValueError:  # an empty cell
                continue
        for name, value in keywords.items():  # groups of parameters may have functions of their own
            if type(value) is int:
                found.setdefault(name, []).append(value)
    return found


def end_of(function: Callable[[int], Any]) -> int:
    """Return the step at which a function of the step has decayed; 0 if unknown.

    That is where its value stops to become smaller, after it has.
    """
    before, is_falling = float(function(0)), False
    for step in range(1, MAX_LENGTH):
        value = float(function(step))
        if is_falling and value >= before * (1 - SAME):
            return step - 1
        is_falling = value < before * (1 - SAME)
        before = value
    return 0


def peak_of(function: Callable[[int], Any]) -> float:
    """Return the value of a function of the step from which on it becomes smaller."""
    largest = float(function(0))
    for step in range(1, MAX_LENGTH):
        value = float(function(step))
        if value < largest * (1 - SAME):
            break
        largest = value
    return largest


def _peaks(schedule: Any) -> list[float]:
    """Return the largest learning rate of parameter groups, as far as it is known.

    Of functions, only that of the first group is evaluated.
    """
    groups = schedule.optimizer.param_groups
    if all("max_lr" in group for group in groups):
        return [float(group["max_lr"]) for group in groups]
    bases, functions = getattr(schedule, "base_lrs", []), vars(schedule).get("lr_lambdas")
    return [float(bases[0]) * peak_of(functions[0])] if functions and bases else []


def _numbers(schedule: Any) -> dict[str, float]:
    values = {name: vars(schedule).get(name) for name in _VALUES}
    return {name: float(x) for name, x in values.items() if isinstance(x, int | float)}
