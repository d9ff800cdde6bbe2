"""Time by line of the script, and operators of the model, as tables of a diagnosis's page."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...analyze.diagnosis.line_profile import Doing, LineProfile, SampledLine
from ...analyze.diagnosis.operator_profile import OperatorProfile
from ...analyze.diagnosis.rules.operators import findings
from ..terminal.diagnosis.lines import (
    MIN_LINE_SHARE,
    describe_doing,
    describe_ranks,
    describe_worker,
    lines_as_json,
)
from ..terminal.diagnosis.operators import nothing_wrong

MAX_LINES = 20
LEAST_OPERATORS, MAX_OPERATORS = 5, 20  # those between have MIN_LINE_SHARE of a step
_COLOURS = {  # CSS variables
    Doing.TORCH: "useful",
    Doing.LIBRARY: "checkpoint",
    Doing.PYTHON: "validation",
    Doing.SHORT_CALLS: "map2",
    Doing.FILE: "input",
    Doing.WAIT: "wait",
    Doing.COLLECTIVE: "transfer",
    Doing.CORE: "starved",
    Doing.GARBAGE: "garbage",
}


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        path: Position in the JSON of the diagnosis.
        parts: Of the bar: (activity, CSS variable of its colour, width in percent).
        inclusive: Share of a step with calls; None for lines of loader workers.
    """

    path: str
    place: str
    code: str
    share: float
    inclusive: float | None
    doing: str
    parts: list[tuple[str, str, float]]


def line_rows(profile: LineProfile | None) -> tuple[list[Row], list[Row]]:
    """Return the lines with most time, and those of loader workers."""
    if profile is None:
        return [], []
    known = {_key(one): at for at, one in enumerate(lines_as_json(profile) or [])}
    lines = [one for one in profile.lines()[:MAX_LINES] if one.share >= MIN_LINE_SHARE]
    workers = [one for one in profile.worker_lines()[:MAX_LINES] if one.share >= MIN_LINE_SHARE]

    def row(
        line: SampledLine, doing: Mapping[Doing, float], said: str, longest: float, *, worker: bool
    ) -> Row:
        at = known[line.file, line.line, line.function, worker]
        place = f"{line.file.rpartition('/')[2]}:{line.line} {line.function}"
        largest = sorted(doing.items(), key=lambda one: -one[1])
        parts = [(str(name), _COLOURS[name], 100 * part / longest) for name, part in largest]
        return Row(f"lines.{at}", place, line.code, sum(doing.values()), None, said, parts)

    longest = max((one.share for one in lines), default=1.0)
    own = []
    for one in lines:
        said = describe_doing(one) + describe_ranks(profile.ranks, one)
        found = row(one.line, one.doing, said, longest, worker=False)
        own.append(replace(found, share=one.share, inclusive=one.inclusive_share))
    longest = max((one.share for one in workers), default=1.0)
    return own, [
        row(one.line, {one.doing: one.share}, describe_worker(one), longest, worker=True)
        for one in workers
    ]


def _key(one: dict[str, Any]) -> tuple[str, int, str, bool]:
    return one["file"], one["line"], one["function"], one["in_workers"]


def legend(rows: list[Row]) -> list[tuple[str, str]]:
    """Return the activities of the bars with their colours."""
    return list(dict.fromkeys((name, colour) for row in rows for name, colour, _ in row.parts))


def operator_context(profile: OperatorProfile | None) -> dict[str, Any]:
    """Return the template variables of the section "Inside the model"."""
    shown = profile if profile is not None and profile.operators else None
    largest = shown.operators[:MAX_OPERATORS] if shown else []
    return {
        "model": shown,
        "operators": [
            one
            for at, one in enumerate(largest)
            if at < LEAST_OPERATORS or one.share >= MIN_LINE_SHARE
        ],
        "findings": findings(shown) if shown else [],
        "nothing_wrong": nothing_wrong(shown) if shown else "",
    }
