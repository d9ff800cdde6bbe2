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
        parts += [Text(), Text("Not in the file, and needed on a node as it is here:")]
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
    return [use, f"{folder}/bin/python -m paceline run ...", *done]


def _table(found: Packed) -> Table:
    table = Table(title="import torch", box=None, pad_edge=False, title_justify="left")
    for heading in ("", "as it is", found.how or "packed"):
        table.add_column(heading, justify="right" if heading else "left")
    own, other = found.as_it_is, found.load
    if other is not None:
        place = "to mount" if found.how.startswith("mounted") else "to unpack"
        table.add_row(place, "", _figure(found.place))
    for what, one, two in (
        ("first", own.first, other.first if other else None),
        ("repeated", own.repeated, other.repeated if other else None),
        ("of that a core's", own.busy, other.busy if other else None),
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
    one = "its file is opened once" if found.file.endswith(".tar") else "the file is opened once"
    return (
        f"As it is, a start asks the file system {found.calls:,} times ({found.counted_by}), the "
        f"standard library's files included. Packed, {one} by the node, and what is asked of the "
        "environment is answered there. When many nodes start at once, each of their questions "
        "waits for the same servers: that is not measured here."
    )


def _of_memory(found: Packed) -> list[str]:
    """Return notes on whether the first import really read its files from storage."""
    notes = ["first: after the pages of its files were asked to be dropped; names stay cached."]
    stayed = found.as_it_is.in_memory
    if stayed is None:
        notes.append(
            f"Nobody can say what {found.filesystem or 'this file system'} itself keeps in "
            "memory: the first import may have been from there."
        )
    elif stayed > STAYED:
        notes.append(
            f"{percent(stayed)} of the environment's bytes stayed in memory (other processes use "
            "them, or the file system is in memory): first is less than on a fresh node."
        )
    return notes
