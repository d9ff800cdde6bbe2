"""Which stage holds which parameters and buffers: consecutive units of a model, evenly divided.

A unit is an event that uses parameters, with the events without parameters that follow. Where no
example inputs are given, it is an atom of the model, in order of registration. Stages are cut
before units only, so that where an operation without parameters runs follows from them.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from ...cost.layout import chunks_of, idle_share
from ...plurals import counted
from .atoms import Atoms, tensor_names, tensors_by_name
from .trace import Trace

MAX_SHOWN_NAMES = 3


class DoesNotFitError(ValueError):
    """No division of a model has stages that fit in the memory of a rank."""


@dataclass(frozen=True)
class Unit:
    """Consecutive parts of a model that stay on one stage.

    Attributes:
        name: Of its first part.
        tensors: Parameters and buffers that it uses.
        cost: Operations of its forward, bytes of its parameters, or measured seconds.
        can_begin: Whether a stage may begin with it.
        activations: Bytes that a micro-batch keeps for its backward; 0 if they are not known.
    """

    name: str
    tensors: tuple[str, ...]
    cost: float
    can_begin: bool = True
    activations: float = 0.0


@dataclass(frozen=True)
class Partition:
    """The division of a model into stages.

    Attributes:
        units: Of each stage.
        held: Stages that hold a parameter or buffer, by its name; several for tied ones.
    """

    units: tuple[tuple[Unit, ...], ...]
    held: Mapping[str, frozenset[int]]

    @property
    def cuts(self) -> list[int]:
        """The number of the first unit of each stage after the first one."""
        return list(accumulate(len(units) for units in self.units))[:-1]

    @property
    def shares(self) -> list[float]:
        """The share of each stage of the cost of all."""
        costs = [sum(unit.cost for unit in stage) for stage in self.units]
        return [cost / (sum(costs) or 1) for cost in costs]

    def __str__(self) -> str:
        return "; ".join(
            f"stage {number}: {_range_text(stage)} ({share:.0%})"
            for number, (stage, share) in enumerate(zip(self.units, self.shares, strict=True))
        )


def _range_text(units: Sequence[Unit]) -> str:
    names = list(dict.fromkeys(unit.name for unit in units))
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def units_of_trace(trace: Trace, model: nn.Module) -> list[Unit]:
    """Return the units in the order in which a forward runs them."""
    tensors = tensors_by_name(model)
    parts: list[list[int]] = []
    for number, event in enumerate(trace.events):
        is_first = any(isinstance(tensors[n], nn.Parameter) for n in event.tensors)
        if is_first or event.changes or not parts:
            parts.append([])
        parts[-1].append(number)
    flops = sum(event.flops for event in trace.events)
    seen: set[str] = set()
    units = []
    for part in parts:
        events = [trace.events[number] for number in part]
        names = tuple(dict.fromkeys(n for event in events for n in event.tensors))
        new = [n for n in names if n not in seen and isinstance(tensors[n], nn.Parameter)]
        seen.update(new)
        cost = sum(event.flops for event in events) if flops else _nbytes(tensors, new)
        first = next((event for event in events if event.tensors), events[0])
        units.append(Unit(_unit_name(first.target, names), names, cost, _can_begin(trace, part[0])))
    unused = [n for n in tensors if not any(n in unit.tensors for unit in units)]
    if unused and units:
        first_unit = units[0]
        units[0] = Unit(first_unit.name, (*first_unit.tensors, *unused), first_unit.cost)
    return units


def _unit_name(target: object, tensors: Sequence[str]) -> str:
    return target if isinstance(target, str) else tensors[0] if tensors else "inputs"


def _can_begin(trace: Trace, number: int) -> bool:
    """Return whether no later event changes a value in place that an earlier one has made."""
    return not any(
        change.event >= number and any((trace.values[v].event or 0) < number for v in change.values)
        for change in trace.changes
    )


def units_of_modules(model: nn.Module, atoms: Atoms) -> list[Unit]:
    """Return the units in order of registration."""
    tensors, names = tensors_by_name(model), tensor_names(model)
    owned: list[tuple[str, str]] = []  # name of the unit, name of a parameter
    for full in names:
        atom = next((a for a in atoms.names if full.startswith(f"{a}.")), None)
        if isinstance(tensors[names[full]], nn.Parameter) or _is_norm(model, full):
            owned.append((full.rpartition(".")[0] if atom is None else atom, full))
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    owned.sort(key=lambda pair: order.get(pair[0], 0))
    units, seen = [], set[str]()
    for name, group in groupby(owned, key=lambda pair: pair[0]):
        held = tuple(dict.fromkeys(names[full] for _, full in group))
        new = [n for n in held if n not in seen]
        seen.update(new)
        units.append(Unit(name, held, _nbytes(tensors, new)))
    return units


def _is_norm(model: nn.Module, name: str) -> bool:
    return isinstance(model.get_submodule(name.rpartition(".")[0]), _NormBase)


def _nbytes(tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> int:
    return sum(tensors[name].nbytes for name in names)


# whether a stage has memory for these units, and then also for some of them
Fits = Callable[[int, Sequence[Unit]], bool]


def divide(
    units: Sequence[Unit],
    stages: int,
    names: Sequence[str],
    begins: Sequence[str] | None = None,
    fits: Fits = lambda stage, units: True,
) -> Partition:
    """Divide units into stages: the largest is as small as possible, then all as even as possible.

    Args:
        names: All parameters and buffers; those of no unit are on every stage.
        begins: Names of modules with which the stages after the first one begin.

    Raises:
        ValueError: There are not enough places to cut, a name is unknown, or no division fits.
    """
    if begins is not None:
        return divide_at(units, _named_cuts(units, stages, begins), names)
    return divide_at(units, _best_cuts(units, stages, fits), names)


def divide_at(units: Sequence[Unit], cuts: Sequence[int], names: Sequence[str]) -> Partition:
    """Divide units into stages that begin with the units of these numbers."""
    firsts, ends = [0, *cuts], [*cuts, len(units)]
    parts = tuple(tuple(units[a:b]) for a, b in zip(firsts, ends, strict=True))
    return Partition(parts, held_by_stages(parts, names))


def held_by_stages(
    parts: Sequence[Sequence[Unit]], names: Iterable[str]
) -> dict[str, frozenset[int]]:
    """Return the stages that hold each parameter or buffer; those of no unit are on every stage."""
    held: dict[str, set[int]] = {}
    for stage, part in enumerate(parts):
        for unit in part:
            for name in unit.tensors:
                held.setdefault(name, set()).add(stage)
    return {name: frozenset(held.get(name, range(len(parts)))) for name in names}


def _best_cuts(units: Sequence[Unit], stages: int, fits: Fits) -> list[int]:
    sums = [0.0, *accumulate(unit.cost for unit in units)]
    places = [i for i, unit in enumerate(units) if i and unit.can_begin]
    if len(places) < stages - 1:
        if not places:
            raise ValueError(
                f"the model can't be cut: it is one part ({_unit_names(units)}). HINT: "
                "layout='data'"
            )
        raise ValueError(
            f"the model can be cut in {counted(len(places), 'place')}, and "
            f"{counted(stages, 'stage')} need {stages - 1}: {_unit_names(units)}. HINT: "
            f"layout='pp{len(places) + 1}'"
        )
    # of each place: the best division of all before it, as its cost and its cuts
    best: dict[int, tuple[tuple[float, float], list[int]]] = {
        end: ((sums[end], sums[end] ** 2), [])
        for end in (*places, len(units))
        if fits(0, units[:end])
    }
    for stage in range(1, stages):
        found: dict[int, tuple[tuple[float, float], list[int]]] = {}
        lowest = 0  # place from which on the stage fits; further units only need more memory
        for end in (*places, len(units)):
            inside = [cut for cut in places if cut < end]
            while lowest < len(inside) and not fits(stage, units[inside[lowest] : end]):
                lowest += 1
            for cut in inside[lowest:]:
                if cut not in best:
                    continue
                (largest, squares), cuts = best[cut]
                own = sums[end] - sums[cut]
                cost = (max(largest, own), squares + own * own)
                if end not in found or cost < found[end][0]:
                    found[end] = (cost, [*cuts, cut])
        best = found
    if len(units) not in best:
        raise DoesNotFitError(f"no division into {counted(stages, 'stage')} fits in the memory")
    return best[len(units)][1]


def _named_cuts(units: Sequence[Unit], stages: int, begins: Sequence[str]) -> list[int]:
    cuts: list[int] = []
    for name in begins:
        at = next(
            (i for i, u in enumerate(units) if u.name == name or u.name.startswith(f"{name}.")), 0
        )
        if not at or (cuts and at <= cuts[-1]) or not units[at].can_begin:
            raise ValueError(
                f"balance={list(begins)!r}: no stage can begin with {name!r}. HINT: names of "
                f"modules in the order in which they run: {_unit_names(units[1:])}"
            )
        cuts.append(at)
    if len(cuts) != stages - 1:
        raise ValueError(
            f"balance={list(begins)!r} has {counted(len(cuts), 'name')}, and "
            f"{counted(stages, 'stage')} begin after the first one with {stages - 1}. HINT: "
            f"balance={[u.name for u in units[1:stages]]!r}"
        )
    return cuts


def _unit_names(units: Sequence[Unit]) -> str:
    names = [unit.name or "the model" for unit in units]
    more = len(names) - MAX_SHOWN_NAMES
    shown = ", ".join(names[:MAX_SHOWN_NAMES])
    return f"{shown} and {more} more" if more > 0 else shown


# Times of the stages in the first steps: idle time beside its formula, and a better balance.

SKIPPED_STEPS = 3  # they plan, and allocate memory
MEASURED_STEPS = 20
MIN_GAIN = 0.05  # of the longest stage's time, for another balance to be proposed


class StageTimes:
    """The computing times of all stages, which each rank has after a step.

    Args:
        say: Prints a line on rank 0.
        note: Writes a field of the record's header.
        is_timed: Whether the times are those of the computation. On a GPU calls return before it
            ends, so that nothing is printed.
    """

    def __init__(
        self,
        partition: Partition,
        schedule: str,
        say: Callable[[str], None],
        note: Callable[..., None],
        is_timed: bool = True,
    ) -> None:
        self.partition, self.schedule, self._say, self._note = partition, schedule, say, note
        self._is_timed, self._steps = is_timed, 0
        self._busy: list[int] = []
        self._whole = 0

    def add(self, busy: Sequence[int], whole: Sequence[int], micro_batches: int) -> None:
        """Add the times of a step (ns) of each stage; after MEASURED_STEPS, print them."""
        self._steps += 1
        if self._steps == 1:
            self._note_header(len(busy), micro_batches)
        measured = self._steps - SKIPPED_STEPS
        if not self._is_timed or not 1 <= measured <= MEASURED_STEPS:
            return
        before = self._busy or [0] * len(busy)
        self._busy = [a + b for a, b in zip(before, busy, strict=True)]
        self._whole += max(whole)
        if measured == MEASURED_STEPS:
            self._say(self.text(micro_batches))
            self._note_header(len(busy), micro_batches, balance=self.better_balance() or [])

    def _note_header(self, stages: int, micro_batches: int, **more: Any) -> None:
        known = {"schedule": self.schedule, "stages": stages, "micro_batches": micro_batches}
        self._note(pipeline=known | more)

    def text(self, micro_batches: int) -> str:
        """Return a line about the measured steps."""
        stages, steps = len(self._busy), min(self._steps - SKIPPED_STEPS, MEASURED_STEPS)
        idle = 1 - sum(self._busy) / stages / max(self._whole, 1)
        formula = idle_share(self.schedule, stages, micro_batches)
        each = ", ".join(f"{ns / steps / 1e6:.3g}" for ns in self._busy)
        line = (
            f"pipeline: stages were idle for {idle:.0%} of {steps} steps, {formula:.0%} by the "
            f"formula; computing took {each} ms by stage"
        )
        begins = self.better_balance()
        if begins is None:
            return line
        slowest = self._busy.index(max(self._busy))
        return f"{line}. The others wait for stage {slowest}. HINT: balance={begins!r}"

    def better_balance(self) -> list[str] | None:
        """Return names for the option ``balance`` that would shorten the longest stage."""
        if chunks_of(self.schedule) > 1:
            return None
        costs = [sum(unit.cost for unit in of) for of in self.partition.units]
        units = [
            replace(unit, cost=unit.cost * ns / cost if cost else ns / len(of))
            for of, ns, cost in zip(self.partition.units, self._busy, costs, strict=True)
            for unit in of
        ]
        better = divide(units, len(costs), list(self.partition.held))
        longest = max(sum(unit.cost for unit in of) for of in better.units)
        if longest > max(self._busy) * (1 - MIN_GAIN):
            return None
        return [of[0].name for of in better.units[1:]]
