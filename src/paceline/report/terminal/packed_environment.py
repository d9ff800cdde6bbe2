"""Result of ``paceline check --pack-env``: table, verdict, and use of the file on a node."""

import shlex

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...cost.import_cost import Packed
from ...cost.machine.machine_file import Figure
from ...cost.machine.units import format_value, size
from ..numbers import percent

STAYED = 0.02  # share of the bytes that stay in memory; a larger one is reported


def render(found: Packed) -> Group:
    """Return the result as text for the terminal."""
    parts: list[RenderableType] = [_table(found), Text()]
    parts.append(Text(found.sentence, style="green" if found.worth_it else "bold"))
    parts.append(Text(_of_calls(found)))
    parts += [Text(), Text("On a node:"), *(Text(f"  {one}") for one in commands(found.file))]
    if found.outside:
        parts += [Text(), Text("Not in the file, and required on a node at the same path:")]
        parts += [Text(f"  {one}") for one in found.outside]
    parts += [Text(note, style="bright_black") for note in [*found.notes, *_of_memory(found)]]
    return Group(*parts)


def commands(file: str) -> list[str]:
    """Return the shell commands that use the packed environment on a node.

    They start Paceline with ``python -m``, because scripts in bin/ have the path of the original
    environment in their first line.
    """
    name, folder = shlex.quote(file), "/tmp/env"
    use = f"mkdir -p {folder} && squashfuse {name} {folder}"
    if file.endswith(".tar"):
        use = f"mkdir -p {folder} && tar -xf {name} -C {folder}"
    done = [] if file.endswith(".tar") else [f"fusermount -u {folder}     # afterwards"]
    return [use, f"{folder}/bin/python -P -m paceline run ...", *done]


def _table(found: Packed) -> Table:
    table = Table(title="import torch", box=None, pad_edge=False, title_justify="left")
    for heading in ("", "original", found.how or "packed"):
        table.add_column(heading, justify="right" if heading else "left")
    own, other = found.as_it_is, found.load
    if other is not None:
        place = "to mount" if found.how.startswith("mounted") else "to unpack"
        table.add_row(place, "", _figure(found.place))
    for what, one, two in (
        ("first", own.first, other.first if other else None),
        ("repeated", own.repeated, other.repeated if other else None),
        ("CPU time of it", own.busy, other.busy if other else None),
    ):
        table.add_row(what, _figure(one), _figure(two))
    table.add_row("to pack", "", format_value(found.pack_s, "s"))
    table.add_row("size", size(found.bytes), size(found.file_bytes))
    table.add_row("files", f"{found.files:,}", "1")
    table.add_row("file system", found.filesystem or "?", found.file_filesystem or "?")
    return table


def _figure(figure: Figure | None) -> str:
    """Format the median, with half of the spread in percent if there are several values."""
    if figure is None:
        return "-"
    half = (figure.high - figure.low) / 2
    spread = f" ±{percent(half / figure.median)}" if figure.n > 1 and figure.median else ""
    return f"{format_value(figure.median, figure.unit)}{spread}"


def _of_calls(found: Packed) -> str:
    return (
        f"With the original environment, a start makes {found.calls:,} calls to the file system "
        f"({found.counted_by}), including those for the standard library. With the packed "
        "environment, each node opens one file, and the node itself serves all other calls. When "
        "many nodes start at the same time, their calls wait for the same servers: this "
        "measurement does not include that wait."
    )


def _of_memory(found: Packed) -> list[str]:
    """Return notes on whether the first import really read its files from storage."""
    notes = [
        "first: Paceline asked the kernel to drop the pages of the files; file names stay cached."
    ]
    stayed = found.as_it_is.in_memory
    if stayed is None:
        notes.append(
            f"Paceline cannot determine what {found.filesystem or 'this file system'} itself "
            "caches in memory: the first import may have read from this cache."
        )
    elif stayed > STAYED:
        notes.append(
            f"{percent(stayed)} of the environment's bytes stayed in memory (other processes use "
            "them, or the file system is in memory): the first import takes longer on a fresh "
            "node."
        )
    return notes
