"""Read what ``--reference`` names: reference files, record folders, and outputs of runs."""

from pathlib import Path

import numpy as np

from ...analyze.reference.metric import PATTERN, Metric
from ...analyze.reference.reference_file import merge_references, read_reference
from ...analyze.reference.series import Reference, Series
from ...security.files import read_regular
from .metric_lines import MetricPattern
from .request import parse_metric

MAX_OUTPUT_BYTES = 256 << 20


def load_reference(paths: list[str], metric: str | None) -> Reference:
    """Read and join references.

    Args:
        paths: Files of ``--make-reference``, record folders, or files with the output of a run.
        metric: ``--metric``; needed for outputs, otherwise it must be that of the references.

    Raises:
        ValueError: A reference can't be read, or is of another metric or model than the others.
    """
    wanted = parse_metric(metric)
    found = []
    for name in paths:
        path = Path(name)
        if not path.exists():
            raise ValueError(
                f"--reference {name} does not exist. HINT: paceline run --make-reference {name} "
                "SCRIPT makes it"
            )
        if path.is_dir() or _is_json(path):
            reference = read_reference(path)
            if metric is not None and reference.metric != wanted:
                raise ValueError(
                    f"--reference {name} is of another metric: it has {reference.metric}, and "
                    f"--metric is {metric!r}. HINT: leave out --metric, or make a reference of "
                    "this metric"
                )
            found.append(reference)
        elif wanted.source == PATTERN:
            found.append(read_output(path, wanted))
        else:
            raise ValueError(
                f"--reference {name} is neither a reference nor a record folder. HINT: for the "
                r"output of a run add its pattern: --metric 'loss[ =:]+(\S+)'"
            )
    return merge_references(found)


def read_output(path: Path, metric: Metric) -> Reference:
    """Return the values that a pattern finds in the output of a run.

    Raises:
        ValueError: It finds none, or the file can't be read.
    """
    try:
        text = read_regular(path, MAX_OUTPUT_BYTES).decode(errors="replace")
    except OSError as error:
        raise ValueError(f"--reference {path}: {error.strerror}") from None
    pattern, lines = MetricPattern(metric.name), text.replace("\r", "\n").split("\n")
    found = [value for line in lines if (value := pattern.find(line)) is not None]
    if not found:
        raise ValueError(
            f"--metric {metric.name!r} matches none of the {len(lines):,} lines of {path}. HINT: "
            "look at a line of the output, and write a pattern for it"
        )
    count = len(found)
    steps = [number + 1 if one.step is None else one.step for number, one in enumerate(found)]
    samples = [0.0 if one.samples is None else one.samples for one in found]
    unknown = np.full(count, np.nan)
    values = np.array([one.value for one in found], np.float64)
    run = Series(np.array(steps), np.array(samples), values, unknown, unknown, str(path))
    return Reference(metric, [run])


def _is_json(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip().startswith(b"{")
    except OSError as error:
        raise ValueError(f"--reference {path}: {error.strerror}") from None
