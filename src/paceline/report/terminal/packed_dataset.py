"""Results of packing, checking and staging a packed dataset, for the terminal."""

from typing import Any

from ...cost.machine.units import format_value, size
from ...security.text import printable
from .. import document as doc
from ..numbers import amount, counted

SHOWN = 10  # most lines about individual samples
CHANNELS = 8  # most channels whose mean and deviation are shown


def packed_blocks(
    meta: dict[str, Any], left_out: list[str], notes: list[str], seconds: float
) -> list[doc.Block]:
    """Return the result of ``paceline pack``.

    Args:
        meta: Content of the dataset's paceline.json.
        left_out: One line for each sample that could not be packed.
        notes: Warnings for the user.
        seconds: Duration of packing in s; 0 omits it and the rate.
    """
    rows = [doc.Row([doc.Part(name, doc.MUTED), value]) for name, value in _facts(meta, seconds)]
    blocks: list[doc.Block] = [
        doc.Table(doc.columns("", "", left=2), rows, has_headings=False, is_breakable=True)
    ]
    blocks += [doc.Line(note, doc.DOUBT) for note in notes]
    if left_out:
        were = "was" if len(left_out) == 1 else "were"
        blocks.append(doc.Line(f"{counted(len(left_out), 'sample')} {were} left out:", doc.WORSE))
    return [*blocks, *_first_lines(left_out)]


def checked_blocks(
    folder: str, meta: dict[str, Any], bad: list[str], seconds: float
) -> list[doc.Block]:
    """Return the result of reading a packed dataset back; ``bad`` has one line per bad sample."""
    whole = sum(shard["bytes"] for shard in meta["shards"])
    samples = f"{counted(meta['samples'], 'sample')} ({size(whole)})"
    read = f"{folder}: {samples} read back in {format_value(seconds, 's')}"
    if not bad:
        return [doc.Line(f"{read}: all samples are unchanged", doc.GOOD)]
    changed = doc.Line(f"{read}: changed: {counted(len(bad), 'sample')}", doc.WORSE)
    return [changed, *_first_lines(bad)]


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


def staged_lines(hosts: list[dict[str, Any]]) -> list[doc.Line]:
    """Return the result of ``paceline stage`` on each host."""
    several = len(hosts) > 1
    lines = []
    for host in hosts:
        rate = host["bytes"] / host["seconds"] if host["seconds"] else 0.0
        where = f"{host['host']}: {host['folder']}" if several else str(host["folder"])
        line = f"{where}: {host['here']:,} of {host['shards']:,} shards are on the node"
        if host["copied"]:
            line += f", {host['copied']:,} copied ({size(host['bytes'])}, {size(round(rate))}/s)"
        lines.append(doc.Line(line, doc.GOOD if host["copied"] else ""))
        indent = "  " if several else ""
        lines += [doc.Line(f"{indent}{text}", doc.DOUBT) for text in concerns(host)]
    return [*lines, *([doc.Line(staged_sum("", hosts))] if several else [])]


def staged_sum(source: str, hosts: list[dict[str, Any]]) -> str:
    """Return one line that summarizes the copies to several hosts."""
    names = ("read", "bytes", "copied", "fetched")
    read, came, copied, fetched = (sum(host[name] for host in hosts) for name in names)
    took = max(host["seconds"] for host in hosts)
    what = f"{source} on {counted(len(hosts), 'node')}" if source else counted(len(hosts), "host")
    if not copied:
        return f"{what}: no shard had to be copied"
    return (
        f"{what}: {counted(copied, 'shard')} copied ({size(came)}) in {format_value(took, 's')}, "
        f"{copied - fetched:,} of them ({size(read)}) from the source, the others from other "
        "nodes"
    )


def concerns(host: dict[str, Any]) -> list[str]:
    """Return the errors, notes, evictions and missing shards of a host, as lines."""
    lines = [f"{host['host']}: {host['error']}"] if host["error"] else []
    lines += host["notes"]
    if host["evicted"]:
        lines.append(f"{host['host']}: removed to free space: {', '.join(host['evicted'])}")
    if host["left"] and not host["error"]:
        count, share = len(host["left"]), len(host["left"]) / host["shards"]
        lines.append(
            f"{host['host']}: no space for {counted(count, 'shard')}. The ranks read them from the "
            f"source: about {share:.0%} of a shuffled dataset"
        )
    return [printable(line) for line in lines]


def _facts(meta: dict[str, Any], seconds: float) -> list[tuple[str, str]]:
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


def _array(array: dict[str, Any] | None) -> str:
    return f"{array['dtype']} {tuple(array['shape'])}" if array else ""


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


def _first_lines(lines: list[str]) -> list[doc.Line]:
    shown = [f"  {line}" for line in lines[:SHOWN]]
    if len(lines) > SHOWN:
        shown.append(f"  and {len(lines) - SHOWN:,} more: see --json")
    return [*map(doc.Line, shown)]
