"""What ``paceline report`` prints and writes."""

import io
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import RenderableType

from ..analyze.figures.compare_runs import compare, scaling
from ..analyze.figures.report import Report, RunAnalysis, analyse_with_window
from ..analyze.records.load_run import Run, load_run
from ..cost.machine.machine_file import load as load_machine
from .console import PlainConsole
from .terminal import comparison
from .terminal.run_report import panel


def told(
    folders: list[Path],
    steps: str | None = None,
    as_json: bool = False,
    html: Path | None = None,
    timeline: Path | None = None,
    load: Callable[[Path], Run] = load_run,
    machine: Path | None = None,
) -> str:
    """The report of one folder's record, of two before and after, or of several sizes: as text,
    or with html or timeline written to these files, and then what was written. load: reads a
    folder. machine: the machine file whose roofline a step is placed on.

    Raises ValueError for what can't be read, compared or written.
    """
    chosen = _range(steps) if steps is not None else None
    if timeline is not None and len(folders) > 1:
        raise ValueError(f"--timeline takes one record, not {len(folders)}. HINT: one at a time")
    checked = load_machine(machine) if machine is not None else None
    examined = [analyse_with_window(load(folder), chosen, checked) for folder in folders]
    if checked is not None and not any(one.report.work for one in examined):
        raise ValueError(
            f"--machine {machine}: no step of {folders[0]} was counted. HINT: paceline run "
            "--record DIR --count-flops, and more than 11 steps"
        )
    written = []
    if html is not None:
        written.append(_page(examined, html))
    if timeline is not None:
        from .trace.timeline import write

        written.append(write(examined[0], timeline, chosen))
    if written and not as_json:
        return "".join(f"{line}\n" for line in written)
    reports = [one.report for one in examined]
    if len(reports) == 1:
        return _one(reports[0], as_json)
    if _before_and_after(reports):
        before, after = reports
        changes = compare(before, after)
        if as_json:
            return _json("paceline-comparison", reports, [asdict(change) for change in changes])
        return _drawn(lambda _: comparison.compared(before, after, changes))
    scales = scaling(reports)
    if as_json:
        return _json("paceline-scaling", reports, [asdict(scale) for scale in scales])
    return _drawn(lambda _: comparison.scaled(scales, reports))


def _one(report: Report, as_json: bool) -> str:
    if as_json:
        return report.to_json() + "\n"
    return _drawn(lambda width: panel(report, width, full=True))


def _before_and_after(reports: list[Report]) -> bool:
    return len(reports) == 2 and reports[0].size == reports[1].size


def _page(examined: list[RunAnalysis], path: Path) -> str:
    """Write the page; imported here, because templates take their time."""
    from .page.comparison import before_and_after, scales
    from .page.run_page import single
    from .page.write_page import save

    reports = [one.report for one in examined]
    if len(examined) == 1:
        text = single(examined[0])
    elif _before_and_after(reports):
        text = before_and_after(*examined)
    else:
        text = scales(examined)
    return save(text, path)


def _json(kind: str, reports: list[Report], rows: list[dict[str, object]]) -> str:
    whole = {"format": kind, "version": 1, "rows": rows, "reports": [asdict(r) for r in reports]}
    return json.dumps(whole, indent=1) + "\n"


def _range(text: str) -> tuple[int, int]:
    first, colon, last = text.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise ValueError(f"--steps {text} is not understood. HINT: as in 100:200, for 100 to 199")
    return int(first), int(last)


def _drawn(draw: Callable[[int], RenderableType]) -> str:
    """As wide as the terminal, coloured where it is one."""
    terminal = sys.stdout.isatty()
    text = io.StringIO()
    width = None if terminal or "COLUMNS" in os.environ else 100
    console = PlainConsole(file=text, force_terminal=terminal, width=width)
    console.print(draw(console.width))
    return text.getvalue()
