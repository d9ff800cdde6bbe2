"""Result of ``paceline check --data SET``.

It shows how fast the dataset is read, what limits the rate, the error of the prediction, and
remedies.
"""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...cost.machine.units import size
from ..numbers import amount, counted

LIMITS = {
    "processor": "the processors",
    "interpreter": "one process, whose threads wait for each other",
    "threads": "the loader threads",
    "bandwidth": "the storage's bandwidth",
    "operations": "the storage's reads per second",
}
STATES = {
    "storage": "from storage, as in a first epoch",
    "memory": "from memory, as in later epochs",
}


def render(told: dict[str, Any]) -> Group:
    """Return the result as text for the terminal; ``told`` has the layout of ``--json``."""
    parts: list[RenderableType] = [Text(line) for line in _terms(told)]
    for state, rates in told["rates"].items():
        parts += [Text(), _table(told, state, rates)]
    parts += [Text(), *_sentences(told)]
    parts += [Text(note, style="bright_black") for note in told["notes"]]
    return Group(*parts)


def _terms(told: dict[str, Any]) -> list[str]:
    t = told["terms"]
    cpu = t["read_s"] + t["decode_s"] + t["transform_s"]
    parts = ", ".join(
        f"{name} {1e6 * t[key]:,.0f}"
        for name, key in (("read", "read_s"), ("decode", "decode_s"), ("transform", "transform_s"))
        if t[key] > 0.01 * cpu
    )
    where = f" on {told['filesystem']}" if told["filesystem"] else ""
    lines = [
        f"{counted(t['samples'], 'sample')} of {size(t['bytes'])}{where}; "
        f"{counted(t['cores'], 'core')}",
        f"CPU time per sample: {1e6 * cpu:,.0f} us ({parts})",
    ]
    if t["bandwidth"] is not None:
        lines.append(
            f"storage: {size(t['bandwidth'])}/s in large reads, "
            f"{amount(t['operations'])} samples/s in parallel single reads, "
            f"{1e6 * t['wait_s']:,.0f} us per sequential read"
        )
    return lines


def _table(told: dict[str, Any], state: str, rates: list[dict[str, Any]]) -> Table:
    title = STATES[state]
    table = Table(title=title, box=None, pad_edge=False, title_justify="left", title_style="bold")
    for heading in ("ranks", "predicted", "limited by", "measured"):
        table.add_column(heading, justify="left" if heading == "limited by" else "right")
    for one in rates:
        measured = ""
        if one["ranks"] == told["ranks"]:
            found = told["measured"][state]
            measured = f"{amount(found)} ({100 * (one['samples_s'] / found - 1):+.0f} %)"
        table.add_row(f"{one['ranks']}", amount(one["samples_s"]), LIMITS[one["limit"]], measured)
    table.caption = "samples/s of all ranks; in brackets: error of the prediction"
    table.caption_justify = "left"
    return table


def _sentences(told: dict[str, Any]) -> list[Text]:
    found = []
    for one in told["remedies"]:
        text = f"{one['id']}: {amount(one['samples_s'])} samples/s predicted: {one['sentence']}"
        found.append(Text(text, style="green"))
    if not told["remedies"]:
        found.append(Text("No known remedy gains 10 % or more.", style="bold"))
    if told["terms"]["bandwidth"] is not None and told["fits"]:
        found.append(Text("The dataset fits into memory: later epochs are not read from storage."))
    if told["hosts"] is not None:
        found.append(
            Text(f"From {told['hosts']} such nodes on, the storage is the limit if all share it.")
        )
    return found
