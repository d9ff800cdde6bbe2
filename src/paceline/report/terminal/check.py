"""Tables of ``paceline check``, and a sentence in red for each anomaly."""

import shlex
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...cost.catalogue import lookup
from ...cost.compare_machines import Change
from ...cost.import_cost import Packed
from ...cost.machine.machine_file import Figure, HostFacts, Machine
from ...cost.machine.named_figures import host_figures
from ...cost.machine.units import format_value, join_words, size
from ...cost.outliers import Outlier
from ...cost.roofline import roofs
from ..numbers import amount, counted, percent
from ..roofline import draw_roofline

MAX_COLLECTIVE_ROWS = 32  # of one operation in one kind of group
MAX_HOST_COLUMNS = 4  # for more hosts, the table shows the median and the worst host
MEMORY_BANDWIDTH = "memory bandwidth"  # name of the figure in cost.machine.named_figures


def render(machine: Machine, found: Sequence[Outlier], notes: Sequence[str]) -> Group:
    """Return all tables and sentences.

    found: Anomalies. notes: Lines printed at the end.
    """
    parts: list[RenderableType] = [*_facts(machine), Text()]
    parts.append(
        _rates(machine, found)
        if len(machine.hosts) <= MAX_HOST_COLUMNS
        else _median_and_worst(machine, found)
    )
    if machine.collectives:
        parts += [Text(), _collectives(machine)]
    if machine.pairs:
        parts += [Text(), _pairs(machine, found)]
    lines = _render_roofline(machine.hosts[0]) if machine.hosts else ""
    if lines:
        parts += [Text(), Text(lines)]
    parts += [Text(one.sentence, style="bold red") for one in found]
    if not found:
        parts.append(Text("No anomaly found.", style="green"))
    parts += [Text(note, style="bright_black") for note in notes]
    return Group(*parts)


def _facts(machine: Machine) -> list[Text]:
    """Return the lines about the hosts; hosts with equal facts share a line."""
    hosts_by_line: dict[str, list[str]] = {}
    for host in machine.hosts:
        for line in filter(
            None,
            (_hardware(host), _free_space(host), _import(host), _torch(host), _versions(host)),
        ):
            hosts_by_line.setdefault(line, []).append(host.name)
    return [Text(f"{join_words(names)}: {line}") for line, names in hosts_by_line.items()]


def _hardware(host: HostFacts) -> str:
    parts = [host.processor or "processor unknown"]
    for count, noun in ((host.sockets, "socket"), (host.cores, "core"), (host.threads, "thread")):
        parts += [counted(count, noun)] if count is not None else []
    parts.append(f"available cores {host.mask or '?'}")
    gpus = ", ".join(dict.fromkeys(gpu.name for gpu in host.gpus))
    parts += [f"{counted(len(host.gpus), 'GPU')} ({gpus})"] if host.gpus else []
    return ", ".join(parts)


def _free_space(host: HostFacts) -> str:
    parts = []
    for count, what in ((host.free_memory_bytes, "memory"), (host.free_disk_bytes, "disk")):
        parts += [f"{size(count)} of {what} free"] if count is not None else []
    if host.clock_offset_s is not None:
        parts.append(f"clock {1e3 * host.clock_offset_s:+.2f} ms")
    return ", ".join(parts)


def _import(host: HostFacts) -> str:
    """Return the figures of ``import torch`` that the table of rates does not show."""
    parts = []
    if host.import_torch_first_s is not None:
        parts.append(f"{format_value(host.import_torch_first_s, 's')} the first time")
    if host.import_torch_busy is not None:
        parts.append(f"{format_value(host.import_torch_busy.median, 's')} of CPU time")
    if host.import_torch_calls is not None:
        parts.append(f"{host.import_torch_calls:,} calls to the file system")
    return f"import torch: {', '.join(parts)}" if parts else ""


def _torch(host: HostFacts) -> str:
    """Return what PyTorch's kernels use of the processor, and the BLAS library."""
    build, parts = host.torch_build, []
    if "capability" in build:
        there = f" (processor: {build['processor']})" if "processor" in build else ""
        parts.append(f"vector instructions {build['capability']}{there}")
    if "blas" in build:
        parts.append(f"BLAS {build['blas']}")
    return f"PyTorch: {', '.join(parts)}" if parts else ""


def _versions(host: HostFacts) -> str:
    return ", ".join(f"{name} {version}" for name, version in sorted(host.versions.items()))


def _format_figure(figure: Figure | None) -> str:
    """Format the median and half of the spread."""
    if figure is None:
        return "-"
    half = (figure.high - figure.low) / 2
    share = half / figure.median if figure.median else 0.0
    return f"{format_value(figure.median, figure.unit)} ±{percent(share)}"


Rows = dict[tuple[str, str], dict[str, Figure]]


def _rows(machine: Machine) -> Rows:
    """Return the figure of each host by (device, what); collectives have their own table."""
    rows: Rows = {}
    for named in host_figures(machine):
        if "(" not in named.what:
            rows.setdefault((named.device, named.what), {})[named.hosts[0]] = named.figure
    return rows


def _rates(machine: Machine, found: Sequence[Outlier]) -> Table:
    """Return a table with a row for each rate, a column for each host, and the catalogue value."""
    table = Table(title="Rates", box=None, pad_edge=False, title_justify="left")
    table.add_column("")
    for host in machine.hosts:
        table.add_column(host.name, justify="right")
    table.add_column("catalogue", justify="right")
    odd = _slow_figures(found)
    for (device, what), cells in _rows(machine).items():
        line: list[RenderableType] = [f"{device} {what}".strip()]
        for host in machine.hosts:
            style = "bold red" * ((host.name, what) in odd)
            line.append(Text(_format_figure(cells.get(host.name)), style=style))
        table.add_row(*line, _catalogue_values(machine, cells, device, what))
    return table


def _median_and_worst(machine: Machine, found: Sequence[Outlier]) -> Table:
    """Return a table with the median and the worst host of each rate, for many hosts."""
    table = Table(title="Rates", box=None, pad_edge=False, title_justify="left")
    for heading in ("", "median", "worst", "node", "catalogue"):
        table.add_column(heading, justify="left" if heading in ("", "node") else "right")
    odd = _slow_figures(found)
    for (device, what), cells in _rows(machine).items():
        order = sorted(cells, key=lambda name: cells[name].median)
        figure = cells[order[len(order) // 2]]
        worst = order[-1 if figure.unit == "s" else 0]
        style = "bold red" * ((worst, what) in odd)
        table.add_row(
            f"{device} {what}".strip(),
            _format_figure(figure),
            Text(_format_figure(cells[worst]), style=style),
            Text(worst, style=style),
            _catalogue_values(machine, cells, device, what),
        )
    return table


def _slow_figures(found: Sequence[Outlier]) -> set[tuple[str, str]]:
    return {(name, one.what) for one in found if one.kind == "slow" for name in one.hosts}


def _catalogue_values(machine: Machine, cells: dict[str, Figure], device: str, what: str) -> str:
    """Return the catalogue's values for the hardware of these hosts."""
    said = {_catalogue_peak(host, device, what) for host in machine.hosts if host.name in cells}
    return " ".join(sorted(said - {""}))


def _catalogue_peak(host: HostFacts, device: str, what: str) -> str:
    """Return a device's peak rate of matrix products, or its memory bandwidth."""
    row = lookup(host.hardware(device)) if device else None
    if row is None:
        return ""
    if what == MEMORY_BANDWIDTH:
        return format_value(row.bandwidth, "B/s") if row.bandwidth else ""
    peak = row.peak.get(what.partition(" ")[0])
    return format_value(peak, "FLOP/s") if peak else ""


def _collectives(machine: Machine) -> Table:
    table = Table(title="Collectives", box=None, pad_edge=False, title_justify="left")
    for heading in (
        "group",
        "operation",
        "ranks",
        "backend",
        "latency",
        "best bus bandwidth",
        "at",
    ):
        table.add_column(heading)
    seen: dict[tuple[str, str], int] = {}
    for one in machine.collectives:
        key = (one.group, one.operation)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] > MAX_COLLECTIVE_ROWS:
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
            _format_figure(one.latency),
            _format_figure(best[0]) if best else "-",
            size(best[1]) if best else "-",
        )
    return table


def _pairs(machine: Machine, found: Sequence[Outlier]) -> Table:
    """Return a table with the slowest links, and the median of the others."""
    table = Table(title="Links between nodes", box=None, pad_edge=False, title_justify="left")
    for heading in ("nodes", "latency", "bandwidth"):
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
        table.add_row(names, _format_figure(pair.latency), _format_figure(pair.bandwidth))
    if len(order) > 8:
        middle = machine.pairs[order[len(order) // 2]]
        left = counted(len(order) - 8, "faster link")
        table.add_row(
            f"{left}, median",
            _format_figure(middle.latency),
            _format_figure(middle.bandwidth),
        )
    return table


def _render_roofline(host: HostFacts) -> str:
    """Return the roofline of the host's GPU if it has one, else of its CPU."""
    device = "cuda:0" if host.gpus else "cpu"
    found = roofs(host, device)
    return f"Roofline of {host.name}, {device}\n{draw_roofline(found, {})}" if found else ""


def render_comparison(before: Machine, after: Machine, changes: Sequence[Change]) -> Table:
    """Return the table of ``--compare``: figures that changed by more than their noise."""
    table = Table(title=f"{before.made} and {after.made}", box=None, pad_edge=False)
    for heading in ("nodes", "figure", "before", "after", "change"):
        table.add_column(heading)
    for one in changes:
        style = {True: "green", False: "bold red", None: ""}[one.better]
        names = join_words(one.hosts)
        change = percent(one.by) if one.by else ""
        table.add_row(names, one.what, one.before, one.after, Text(change, style=style))
    if not changes:
        table.add_row("", "No figure changed by more than its noise.", "", "", "")
    return table


def as_json(
    machine: dict[str, Any], found: Sequence[Outlier], notes: Sequence[str], more: dict[str, Any]
) -> dict[str, Any]:
    """Return the check as JSON.

    machine: Machine file, from ``cost.machine.machine_file.as_json``.
    """
    odd = [
        {"kind": one.kind, "hosts": one.hosts, "what": one.what, "sentence": one.sentence}
        for one in found
    ]
    return {"machine": machine, "odd": odd, "notes": list(notes), "more": more}


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


def render_input_rate(told: dict[str, Any]) -> Group:
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


STAYED = 0.02  # share of the bytes that stay in memory; a larger one is reported


def render_environment(found: Packed) -> Group:
    """Return the result as text for the terminal."""
    parts: list[RenderableType] = [_environment_table(found), Text()]
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


def _environment_table(found: Packed) -> Table:
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
