"""Sizes of a study as a LaTeX table, which needs no package."""

from ...analyze.scaling.derived import Estimate
from ...analyze.scaling.study_model import STRONG, ScalingStudy
from ...plurals import counted
from ...security.text import printable
from .size_rows import SizeRow, size_rows

_SPECIAL = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    '"': r"\textquotedbl{}",
    "|": r"\textbar{}",
}
_HEADINGS = (
    *("ranks", "nodes", "batch", "step (ms)", "samples/s", "speed-up", "efficiency"),
    *("PE", "CS"),
)
_NONE = "--"


def latex_text(study: ScalingStudy) -> str:
    """Return one ``table`` with a ``tabular`` for each kind of scaling that has sizes."""
    kinds = [kind for kind in study.request.kinds if study.of_kind(kind)]
    return "\n".join(_table(study, kind) for kind in kinds)


def escape(text: str) -> str:
    """Return text in which no character is a command of LaTeX."""
    return "".join(_SPECIAL.get(sign, sign) for sign in printable(text))


def _table(study: ScalingStudy, kind: str) -> str:
    rows = size_rows(study, kind)
    lines = [
        "% Written by paceline scale. It needs no package.",
        r"\begin{table}",
        r"\centering",
        rf"\caption{{{_caption(study, kind, rows)}}}",
        rf"\label{{tab:scaling-{kind}}}",
        r"\footnotesize\setlength{\tabcolsep}{2pt}% it fits the text width of article",
        rf"\begin{{tabular}}{{{'r' * len(_HEADINGS)}}}",
        r"\hline",
        " & ".join(_HEADINGS) + r" \\",
        r"\hline",
        *(" & ".join(_cells(row)) + r" \\" for row in rows),
        r"\hline",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _caption(study: ScalingStudy, kind: str, rows: list[SizeRow]) -> str:
    same = "the same global batch" if kind == STRONG else "the same batch per rank"
    first = next((row.point.ranks for row in rows if row.throughput is not None), None)
    runs = [len(row.point.runs) for row in rows if row.point.runs]
    counts = f"{min(runs)} to {max(runs)} runs" if len(set(runs)) > 1 else ""
    counts = counts or (counted(runs[0], "run") if runs else "no run")
    against = f" Speed-up and efficiency are relative to {counted(first, 'rank')}." if first else ""
    return (
        f"{kind.capitalize()} scaling of {escape(study.file_name)}: {same} on all numbers of "
        f"ranks. Medians of {counts} per size; $\\pm$: half of the 90\\,\\% confidence interval."
        f"{against} PE: parallel efficiency, CS: computation scalability (POP)."
    )


def _cells(row: SizeRow) -> list[str]:
    point = row.point
    head = [str(point.ranks), str(point.hosts), str(point.setup.global_batch)]
    if row.throughput is None:
        failed = "failed" if point.failure else "not measured"
        return [*head, rf"\multicolumn{{{len(_HEADINGS) - 3}}}{{l}}{{{failed}}}"]
    return [
        *head,
        _with_interval(row.step.times(1e3) if row.step is not None else None),
        _with_interval(row.throughput),
        _with_interval(row.speedup),
        _with_interval(row.efficiency),
        _factor(row.pop.get("parallel")),
        _factor(row.computation),
    ]


def _with_interval(found: Estimate | None) -> str:
    """Return the value with as many digits as its interval has significant ones."""
    if found is None:
        return _NONE
    half = (found.high - found.low) / 2
    digits = decimals(found.value, half)
    value = f"{found.value:.{digits}f}"
    if not half or half == float("inf"):
        return f"${value}$"
    return rf"${value} \pm {half:.{digits}f}$"


def decimals(value: float, half: float) -> int:
    """Return the number of decimals that show two digits of ``half``, or four of ``value``."""
    scale, digits = (half, 2) if 0 < half < float("inf") else (abs(value), 4)
    for count in range(7):
        if scale * 10**count >= 10 ** (digits - 1):
            return count
    return 6


def _factor(value: float | None) -> str:
    return _NONE if value is None else f"{value:.3f}"
