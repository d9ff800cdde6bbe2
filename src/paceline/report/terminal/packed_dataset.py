"""Results of packing, checking and staging a packed dataset, as text for the terminal."""

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...cost.machine.units import format_value, size
from ...security.text import printable
from ..numbers import amount, counted

SHOWN = 10  # most lines about individual samples
CHANNELS = 8  # most channels whose mean and deviation are shown


def render(meta: dict[str, Any], left_out: list[str], notes: list[str], seconds: float) -> Group:
    """Return the result of ``paceline pack`` as text.

    Args:
        meta: Content of the dataset's paceline.json.
        left_out: One line for each sample that could not be packed.
        notes: Warnings for the user.
        seconds: Duration of packing in s; 0 omits it and the rate.
    """
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column("", style="bright_black")
    table.add_column("")
    for name, value in _rows(meta, seconds):
        table.add_row(name, value)
    parts: list[RenderableType] = [table]
    parts += [Text(printable(note), style="yellow") for note in notes]
    if left_out:
        parts.append(
            Text(
                f"{counted(len(left_out), 'sample')} {'was' if len(left_out) == 1 else 'were'} "
                "left out:",
                style="bold red",
            )
        )
        parts += _some(left_out)
    return Group(*parts)


def render_check(folder: str, meta: dict[str, Any], bad: list[str], seconds: float) -> Group:
    """Return the result of reading a packed dataset back; ``bad`` has one line per bad sample."""
    whole = sum(shard["bytes"] for shard in meta["shards"])
    samples = f"{counted(meta['samples'], 'sample')} ({size(whole)})"
    read = f"{samples} read back in {format_value(seconds, 's')}"
    folder = printable(folder)
    if not bad:
        return Group(Text(f"{folder}: {read}: all samples are unchanged", style="green"))
    return Group(
        Text(
            f"{folder}: {read}: changed: {counted(len(bad), 'sample')}",
            style="bold red",
        ),
        *_some(bad),
    )


def progress(
    what: str, done: int, whole: int | None, read: int, rate: float, each: str = "samples"
) -> str:
    """Return one line that shows the progress of an operation.

    Args:
        what: Operation that is in progress.
        done: Number of items that are finished.
        whole: Number of all items, or None if it is not known.
        read: Number of bytes read.
        rate: Items per second.
        each: Name of the items.
    """
    of = f" of {whole:,}" if whole else ""
    return f"{what} {done:,}{of} {each}, {size(read)}, {amount(rate)} {each}/s"


def render_staged(hosts: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Return the result of ``paceline stage`` on each host, as lines with their styles."""
    several = len(hosts) > 1
    lines = []
    for one in hosts:
        rate = one["bytes"] / one["seconds"] if one["seconds"] else 0.0
        where = f"{one['host']}: {one['folder']}" if several else str(one["folder"])
        line = f"{where}: {one['here']:,} of {one['shards']:,} shards are on the node"
        if one["copied"]:
            line += f", {one['copied']:,} copied ({size(one['bytes'])}, {size(round(rate))}/s)"
        lines.append((line, "green" if one["copied"] else ""))
        lines += [(f"  {text}" if several else text, "yellow") for text in concerns(one)]
    if several:
        lines.append((render_staged_hosts("", hosts), ""))
    return lines


def render_staged_hosts(source: str, hosts: list[dict[str, Any]]) -> str:
    """Return one line that summarizes the copies to several hosts."""
    read, came = (sum(one[name] for one in hosts) for name in ("read", "bytes"))
    copied, fetched = (sum(one[name] for one in hosts) for name in ("copied", "fetched"))
    took = max(one["seconds"] for one in hosts)
    what = f"{source} on {counted(len(hosts), 'node')}" if source else counted(len(hosts), "host")
    if not copied:
        return f"{what}: no shard had to be copied"
    return (
        f"{what}: {counted(copied, 'shard')} copied ({size(came)}) in {format_value(took, 's')}, "
        f"{copied - fetched:,} of them ({size(read)}) from the source, the others from other "
        "nodes"
    )


def concerns(one: dict[str, Any]) -> list[str]:
    """Return the errors, notes, evictions and missing shards of one host, as lines."""
    lines = [f"{one['host']}: {one['error']}"] if one["error"] else []
    lines += one["notes"]
    if one["evicted"]:
        lines.append(f"{one['host']}: removed to free space: {', '.join(one['evicted'])}")
    if one["left"] and not one["error"]:
        count, share = len(one["left"]), len(one["left"]) / one["shards"]
        lines.append(
            f"{one['host']}: no space for {counted(count, 'shard')}. The ranks read them from the "
            f"source: about {share:.0%} of a shuffled dataset"
        )
    return [printable(line) for line in lines]


def _rows(meta: dict[str, Any], seconds: float) -> list[tuple[str, str]]:
    whole = sum(shard["bytes"] for shard in meta["shards"])
    count = meta["samples"]
    rate = (
        f"{amount(count / seconds)} samples/s, {format_value(whole / seconds, 'B/s')}"
        if seconds
        else ""
    )
    rows = [
        ("samples", f"{count:,} {meta['packed'].get('kind', 'arrays')}"),
        ("shards", f"{len(meta['shards']):,}, {size(whole)} in total"),
        ("sample", _array(meta["array"]) or f"{size(whole / count)} on average"),
        ("labels", _labels(meta)),
        *_moments(meta["statistics"]),
        ("duration", f"{format_value(seconds, 's')}: {rate}" if seconds else ""),
    ]
    return [(name, value) for name, value in rows if value]


def _array(told: dict[str, Any] | None) -> str:
    return f"{told['dtype']} {tuple(told['shape'])}" if told else ""


def _labels(meta: dict[str, Any]) -> str:
    label = meta["label"]
    if label is None:
        return "none"
    if isinstance(label, dict):
        return _array(label)
    counts = meta["statistics"].get("classes", {})
    if not counts:
        return "classes"
    least, most = min(counts.values()), max(counts.values())
    return f"{counted(len(counts), 'class', 'classes')}, of {least:,} to {counted(most, 'sample')}"


def _moments(statistics: dict[str, Any]) -> list[tuple[str, str]]:
    if "mean" not in statistics:
        return []
    of = f"  (of {counted(statistics['of'], 'sample')})"
    return [
        ("mean", _numbers(statistics["mean"]) + of),
        ("deviation", _numbers(statistics["deviation"])),
    ]


def _numbers(values: Any) -> str:
    if not isinstance(values, list):
        return f"{values:.4g}"
    some = ", ".join(f"{value:.4g}" for value in values[:CHANNELS])
    return some + (f" ... ({len(values)})" if len(values) > CHANNELS else "")


def _some(lines: list[str]) -> list[RenderableType]:
    shown: list[RenderableType] = [Text(f"  {printable(line)}") for line in lines[:SHOWN]]
    if len(lines) > SHOWN:
        shown.append(Text(f"  and {len(lines) - SHOWN:,} more: see --json"))
    return shown
