"""What is printed at the end of every run: one Summary from all ranks' records."""

import json
from dataclasses import asdict, dataclass

from ..record.states import USEFUL, State
from .pop import Efficiencies, busy, efficiencies
from .read import Record
from .states import STATES, latest_starts, states, window


@dataclass(frozen=True)
class Summary:
    """Figures of one run; times in seconds, shares of the window in [0, 1].

    ``states`` has a dict a rank, in the order of ``ranks``. Where fewer than two steps were
    recorded there is no window, and everything measured in it is None or empty.
    """

    ranks: list[int]
    size: int
    hosts: list[str]
    steps: int  # in this run, or since its last restart
    first_step: int  # more than 0 where it went on from a checkpoint
    wall_s: float
    startup_s: float
    window_s: float | None
    samples_per_s: float | None
    states: list[dict[str, float]]
    efficiencies: Efficiencies | None
    slowest_rank: int | None
    slowest_excess: float | None  # its time outside communication over the mean's, minus 1
    recording_cost: float  # share of the time after start-up, the rank where it is largest
    missing_ranks: list[int]
    lost_events: int
    unmatched_collectives: int
    clocks_aligned: bool

    def to_json(self) -> str:
        return json.dumps({"format": "paceline-summary", "version": 1, **asdict(self)}, indent=1)


def summarise(records: list[Record], missing: list[int]) -> Summary:
    """The summary of one run from the records of its ranks."""
    records = sorted(records, key=lambda record: record.rank)
    hosts = sorted({record.meta["host"] for record in records})
    started = min(int(record.meta["started_ns"]) for record in records)
    ends = [int(r.events["end"].max()) for r in records if len(r.events)]
    wall = max(ends, default=started) - started
    steps = [record.of(State.STEP) for record in records]
    work = [record.of(State.INPUT, *USEFUL) for record in records]
    first = min((int(w["start"].min()) for w in work if len(w)), default=started)
    within = window(records)
    measured: list[dict[str, int]] = []
    unmatched, samples = 0, 0
    if within is not None:
        latest, unmatched = latest_starts(records)
        if len(hosts) > 1:  # clocks of different hosts can't be compared
            latest = [record.of(State.BLOCKED)["start"] for record in records]
        measured = [states(r, at, within) for r, at in zip(records, latest, strict=True)]
        inside = [s[s["end"] > within.start] for s in steps]
        samples = sum(int(s["amount"].sum()) for s in inside)
    length = within.length if within else 0
    times = [busy(rank) for rank in measured]
    mean = sum(times) / len(times) if times else 0.0
    slowest = max(range(len(times)), key=times.__getitem__) if len(times) > 1 else None
    return Summary(
        ranks=[record.rank for record in records],
        size=int(records[0].meta["size"]),
        hosts=hosts,
        steps=max(len(s) for s in steps),
        first_step=min((int(s["step"].min()) for s in steps if len(s)), default=0),
        wall_s=wall / 1e9,
        startup_s=(first - started) / 1e9,
        window_s=length / 1e9 if within else None,
        samples_per_s=samples / (length / 1e9) if within and samples else None,
        states=[{name: rank[name] / length for name in STATES} for rank in measured],
        efficiencies=efficiencies(measured, length) if within else None,
        slowest_rank=records[slowest].rank if slowest is not None else None,
        slowest_excess=times[slowest] / mean - 1 if slowest is not None and mean else None,
        recording_cost=max(r.cost_ns for r in records) / max(wall - (first - started), 1),
        missing_ranks=missing,
        lost_events=sum(record.lost for record in records),
        unmatched_collectives=unmatched,
        clocks_aligned=len(hosts) == 1,
    )
