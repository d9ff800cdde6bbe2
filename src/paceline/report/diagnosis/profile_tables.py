"""Time by line of the script, and by operator of the model, as tables and as JSON."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import PurePath
from typing import Any

import msgspec

from ...analyze.diagnosis.evidence import MIN_SHARE
from ...analyze.diagnosis.line_profile import Doing, LineProfile, LineTime, WorkerLine
from ...analyze.diagnosis.operator_profile import OperatorProfile, ProfiledOperator
from ...analyze.diagnosis.rules.operators import Finding, findings, products
from ...analyze.records.rank_lines import SampledLine
from ...record.experiments.lines.sidecar import Activity
from .. import document as doc
from ..numbers import amount, duration, percent

MAX_LINES, MAX_LINES_ON_PAGE, MAX_JSON_LINES = 10, 20, 200  # lines of the script
MIN_LINE_SHARE = 0.01  # of a step: lines with less are not shown
MIN_OF_LINE = 0.25  # of a line's time: smaller parts are not named
MIN_RANK_DIFFERENCE = 0.05  # of a step: then a line's time on single ranks is shown
MAX_OPERATORS, MAX_OPERATORS_ON_PAGE, MAX_JSON_OPERATORS = 5, 20, 100
MAX_CODE_CHARACTERS, MAX_MODULE_CHARACTERS = 40, 16  # in the terminal
_ACTIVITY_COLOURS = {  # CSS variables
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


def lines_section(profile: LineProfile | None) -> list[doc.Section]:
    """Return the lines with most time, and those of loader workers; nothing without a profile."""
    if profile is None:
        return []
    every = profile.lines()  # the largest share first, as in the JSON, which has workers after them
    first_worker = min(len(every), MAX_JSON_LINES)
    lines = [line for line in every if line.share >= MIN_LINE_SHARE]
    workers = [line for line in profile.worker_lines() if line.share >= MIN_LINE_SHARE]
    lines, workers = lines[:MAX_LINES_ON_PAGE], workers[:MAX_LINES_ON_PAGE]
    doing = {activity for line in lines for activity in line.doing}
    doing |= {worker.doing for worker in workers}
    legend = [(colour, str(name)) for name, colour in _ACTIVITY_COLOURS.items() if name in doing]
    blocks: list[doc.Block] = [doc.Legend(legend)] if legend else []
    if lines:
        rows = []
        longest = lines[0].share
        for number, line in enumerate(lines):
            at = f"lines.{number}"
            shares = [
                doc.Part(percent(line.share), figure=f"{at}.share"),
                doc.Part(percent(line.inclusive_share), figure=f"{at}.inclusive"),
            ]
            description = describe_doing(line) + describe_ranks(profile.ranks, line)
            bar = _bar(line.doing, longest)
            rows.append(_row(number, [_line(line.line), *shares, [bar, description]]))
        share = doc.Column("of a step", term="line time", width=13)
        with_calls = doc.Column("with calls", term="with calls", width=13)
        blocks.append(_line_table(share, rows, with_calls))
    if workers:
        rows = []
        longest = workers[0].share
        for number, worker in enumerate(workers):
            at = f"lines.{first_worker + number}.share"
            figure = doc.Part(percent(worker.share), figure=at)
            bar = _bar({worker.doing: worker.share}, longest)
            rows.append(_row(number, [_line(worker.line), figure, [bar, describe_worker(worker)]]))
        share = doc.Column("of their time", term="line time", width=13)
        blocks += [doc.Heading("In loader workers"), _line_table(share, rows)]
    return [doc.Section("lines", "Time by line", blocks, "Time by line of the script")]


def _line_table(share: doc.Column, rows: list[doc.Row], *more: doc.Column) -> doc.Table:
    """Return a table of lines with their share of the time."""
    line, doing = (
        doc.Column(name, right=False, ratio=ratio) for name, ratio in (("line", 3), ("doing", 2))
    )
    return doc.Table([line, share, *more, doing], rows, name="by-line")


def _row(number: int, cells: list[doc.Text]) -> doc.Row:
    return doc.Row(cells, where=doc.BOTH if number < MAX_LINES else doc.PAGE)


def _line(line: SampledLine) -> doc.Text:
    file, function = line.file.rpartition("/")[2], line.function
    return [
        doc.in_terminal(f"{file}:{line.line} {function.rpartition('.')[2]}: "),
        doc.on_page(f"{file}:{line.line} {function}", doc.SMALL),
        doc.NEW_LINE,
        doc.Part(line.code, doc.CODE),
    ]


def _bar(doing: Mapping[Doing, float], longest: float) -> doc.Part:
    largest = sorted(doing.items(), key=lambda part: -part[1])
    bar = [(str(name), _ACTIVITY_COLOURS[name], share / longest) for name, share in largest]
    return doc.Part("", where=doc.PAGE, bar=bar)


def describe_doing(line: LineTime) -> str:
    """Return what most of a line's time went to."""
    main = [
        doing
        for doing, share in line.doing.items()
        if share >= MIN_OF_LINE * line.share or doing == line.main_activity
    ]
    text = ", ".join(main)
    named = any(doing in Activity for doing in main if doing != Doing.COLLECTIVE)
    return f"{text} {_short(line.what)}".strip() if named else text


def describe_worker(line: WorkerLine) -> str:
    """Return what a loader worker did in a line."""
    return f"{line.doing} {_short(line.what)}".strip()


def _short(what: str) -> str:
    """Return the end of a path or of a function's name."""
    return what.rpartition("/")[2] if "/" in what else ".".join(what.split(".")[-2:])


def describe_ranks(ranks: list[int], line: LineTime) -> str:
    """Say on which rank a line takes longer than on the others."""
    most = max(range(len(ranks)), key=lambda i: line.own[i])
    others = [share for i, share in enumerate(line.own) if i != most]
    if not others or line.own[most] - max(others) < MIN_RANK_DIFFERENCE:
        return ""
    return f"; rank {ranks[most]} {percent(line.own[most])}, others up to {percent(max(others))}"


def lines_as_json(profile: LineProfile | None) -> list[dict[str, Any]] | None:
    """Return the lines that take time, largest first; None if nothing was sampled."""
    if profile is None:
        return None
    waited = {
        line: {rank: lines[line] for rank, lines in profile.waited.items() if line in lines}
        for line in {line for lines in profile.waited.values() for line in lines}
    }
    found = [
        {
            **asdict(line.line),
            "in_workers": False,
            "share": line.share,
            "inclusive": line.inclusive_share,
            "doing": {str(doing): share for doing, share in line.doing.items()},
            "what": line.what,
            "ranks": {str(r): share for r, share in zip(profile.ranks, line.own, strict=True)},
            "waited_for": {str(r): share for r, share in waited.get(line.line, {}).items()},
            "executions_a_step": line.executions,
        }
        for line in profile.lines()[:MAX_JSON_LINES]
    ]
    return found + [
        {
            **asdict(worker.line),
            "in_workers": True,
            "share": worker.share,
            "doing": {str(worker.doing): worker.share},
            "what": worker.what,
        }
        for worker in profile.worker_lines()[:MAX_JSON_LINES]
    ]


def operators_section(profile: OperatorProfile | None) -> list[doc.Section]:
    """Return the largest operators with the findings, or that nothing is wrong.

    Nothing without a profile.
    """
    if profile is None or not profile.operators:
        return []
    share = percent(min(profile.accounted, 1.0))
    step = doc.Part(duration(profile.step_s), figure="operators.step_s")
    blocks: list[doc.Block] = [doc.Line([f"Operators take {share} of a step of ", step, "."])]
    if found := findings(profile):
        blocks.append(doc.Bullets([_finding(finding, n) for n, finding in enumerate(found)]))
    else:
        blocks.append(doc.Line(nothing_wrong(profile)))
    blocks += [doc.BLANK, _operator_table(profile), *doc.lines(profile.notes, doc.DOUBT)]
    return [doc.Section("model", "Inside the model", blocks, "Inside the model")]


def _finding(found: Finding, number: int) -> doc.Text:
    """Return what is wrong, at which lines, and what to do."""
    at = f"operators.findings.{number}"
    places = [f"{PurePath(line['file']).name}:{line['line']}" for line in found.lines]
    where = ", ".join(dict.fromkeys(place for place in places if place != ":0"))
    return [
        doc.Part(found.id, doc.CODE, f"{at}.id"),
        ", ",
        doc.Part("at most", term="upper bound"),
        " ",
        doc.Part(percent(found.share), doc.STRONG, f"{at}.share"),
        f" of a step{where and f' (lines {where})'}: {found.sentence}. HINT: {found.remedy}.",
    ]


def _operator_table(profile: OperatorProfile) -> doc.Table:
    rows = []
    for number, operator in enumerate(profile.operators[:MAX_OPERATORS_ON_PAGE]):
        row, at = operator.row, f"operators.operators.{number}"
        if number >= MAX_OPERATORS and operator.share < MIN_LINE_SHARE:
            continue
        of_roofline = operator.of_roofline
        reached = doc.NOT_KNOWN if of_roofline is None else percent(of_roofline)
        name: list[str | doc.Part] = [
            row.operator,
            doc.in_terminal(f", {row.phase}"),
            doc.NEW_LINE,
            doc.on_page(row.phase, doc.SMALL),
        ]
        module = [doc.in_terminal(_end(row.module)), doc.on_page(row.module)]
        cells: list[doc.Text] = [
            name,
            doc.Part(percent(operator.share), figure=f"{at}.share"),
            doc.Part(reached, figure=f"{at}.of_roofline"),
            amount(row.calls),
            module,
            list(_operator_line(operator)),
        ]
        where = doc.BOTH if number < MAX_OPERATORS else doc.PAGE
        rows.append(doc.Row(cells, where=where))
    columns = [
        doc.Column("operator", right=False, ratio=2),
        doc.Column("of a step", term="operator share", width=9),
        doc.Column("roofline", term="of roofline", width=8),
        doc.Column("calls", width=6),
        doc.Column("module", right=False, width=MAX_MODULE_CHARACTERS),
        doc.Column("line", right=False, ratio=3),
    ]
    return doc.Table(columns, rows, name="operators")


def _end(module: str) -> str:
    """Return the end of a long name, which says more than its beginning."""
    if len(module) <= MAX_MODULE_CHARACTERS:
        return module
    return f"\N{HORIZONTAL ELLIPSIS}{module[1 - MAX_MODULE_CHARACTERS :]}"


def _operator_line(operator: ProfiledOperator) -> Iterable[doc.Part]:
    if operator.file:
        place = f"{PurePath(operator.file).name}:{operator.line}"
        yield doc.in_terminal(f"{place} {operator.code[:MAX_CODE_CHARACTERS]}")
        yield doc.on_page(place, doc.SMALL)
        yield doc.NEW_LINE
        yield doc.on_page(operator.code, doc.CODE)


def nothing_wrong(profile: OperatorProfile) -> str:
    """Return the sentence for a model in which no finding takes ``MIN_SHARE`` of a step."""
    sentence = f"No unneeded work inside the model takes {100 * MIN_SHARE:.0f} % of a step or more."
    largest = products(profile)
    if not largest:
        return sentence
    share = sum(op.share for op in largest)
    reached = sum(op.share * (op.of_roofline or 0.0) for op in largest) / share if share else 0.0
    names = ", ".join(
        f"{op.row.operator} of {op.row.shapes}{f' in {op.row.module}' * bool(op.row.module)}"
        for op in largest
    )
    take = "largest matrix product takes"
    if len(largest) > 1:
        take = f"{len(largest)} largest matrix products take"
    return (
        f"{sentence} The {take} {percent(share)} of a step, at {percent(reached)} of the roofline: "
        f"{names}."
    )


def operators_as_json(profile: OperatorProfile | None) -> dict[str, Any] | None:
    """Return the profile as JSON-compatible values: docs/reference/formats/json.md."""
    if profile is None:
        return None
    fields = ("ranks", "step_s", "core_wait", "profiled_step_s", "accounted", "dispatch_s")
    return {
        **{name: getattr(profile, name) for name in (*fields, "device")},
        "limits": msgspec.to_builtins(profile.limits),
        "operators": [*map(_row_as_json, profile.operators[:MAX_JSON_OPERATORS])],
        "findings": [asdict(finding) for finding in findings(profile)],
        "notes": profile.notes,
    }


def _row_as_json(operator: ProfiledOperator) -> dict[str, Any]:
    place = {"file": operator.file, "line": operator.line, "code": operator.code}
    figures = {"share": operator.share, "of_roofline": operator.of_roofline}
    return {**msgspec.to_builtins(operator.row), **place, **figures}
