"""CPU binding of the ranks as the kernel reports it: a table, and a drawing of each host."""

import shutil
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from ...plurals import format_ranges, named_ranks, parse_ranges
from ..console import PlainConsole
from ..numbers import counted

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
    console = PlainConsole(width=width, file=None, force_terminal=None, stderr=True)
    with console.capture() as taken:
        console.print(_table(hosts, stepped))
        seen: dict[tuple[str, ...], list[str]] = {}
        for name, told in hosts:
            seen.setdefault(tuple(draw_host(told)), []).append(name)
        for lines, names in seen.items():
            console.print(Text(f"{_hosts(names)}: {lines[0]}", style="bold"))
            for line in lines[1:]:
                console.print(Text(f"  {line}"), soft_wrap=True)
        for line in _problems(hosts):
            console.print(Text(line, style="bold red"))
        ended = set(range(ranks)) - {one["rank"] for _, told in hosts for one in told["ranks"]}
        if ended:
            which = named_ranks(ended)
            line = f"{which} ended before the bindings were read. HINT: run more steps"
            console.print(Text(line, style="bold red"))
        for line in _notes(hosts):
            console.print(Text(line, style="bright_black"))
    return taken.get()


def _table(hosts: Sequence[Host], stepped: bool) -> Table:
    title = "Bindings reported by the kernel" if stepped else "Bindings before the first step"
    table = Table(box=None, pad_edge=False, title=title)
    for heading in ("rank", "node", "socket", "NUMA", "hardware threads", "GPU", "network"):
        table.add_column(heading)
    for heading in ("memory", "threads", "workers"):
        table.add_column(heading)
    rows = [(name, one) for name, told in hosts for one in told["ranks"]]
    shown = [row for at, row in enumerate(rows) if at < MAX_LISTED_RANKS or row[1]["odd"]]
    for name, one in shown:
        process, planned = one["process"], one["planned"]
        table.add_row(
            str(one["rank"]),
            name,
            format_ranges(one["packages"]),
            format_ranges(one["nodes"]),
            Text(process["cpus"], style="bold red" if one["odd"] else ""),
            one["gpu"] or "-",
            " ".join(planned["cards"]) or "-",
            process["memory"] or "?",
            f"{planned['threads']} of {process['threads']}",
            _workers(one),
        )
    if len(shown) < len(rows):
        table.caption = f"and {counted(len(rows) - len(shown), 'more rank')} without problems"
    return table


def _workers(one: dict[str, Any]) -> str:
    """Describe a rank's child processes, with the cores of those that are bound elsewhere."""
    children, cpus = one["children"], one["process"]["cpus"]
    away = [child for child in children if child["cpus"] != cpus]
    if not children:
        return "-"
    if not away:
        return f"{len(children)} on same cores"
    named = ", ".join(f"{child['pid']} on {child['cpus']}" for child in away[:_CHILDREN])
    return f"{len(children)}: {named}{' ...' if len(away) > _CHILDREN else ''}"


def draw_host(told: dict[str, Any]) -> list[str]:
    """Return a drawing of one host, as lines.

    The first line counts the hardware. Then each NUMA node has one line with one sign per core: the
    sign of the rank that is bound to the core, ``*`` for several ranks, ``.`` for no rank, or
    ``-`` for a core on which the job may not run.
    """
    allowed = set(told["allowed"])
    owners: dict[int, set[int]] = {}
    for one in told["ranks"]:
        for number in parse_ranges(one["process"]["cpus"]):
            owners.setdefault(number, set()).add(one["rank"])
    lowest = min((one["rank"] for one in told["ranks"]), default=0)
    places: dict[tuple[int, int | None], dict[int, list[int]]] = {}
    for package, node, core, number in told["cpus"]:
        places.setdefault((package, node), {}).setdefault(core, []).append(number)
    sockets = len({package for package, _ in places})
    cores = sum(len(found) for found in places.values())
    lines = [
        f"{counted(sockets, 'socket')}, {counted(cores, 'core')}, "
        f"{counted(len(told['cpus']), 'hardware thread')}"
    ]
    for (package, node), found in sorted(places.items(), key=lambda entry: min(entry[1])):
        signs = [_sign(numbers, owners, allowed, lowest) for _, numbers in sorted(found.items())]
        text = "".join(signs)
        parts = [text[i : i + _EVERY] for i in range(0, len(text), _EVERY)]
        numa = f" NUMA {node}" if node is not None else ""
        lines.append(f"socket {package}{numa:9} {' '.join(parts)}")
    last = max((one["rank"] for one in told["ranks"]), default=0)
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


def _problems(hosts: Sequence[Host]) -> list[str]:
    found = []
    for name, told in hosts:
        found += [
            f"{name}: rank {one['rank']}: {odd}" for one in told["ranks"] for odd in one["odd"]
        ]
        found += [f"{name}: {_global(odd, told['numbers'])}" for odd in told["odd"]]
    return found


def _global(odd: str, numbers: Sequence[int]) -> str:
    """Add the global rank number: messages of a plan count the ranks of a host from 0."""
    if not numbers or numbers[0] == 0:
        return odd
    return f"{odd} (local ranks of this node: local rank 0 is rank {numbers[0]})"


def _notes(hosts: Sequence[Host]) -> list[str]:
    said: dict[str, list[str]] = {}
    for name, told in hosts:
        for note in told["notes"]:
            said.setdefault(note, []).append(name)
    return [f"{_hosts(names)}: {note}" for note, names in said.items()]


def _hosts(names: Sequence[str]) -> str:
    if len(names) <= 3:
        return ", ".join(names)
    return f"{names[0]} and {counted(len(names) - 1, 'other node')} like it"
