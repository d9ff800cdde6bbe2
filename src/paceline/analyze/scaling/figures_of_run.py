"""From the record of one run to its figures in a scaling study."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from ...record.ring.states import Memory, State
from ..figures.report import Report, RunAnalysis, analyse_with_window
from ..figures.steps import states_by_step
from ..figures.window_steps import Floats, Steps, batches_per_step
from ..records.data_axis import find_data_axis
from ..records.load_run import Run
from ..records.read_record import Record
from ..records.state_timeline import BUBBLE, STATES
from .study_model import (
    CollectiveLoad,
    HostPlacement,
    NoiseFigures,
    RunFigures,
    Spread,
    StateSeconds,
    WaitCause,
)

# Find the first steady step of a run: the marginal standard error rule.
#
# The first steps of a training are not like the later ones: memory is allocated, caches fill,
# batches that were loaded ahead are used up. The rule drops as many steps as make the standard
# error of the mean of the remaining ones smallest (MSER; White, "An effective truncation
# heuristic for bias reduction in simulation output", Simulation 69, 1997). At most half of the
# steps are dropped: where the smallest error lies there, the run has no steady part that is long
# enough.
#
# A step far above the others (a validation, a checkpoint) may lie anywhere, and says nothing of
# the warm-up. For the rule, and only for it, steps count as at most ``MAX_RATIO`` times the
# median.

MAX_RATIO = 2.0  # of the later half's median
MIN_RULE_STEPS = 6  # with fewer, nothing is dropped, and it is not known whether the run is steady


@dataclass(frozen=True)
class WarmUp:
    """Steps to drop at the beginning, and whether the rest is steady."""

    steps: int
    steady: bool


def find_warm_up(seconds: Sequence[float]) -> WarmUp:
    """Return the number of steps to drop of a run with steps of these durations."""
    count = len(seconds)
    if count < MIN_RULE_STEPS:
        return WarmUp(0, steady=False)
    times = np.asarray(seconds, np.float64)
    times = np.minimum(times, MAX_RATIO * np.median(times[count // 2 :]))
    # Sums of the remaining steps, for each number of dropped ones.
    left = np.arange(count, 0, -1)
    sums = np.cumsum(times[::-1])[::-1]
    squares = np.cumsum((times**2)[::-1])[::-1]
    errors = np.maximum(squares - sums**2 / left, 0.0) / left.astype(np.float64) ** 2
    most = count // 2
    dropped = int(errors[: most + 1].argmin())
    return WarmUp(dropped, steady=dropped < most)


QUANTILES = np.linspace(0.0, 1.0, 21)
MIN_STEPS = 3  # measured ones, after the warm-up
MAX_WAITS = 64  # the longest ones; of the others, the sum by what was being done
USEFUL = STATES.index("useful")


class TooShortError(ValueError):
    """The run ended before enough steps were measured."""


def figures_of_run(run: Run) -> RunFigures:
    """Return the figures of a run's steady steps: those that ``find_warm_up`` does not drop.

    Raises:
        TooShortError: Fewer than ``MIN_STEPS`` steps are left.
    """
    whole = analyse_with_window(run)
    steps = whole.measured.steps if whole.measured is not None else None
    done = 0 if steps is None else len(steps)
    if steps is None or done < MIN_STEPS:
        raise TooShortError(
            f"the script ended after {done + 1 if done else whole.report.steps} steps, too few to "
            "measure. HINT: let the script train longer"
        )
    found = find_warm_up(steps.seconds.tolist())
    dropped = min(found.steps, done - MIN_STEPS)
    first = steps.first + dropped
    measured = analyse_with_window(run, (first, steps.first + done))
    figures = _figures(measured, replace(found, steps=dropped))
    noise = whole.report.noise_scale
    return replace(
        figures,
        startup_s=max(whole.report.startup_s, 0.0),
        wall_s=max(whole.report.wall_s, 0.0),
        noise=NoiseFigures(**asdict(noise)) if noise is not None else None,
    )


def _figures(analysed: RunAnalysis, warm_up: WarmUp) -> RunFigures:
    report, m = analysed.report, analysed.measured
    assert m is not None, "the window of these steps exists in the whole run"
    assert m.steps is not None
    assert report.efficiencies is not None
    count, window_s = len(m.steps), m.within.length / 1e9
    # The window begins and ends at the last rank's end of a step: steps fill it completely.
    spent = np.array([states_by_step(m, m.steps, i) for i in range(len(m.records))]) / 1e9
    mean = {
        name: sum(rank[name] for rank in report.states) / len(report.states) * window_s / count
        for name in STATES
    }
    samples = samples_by_step(m.records, m.steps, find_data_axis(m.records, m.within).shards)
    return RunFigures(
        first_step=m.steps.first,
        warm_up=warm_up.steps,
        steady=warm_up.steady,
        step_s=[float(seconds) for seconds in m.steps.seconds],
        samples_per_step=float(samples.mean()),
        usual_samples=float(np.median(samples)),
        batches_per_step=batches_per_step(m.records, m.steps),
        seconds=StateSeconds(**mean),
        pop={name: _clipped(value) for name, value in asdict(report.efficiencies).items()},
        spread=_spread(spent),
        collectives=_collectives(report, count, window_s),
        waits=_waits(report, count, window_s),
        placement=_placement(report),
        memory_bytes=_largest(m.records, Memory.HOST),
        device_bytes=_largest(m.records, Memory.DEVICE),
        flops_per_step=report.work.flops if report.work is not None else None,
        recording_share=report.recording_cost,
        layout=str(m.records[0].meta.get("layout", "")),
        confidence=_clipped(report.confidence) or 0.0,
        doubts=report.doubts,
    )


def samples_by_step(
    records: Sequence[Record], steps: Steps, shards: Sequence[Sequence[int]]
) -> Floats:
    """Return the samples of the job in each step; ranks of a shard train the same samples."""
    each = np.zeros((len(records), len(steps)))
    for i, record in enumerate(records):
        rows = record.events_in(State.STEP)
        at = rows["step"].astype(np.int64) - steps.first
        inside = (at >= 0) & (at < len(steps))
        np.add.at(each[i], at[inside], rows["amount"][inside])
    return np.asarray(sum(each[list(shard)].max(axis=0) for shard in shards), np.float64)


def _clipped(value: float | None) -> float | None:
    """Return a share without its rounding errors beyond 0 and 1."""
    return None if value is None else min(max(float(value), 0.0), 1.0)


def _spread(spent: Floats) -> Spread:
    """Return the spread of the ranks' times. spent: seconds by (rank, step, state)."""
    useful = spent[:, :, USEFUL]
    busy = spent[:, :, :BUBBLE].sum(axis=2)
    return Spread(
        own_mean_s=useful.mean(axis=1).tolist(),
        busy_mean_s=busy.mean(axis=1).tolist(),
        busy_sd_s=float(busy.std(axis=1).mean()),
        busy_max_s=float(busy.max(axis=0).mean()),
        busy_quantiles_s=np.quantile(busy, QUANTILES).tolist(),
    )


def _collectives(report: Report, steps: int, window_s: float) -> list[CollectiveLoad]:
    step_s = window_s / steps
    return [
        CollectiveLoad(
            group.name,
            group.size,
            collective.name,
            collective.count / steps,
            collective.bytes / steps,
            max(collective.wait, 0.0) * step_s,
            max(collective.transfer, 0.0) * step_s,
            max(collective.hidden, 0.0) * step_s,
            collective.busbw,
        )
        for group in report.groups
        for collective in group.collectives
    ]


def _waits(report: Report, steps: int, window_s: float) -> list[WaitCause]:
    """Return for whom ranks waited: seconds per step and rank, the longest first.

    Those beyond ``MAX_WAITS`` follow without the rank.
    """
    sums: dict[tuple[int | None, str | None], float] = defaultdict(float)
    for loss in report.losses:
        if loss.kind == "wait" and loss.share > 0:
            sums[loss.rank, loss.doing] += loss.share * window_s / steps
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    rest: dict[tuple[None, str | None], float] = defaultdict(float)
    for (_, doing), seconds in ordered[MAX_WAITS:]:
        rest[None, doing] += seconds
    return [
        WaitCause(rank, doing, seconds)
        for (rank, doing), seconds in (*ordered[:MAX_WAITS], *rest.items())
    ]


def _placement(report: Report) -> list[HostPlacement]:
    return [
        HostPlacement(place.host, place.ranks, place.cores, [], place.threads, place.device)
        for place in report.places
    ]


def _largest(records: Sequence[Record], kind: Memory) -> list[int]:
    """Return the largest memory of each rank in its samples; empty without samples."""
    rows = [record.events_in(State.MEMORY) for record in records]
    sizes = [int(row["amount"][row["peer"] == kind].max(initial=0)) for row in rows]
    return sizes if any(sizes) else []


def recorded_batch(run: Run) -> tuple[str, str]:
    """Return how the knob of the global batch was set in a run, and why it was not, or ""."""
    results = [record.meta.get("knobs", {}).get("global-batch", {}) for record in run.records]
    how = next((result["how"] for result in results if result.get("how")), "loader")
    was_set = bool(results) and all(result.get("set") for result in results)
    why = next((result["why_not"] for result in results if result.get("why_not")), "")
    if was_set and not why:
        return how, ""
    return "", why or "the script makes no DataLoader that the training uses"
