"""The parameters of a study: their ranges, and when they exist."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from ...knobs.settings import unfit

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")

Value = bool | int | float | str
Choices = Annotated[list[Value], Meta(min_length=1, max_length=10_000)]


class ParameterTable(
    msgspec.Struct, forbid_unknown_fields=True, frozen=True, rename={"is_int": "int"}
):
    """A table ``[parameters.NAME]``.

    Attributes:
        low, high: Range of a number, with both ends.
        is_int: Whether it is an integer (key ``int``).
        log: Whether it is drawn on a logarithmic scale.
        step: Distance of its values from ``low``.
        choices: Values, instead of a range.
        when: Values of other parameters with which this one exists.
        knob: Knob of ``paceline run --settings`` that has the value; "" for a placeholder.
    """

    low: int | float | None = None
    high: int | float | None = None
    is_int: bool = False
    log: bool = False
    step: int | float | None = None
    choices: Choices | None = None
    when: dict[str, Value | Choices] = {}
    knob: str = ""


@dataclass(frozen=True)
class Parameter:
    """A parameter that was checked. Attributes: those of ``ParameterTable``."""

    name: str
    low: float = 0.0
    high: float = 0.0
    is_int: bool = False
    log: bool = False
    step: float | None = None
    choices: tuple[Value, ...] = ()
    when: dict[str, tuple[Value, ...]] = field(default_factory=dict)
    knob: str = ""

    @property
    def range_text(self) -> str:
        """The values in words."""
        if self.choices:
            return ", ".join(map(repr, self.choices))
        return f"{self.low:g} to {self.high:g}"

    @property
    def _grid_step(self) -> float | None:
        """Distance of its values; None: any number of the range."""
        return self.step or (1 if self.is_int else None)

    @property
    def example(self) -> Value:
        """One of its values."""
        return self.choices[0] if self.choices else int(self.low) if self.is_int else self.low

    def accepts(self, value: Any) -> bool:
        """Return whether a value is one of this parameter."""
        if self.choices:
            return any(value == choice and type(value) is type(choice) for choice in self.choices)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if self.is_int and value != int(value):
            return False
        return self.low <= value <= self.high

    def distribution(self) -> "BaseDistribution":
        """Return the distribution of Optuna."""
        from optuna import distributions

        if self.choices:
            return distributions.CategoricalDistribution(self.choices)
        if self.is_int:
            low, high, step = int(self.low), int(self.high), int(self._grid_step or 1)
            return distributions.IntDistribution(low, high, self.log, step)
        return distributions.FloatDistribution(self.low, self.high, self.log, self.step)

    def draw(self, trial: "Trial") -> Value:
        """Return the value in a trial; a trial that has it already keeps it."""
        if self.choices:
            chosen = trial.suggest_categorical(self.name, self.choices)
            assert chosen is not None, "None is no choice of a study file"
            return chosen
        if self.is_int:
            low, high, step = int(self.low), int(self.high), int(self._grid_step or 1)
            return trial.suggest_int(self.name, low, high, step=step, log=self.log)
        return trial.suggest_float(self.name, self.low, self.high, step=self.step, log=self.log)

    def at(self, share: float) -> Value:
        """Return the value at a place of the range, from 0 to 1, on the scale that is drawn on."""
        if self.choices:
            return self.choices[min(int(share * len(self.choices)), len(self.choices) - 1)]
        if self.log:
            return self._rounded(self.low * (self.high / self.low) ** share)
        return self._rounded(self.low + share * (self.high - self.low))

    def near(self, value: Value, factor: float) -> Value:
        """Return another value near one: a number times the factor, or a neighbouring choice.

        In a range that begins at 0 or below, the number moves by that part of the range instead.
        """
        if self.choices:
            at = self.choices.index(value) + (1 if factor > 1 else -1)
            return self.choices[min(max(at, 0), len(self.choices) - 1)]
        number = float(value)
        moved = number * factor if self.low > 0 else number + (factor - 1) * (self.high - self.low)
        found = self._rounded(moved)
        if found == value and (step := self._grid_step) is not None:
            found = self._rounded(number + (step if factor > 1 else -step))
        return found

    def _rounded(self, number: float) -> int | float:
        """Return the nearest number that the parameter may have."""
        if (step := self._grid_step) is not None:
            most = int((self.high - self.low) / step + 1e-9)
            number = self.low + min(max(round((number - self.low) / step), 0), most) * step
        number = min(max(number, self.low), self.high)
        return int(number) if self.is_int else number

    def grid(self) -> list[Value] | None:
        """Return all values, or None if there are infinitely many."""
        if self.choices:
            return list(self.choices)
        if self.log or (step := self._grid_step) is None:
            return None
        count = int((self.high - self.low) / step + 1e-9) + 1
        values = [self.low + number * step for number in range(count)]
        return [int(value) for value in values] if self.is_int else list(values)


def parameter_of(name: str, table: ParameterTable) -> Parameter:
    """Check a table ``[parameters.NAME]``. Raises ValueError."""
    where = f"parameters.{name}"
    if not NAME.fullmatch(name):
        raise ValueError(f"{where} is no name. HINT: letters, digits, _, . and -")
    when = {
        other: tuple(values) if isinstance(values, list) else (values,)
        for other, values in table.when.items()
    }
    if table.choices is not None:
        wrong = [key for key in ("low", "high", "step") if getattr(table, key) is not None]
        wrong += ["int"] * table.is_int + ["log"] * table.log
        if wrong:
            raise ValueError(f"{where} has choices and {wrong[0]}. HINT: leave out one of them")
        if len({(type(choice), choice) for choice in table.choices}) < len(table.choices):
            raise ValueError(f"{where}.choices has a value twice")
        _check_knob(where, table.knob, table.choices)
        return Parameter(name, choices=tuple(table.choices), when=when, knob=table.knob)
    low, high, step = table.low, table.high, table.step
    if low is None or high is None:
        raise ValueError(f"{where} needs low and high, or choices")
    if not math.isfinite(low) or not math.isfinite(high) or low > high:
        raise ValueError(
            f"{where}: low = {low:g} and high = {high:g} are no range. HINT: finite numbers, low "
            "not above high"
        )
    if table.log and low <= 0:
        raise ValueError(f"{where}: log needs a low above 0; it is {low:g}")
    if table.log and step is not None:
        raise ValueError(f"{where} has log and step. HINT: leave out one of them")
    if step is not None and not 0 < step <= max(high - low, 1e-300):
        raise ValueError(f"{where}.step = {step:g} must be above 0 and at most high - low")
    if table.is_int and any(
        value is not None and value != int(value) for value in (low, high, step)
    ):
        raise ValueError(f"{where}: low, high and step of an integer must be integers")
    _check_knob(where, table.knob, (low, high))
    return Parameter(
        name,
        low,
        high,
        table.is_int,
        table.log,
        float(step) if step is not None else None,
        when=when,
        knob=table.knob,
    )


def _check_knob(where: str, knob: str, values: Iterable[Value]) -> None:
    """Raise ValueError for a knob that does not exist, or a value that it can't have."""
    for value in values if knob else ():
        if why := unfit(knob, value):
            raise ValueError(f"{where}: the knob {knob} can't be {value!r}: {why}")


def is_active(parameter: Parameter, values: Mapping[str, Value]) -> bool:
    """Return whether a parameter exists at a point."""
    return all(name in values and values[name] in wanted for name, wanted in parameter.when.items())


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the most similar name, or ""."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)), "")
