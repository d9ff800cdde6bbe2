"""CPU binding of the ranks as the kernel reports it: a table, and a drawing of each host."""

import shutil
from collections.abc import Sequence
from typing import Any

from rich.text import Text

from ...plurals import format_ranges, named_ranks, parse_ranges
from .. import document as doc
from ..console import PlainConsole
from ..numbers import counted
from .draw import draw

SIGNS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
MANY_RANKS, FREE, FORBIDDEN = "*", ".", "-"
MAX_LISTED_RANKS = (
    64  # ranks in the table; of larger jobs, the first ranks and those with an odd binding
)
_CHILDREN = 4  # most child processes that are listed individually
_EVERY = 8  # cores in a drawing between two gaps

Host = tuple[str, dict[str, Any]]


def render(hosts: Sequence[Host], ranks: int, *, stepped: bool = True) -> str:
    """Return the table and the drawings as text.

    Args:
        hosts: Name of each host, and the result of ``launch.affinity.report_bindings.report_host``.
        ranks: Number of ranks of the job. Ranks that no host reports have ended.
        stepped: Whether the ranks have begun to train. Until then, threads and loader workers may
            be missing.
    """
    width = max(80, min(160, shutil.get_terminal_size((100, 24)).columns))
    console = PlainConsole(width=width, stderr=True)
    with console.capture() as taken:
        for block in draw(_table(hosts, stepped)):
            console.print(block)
        drawings: dict[tuple[str, ...], list[str]] = {}
        for name, host in hosts:
            drawings.setdefault(tuple(draw_host(host)), []).append(name)
        for lines, names in drawings.items():
            console.print(Text(f"{_hosts(names)}: {lines[0]}", style="bold"))
            for line in lines[1:]:
                console.print(Text(f"  {line}"), soft_wrap=True)
        for line in _problems(hosts, ranks):
            console.print(Text(line, style="bold red"))
        for line in _notes(hosts):
            console.print(Text(line, style="bright_black"))
    return taken.get()


def _table(hosts: Sequence[Host], stepped: bool) -> list[doc.Block]:
    title = "Bindings reported by the kernel" if stepped else "Bindings before the first step"
    ranks = [(name, rank) for name, host in hosts for rank in host["ranks"]]
    shown = [entry for at, entry in enumerate(ranks) if at < MAX_LISTED_RANKS or entry[1]["odd"]]
    rows = []
    for name, rank in shown:
        process, planned = rank["process"], rank["planned"]
        cells = [
            *(str(rank["rank"]), name),
            *(format_ranges(rank["packages"]), format_ranges(rank["nodes"])),
            doc.Part(process["cpus"], doc.WORSE if rank["odd"] else ""),
            *(rank["gpu"] or "-", " ".join(planned["cards"]) or "-", process["memory"] or "?"),
            *(f"{planned['threads']} of {process['threads']}", _workers(rank)),
        ]
        rows.append(doc.Row(cells))
    headings = ("rank", "node", "socket", "NUMA", "hardware threads", "GPU", "network", "memory")
    columns = doc.columns(*headings, "threads", "workers", left=10)
    blocks: list[doc.Block] = [doc.Heading(title), doc.Table(columns, rows, is_breakable=True)]
    if more := len(ranks) - len(shown):
        blocks.append(doc.Line(f"and {counted(more, 'more rank')} without problems", doc.MUTED))
    return blocks


def _workers(rank: dict[str, Any]) -> str:
    """Describe a rank's child processes, with the cores of those that are bound elsewhere."""
    children, cpus = rank["children"], rank["process"]["cpus"]
    away = [child for child in children if child["cpus"] != cpus]
    if not children:
        return "-"
    if not away:
        return f"{len(children)} on same cores"
    named = ", ".join(f"{child['pid']} on {child['cpus']}" for child in away[:_CHILDREN])
    return f"{len(children)}: {named}{' ...' if len(away) > _CHILDREN else ''}"


def draw_host(host: dict[str, Any]) -> list[str]:
    """Return a drawing of one host, as lines.

    The first line counts the hardware. Then each NUMA node has one line with one sign per core: the
    sign of the rank that is bound to the core, ``*`` for several ranks, ``.`` for no rank, or
    ``-`` for a core on which the job may not run.
    """
    allowed = set(host["allowed"])
    owners: dict[int, set[int]] = {}
    for rank in host["ranks"]:
        for number in parse_ranges(rank["process"]["cpus"]):
            owners.setdefault(number, set()).add(rank["rank"])
    lowest = min((rank["rank"] for rank in host["ranks"]), default=0)
    places: dict[tuple[int, int | None], dict[int, list[int]]] = {}
    for package, node, core, number in host["cpus"]:
        places.setdefault((package, node), {}).setdefault(core, []).append(number)
    sockets = len({package for package, _ in places})
    cores = sum(len(found) for found in places.values())
    lines = [
        f"{counted(sockets, 'socket')}, {counted(cores, 'core')}, "
        f"{counted(len(host['cpus']), 'hardware thread')}"
    ]
    for (package, node), found in sorted(places.items(), key=lambda entry: min(entry[1])):
        signs = [_sign(numbers, owners, allowed, lowest) for _, numbers in sorted(found.items())]
        text = "".join(signs)
        parts = [text[i : i + _EVERY] for i in range(0, len(text), _EVERY)]
        numa = f" NUMA {node}" if node is not None else ""
        lines.append(f"socket {package}{numa:9} {' '.join(parts)}")
    last = max((rank["rank"] for rank in host["ranks"]), default=0)
    if last - lowest >= len(SIGNS):
        lines.append(f"signs number the ranks from {lowest}, and repeat after {len(SIGNS)} ranks")
    elif lowest or last > 9:
        lines.append(f"signs: {SIGNS[0]} is rank {lowest}, {SIGNS[last - lowest]} is rank {last}")
    return lines


def _sign(
    numbers: Sequence[int], owners: dict[int, set[int]], allowed: set[int], lowest: int
) -> str:
    ranks = set().union(*(owners.get(number, set()) for number in numbers))
    if len(ranks) > 1:
        return MANY_RANKS
    if ranks:
        return SIGNS[(ranks.pop() - lowest) % len(SIGNS)]
    return FREE if allowed & set(numbers) else FORBIDDEN


def _problems(hosts: Sequence[Host], ranks: int) -> list[str]:
    found = []
    for name, host in hosts:
        found += [
            f"{name}: rank {rank['rank']}: {odd}" for rank in host["ranks"] for odd in rank["odd"]
        ]
        found += [f"{name}: {_global(odd, host['numbers'])}" for odd in host["odd"]]
    ended = set(range(ranks)) - {rank["rank"] for _, host in hosts for rank in host["ranks"]}
    if ended:
        which = named_ranks(ended)
        found.append(f"{which} ended before the bindings were read. HINT: run more steps")
    return found


def _global(odd: str, numbers: Sequence[int]) -> str:
    """Add the global rank number: messages of a plan count the ranks of a host from 0."""
    if not numbers or numbers[0] == 0:
        return odd
    return f"{odd} (local ranks of this node: local rank 0 is rank {numbers[0]})"


def _notes(hosts: Sequence[Host]) -> list[str]:
    notes: dict[str, list[str]] = {}
    for name, host in hosts:
        for note in host["notes"]:
            notes.setdefault(note, []).append(name)
    return [f"{_hosts(names)}: {note}" for note, names in notes.items()]


def _hosts(names: Sequence[str]) -> str:
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} and {counted(len(names) - 1, 'other node')} like it"
