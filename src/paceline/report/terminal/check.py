"""What ``paceline check`` found, as tables; what is odd in red, in words."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...cost.catalogue import lookup
from ...cost.compare_machines import Change
from ...cost.machine.machine_file import Figure, HostFacts, Machine
from ...cost.machine.named_figures import of_hosts
from ...cost.machine.units import listed, size, told
from ...cost.outliers.outliers import Odd
from ...cost.roofline import roofs
from ..numbers import counted, percent
from .roofline import drawing

MOST = 32  # rows of one collective
FEW = 4  # hosts with a column each
MEMORY = "memory bandwidth"  # as cost.named calls it


def drawn(machine: Machine, found: Sequence[Odd], notes: Sequence[str]) -> Group:
    """All of it."""
    parts: list[RenderableType] = [*_facts(machine), Text()]
    parts.append(_rates(machine, found) if len(machine.hosts) <= FEW else _middles(machine, found))
    if machine.collectives:
        parts += [Text(), _collectives(machine)]
    if machine.pairs:
        parts += [Text(), _pairs(machine, found)]
    lines = _roof(machine.hosts[0]) if machine.hosts else ""
    if lines:
        parts += [Text(), Text(lines)]
    parts += [Text(one.sentence, style="bold red") for one in found]
    if not found:
        parts.append(Text("nothing is odd", style="green"))
    parts += [Text(note, style="bright_black") for note in notes]
    return Group(*parts)


def _facts(machine: Machine) -> list[Text]:
    """Lines; hosts of which the same is to be said have one together."""
    same: dict[str, list[str]] = {}
    for host in machine.hosts:
        for told_of in filter(None, (_hardware(host), _free(host), _import(host), _versions(host))):
            same.setdefault(told_of, []).append(host.name)
    return [Text(f"{listed(names)}: {words}") for words, names in same.items()]


def _hardware(host: HostFacts) -> str:
    parts = [host.processor or "processor unknown"]
    for count, noun in ((host.sockets, "socket"), (host.cores, "core"), (host.threads, "thread")):
        parts += [counted(count, noun)] if count is not None else []
    parts.append(f"may use {host.mask or '?'}")
    gpus = ", ".join(dict.fromkeys(gpu.name for gpu in host.gpus))
    parts += [f"{counted(len(host.gpus), 'GPU')} ({gpus})"] if host.gpus else []
    return ", ".join(parts)


def _free(host: HostFacts) -> str:
    parts = []
    for count, what in ((host.free_memory_bytes, "memory"), (host.free_disk_bytes, "disk")):
        parts += [f"{size(count)} of {what} free"] if count is not None else []
    if host.clock_offset_s is not None:
        parts.append(f"clock {1e3 * host.clock_offset_s:+.2f} ms")
    return ", ".join(parts)


def _import(host: HostFacts) -> str:
    """The rest of what the table of rates has of it."""
    parts = []
    if host.import_torch_first_s is not None:
        parts.append(f"{told(host.import_torch_first_s, 's')} the first time")
    if host.import_torch_busy is not None:
        parts.append(f"{told(host.import_torch_busy.median, 's')} of a core")
    if host.import_torch_calls is not None:
        parts.append(f"{host.import_torch_calls:,} calls to the file system")
    return f"import torch: {', '.join(parts)}" if parts else ""


def _versions(host: HostFacts) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(host.versions.items()))


def _figure(figure: Figure | None) -> str:
    """The median, and half of the spread beside it."""
    if figure is None:
        return "-"
    half = (figure.high - figure.low) / 2
    share = half / figure.median if figure.median else 0.0
    return f"{told(figure.median, figure.unit)} ±{percent(share)}"


Rows = dict[tuple[str, str], dict[str, Figure]]


def _rows(machine: Machine) -> Rows:
    """(device, what) and the figure of each host; collectives have a table of their own."""
    rows: Rows = {}
    for named in of_hosts(machine):
        if "(" not in named.what:
            rows.setdefault((named.device, named.what), {})[named.hosts[0]] = named.figure
    return rows


def _rates(machine: Machine, found: Sequence[Odd]) -> Table:
    """A row a rate, a column a host; what the catalogue says of its hardware beside it."""
    table = Table(title="Rates", box=None, pad_edge=False, title_justify="left")
    table.add_column("")
    for host in machine.hosts:
        table.add_column(host.name, justify="right")
    table.add_column("catalogue", justify="right")
    odd = _slow(found)
    for (device, what), cells in _rows(machine).items():
        line: list[RenderableType] = [f"{device} {what}".strip()]
        for host in machine.hosts:
            style = "bold red" * ((host.name, what) in odd)
            line.append(Text(_figure(cells.get(host.name)), style=style))
        table.add_row(*line, _known(machine, cells, device, what))
    return table


def _middles(machine: Machine, found: Sequence[Odd]) -> Table:
    """Of many hosts the middle one's figure and the worst one's."""
    table = Table(title="Rates", box=None, pad_edge=False, title_justify="left")
    for heading in ("", "middle", "worst", "host", "catalogue"):
        table.add_column(heading, justify="left" if heading in ("", "host") else "right")
    odd = _slow(found)
    for (device, what), cells in _rows(machine).items():
        order = sorted(cells, key=lambda name: cells[name].median)
        figure = cells[order[len(order) // 2]]
        worst = order[-1 if figure.unit == "s" else 0]
        style = "bold red" * ((worst, what) in odd)
        table.add_row(
            f"{device} {what}".strip(),
            _figure(figure),
            Text(_figure(cells[worst]), style=style),
            Text(worst, style=style),
            _known(machine, cells, device, what),
        )
    return table


def _slow(found: Sequence[Odd]) -> set[tuple[str, str]]:
    return {(name, one.what) for one in found if one.kind == "slow" for name in one.hosts}


def _known(machine: Machine, cells: dict[str, Figure], device: str, what: str) -> str:
    """What the catalogue says of these hosts' hardware."""
    said = {_peak(host, device, what) for host in machine.hosts if host.name in cells}
    return " ".join(sorted(said - {""}))


def _peak(host: HostFacts, device: str, what: str) -> str:
    """Of a device's rate: the peak of matrix products, the memory's bandwidth."""
    row = lookup(host.hardware(device)) if device else None
    if row is None:
        return ""
    if what == MEMORY:
        return told(row.bandwidth, "B/s") if row.bandwidth else ""
    peak = row.peak.get(what.partition(" ")[0])
    return told(peak, "FLOP/s") if peak else ""


def _collectives(machine: Machine) -> Table:
    table = Table(title="Collectives", box=None, pad_edge=False, title_justify="left")
    for heading in ("group", "operation", "ranks", "over", "latency", "best bus bandwidth", "at"):
        table.add_column(heading)
    seen: dict[tuple[str, str], int] = {}
    for one in machine.collectives:
        key = (one.group, one.operation)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > MOST:
            continue
        rates = [(one.busbw(at), at.bytes) for at in one.sizes]
        best = max(
            ((rate, at) for rate, at in rates if rate is not None),
            key=lambda entry: entry[0].median,
            default=None,
        )
        where = f" ({one.hosts[0]})" if one.group == "in host" and one.hosts else ""
        table.add_row(
            f"{one.group}{where}",
            one.operation,
            str(one.ranks),
            one.backend,
            _figure(one.latency),
            _figure(best[0]) if best else "-",
            size(best[1]) if best else "-",
        )
    return table


def _pairs(machine: Machine, found: Sequence[Odd]) -> Table:
    """The worst links; of all the others the middle."""
    table = Table(title="Links between hosts", box=None, pad_edge=False, title_justify="left")
    for heading in ("hosts", "latency", "bandwidth"):
        table.add_column(heading)
    odd = {frozenset(one.hosts) for one in found if one.kind == "link"}

    def bandwidth(at: int) -> float:
        figure = machine.pairs[at].bandwidth
        return figure.median if figure is not None else float("inf")

    order = sorted(range(len(machine.pairs)), key=bandwidth)
    for at in order[:8]:
        pair = machine.pairs[at]
        bad = frozenset((pair.first, pair.second)) in odd
        names = Text(f"{pair.first} {pair.second}", style="bold red" * bad)
        table.add_row(names, _figure(pair.latency), _figure(pair.bandwidth))
    if len(order) > 8:
        middle = machine.pairs[order[len(order) // 2]]
        left = counted(len(order) - 8, "faster link")
        table.add_row(f"{left}; the middle one", _figure(middle.latency), _figure(middle.bandwidth))
    return table


def _roof(host: HostFacts) -> str:
    """Where the limits of the first host's fastest device are."""
    device = "cuda:0" if host.gpus else "cpu"
    found = roofs(host, device)
    return f"Roofline of {host.name}, {device}\n{drawing(found, {})}" if found else ""


def compared(before: Machine, after: Machine, changes: Sequence[Change]) -> Table:
    """``--compare``: what is another figure by more than its spread, before and after."""
    table = Table(title=f"{before.made} and {after.made}", box=None, pad_edge=False)
    for heading in ("hosts", "what", "before", "after", "change"):
        table.add_column(heading)
    for one in changes:
        style = {True: "green", False: "bold red", None: ""}[one.better]
        names = listed(one.hosts)
        change = percent(one.by) if one.by else ""
        table.add_row(names, one.what, one.before, one.after, Text(change, style=style))
    if not changes:
        table.add_row("", "nothing changed by more than its spread", "", "", "")
    return table


def as_json(
    machine: dict[str, Any], found: Sequence[Odd], notes: Sequence[str], more: dict[str, Any]
) -> dict[str, Any]:
    """machine: as ``cost.machine.machine_file.as_json`` gives it."""
    odd = [
        {"kind": one.kind, "hosts": one.hosts, "what": one.what, "sentence": one.sentence}
        for one in found
    ]
    return {"machine": machine, "odd": odd, "notes": list(notes), "more": more}
