"""Notes on a study: noise, load of other processes, sizes that are not comparable."""

import math
import shlex
import statistics
from collections.abc import Sequence

from ...plurals import counted
from ...security.text import printable
from .derived import throughput
from .study_model import MAX_REPEATS, RunFigures, SizePoint, StudyRequest, StudyRun

OTHER_CORES = 0.25  # mean number of cores that other processes use; a note reports more
CLOCK_DROP = 0.1  # of the mean clock frequency of a run below that of the fastest run
MIN_NOISE_DEGREES = 2


def noise_of(points: Sequence[SizePoint]) -> float | None:
    """Return the relative standard deviation between runs of a setup; None with too few runs."""
    squares, degrees = 0.0, 0
    for runs in {point.setup: point.figures for point in points}.values():
        logs = [math.log(run.throughput) for run in runs if run.throughput > 0]
        if len(logs) > 1:
            squares += statistics.variance(logs) * (len(logs) - 1)
            degrees += len(logs) - 1
    return math.sqrt(squares / degrees) if degrees >= MIN_NOISE_DEGREES else None


def study_notes(
    folder: str, request: StudyRequest, points: Sequence[SizePoint], ended: Sequence[StudyRun]
) -> list[str]:
    """Return the notes on what was measured until now.

    Args:
        folder: That of the study.
        ended: All runs that ended, also failed ones.
    """
    runs = [run for point in points for run in point.figures]
    if not runs:
        return []
    return [
        *_on_schedule(request),
        *_on_failures(folder, points, ended),
        *_on_noise(folder, request, points),
        *_on_machine(runs),
        *_on_threads(points),
        *_on_warm_up(points),
    ]


def _on_schedule(request: StudyRequest) -> list[str]:
    """Return what disturbs the comparison of sizes by when and where they ran."""
    notes = []
    if request.ranks_per_host is not None:
        notes.append(
            "each size ran in a job of its own, on other nodes or at another time: what differs "
            "between the jobs is part of the differences between the sizes"
        )
    if request.side_by_side:
        notes.append(
            "sizes ran at the same time on different hosts: they share the network and its storage"
        )
    return notes


def _on_failures(folder: str, points: Sequence[SizePoint], ended: Sequence[StudyRun]) -> list[str]:
    """Return the failures at sizes that have figures of other runs."""
    notes = []
    for setup, good in {point.setup: len(point.runs) for point in points if point.runs}.items():
        failed = [run for run in ended if run.setup == setup and run.figures is None]
        if failed:
            words = printable(failed[0].failure.strip().partition("\n")[0]) or "no reason is known"
            size = f"{counted(setup.ranks, 'rank')} with a global batch of {setup.global_batch:,}"
            run, study = (shlex.quote(path) for path in (f"{folder}/{failed[0].folder}", folder))
            notes.append(
                f"{len(failed)} of {counted(good + len(failed), 'run')} on {size} failed ({words}):"
                " the figures are those of the others, and the size is not repeated. HINT: rm -r "
                f"{run}, then paceline scale --continue {study}"
            )
    return notes


def _on_noise(folder: str, request: StudyRequest, points: Sequence[SizePoint]) -> list[str]:
    notes = []
    noise = noise_of(points)
    if noise is not None:
        notes.append(
            f"runs of the same size differ by {100 * noise:.1f} % (standard deviation): the noise "
            "of this machine"
        )
    unsure = [
        (point, rate.precision)
        for point in points
        if (rate := throughput(point)) is not None and rate.precision > request.precision
    ]
    noisy = [one for one in unsure if len(one[0].figures) >= MAX_REPEATS]
    few = [
        one
        for one in unsure
        if len(one[0].figures) < MAX_REPEATS and not one[0].failed_runs  # which are not repeated
    ]
    asked = f"--precision {100 * request.precision:g}%"
    if noisy:
        worst = math.ceil(100 * max(precision for _, precision in noisy))
        notes.append(
            f"this machine is too noisy for {asked}: after {MAX_REPEATS} runs the throughput on "
            f"{_sizes([point for point, _ in noisy])} is known to ±{worst} %. HINT: --precision "
            f"{min(worst, 100)}%, or nodes without other load"
        )
    if few:
        command = f"paceline scale --continue {shlex.quote(folder)} --minutes N"
        more = f"{command} measures for N more minutes"
        if request.ranks_per_host is not None:  # --continue submits no job for a size with 3 runs
            more = "a new study with more --minutes for each job"
        notes.append(
            f"the throughput on {_sizes([point for point, _ in few])} is not known to the "
            f"{100 * request.precision:g} % that {asked} asks for. HINT: {more}"
        )
    return notes


def _sizes(points: Sequence[SizePoint]) -> str:
    sizes = sorted({point.ranks for point in points})
    if len(sizes) == 1:
        return counted(sizes[0], "rank")
    return f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]} ranks"


def _on_machine(runs: Sequence[RunFigures]) -> list[str]:
    notes = []
    others = [run.machine.other_cores for run in runs if run.machine.other_cores is not None]
    if others and statistics.fmean(others) > OTHER_CORES:
        notes.append(
            f"other processes used {statistics.fmean(others):.1f} cores during the runs (up to "
            f"{max(others):.1f}): the figures contain their effect"
        )
    clocks = [run.machine.core_mhz for run in runs if run.machine.core_mhz]
    if clocks and min(clocks) < (1 - CLOCK_DROP) * max(clocks):
        notes.append(
            f"the cores ran at {min(clocks):,.0f} MHz in one run and at {max(clocks):,.0f} MHz in "
            "another: sizes may differ by the clock frequency"
        )
    notes += dict.fromkeys(note for run in runs for note in run.machine.notes)
    return notes


def _on_threads(points: Sequence[SizePoint]) -> list[str]:
    threads = {
        point.ranks: {host.threads for run in point.figures for host in run.placement}
        for point in points
    }
    known = {size: {n for n in found if n is not None} for size, found in threads.items()}
    different = {tuple(sorted(found)) for found in known.values() if found}
    if len(different) < 2:
        return []
    each = "; ".join(
        f"{counted(size, 'rank')}: {', '.join(map(str, sorted(found)))}"
        for size, found in sorted(known.items())
        if found
    )
    return [
        f"a rank does not have the same number of threads at all sizes ({each}). HINT: --threads"
    ]


def _on_warm_up(points: Sequence[SizePoint]) -> list[str]:
    shaky = [point for point in points if any(not run.steady for run in point.figures)]
    if not shaky:
        return []
    return [
        f"runs on {_sizes(shaky)} have no steady part, so their figures may "
        "contain the warm-up. HINT: more --steps"
    ]
