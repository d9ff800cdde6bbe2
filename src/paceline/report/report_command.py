"""``paceline report``: the text that it prints and the files that it writes."""

import io
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import RenderableType

from ..analyze.figures.compare_runs import (
    Gate,
    Reports,
    chance_limit,
    check_gate,
    compare,
    compare_states,
    scaling,
)
from ..analyze.figures.report import Report, RunAnalysis, analyse_with_window
from ..analyze.records.load_run import Run, load_run
from ..cost.machine.machine_file import load as load_machine
from . import run_comparison as comparison
from .console import PlainConsole, output_width
from .numbers import counted
from .run_verdict import run_json
from .terminal.draw import draw_panel
from .terminal.run_report import panel


@dataclass(frozen=True)
class ReportOutput:
    """What ``paceline report`` prints.

    Attributes:
        text: The text, or JSON.
        gate: Result of --gate; None without it.
    """

    text: str
    gate: Gate | None = None


def make_report(
    folders: list[Path],
    steps: str | None = None,
    as_json: bool = False,
    html: Path | None = None,
    timeline: Path | None = None,
    load: Callable[[Path], Run] = load_run,
    machine: Path | None = None,
    baseline: Sequence[Path] = (),
    tolerance: float | None = None,
) -> ReportOutput:
    """Report one run, the comparison of two or of two groups, or the scaling of several.

    folders: Folders with the records of one run each.
    steps: Range of steps to examine, as in "100:200"; None for all.
    as_json: Return JSON instead of tables.
    html, timeline: Files to write; the text then says what was written.
    load: Reads the record in a folder.
    machine: Machine file with the roofline on which a step is placed.
    baseline: Folders with the records of the runs that ``folders`` are compared with.
    tolerance: Slowdown that --gate accepts, as a share of the step time; None: no gate.

    Raises:
        ValueError: A record cannot be read or compared, or a file cannot be written.
    """
    step_range = _parse_step_range(steps) if steps is not None else None
    every = [*baseline, *folders]
    _check_number(len(every), html is not None and len(baseline) > 0, timeline is not None)
    machine_facts = load_machine(machine) if machine is not None else None
    examined = [analyse_with_window(load(folder), step_range, machine_facts) for folder in every]
    if machine_facts is not None and not any(run.report.work for run in examined):
        raise ValueError(
            f"--machine {machine}: no step of {folders[0]} was counted. HINT: record the run "
            "again with paceline run --record DIR --count-flops and more than 11 steps"
        )
    reports = [run.report for run in examined]
    groups = _before_and_after(reports, len(baseline))
    gate = None
    if tolerance is not None:
        if groups is None:
            raise ValueError(
                "--gate compares two records with the same number of ranks. HINT: paceline report "
                "BEFORE AFTER --gate 5%"
            )
        gate = check_gate(*groups, tolerance)
    written = []
    if html is not None:
        written.append(_write_page(examined, html))
    if timeline is not None:
        from .trace.timeline import write

        written.append(write(examined[0], timeline, step_range))
    if written and not as_json:
        written += [comparison.describe_gate(gate)] if gate is not None else []
        return ReportOutput("".join(f"{line}\n" for line in written), gate)
    if len(reports) == 1:
        if as_json:
            return ReportOutput(run_json(reports[0]) + "\n")
        return ReportOutput(_render(lambda width: panel(reports[0], width, full=True)))
    if groups is not None:
        if as_json:
            return ReportOutput(_comparison_json(*groups, gate), gate)
        document = comparison.comparison_document(*groups, gate)
        return ReportOutput(_render(lambda _: draw_panel(document)), gate)
    if as_json:
        rows = [asdict(scale) for scale in scaling(reports)]
        return ReportOutput(_to_json("paceline-scaling", reports, rows))
    return ReportOutput(_render(lambda _: draw_panel(comparison.scaling_document(reports))))


def _check_number(records: int, is_compared_on_page: bool, has_timeline: bool) -> None:
    """Raise ValueError if a file can't show so many records."""
    if has_timeline and records > 1:
        raise ValueError(
            f"--timeline takes one record; {records} are given. HINT: run paceline report once per "
            "record"
        )
    if is_compared_on_page and records > 2:
        raise ValueError(
            f"--html compares two records; {records} are given. HINT: give one --baseline and one "
            "DIR"
        )


def _comparison_json(before: Reports, after: Reports, gate: Gate | None) -> str:
    changes, states = compare(before, after), compare_states(before, after)
    return _to_json(
        "paceline-comparison",
        [*before, *after],
        [asdict(change) for change in changes],
        states=asdict(states) if states is not None else None,
        runs={"before": len(before), "after": len(after)},
        chance=chance_limit(changes),
        gate=asdict(gate) if gate is not None else None,
    )


def _before_and_after(
    reports: list[Report], baselines: int = 0
) -> tuple[list[Report], list[Report]] | None:
    """Return the runs before and after; None where this is no comparison.

    baselines: Number of runs of --baseline, the first of ``reports``.

    Raises:
        ValueError: There is a baseline, and the runs have different numbers of ranks.
    """
    if not baselines:
        both = len(reports) == 2 and reports[0].size == reports[1].size
        return (reports[:1], reports[1:]) if both else None
    for report in reports:
        if report.size != reports[0].size:
            raise ValueError(
                f"--baseline: {reports[0].name} has {counted(reports[0].size, 'rank')} and "
                f"{report.name} {report.size}, and their figures are not comparable. HINT: record "
                "both with the same number of ranks"
            )
    return reports[:baselines], reports[baselines:]


def _write_page(examined: list[RunAnalysis], path: Path) -> str:
    """Write the page and return the line to print; imports are local as templates load slowly."""
    from .page.run_page import single
    from .page.write_page import document_page, save

    reports = [run.report for run in examined]
    if len(examined) == 1:
        return save(single(examined[0]), path)
    if len(reports) == 2 and (groups := _before_and_after(reports)) is not None:
        document = comparison.comparison_document(*groups)
        charts = comparison.comparison_charts(examined, ("before", "after"))
        return save(document_page(document, charts), path)
    document = comparison.scaling_document(reports)
    return save(document_page(document, comparison.scaling_charts(examined)), path)


def _to_json(
    kind: str, reports: list[Report], rows: list[dict[str, object]], **more: object
) -> str:
    whole = {"format": kind, "version": 1, "rows": rows, **more}
    return json.dumps({**whole, "reports": [asdict(r) for r in reports]}, indent=1) + "\n"


def _parse_step_range(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise ValueError(
            f"--steps must be FIRST:END with FIRST below END; this is '{text}'. HINT: --steps "
            "100:200 selects the steps 100 to 199"
        )
    return int(first), int(last)


def _render(draw: Callable[[int], RenderableType]) -> str:
    """Return what ``draw`` makes for the width of the terminal, with colours if it is one."""
    terminal = sys.stdout.isatty()
    text = io.StringIO()
    console = PlainConsole(file=text, force_terminal=terminal, width=output_width())
    console.print(draw(console.width))
    return text.getvalue()
