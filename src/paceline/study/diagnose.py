"""``paceline diagnose``: the ladder climbed, and what it and the record say."""

from collections.abc import Callable
from dataclasses import dataclass

from ..analyze.causes import Cause, Evidence, Witness, causes, witnesses
from ..analyze.ladder import Climb, Waterfall, waterfall
from ..analyze.report import Report, analyse
from .ladder import Asked, Ladder, climbed


@dataclass(frozen=True)
class Diagnosis:
    """waterfall: None where a rung that it needs could not be run; ``notes`` say why."""

    command: list[str]
    ladder: Ladder
    report: Report
    waterfall: Waterfall | None
    witnesses: list[Witness]
    causes: list[Cause]
    notes: list[str]


def diagnosed(asked: Asked, say: Callable[[str], None]) -> Diagnosis:
    """Climb and judge. Raises ValueError where the script can't be measured."""
    ladder = climbed(asked, say)
    report = analyse(ladder.run, (ladder.warm, ladder.warm + ladder.steps))
    notes = [f"left out: {why}" for why in ladder.refused.values()]
    climbs = ladder.climbs
    notes += _unseen(climbs)
    needed = ("alone", "silent", "cached", "everything")
    command = [asked.script, *asked.args]
    if not all(climbs[name] for name in needed):
        return Diagnosis(command, ladder, report, None, [], [], notes)
    count = min(len(climbs[name]) for name in needed)
    found = waterfall(*(climbs[name][:count] for name in needed))
    place = report.places[0]
    evidence = Evidence(
        found,
        report,
        ladder.loader,
        place.threads,
        _cores(report),
        max(report.hosts.count(host) for host in set(report.hosts)),
        ladder.steps,
    )
    both = witnesses(evidence)
    return Diagnosis(command, ladder, report, found, both, causes(evidence), notes)


def _unseen(climbs: dict[str, list[Climb]]) -> list[str]:
    """What could not be switched off in this script."""
    found = []
    if any(not one.cached for one in climbs["cached"]):
        found.append(
            "no torch DataLoader was seen: its batches could not be kept in memory, and the "
            "input's share is the record's alone"
        )
    if any(not one.silent for one in climbs["silent"]):
        found.append("no process group was seen: there was no exchange to switch off")
    return found


def _cores(report: Report) -> int | None:
    """Hardware threads that the ranks of the first host may run on, together."""
    from ..cluster.host import unspanned

    own = [place.cores for place in report.places if place.host == report.hosts[0]]
    if any(cores is None for cores in own):
        return None
    return len({core for cores in own for core in unspanned(str(cores))})
