"""Options of ``paceline scale``: sizes, precision, and the name of a new folder."""

import re
from pathlib import Path
from typing import Any

from ...analyze.reference.metric import parse_goal
from ...analyze.scaling.study_model import MAX_RANKS, MAX_SIZES
from ...cost.layout import Layout
from ...launch.guard.request import parse_metric

DEFAULT_SEEDS = 3


def parse_sizes(text: str | None) -> list[int]:
    """Return the sizes of ``-n``, ascending.

    Raises:
        ValueError: They are missing or not valid.
    """
    if text is None:
        raise ValueError("-n is missing. HINT: -n 1,2,4 compares 1, 2 and 4 ranks")
    words = text.split(",")
    if not all(re.fullmatch(r"[1-9]\d{0,6}", word.strip()) for word in words):
        raise ValueError(f"-n {text!r}: sizes are numbers of ranks. HINT: -n 1,2,4,8")
    sizes = sorted(set(map(int, words)))
    if len(sizes) < len(words):
        once = ",".join(map(str, sizes))
        raise ValueError(f"-n {text!r}: a size is given more than once. HINT: -n {once}")
    if sizes[-1] > MAX_RANKS or len(sizes) > MAX_SIZES:
        raise ValueError(
            f"-n {text!r}: at most {MAX_SIZES} sizes of at most {MAX_RANKS:,} ranks. HINT: -n 1,2,4"
        )
    return sizes


def parse_precision(text: str) -> float:
    """Return ``--precision`` as a share. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(%?)", text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share <= 1:
        raise ValueError(f"--precision {text!r} is no share of the throughput. HINT: 3% or 0.03")
    return share


def parse_layout(text: str | None) -> str:
    """Return ``--layout`` as a layout is printed; "" without it. Raises ValueError."""
    try:
        return str(Layout.parse(text)) if text is not None else ""
    except ValueError as error:
        raise ValueError(f"--layout: {error}") from None


def new_folder(script: str) -> Path:
    """Return a folder that does not exist, named after the script."""
    stem = re.sub(r"[^A-Za-z0-9._-]", "-", Path(script).name.removesuffix(".py")) or "script"
    number, path = 1, Path(f"scaling-{stem}")
    while path.exists():
        number += 1
        path = Path(f"scaling-{stem}-{number}")
    return path


def parse_target(until: str | None, metric: str | None, seeds: int | None) -> dict[str, Any]:
    """Return the fields of a request for ``--until``; none without it.

    Raises:
        ValueError: The options are not valid, or do not fit together.
    """
    if until is None:
        given = "--metric" if metric is not None else "--seeds" if seeds is not None else ""
        if given:
            raise ValueError(f"{given} needs a target. HINT: --until 'accuracy>=0.97'")
        return {}
    parse_metric(metric)
    parse_goal(until, metric)
    return {"until": until, "metric": metric or "", "seeds": seeds or DEFAULT_SEEDS}
