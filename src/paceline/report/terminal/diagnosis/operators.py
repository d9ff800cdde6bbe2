"""Inside the model: which operators a step computes, as a short table and as JSON."""

from dataclasses import asdict
from pathlib import PurePath
from typing import Any

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ....analyze.diagnosis.evidence import MIN_SHARE
from ....analyze.diagnosis.operator_profile import OperatorProfile, ProfiledOperator
from ....analyze.diagnosis.rules.operators import Finding, findings, products
from ...numbers import percent

MAX_ROWS = 5  # of the table
MAX_JSON_OPERATORS = 100
MAX_CODE_CHARACTERS = 40
MAX_MODULE_CHARACTERS = 16


def render(profile: OperatorProfile | None) -> list[RenderableType]:
    """Return the table of the largest operators, the findings' remedies, or that nothing is wrong.

    Empty without a profile.
    """
    if profile is None or not profile.operators:
        return []
    head = (
        f"Inside the model: operators take {percent(min(profile.accounted, 1.0))} of a step "
        f"({profile.step_s * 1e3:.3g} ms)"
    )
    found = findings(profile)
    parts: list[RenderableType] = [Text(), Text(head, style="bold"), _table(profile), Text()]
    parts += [_remedy(one) for one in found] or [Text(nothing_wrong(profile))]
    parts += [Text(f"{note}.", style="yellow") for note in profile.notes]
    return parts


def _table(profile: OperatorProfile) -> Table:
    table = Table(box=None, pad_edge=False, expand=True)
    for heading, width in (("of a step", 9), ("roofline", 8), ("calls", 6)):
        table.add_column(heading, justify="right", no_wrap=True, width=width)
    table.add_column("operator", no_wrap=True, overflow="ellipsis", ratio=2)
    table.add_column("module", no_wrap=True, width=MAX_MODULE_CHARACTERS)
    table.add_column("line", no_wrap=True, overflow="ellipsis", ratio=3)
    for one in profile.operators[:MAX_ROWS]:
        row = one.row
        table.add_row(
            percent(one.share),
            percent(one.of_roofline) if one.of_roofline is not None else "",
            f"{row.calls:,.0f}",
            f"{row.operator}, {row.phase}",
            _end(row.module),
            _place(one),
        )
    return table


def _end(module: str) -> str:
    """Return the end of a long name, which says more than its beginning."""
    if len(module) <= MAX_MODULE_CHARACTERS:
        return module
    return f"\N{HORIZONTAL ELLIPSIS}{module[1 - MAX_MODULE_CHARACTERS :]}"


def _place(one: ProfiledOperator) -> str:
    if not one.file:
        return ""
    return f"{PurePath(one.file).name}:{one.line} {one.code[:MAX_CODE_CHARACTERS]}"


def _remedy(found: Finding) -> Text:
    named = [f"{PurePath(line['file']).name}:{line['line']}" for line in found.lines]
    where = ", ".join(dict.fromkeys(name for name in named if name != ":0"))
    text = Text(f"{found.id}, at most ").append(percent(found.share), style="bold")
    return text.append(f" of a step{f' (lines {where})' if where else ''}. HINT: {found.remedy}.")


def nothing_wrong(profile: OperatorProfile) -> str:
    """Return the sentence for a model in which no finding takes ``MIN_SHARE`` of a step."""
    said = f"No unneeded work inside the model takes {100 * MIN_SHARE:.0f} % of a step or more."
    largest = products(profile)
    if not largest:
        return said
    share = sum(one.share for one in largest)
    reached = sum(one.share * (one.of_roofline or 0.0) for one in largest) / share if share else 0.0
    names = ", ".join(
        f"{one.row.operator} of {one.row.shapes}" + (f" in {one.row.module}" * bool(one.row.module))
        for one in largest
    )
    which = (
        f"{len(largest)} largest matrix products take"
        if len(largest) > 1
        else "largest matrix product takes"
    )
    return (
        f"{said} The {which} {percent(share)} of a step, at {percent(reached)} of the roofline: "
        f"{names}."
    )


def as_json(profile: OperatorProfile | None) -> dict[str, Any] | None:
    """Return the profile as JSON-compatible values: docs/reference/formats/json.md."""
    if profile is None:
        return None
    return {
        "ranks": profile.ranks,
        "step_s": profile.step_s,
        "core_wait": profile.core_wait,
        "profiled_step_s": profile.profiled_step_s,
        "accounted": profile.accounted,
        "dispatch_s": profile.dispatch_s,
        "device": profile.device,
        "limits": msgspec.to_builtins(profile.limits),
        "operators": [_row_as_json(one) for one in profile.operators[:MAX_JSON_OPERATORS]],
        "findings": [asdict(one) for one in findings(profile)],
        "notes": profile.notes,
    }


def _row_as_json(one: ProfiledOperator) -> dict[str, Any]:
    place = {"file": one.file, "line": one.line, "code": one.code}
    figures = {"share": one.share, "of_roofline": one.of_roofline}
    return {**msgspec.to_builtins(one.row), **place, **figures}
