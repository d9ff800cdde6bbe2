"""Figures of one run of the ladder."""

from ...analyze.diagnosis.exchanged_calls import CollectiveKind, measure_exchanged_calls
from ...analyze.figures.report import analyse_with_window
from ...analyze.records.load_run import Run
from ...record.experiments.rung import LOADER
from ...record.ring.states import State


def steps_s(run: Run) -> float:
    """Return the duration of all steps of the first rank."""
    rows = run.records[0].events_in(State.STEP)
    return float(rows["end"].max() - rows["start"].min()) / 1e9


def broadcast_share(run: Run, steps: tuple[int, int]) -> float:
    """Return the share of time in broadcasts of buffers, in the steps from the first one on to
    before the second one. Waits for a late rank are part of it.
    """
    measured = analyse_with_window(run, steps).measured
    calls = measure_exchanged_calls(measured) if measured is not None else []
    return sum(one.transfer + one.wait for one in calls if one.site.kind == CollectiveKind.BUFFER)


def loader_totals(run: Run) -> dict[str, float] | None:
    """Return the totals of all ranks' loaders when they run without training, or None."""
    told = [record.meta.get("rung", {}).get("loader") for record in run.records]
    known = [one for one in told if one and one["batches"]]
    if not known:
        return None
    keys = set.intersection(*(set(one) for one in known))  # older records lack some
    return {key: sum(one[key] for one in known) for key in known[0] if key in keys} | {
        "ranks": len(known)
    }


def split_phases(phases: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return one run for each phase; the loader alone is measured after the first of them."""
    parts = [(one,) for one in phases if one != LOADER]
    return [(*parts[0], LOADER), *parts[1:]] if LOADER in phases else list(parts)
