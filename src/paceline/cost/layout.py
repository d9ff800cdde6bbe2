"""The layout of a training over ranks, as one value: ``Layout.parse("dp2 x tp4")``.

A text names axes and options: ``"zero3"``, ``"pp2 x zero1"``, ``"d2 x h2 x dp2 + recompute"``.

| axis | divides |
| --- | --- |
| ``dp`` | samples: each data rank has a replica of the model, or a shard of its states (``zero``) |
| ``zero1`` to ``zero3`` | optimizer states, gradients, parameters over the data ranks |
| ``tp`` | operators (tensor parallel) |
| ``pp`` | the model's blocks into pipeline stages |
| ``d``, ``h``, ``w`` | depth, height and width of each sample |

One extent may stay open (``dp`` without a number, or left out): it takes the ranks that remain.
"""

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from ..plurals import counted, named_ranks

# From the outermost axis to the innermost one, whose ranks exchange most.
AXIS_WORDS = {
    "pp": "stage",
    "dp": "data",
    "d": "depth",
    "h": "height",
    "w": "width",
    "tp": "tensor",
}
_PRINTED_AXES = ("d", "h", "w", "pp", "dp", "zero", "tp")
ZERO_LEVELS = (1, 2, 3)
HOST = "host"
RECOMPUTES = ("blocks", "selective", "auto")
OFFLOADS = ("optimizer", "parameters")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "auto")
INTERLEAVED_CHUNKS = 2  # virtual stages of a rank
# Their ranks exchange in each layer, so a slow link between them is reported.
FREQUENT_AXES = ("depth", "height", "width", "tensor")
MAX_EXTENT = 1 << 20
MAX_TEXT_CHARS = 4096
_KEYWORDS = ("data", "dp", "zero1", "zero2", "zero3", "tp", "pp", "h", "w", "d")
_OPTIONS = ("recompute", "offload", "schedule", "micro-batches", "rule")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a training is divided over ranks. ``str(layout)`` is a text that ``parse`` reads.

    Attributes:
        dp: Data ranks, which train different samples; None: the ranks that remain.
        zero: Sharding level: 0 (replicas), 1 (optimizer states), 2 (and gradients), 3 (and
            parameters).
        shards: Ranks that hold one copy of the states together; None: all data ranks, "host":
            those of each node.
        tp: Ranks that share an operator; None: the ranks that remain, as for the other axes.
        pp: Pipeline stages.
        schedule: Order of a pipeline's micro-batches; "auto": the fastest of measured ones; None:
            the default.
        micro_batches: Parts of a rank's batch in a pipeline; None: the default.
        h: Parts of each sample along its height.
        w: The same for the width.
        d: The same for the depth.
        recompute: "blocks", "selective" or "auto" (``world.distribute``); None: nothing.
        offload: "optimizer" or "parameters"; None: nothing.
        rules: How modules are divided: pairs of a pattern over their names and a kind. A mapping
            is accepted.

    Raises:
        ValueError: A value is unknown or out of range, values contradict each other, or several
            extents are open.
    """

    dp: int | None = None
    zero: int = 0
    shards: int | str | None = None
    tp: int | None = 1
    pp: int | None = 1
    schedule: str | None = None
    micro_batches: int | None = None
    h: int | None = 1
    w: int | None = 1
    d: int | None = 1
    recompute: str | None = None
    offload: str | None = None
    rules: Mapping[str, str] | tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        self._set("rules", tuple((pattern, kind) for pattern, kind in self.rule_pairs))
        for name in AXIS_WORDS:
            _check_extent(name, getattr(self, name))
        open_axes = [name for name in AXIS_WORDS if name != "dp" and getattr(self, name) is None]
        _check_one_open(open_axes)
        if open_axes and self.dp is None:
            self._set("dp", 1)
        self._check_sharding()
        self._check_options()

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # the instance is frozen

    def _check_sharding(self) -> None:
        if isinstance(self.zero, bool) or self.zero not in (0, *ZERO_LEVELS):
            raise ValueError(
                f"there is no sharding level {self.zero!r}. HINT: zero1 (optimizer states), zero2 "
                "(and gradients) or zero3 (and parameters)"
            )
        if self.shards is None:
            return
        if isinstance(self.shards, str):
            _check_word("shards", self.shards, (HOST,))
        else:
            _check_extent("shards", self.shards)
        if not self.zero:
            raise ValueError(
                f"shards={self.shards!r} needs a layout that shards. HINT: zero3/{self.shards}"
            )
        if isinstance(self.shards, int) and self.dp is not None and self.dp % self.shards:
            raise ValueError(
                f"{counted(self.dp, 'data rank')} can't be divided into groups of {self.shards}. "
                f"HINT: dp{self.shards * -(-self.dp // self.shards)}"
            )

    def _check_options(self) -> None:
        for name, words in (
            ("recompute", RECOMPUTES),
            ("offload", OFFLOADS),
            ("schedule", SCHEDULES),
        ):
            if getattr(self, name) is not None:
                _check_word(name, getattr(self, name), words)
        if self.offload == "parameters" and not self.zero:
            raise ValueError(
                "offload='parameters' needs a layout that shards. HINT: zero3, or "
                "offload='optimizer'"
            )
        if self.micro_batches is not None:
            _check_extent("micro-batches", self.micro_batches)
        if self.pp == 1 and (self.schedule or self.micro_batches):
            name = "schedule" if self.schedule else "micro-batches"
            raise ValueError(f"{name} needs pipeline stages. HINT: pp2, or leave {name} out")
        for pattern, kind in self.rule_pairs:
            is_text = isinstance(pattern, str) and isinstance(kind, str)
            if not is_text or not pattern or re.search(r"\s", pattern):
                raise ValueError(f"the rule {pattern!r} is not a pattern. HINT: rule:blocks.*=row")
            if not re.fullmatch(r"[A-Za-z][\w-]*", kind):
                raise ValueError(f"the rule {pattern!r} has no kind: {kind!r}. HINT: column, row")

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Return the layout of a text such as "dp2 x tp4" or "zero3/host + recompute".

        Raises:
            ValueError: The text names no layout; the message has the nearest one.
        """
        if not isinstance(text, str) or len(text) > MAX_TEXT_CHARS:
            raise ValueError(f"layout={text!r:.60} is not a text of a layout. HINT: layout='zero3'")
        axes, *options = re.split(r"\s+\+\s+", text.strip())
        values: dict[str, object] = {}
        try:
            _check_separators(
                axes, *(option for option in options if not option.startswith("rule:"))
            )
            for name, value in (*_parse_axes(axes), *_parse_options(options)):
                if name in values:
                    raise ValueError(f"{name} is given twice. HINT: leave one out")
                values[name] = value
            _check_one_open([name for name in AXIS_WORDS if values.get(name, 1) is None])
            return cls(**values)  # type: ignore[arg-type]  # checked by the class
        except ValueError as error:
            raise ValueError(f"layout={text!r}: {error}") from None

    def __str__(self) -> str:
        texts = [text for name in _PRINTED_AXES if (text := self._axis_text(name))]
        options = [
            "recompute" if self.recompute == "blocks" else f"recompute={self.recompute}",
            f"offload={self.offload}",
            f"schedule={self.schedule}",
            f"micro-batches={self.micro_batches}",
        ]
        given = (self.recompute, self.offload, self.schedule, self.micro_batches)
        shown = [text for text, value in zip(options, given, strict=True) if value is not None]
        shown += [f"rule:{pattern}={kind}" for pattern, kind in self.rule_pairs]
        return " + ".join([" x ".join(texts) or "data", *shown])

    def _axis_text(self, name: str) -> str:
        if name == "zero":
            extent = f"/{self.shards}" if self.shards is not None else ""
            return f"zero{self.zero}{extent}" if self.zero else ""
        value = getattr(self, name)
        if name == "dp":
            is_default = value is None or (value == 1 and None in self.extents.values())
            return "" if is_default else f"dp{value}"
        return name if value is None else f"{name}{value}" if value != 1 else ""

    @property
    def rule_pairs(self) -> tuple[tuple[str, str], ...]:
        """The rules as pairs of a pattern and a kind."""
        return tuple(self.rules.items()) if isinstance(self.rules, Mapping) else self.rules

    @property
    def extents(self) -> dict[str, int | None]:
        """The extent of each axis, outermost first; None for the open one."""
        return {name: getattr(self, name) for name in AXIS_WORDS}

    @property
    def divided_axes(self) -> tuple[str, ...]:
        """The axes that divide a model or a sample: all but the data ranks."""
        return tuple(name for name, n in self.extents.items() if name != "dp" and n != 1)

    @property
    def ranks(self) -> int | None:
        """Number of ranks that the layout needs; None if one extent is open."""
        extents = list(self.extents.values())
        return None if None in extents else prod(extent or 1 for extent in extents)

    @property
    def least_ranks(self) -> int:
        """The smallest number of ranks that the layout can have."""
        least = prod(extent or 1 for extent in self.extents.values())
        is_open = self.dp is None and isinstance(self.shards, int)
        return least * self.shards if is_open and isinstance(self.shards, int) else least

    def over(self, ranks: int) -> "Layout":
        """Return the layout with all extents, for a number of ranks.

        Raises:
            ValueError: The layout does not fit this number; the message has numbers that do.
        """
        least = self.least_ranks
        is_fixed = self.ranks is not None
        if (is_fixed and least != ranks) or ranks % least:
            numbers = [least] if is_fixed else [ranks // least * least, -(-ranks // least) * least]
            fitting = " or ".join(str(n) for n in dict.fromkeys(numbers) if n)
            needs = f"{'' if is_fixed else 'a multiple of '}{counted(least, 'rank')}"
            free = ", or leave the number of dp out" if is_fixed and self.dp != 1 else ""
            raise ValueError(
                f"layout={str(self)!r} needs {needs}, and the job has {ranks}. HINT: start "
                f"{fitting} ranks{free}"
            )
        open_axis = next((name for name, n in self.extents.items() if n is None), "dp")
        rest = prod(n or 1 for name, n in self.extents.items() if name != open_axis)
        changes: dict[str, Any] = {open_axis: ranks // rest}
        return replace(self, **changes)

    @property
    def without_options(self) -> "Layout":
        """The axes alone: without recomputation, offload, schedule and rules."""
        return replace(
            self, recompute=None, offload=None, schedule=None, micro_batches=None, rules=()
        )


def _check_separators(*parts: str) -> None:
    wrong = next((part for part in parts if re.search("[,;+]", part)), None)
    if wrong is not None:
        raise ValueError(
            f"{wrong!r} has another separator than those of a layout. HINT: ' x ' between axes, "
            "and ' + ' before each option: 'dp2 x pp2 + schedule=gpipe + micro-batches=4'"
        )


def _parse_axes(text: str) -> Iterator[tuple[str, object]]:
    """Yield the fields of "dp2 x zero1/host"."""
    for part in re.split(r"\s*[x*]\s*", text.strip()):
        if part == "data":
            continue
        if found := re.fullmatch(r"zero([0-9]*)(?:/([a-z]+|[0-9]+))?", part):
            if not found[1]:
                raise ValueError("zero needs its level. HINT: zero1, zero2 or zero3")
            yield "zero", _number(found[1])
            if found[2] is not None:
                yield "shards", _number(found[2]) if found[2].isdigit() else found[2]
        elif found := re.fullmatch(rf"({'|'.join(AXIS_WORDS)})([0-9]*)", part):
            yield found[1], _number(found[2]) if found[2] else None
        else:
            near = difflib.get_close_matches(part, _KEYWORDS, n=1, cutoff=0.0)
            known = "dp, zero1 to zero3, tp, pp, h, w and d with their extents, or data"
            raise ValueError(f"{part!r} is no axis; the axes are {known}. HINT: {near[0]!r}")


def _parse_options(texts: list[str]) -> Iterator[tuple[str, object]]:
    """Yield the fields of "recompute", "offload=optimizer", "rule:PATTERN=KIND"."""
    rules: list[tuple[str, str]] = []
    for text in texts:
        if text.startswith("rule:"):
            pattern, _, kind = text.removeprefix("rule:").rpartition("=")
            rules.append((pattern, kind))
            continue
        name, has_value, value = text.partition("=")
        if name not in _OPTIONS or (not has_value and name != "recompute"):
            near = difflib.get_close_matches(name, _OPTIONS, n=1, cutoff=0.0)[0]
            hint = near if near == "recompute" else f"{near}=..." if near != "rule" else "rule:P=K"
            raise ValueError(f"{text!r} is no option of a layout. HINT: + {hint}")
        if name == "micro-batches":
            yield "micro_batches", _number(value) if value.isdigit() else value
        else:
            yield name, value if has_value else "blocks"
    if rules:
        yield "rules", tuple(rules)


def _number(text: str) -> int:
    return int(text) if len(text) <= 9 else MAX_EXTENT + 1


def _check_one_open(axes: list[str]) -> None:
    if len(axes) > 1:
        raise ValueError(
            f"a layout can leave one extent open, and {' and '.join(axes)} have none. "
            f"HINT: {axes[0]}2"
        )


def _check_extent(name: str, value: object) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_EXTENT:
        raise ValueError(
            f"{name} must be a number from 1 to {MAX_EXTENT:,}; this is {value!r}. HINT: "
            f"{name}{'=' if name in _OPTIONS else ''}2"
        )


def _check_word(name: str, value: object, words: tuple[str, ...]) -> None:
    if value not in words:
        near = difflib.get_close_matches(str(value), words, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"{name} must be {' or '.join(map(repr, words))}; this is {value!r}. "
            f"HINT: {name}={near}"
        )


# The share of a step in which the stages of a pipeline wait.


def chunks_of(schedule: str) -> int:
    """Return the number of virtual stages of a rank."""
    return INTERLEAVED_CHUNKS if schedule == "interleaved" else 1


def idle_share(schedule: str, stages: int, count: int) -> float:
    """Return the share of a step in which a rank waits, where a backward takes two forwards.

    It is (K - 1) / (M + K - 1) for K stages and M micro-batches; interleaved stages divide the
    first term by their number. "zero-bubble" hides the backward of parameters in it.
    """
    idle = (stages - 1) / chunks_of(schedule)
    if schedule == "zero-bubble":
        idle = (stages - 1) / 3  # of F + I - W, each a third of a micro-batch
    return idle / (count + idle)


def crossing_line(axis: str, groups: Sequence[Sequence[int]], nodes: Sequence[str]) -> str:
    """Return a line about ranks of an axis on several nodes; "" if there are none.

    Args:
        groups: The ranks of each group of the axis.
        nodes: Of each rank, its node.
    """
    crossing = [ranks for ranks in groups if len({nodes[rank] for rank in ranks}) > 1]
    if not crossing or axis not in FREQUENT_AXES:
        return ""
    of_node = min(nodes.count(node) for node in nodes)
    hint = f"an extent that divides the {of_node} ranks of a node"
    if of_node < 2:
        hint = f"several ranks on each node, or a layout without the axis {axis}"
    return (
        f"the ranks of the axis {axis} exchange in each layer, and {named_ranks(crossing[0])} "
        f"are on several nodes. HINT: {hint}"
    )
