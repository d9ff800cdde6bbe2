"""FLOPs and memory traffic of a step, and its place on the roofline, in sentences."""

from ...analyze.figures.report import Report
from ...analyze.figures.step_work import Roofline
from ...cost.machine.units import format_value, join_words
from ...cost.roofline import RooflinePoint
from ..numbers import counted, percent

MEASURED_ALIKE = 1.1  # factor by which two measurements of one rate may differ


def sentences(report: Report) -> list[str]:
    """Return the sentences, without full stops; empty if the FLOPs of no step were counted."""
    work = report.work
    if work is None:
        return []
    if not work.flops:
        return [f"Step {work.step} was counted, and has no operator whose FLOPs are known"]
    found = [
        f"A step computes {format_value(work.flops, 'FLOP')} ({work.precision}) and moves "
        f"{format_value(work.bytes, 'B')} through memory, {work.flops / work.bytes:.3g} FLOP/byte: "
        f"counted on {counted(len(work.ranks), 'rank')} in step {work.step}, which the "
        "counting made slower"
    ]
    if work.uncounted:
        found.append(f"Operators with unknown FLOPs: {join_words(work.uncounted)}")
    line = report.roofline
    if line is None:
        return found
    whole = line.points.get("a step")
    if whole is not None:
        found.append(f"A step reaches {reaches(whole)} on {line.host} ({line.device})")
    found += _above(line)
    if line.assumed:
        found.append(
            f"paceline check has not measured {report.hosts[0]}: the roofline is that "
            f"of {line.host}"
        )
    return found


def _above(line: Roofline) -> list[str]:
    """Explain points that lie above their roof."""
    above = {p.bound: name for name, p in line.points.items() if p.share > MEASURED_ALIKE}
    found = []
    if "compute" in above:
        found.append(
            f"{above['compute']} is above the roof: other processes slowed paceline check down. "
            "HINT: repeat paceline check while no other process runs"
        )
    if "memory" in above:
        found.append(
            f"{above['memory']} is above the memory roof: part of its memory traffic came from "
            "caches"
        )
    return found


def reaches(placed: RooflinePoint) -> str:
    """Return the rate of a point, and its share of the attainable rate, in words."""
    by = "arithmetic" if placed.bound == "compute" else "memory bandwidth"
    return f"{format_value(placed.rate, 'FLOP/s')}, {percent(placed.share)} of what {by} allows"
