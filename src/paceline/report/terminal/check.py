"""Tables and sentences of ``paceline check`` and ``paceline bench comm``, for terminal and JSON."""

import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from ...cost.catalogue import lookup
from ...cost.compare_machines import Change
from ...cost.import_cost import Packed
from ...cost.machine.machine_file import AtSize, Collective, Figure, HostFacts, Machine
from ...cost.machine.named_figures import host_figures
from ...cost.machine.units import format_value, join_words, size
from ...cost.outliers import Outlier
from ...cost.roofline import roofs
from .. import document as doc
from ..numbers import amount, counted, percent
from ..roofline import draw_roofline

MAX_COLLECTIVE_ROWS = 32  # of one operation in one kind of group
MAX_HOST_COLUMNS = 4  # for more hosts, the table shows the median and the worst host
MAX_LINK_ROWS = 8
MEMORY_BANDWIDTH = "memory bandwidth"  # name of the figure in cost.machine.named_figures


def check_blocks(
    machine: Machine, outliers: Sequence[Outlier], notes: Sequence[str]
) -> list[doc.Block]:
    """Return all tables, a sentence for each anomaly, and the notes."""
    is_small = len(machine.hosts) <= MAX_HOST_COLUMNS
    rates = _rates(machine, outliers) if is_small else _median_and_worst(machine, outliers)
    blocks: list[doc.Block] = [
        *map(doc.Line, _facts(machine)),
        *(doc.BLANK, doc.Heading("Rates"), rates),
    ]
    if machine.collectives:
        blocks += [doc.BLANK, doc.Heading("Collectives"), _collectives(machine)]
    if machine.pairs:
        blocks += [doc.BLANK, doc.Heading("Links between nodes"), _links(machine, outliers)]
    if machine.hosts and (drawing := _draw_roofline(machine.hosts[0])):
        blocks += [doc.BLANK, doc.Line(drawing, doc.FIXED)]
    blocks += [doc.Line(outlier.sentence, doc.WORSE) for outlier in outliers]
    if not outliers:
        blocks.append(doc.Line("No anomaly found.", doc.GOOD))
    return [*blocks, *(doc.Line(note, doc.MUTED) for note in notes)]


def _facts(machine: Machine) -> list[str]:
    """Return the lines about the hosts; hosts with equal facts share a line."""
    hosts_by_line: dict[str, list[str]] = {}
    for host in machine.hosts:
        versions = ", ".join(f"{name} {text}" for name, text in sorted(host.versions.items()))
        facts = (_hardware(host), _free_space(host), _import(host), _torch(host), versions)
        for line in filter(None, facts):
            hosts_by_line.setdefault(line, []).append(host.name)
    return [f"{join_words(names)}: {line}" for line, names in hosts_by_line.items()]


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
        processor = f" (processor: {build['processor']})" if "processor" in build else ""
        parts.append(f"vector instructions {build['capability']}{processor}")
    if "blas" in build:
        parts.append(f"BLAS {build['blas']}")
    return f"PyTorch: {', '.join(parts)}" if parts else ""


def _format_figure(figure: Figure | None) -> str:
    """Format the median, with half of the spread in percent if there are several values."""
    if figure is None:
        return "-"
    is_known = figure.n > 1 and figure.median
    spread = f" ±{percent(figure.spread / 2 / figure.median)}" if is_known else ""
    return f"{format_value(figure.median, figure.unit)}{spread}"


Rows = dict[tuple[str, str], dict[str, Figure]]


def _rows(machine: Machine) -> Rows:
    """Return the figure of each host by (device, what); collectives have their own table."""
    rows: Rows = {}
    for named in host_figures(machine):
        if "(" not in named.what:
            rows.setdefault((named.device, named.what), {})[named.hosts[0]] = named.figure
    return rows


def _rates(machine: Machine, outliers: Sequence[Outlier]) -> doc.Table:
    """Return a table with a row for each rate, a column for each host, and the catalogue value."""
    slow = _slow_figures(outliers)
    rows = []
    for (device, what), figures in _rows(machine).items():
        cells = [
            doc.Part(
                _format_figure(figures.get(host.name)),
                doc.WORSE if (host.name, what) in slow else "",
            )
            for host in machine.hosts
        ]
        catalogue = _catalogue_values(machine, figures, device, what)
        rows.append(doc.Row([f"{device} {what}".strip(), *cells, catalogue]))
    names = ["", *(host.name for host in machine.hosts), "catalogue"]
    columns = [doc.Column(name, right=bool(name)) for name in names]
    return doc.Table(columns, rows, is_breakable=True)


def _median_and_worst(machine: Machine, outliers: Sequence[Outlier]) -> doc.Table:
    """Return a table with the median and the worst host of each rate, for many hosts."""
    slow = _slow_figures(outliers)
    rows = []
    for (device, what), figures in _rows(machine).items():
        order = sorted(figures, key=lambda name: figures[name].median)
        median = figures[order[len(order) // 2]]
        worst = order[-1 if median.unit == "s" else 0]
        style = doc.WORSE if (worst, what) in slow else ""
        cells: list[doc.Text] = [
            f"{device} {what}".strip(),
            _format_figure(median),
            doc.Part(_format_figure(figures[worst]), style),
            doc.Part(worst, style),
            _catalogue_values(machine, figures, device, what),
        ]
        rows.append(doc.Row(cells))
    columns = doc.columns("", "median", "worst", "node", "catalogue")
    return doc.Table(columns, rows, is_breakable=True)


def _slow_figures(outliers: Sequence[Outlier]) -> set[tuple[str, str]]:
    slow = [outlier for outlier in outliers if outlier.kind == "slow"]
    return {(name, outlier.what) for outlier in slow for name in outlier.hosts}


def _catalogue_values(machine: Machine, figures: dict[str, Figure], device: str, what: str) -> str:
    """Return the catalogue's values for the hardware of these hosts."""
    values = {_catalogue_peak(host, device, what) for host in machine.hosts if host.name in figures}
    return " ".join(sorted(values - {""}))


def _catalogue_peak(host: HostFacts, device: str, what: str) -> str:
    """Return a device's peak rate of matrix products, or its memory bandwidth."""
    row = lookup(host.hardware(device)) if device else None
    if row is None:
        return ""
    if what == MEMORY_BANDWIDTH:
        return format_value(row.bandwidth, "B/s") if row.bandwidth else ""
    peak = row.peak.get(what.partition(" ")[0])
    return format_value(peak, "FLOP/s") if peak else ""


def _collectives(machine: Machine) -> doc.Table:
    rows = []
    shown: dict[tuple[str, str], int] = {}
    for found in machine.collectives:
        key = (found.group, found.operation)
        shown[key] = shown.get(key, 0) + 1
        if shown[key] > MAX_COLLECTIVE_ROWS:
            continue
        rates = [(rate, at.bytes) for at in found.sizes if (rate := found.busbw(at)) is not None]
        best = max(rates, key=lambda entry: entry[0].median, default=None)
        host = f" ({found.hosts[0]})" if found.group == "in host" and found.hosts else ""
        cells = [
            f"{found.group}{host}",
            found.operation,
            str(found.ranks),
            found.backend,
            _format_figure(found.latency),
            _format_figure(best[0]) if best else "-",
            size(best[1]) if best else "-",
        ]
        rows.append(doc.Row(cells))
    headings = ("group", "operation", "ranks", "backend", "latency", "best bus bandwidth", "at")
    return doc.Table(doc.columns(*headings, left=len(headings)), rows, is_breakable=True)


def _links(machine: Machine, outliers: Sequence[Outlier]) -> doc.Table:
    """Return a table with the slowest links, and the median of the others."""
    slow = {frozenset(outlier.hosts) for outlier in outliers if outlier.kind == "link"}
    pairs = sorted(
        machine.pairs,
        key=lambda pair: pair.bandwidth.median if pair.bandwidth is not None else float("inf"),
    )
    rows = []
    for pair in pairs[:MAX_LINK_ROWS]:
        style = doc.WORSE if frozenset((pair.first, pair.second)) in slow else ""
        names = doc.Part(f"{pair.first} {pair.second}", style)
        rows.append(doc.Row([names, *map(_format_figure, (pair.latency, pair.bandwidth))]))
    if (more := len(pairs) - MAX_LINK_ROWS) > 0:
        middle = pairs[len(pairs) // 2]
        figures = map(_format_figure, (middle.latency, middle.bandwidth))
        rows.append(doc.Row([f"{counted(more, 'faster link')}, median", *figures]))
    columns = doc.columns("nodes", "latency", "bandwidth", left=3)
    return doc.Table(columns, rows, is_breakable=True)


def _draw_roofline(host: HostFacts) -> str:
    """Return the roofline of the host's GPU if it has one, else of its CPU."""
    device = "cuda:0" if host.gpus else "cpu"
    found = roofs(host, device)
    return f"Roofline of {host.name}, {device}\n{draw_roofline(found, {})}" if found else ""


def machines_blocks(before: Machine, after: Machine, changes: Sequence[Change]) -> list[doc.Block]:
    """Return the table of ``--compare``: figures that changed by more than their noise."""
    styles = {True: doc.GOOD, False: doc.WORSE, None: ""}
    rows = []
    for change in changes:
        by = doc.Part(percent(change.by) if change.by else "", styles[change.better])
        names = join_words(change.hosts)
        rows.append(doc.Row([names, change.what, change.before, change.after, by]))
    if not changes:
        rows.append(doc.Row(["", "No figure changed by more than its noise.", "", "", ""]))
    headings = ("nodes", "figure", "before", "after", "change")
    table = doc.Table(doc.columns(*headings, left=4), rows, is_breakable=True)
    return [doc.Heading(f"{before.made} and {after.made}"), table]


def check_json(
    machine: dict[str, Any], outliers: Sequence[Outlier], notes: Sequence[str], more: dict[str, Any]
) -> dict[str, Any]:
    """Return the check as JSON.

    machine: Machine file, from ``cost.machine.machine_file.as_json``.
    """
    names = ("kind", "hosts", "what", "sentence")
    odd = [{name: getattr(outlier, name) for name in names} for outlier in outliers]
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


def input_rate_blocks(result: dict[str, Any]) -> list[doc.Block]:
    """Return the reading rate of a dataset; ``result`` has the layout of ``--json``."""
    blocks: list[doc.Block] = [*map(doc.Line, _terms(result))]
    for state, rates in result["rates"].items():
        blocks += [doc.BLANK, doc.Heading(STATES[state]), _input_rates(result, state, rates)]
        caption = "samples/s of all ranks; in brackets: error of the prediction"
        blocks.append(doc.Line(caption, doc.MUTED))
    blocks += [doc.BLANK, *_advice(result)]
    return [*blocks, *(doc.Line(note, doc.MUTED) for note in result["notes"])]


def _terms(result: dict[str, Any]) -> list[str]:
    terms = result["terms"]
    cpu = terms["read_s"] + terms["decode_s"] + terms["transform_s"]
    parts = ", ".join(
        f"{name} {1e6 * terms[f'{name}_s']:,.0f}"
        for name in ("read", "decode", "transform")
        if terms[f"{name}_s"] > 0.01 * cpu
    )
    where = f" on {result['filesystem']}" if result["filesystem"] else ""
    lines = [
        f"{counted(terms['samples'], 'sample')} of {size(terms['bytes'])}{where}; "
        f"{counted(terms['cores'], 'core')}",
        f"CPU time per sample: {1e6 * cpu:,.0f} us ({parts})",
    ]
    if terms["bandwidth"] is not None:
        lines.append(
            f"storage: {size(terms['bandwidth'])}/s in large reads, "
            f"{amount(terms['operations'])} samples/s in parallel single reads, "
            f"{1e6 * terms['wait_s']:,.0f} us per sequential read"
        )
    return lines


def _input_rates(result: dict[str, Any], state: str, rates: list[dict[str, Any]]) -> doc.Table:
    rows = []
    for rate in rates:
        measured = ""
        if rate["ranks"] == result["ranks"]:
            found = result["measured"][state]
            measured = f"{amount(found)} ({100 * (rate['samples_s'] / found - 1):+.0f} %)"
        limit = LIMITS[rate["limit"]]
        rows.append(doc.Row([str(rate["ranks"]), amount(rate["samples_s"]), limit, measured]))
    limited_by = doc.Column("limited by", right=False)
    ranks, predicted, measured_rate = map(doc.Column, ("ranks", "predicted", "measured"))
    return doc.Table([ranks, predicted, limited_by, measured_rate], rows, is_breakable=True)


def _advice(result: dict[str, Any]) -> Iterator[doc.Line]:
    for remedy in result["remedies"]:
        rate = f"{amount(remedy['samples_s'])} samples/s predicted"
        yield doc.Line(f"{remedy['id']}: {rate}: {remedy['sentence']}", doc.GOOD)
    if not result["remedies"]:
        yield doc.Line("No known remedy gains 10 % or more.", doc.STRONG)
    if result["terms"]["bandwidth"] is not None and result["fits"]:
        yield doc.Line("The dataset fits into memory: later epochs are not read from storage.")
    if (hosts := result["hosts"]) is not None:
        yield doc.Line(f"From {hosts} such nodes on, the storage is the limit if all share it.")


STAYED = 0.02  # share of the bytes that stay in memory; a larger one is reported


def environment_blocks(found: Packed) -> list[doc.Block]:
    """Return what a packed environment gains for ``import torch``, and how it is used."""
    blocks: list[doc.Block] = [
        *(doc.Heading("import torch"), _environment_table(found), doc.BLANK),
        doc.Line(found.sentence, doc.GOOD if found.worth_it else doc.STRONG),
        doc.Line(_of_calls(found)),
        *(doc.BLANK, doc.Line("On a node:")),
        *(doc.Line(f"  {command}") for command in commands(found.file)),
    ]
    if found.outside:
        required = "Not in the file, and required on a node at the same path:"
        blocks += [doc.BLANK, doc.Line(required)]
        blocks += [doc.Line(f"  {path}") for path in found.outside]
    return [*blocks, *(doc.Line(note, doc.MUTED) for note in [*found.notes, *_of_memory(found)])]


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


def _environment_table(found: Packed) -> doc.Table:
    original, packed = found.as_it_is, found.load
    rows: list[list[str]] = []
    if packed is not None:
        place = "to mount" if found.how.startswith("mounted") else "to unpack"
        rows.append([place, "", _format_figure(found.place)])
    for what, field in (("first", "first"), ("repeated", "repeated"), ("CPU time of it", "busy")):
        figures = (getattr(loads, field) if loads else None for loads in (original, packed))
        rows.append([what, *map(_format_figure, figures)])
    rows += [
        ["to pack", "", format_value(found.pack_s, "s")],
        ["size", size(found.bytes), size(found.file_bytes)],
        ["files", f"{found.files:,}", "1"],
        ["file system", found.filesystem or "?", found.file_filesystem or "?"],
    ]
    columns = doc.columns("", "original", found.how or "packed")
    return doc.Table(columns, [doc.Row(cells) for cells in rows], is_breakable=True)


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


def bench_blocks(
    found: Sequence[Collective], copies: Sequence[AtSize], notes: Sequence[str]
) -> list[doc.Block]:
    """Return a table of collectives in the layout of nccl-tests, by size and backend.

    found: Results of each backend, gloo first: other times are given as shares of its times.
    copies: Times of a copy in memory for the same sizes.
    The spread is the distance between the quartiles, as a share of the median.
    """
    first = found[0]
    where = first.hosts[0] if len(first.hosts) == 1 else counted(len(first.hosts), "node")
    rows = []
    for number, at in enumerate(first.sizes):
        for collective in found:
            label = size(at.bytes) if collective is first else ""
            rows.append(doc.Row([label, *_bench_cells(collective, number, first, copies)]))
    names = ("time", "spread", "algbw", "busbw", "of gloo's", "copies")
    columns = [doc.Column("size"), doc.Column("backend", right=False), *map(doc.Column, names)]
    latencies = ", ".join(
        f"{collective.backend} {format_value(collective.latency.median, 's')}"
        for collective in found
        if collective.latency
    )
    return [
        doc.Heading(f"{first.operation} of {counted(first.ranks, 'rank')} on {where}"),
        doc.Table(columns, rows),
        doc.Line(f"Latency of 8 bytes: {latencies}."),
        *(doc.Line(note, doc.MUTED) for note in notes),
    ]


def _bench_cells(
    collective: Collective, number: int, first: Collective, copies: Sequence[AtSize]
) -> list[str | doc.Part]:
    at = collective.sizes[number]
    rate, bus, seconds = at.algbw, collective.busbw(at), at.seconds
    share = seconds.median / first.sizes[number].seconds.median
    copy = copies[number].seconds.median if number < len(copies) else 0.0
    return [
        collective.backend,
        format_value(seconds.median, "s"),
        f"{100 * seconds.spread / seconds.median:.0f} %" if seconds.median else "",
        format_value(rate.median, "B/s") if rate else "-",
        format_value(bus.median, "B/s") if bus else "-",
        "" if collective is first else doc.Part(f"{share:.2g}", doc.GOOD if share < 1 else ""),
        f"{seconds.median / copy:.3g}" if copy else "",
    ]


def bench_json(
    found: Sequence[Collective], copies: Sequence[AtSize], notes: Sequence[str]
) -> dict[str, Any]:
    """Return median and quartiles for each backend and size, in seconds and bytes/s, as JSON."""

    def quartiles(figure: Figure | None) -> dict[str, float] | None:
        names = ("median", "low", "high")
        return None if figure is None else {name: getattr(figure, name) for name in names}

    return {
        "format": "paceline-comm",
        "version": 1,
        "notes": list(notes),
        "collectives": [
            {
                "operation": collective.operation,
                "backend": collective.backend,
                "group": collective.group,
                "ranks": collective.ranks,
                "hosts": list(collective.hosts),
                "latency": quartiles(collective.latency),
                "sizes": [
                    {
                        "bytes": at.bytes,
                        "seconds": quartiles(at.seconds),
                        "algbw": quartiles(at.algbw),
                        "busbw": quartiles(collective.busbw(at)),
                    }
                    for at in collective.sizes
                ],
            }
            for collective in found
        ],
        "copies": [{"bytes": at.bytes, "seconds": quartiles(at.seconds)} for at in copies],
    }
