"""Compute the figures of a run: one Report from all ranks' records.

See docs/reference/measures.md."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import numpy as np

from ...cost.machine.machine_file import Machine
from ...plurals import counted, format_ranges, named_ranks
from ...record.ring.states import USEFUL_STATES, State
from ...significance import is_slowest
from ..records.clock_alignment import Clocks, align_clocks
from ..records.core_waits import OtherThreads, other_threads
from ..records.data_axis import DataAxis, find_data_axis
from ..records.load_run import Run
from ..records.match_collectives import MatchedCommunication, match_collectives
from ..records.read_record import Record, mesh_places
from ..records.state_timeline import BUBBLE, STATES, Ints, background_ns, find_window, total
from .losses import Loss, losses_add_up
from .measured_window import MeasuredWindow, WaitPair, longest_waits
from .memory import MemoryGrowth, MemoryPeak, find_growth, find_peaks
from .noise_scale import NoiseScale, noise_scale_of_steps, recorded_steps
from .pipeline import PipelineFigures, measure_pipeline
from .pop import Efficiencies, efficiencies, unblocked_ns
from .process_groups import (
    Group,
    MeshAxis,
    axes_add_up,
    axis_figures,
    group_figures,
    groups_add_up,
    overlapped_ns,
)
from .sharded_blocks import ShardedBlock, measure_blocks, measure_layers
from .stalls import Stall, Standstill, explain_outliers, find_stalls, find_standstills
from .step_work import Roofline, StepWork, on_roofline, sum_work
from .steps import StepTimes, measure_steps, times_by_range

# What the headers of records say: where each rank ran, its loader, and halos by layer.

VERSIONS = ("paceline", "torch", "python")


@dataclass(frozen=True)
class RankPlacement:
    """Ranks with the same placement on one host. None: not in the record (before version 3)."""

    host: str
    ranks: str  # as "0-3,8"
    cores: str | None  # that a rank's process may run on
    threads: int | None  # torch's, of a rank
    device: str | None
    paceline: str | None
    torch: str | None
    python: str | None


def rank_placements(records: list[Record]) -> list[RankPlacement]:
    """Return one entry for all ranks of a host that agree in every field."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for record in records:
        meta = record.meta
        device = " ".join(str(meta[name]) for name in ("device", "devices") if name in meta)
        key: tuple[object, ...] = (
            record.host,
            _cores(meta.get("cores")),
            meta.get("threads"),
            device or None,
        )
        key += tuple(meta.get(name) for name in VERSIONS)
        alike.setdefault(key, []).append(record.rank)
    return [
        RankPlacement(str(host), format_ranges(ranks), *cast(Any, rest))
        for (host, *rest), ranks in alike.items()
    ]


def _cores(mask: object) -> str | None:
    """Return the hexadecimal mask of the kernel as "0-3,8"; None if it is no mask."""
    try:
        bits = int(str(mask), 16)
    except ValueError:
        return None
    return format_ranges([core for core in range(bits.bit_length()) if bits >> core & 1])


@dataclass(frozen=True)
class LoaderTotals:
    """Totals of the loaders.

    Attributes:
        workers: Of one rank.
        cores: Cores kept busy while training read from the loader, mean of the ranks.
        most: The same, of the rank where it is largest.
        left_out: Samples that could not be read.
    """

    workers: int
    processes: bool
    cores: float
    most: float
    rank: int
    left_out: int


def loader_totals(records: list[Record]) -> LoaderTotals | None:
    """Return the totals, or None where no rank has a loader."""
    loaders: list[tuple[int, dict[str, Any]]] = [
        (record.rank, record.meta["loader"]) for record in records if "loader" in record.meta
    ]
    if not loaders:
        return None
    busy_cores = [
        (loader["busy_s"] / max(loader["seconds"], 1e-9), rank) for rank, loader in loaders
    ]
    most, rank = max(busy_cores)
    return LoaderTotals(
        workers=max(int(loader["workers"]) for _, loader in loaders),
        processes=any(loader["processes"] for _, loader in loaders),
        cores=sum(cores for cores, _ in busy_cores) / len(busy_cores),
        most=most,
        rank=rank,
        left_out=sum(int(loader["left_out"]) for _, loader in loaders),
    )


# Halos of layouts that divide samples, by layer.


@dataclass(frozen=True)
class HaloLayer:
    """The halos of one layer, in forward and backward.

    Attributes:
        exchanges: Number of exchanges of a rank.
        bytes: What all ranks have received.
        exposed: Share of the ranks' time, since their first halo, in which they waited for halos.
    """

    name: str
    exchanges: int
    bytes: int
    exposed: float


def halo_layers(records: list[Record]) -> list[HaloLayer]:
    """Return the layers, those with most exposed time first."""
    found: dict[str, list[tuple[int, int, float]]] = {}
    seconds = 0.0
    for record in records:
        halos = record.meta.get("halos")
        if halos is not None:
            seconds += halos["seconds"]
            for name, *totals in halos["layers"]:
                found.setdefault(name, []).append((totals[0], totals[1], totals[2]))
    layers = [
        HaloLayer(
            name,
            max(count for count, _, _ in of),
            sum(size for _, size, _ in of),
            sum(exposed for _, _, exposed in of) / seconds if seconds else 0.0,
        )
        for name, of in found.items()
    ]
    return sorted(layers, key=lambda one: -one.exposed)


BUSY_STATES = STATES[:BUBBLE]
TABLES_DIFFER = (
    "the record contradicts itself: the losses or the communication groups do not add up to the "
    "time that the ranks lost"
)


@dataclass(frozen=True)
class StepRange:
    """A range of steps: its length (s), and its efficiencies without replay.

    Attributes:
        states: Share of each state, mean of the ranks.
    """

    first: int
    last: int
    seconds: float
    efficiencies: Efficiencies
    states: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Figures of one run; times in seconds, shares of the window in [0, 1].

    ``states`` and ``hidden`` have one entry per rank, in the order of ``ranks``. With fewer than
    two recorded steps there is no window, and what is measured in it is None or empty. Figures that
    need two ranks are None for one.
    """

    name: str
    command: list[str]
    ranks: list[int]
    size: int
    hosts: list[str]  # of each of ``ranks``
    steps: int  # in this run, or since its last restart
    first_step: int  # more than 0 where it went on from a checkpoint
    wall_s: float
    startup_s: float
    window_s: float | None = None
    samples: int = 0  # in the window's steps, of all ranks that do not train the same ones
    samples_per_s: float | None = None
    states: list[dict[str, float]] = field(default_factory=list)
    hidden: list[float] = field(default_factory=list)
    efficiencies: Efficiencies | None = None
    slowest_rank: int | None = None
    slowest_excess: float | None = None  # its time outside communication over the mean's, minus 1
    groups: list[Group] = field(default_factory=list)
    ranges: list[StepRange] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)  # the largest first; they add up to 1 - useful
    step_times: StepTimes | None = None
    stood_still: list[Standstill] = field(
        default_factory=list
    )  # the longest first, as what follows
    stalled: list[Stall] = field(default_factory=list)
    waited_for: list[WaitPair] = field(
        default_factory=list
    )  # the largest shares first, of a rank's time
    recording_cost: float  # share of the time after start-up, the rank where it is largest
    events: int
    missing_ranks: list[int]
    refused: list[str]
    lost_events: int
    unmatched: int  # collectives and messages that lack a member's record
    clocks_aligned: bool
    clock_residual_s: float
    clocks: list[dict[str, object]]
    confidence: float
    doubts: list[str] = field(default_factory=list)  # what lowers the confidence
    places: list[RankPlacement] = field(default_factory=list)
    work: StepWork | None = None  # of one step, where it was counted
    roofline: Roofline | None = None  # with a machine file
    loading: LoaderTotals | None = None  # by paceline.data.Loader
    # of each rank: other threads than the training one waited for collectives, beside its states
    background: list[float] = field(default_factory=list)
    # of each rank: waits for a core as shares of the window, by the state in which they lay
    starved_in: list[dict[str, float]] = field(default_factory=list)
    other_threads: list[OtherThreads] = field(default_factory=list)  # of each rank
    memory: list[MemoryGrowth] = field(default_factory=list)  # steady growth, the soonest end first
    blocks: list[ShardedBlock] = field(default_factory=list)  # of sharded models
    layers: list[ShardedBlock] = field(default_factory=list)  # that exchange on a tensor axis
    noise_scale: NoiseScale | None = None  # None: one rank, or too few sampled steps
    peaks: list[MemoryPeak] = field(default_factory=list)  # of each rank, the largest first
    halos: list[HaloLayer] = field(default_factory=list)  # most exposed time first
    # Whether the slowest rank is slower by more than chance; None: one rank, or too few steps.
    slowest_real: bool | None = None
    # of each rank along the axes of the mesh; empty where "data" is the only one
    mesh: dict[int, dict[str, int]] = field(default_factory=dict)
    axes: list[MeshAxis] = field(default_factory=list)  # of the mesh; empty where "data" is alone
    pipeline: PipelineFigures | None = None
    env: list[str] = field(default_factory=list)  # values of --env, without secrets

    def named(self, ranks: Sequence[int], host: str = "") -> str:
        """Format ranks with the place in the mesh that they share, and their host."""
        return named_ranks(ranks, places=self.mesh, host=host)

    def to_json(self, **more: Any) -> str:
        """Return the report as JSON text. more: Further keys, in front of the figures."""
        whole = {"format": "paceline-report", "version": 1, **more, **asdict(self)}
        return json.dumps(whole, indent=1)


@dataclass(frozen=True)
class RunAnalysis:
    """A run's report, and the measured window that it was computed from (None: no window)."""

    report: Report
    measured: MeasuredWindow | None


def analyse(run: Run, steps: tuple[int, int] | None = None) -> Report:
    """Return the report of one run. steps: (first, last), from ``first`` up to, not including,
    ``last``.

    Raises:
        ValueError: These steps were not recorded on all ranks.
    """
    return analyse_with_window(run, steps).report


def analyse_with_window(
    run: Run, steps: tuple[int, int] | None = None, machine: Machine | None = None
) -> RunAnalysis:
    """Return the report of one run, and the measured window that plots are made from.

    machine: The machine file on whose roofline the step is placed.
    """
    records = sorted(run.records, key=lambda record: record.rank)
    matched = match_collectives(records)
    records, clocks = align_clocks(records, matched)
    if len(clocks.clocks) > 1:
        matched = match_collectives(records)
    within = find_window(records, steps)
    if within is None and steps is not None:
        done = max(int(r.events["step"].max(initial=0)) for r in records)
        raise ValueError(
            f"{run.name}: steps {steps[0]}:{steps[1]} were not recorded on all ranks. "
            f"HINT: two numbers between 1 and {done}"
        )
    measured = MeasuredWindow(records, matched, clocks, within) if within is not None else None
    stepped = [record.events_in(State.STEP) for record in records]
    unmatched = matched.count_unmatched(within)
    doubts, confidence = _doubts(run, records, matched, unmatched, clocks, measured)
    axis = find_data_axis(records, within) if within is not None else None
    figures: dict[str, Any] = {}
    if measured is not None and axis is not None:
        figures = _window_figures(measured, axis)
        if not _tables_add_up(measured, figures):
            confidence *= 0.5
            doubts.append(TABLES_DIFFER)
        doubts += axis.doubts if figures["samples"] else []
    report = Report(
        name=run.name,
        command=run.command,
        env=run.env,
        ranks=[record.rank for record in records],
        size=max(int(record.meta["size"]) for record in records),
        hosts=[record.host for record in records],
        steps=max(len(s) for s in stepped),
        first_step=min((int(s["step"].min()) for s in stepped if len(s)), default=0),
        **_run_times(records),
        **figures,
        events=sum(len(record.events) + record.lost for record in records),
        missing_ranks=run.missing,
        refused=run.refused,
        lost_events=sum(record.lost for record in records),
        unmatched=unmatched,
        clocks_aligned=not clocks.unaligned,
        clock_residual_s=clocks.residual_ns / 1e9,
        clocks=[asdict(clock) for clock in clocks.clocks],
        confidence=confidence,
        doubts=doubts,
        places=rank_placements(records),
        work=sum_work(records),
        roofline=_roofline(records, machine, figures) if machine is not None else None,
        loading=loader_totals(records),
        memory=find_growth(records),
        noise_scale=noise_scale_of_steps(
            recorded_steps(records, axis.shards if axis is not None else None)
        ),
        peaks=find_peaks(records),
        halos=halo_layers(records),
        mesh=mesh_places(records),
        pipeline=measure_pipeline(measured) if measured is not None else None,
    )
    return RunAnalysis(report, measured)


def _run_times(records: list[Record]) -> dict[str, Any]:
    """Return the fields of a Report about the whole run's time."""
    started = min(int(record.meta["started_ns"]) for record in records)
    ends = [int(r.events["end"].max()) for r in records if len(r.events)]
    wall = max(ends, default=started) - started
    worked = [record.events_in(State.INPUT, *USEFUL_STATES) for record in records]
    # Without a batch and without work the whole run was start-up.
    startup = min((int(w["start"].min()) - started for w in worked if len(w)), default=wall)
    recorded = (wall - startup) or wall
    cost = max(r.cost_ns for r in records) / max(recorded, 1)
    return {"wall_s": wall / 1e9, "startup_s": startup / 1e9, "recording_cost": cost}


def _roofline(records: list[Record], machine: Machine, figures: dict[str, Any]) -> Roofline | None:
    times, found = figures.get("step_times"), figures.get("efficiencies")
    return on_roofline(records, machine, times and times.median_s, found and found.useful)


def _window_figures(m: MeasuredWindow, axis: DataAxis) -> dict[str, Any]:
    """Return the fields of a Report that need a window."""
    length = m.within.length
    samples = axis.count_samples(m.records, m.within)
    times = [unblocked_ns(rank) for rank in m.states]
    mean = sum(times) / len(times)
    slowest = max(range(len(times)), key=times.__getitem__) if len(times) > 1 else None
    steps, still = m.steps, find_standstills(m)
    stalled = find_stalls(m, still)
    took = measure_steps(m, steps) if steps is not None else None
    if steps is not None and took is not None:
        took = explain_outliers(m, steps, took, still, stalled)
    states = [{name: rank[name] / length for name in STATES} for rank in m.states]
    groups = group_figures(m)
    in_flight = overlapped_ns(m.matched.launches, m.matched.waits, m.timelines, m.within)
    return {
        "window_s": length / 1e9,
        "samples": samples,
        "samples_per_s": samples / (length / 1e9) if samples else None,
        "states": states,
        "hidden": [time / length for time in in_flight],
        "efficiencies": m.efficiencies,
        "slowest_rank": m.records[slowest].rank if slowest is not None else None,
        "slowest_excess": times[slowest] / mean - 1 if slowest is not None and mean else None,
        "slowest_real": is_slowest(times_by_range(m, BUSY_STATES)),
        "groups": groups,
        "axes": axis_figures(m, groups),
        "blocks": measure_blocks(m.records, m.matched, m.blocked, m.within),
        "layers": measure_layers(m.records, m.matched, m.blocked, m.within),
        "ranges": _range_efficiencies(m),
        "losses": m.losses,
        "step_times": took,
        "stood_still": still,
        "stalled": stalled,
        "waited_for": longest_waits(m),
        "background": [background_ns(record, m.within) / length for record in m.records],
        "starved_in": [
            {state: ns / length for state, ns in line.starved_in.items()} for line in m.timelines
        ],
        "other_threads": [other_threads(r, m.within.start, m.within.end) for r in m.records],
    }


def _tables_add_up(m: MeasuredWindow, figures: dict[str, Any]) -> bool:
    """Return whether losses and groups add up to the states; a damaged record may prevent it."""
    groups = groups_add_up(figures["groups"], figures["states"])
    axes = axes_add_up(figures["axes"], figures["states"])
    return groups and axes and losses_add_up(m.losses, m.efficiencies)


def _range_efficiencies(m: MeasuredWindow) -> list[StepRange]:
    """Return the efficiencies of each range of steps."""
    edges, steps = m.ranges.edges, m.ranges.steps
    spent = [np.diff(line.cumulative_by_state(edges), axis=0) for line in m.timelines]
    result = []
    for i in range(len(edges) - 1):
        length = int(edges[i + 1] - edges[i])
        if length <= 0:
            continue
        states = [dict(zip(STATES, rank[i].tolist(), strict=True)) for rank in spent]
        mean = {name: sum(rank[name] for rank in states) / len(states) / length for name in STATES}
        found = efficiencies(states, length)
        result.append(StepRange(steps[i], steps[i + 1] - 1, length / 1e9, found, mean))
    return result


def _doubts(
    run: Run,
    records: list[Record],
    matched: MatchedCommunication,
    unmatched: int,
    clocks: Clocks,
    m: MeasuredWindow | None,
) -> tuple[list[str], float]:
    """Return the reasons that lower the confidence, and the confidence.

    It is the share of ranks with a record x the share of blocked time that is matched x the share
    of waits above the clocks' residual.
    """
    doubts, confidence = [], 1.0
    if run.running:
        doubts.append(
            "the job still runs, and the figures contain only the steps recorded until now"
        )
    if run.missing:
        confidence *= len(records) / (len(records) + len(run.missing))
        them = "it" if len(run.missing) == 1 else "them"
        doubts.append(f"no record of {named_ranks(run.missing)}: the figures do not include {them}")
    doubts += [f"a file was ignored: {what}" for what in run.refused]
    doubts += untracked_training(records)
    doubts += _failures(records)
    if any(record.meta.get("failed_hooks") for record in records):
        confidence *= 0.5
    for record in records:
        if record.damaged:
            confidence *= len(record.events) / (len(record.events) + record.damaged)
            events, are = counted(record.damaged, "event"), "is" if record.damaged == 1 else "are"
            doubts.append(f"{events} of rank {record.rank} {are} damaged and ignored")
    blocked = _blocked_ns(matched, m)
    if unmatched:
        alone = total(blocked[~matched.waits["whole"]])
        confidence *= 1 - alone / total(blocked) if blocked.any() else 1.0
        doubts.append(
            f"{counted(unmatched, 'collective or message', 'collectives or messages')} "
            f"{'lacks' if unmatched == 1 else 'lack'} a member's record: waits are attributed from "
            "the other records"
        )
    if any(record.lost for record in records):
        doubts.append(
            "the run had more events than a record holds: the figures cover only the end of the run"
        )
    if clocks.unaligned:
        confidence *= 0.5
        doubts.append(
            "the clocks of some nodes could not be aligned, because these nodes never communicate: "
            "waits and transfers are not distinguished"
        )
    if m is not None and m.replay_contradicts:
        doubts.append(
            "the replay on an ideal network takes longer than the run, because some events end "
            "before the events that they depend on begin: serialisation and transfer are not "
            "distinguished"
        )
    if m is not None and clocks.residual_ns and blocked.any():
        unsure = _wait_below_residual(m) / total(blocked)
        confidence *= 1 - unsure
        doubts.append(
            f"the clocks of the nodes are aligned within {clocks.residual_ns / 1e3:.0f} µs: "
            f"{100 * unsure:.0f} % of the blocked time is in waits too short to attribute to a rank"
        )
    return doubts, confidence


def untracked_training(records: Sequence[Record]) -> list[str]:
    """Return a sentence for each rank whose child processes trained without a process group."""
    found = []
    for record in records:
        if children := record.meta.get("children"):
            number = counted(children["count"], "child process", "child processes")
            found.append(
                f"training went on in {number} of rank {record.rank} that are not ranks: their "
                f"{counted(children['steps'], 'optimizer step')} are not recorded. HINT: start the "
                f"script with paceline run -n {children['count']}, or call "
                "torch.distributed.init_process_group in each of them"
            )
    return found


def _failures(records: list[Record]) -> list[str]:
    """Return sentences about failures of the script and of the recorder, one for each text."""
    ranks: dict[str, list[int]] = {}
    for record in records:
        if failure := record.meta.get("failure"):
            when = "" if record.count(State.STEP) else " before its first step"
            ranks.setdefault(f"failed{when}: {failure}", []).append(record.rank)
        for hook, failure in record.meta.get("failed_hooks", {}).items():
            text = f"recorded only in part, because the hook for {hook} failed ({failure})"
            ranks.setdefault(text, []).append(record.rank)
    return [f"{named_ranks(found)} {text}" for text, found in ranks.items()]


def _blocked_ns(matched: MatchedCommunication, m: MeasuredWindow | None) -> Ints:
    """Return the blocked time of each wait; the exposed time in the window where there is one."""
    if m is not None:
        return m.blocked.wait + m.blocked.bubble + m.blocked.transfer
    return np.asarray(matched.waits["end"] - matched.waits["start"], np.int64)


def _wait_below_residual(m: MeasuredWindow) -> int:
    """Return the exposed time in waits that are not longer than the clocks' residual (ns)."""
    rows = m.matched.waits
    wait = np.clip(rows["latest"], rows["start"], rows["end"]) - rows["start"]
    return total((m.blocked.wait + m.blocked.bubble)[wait <= m.residual_ns])
