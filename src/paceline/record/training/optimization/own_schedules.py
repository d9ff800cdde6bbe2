"""Find functions of the script that return the learning rate of a step.

A line that sets a learning rate leads to the call that computes it. If the function, called with
the same arguments, returns the present learning rate, it can be evaluated for later steps.
"""

import ast
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType, FunctionType

from torch.optim import Optimizer

from ..expressions import Scope, UnknownValueError, parsed, value_of
from ..generators import kept_generators
from ..user_lines import is_users_file, place

SAME = 1e-9  # relative difference of equal learning rates
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
        if any(abs(v - each) <= SAME * each for v in values for each in rates if each > 0):
            return OwnSchedule(function.__name__, line, rate)
    return None


def _or_nan(rate: Callable[[int], float], step: int) -> float:
    try:
        return rate(step)
    except Exception:  # of the script's function
        return float("nan")
