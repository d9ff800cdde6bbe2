"""Checkpoints: who writes them, and what they contain."""

from collections.abc import Iterator, Sequence

from ....record.training.facts.events import FileFacts
from ....record.training.facts.ranks import RankFacts
from ..mistakes import MISTAKES, Finding, Nature
from ..view import View, unique

STATELESS = ("SGD",)  # optimizers that may have no state


def written_by_all(view: View) -> Iterator[Finding]:
    """Find files that several ranks write at the same time."""
    writers: dict[tuple[str, int], dict[int, FileFacts]] = {}
    for rank, facts in enumerate(view.ranks):
        for one in facts.files:
            if one.is_save and not one.is_distributed:
                writers.setdefault((one.path, one.step), {})[rank] = one
    for (path, step), by_rank in writers.items():
        if len(by_rank) < 2:
            continue
        line = next(iter(by_rank.values())).line
        yield Finding(
            MISTAKES["checkpoint-written-by-all"],
            unique([line]),
            f"{len(by_rank)} ranks write {path} after {step} steps: a file that several processes "
            "write at the same time can be damaged.",
            ranks=sorted(by_rank),
            step=step or None,
            values={"path": path, "ranks": len(by_rank)},
        )
        return


def incomplete(view: View) -> Iterator[Finding]:
    """Find checkpoints that are loaded to go on, or have an optimizer, and lack other states."""
    saved = [one for one in view.ranks[0].files if one.is_save]
    resumed = view.runs.resumed or []
    trains_on = any(facts.steps for facts in resumed)
    for one in reversed(saved):
        load = load_of(view, resumed, one)
        is_loaded = load is not None and trains_on
        if "model" not in one.contains or not (is_loaded or "optimizer" in one.contains):
            continue
        together = {what for other in saved if other.step == one.step for what in other.contains}
        needs = _needed(view.ranks[0])
        missing = [what for what in needs if what not in together]
        if not missing:
            continue
        names = " and of the ".join(missing)
        yield Finding(
            MISTAKES["checkpoint-incomplete"],
            unique([one.line, load.line if load is not None else ""]),
            f"{one.path} has the state of {_with(one.contains)}, but not that of the {names}"
            + (", and the training goes on from it." if is_loaded else "."),
            step=one.step or None,
            values={"path": one.path, "missing": ", ".join(missing)},
            nature=None if is_loaded else Nature.QUESTION,
            remedy=f"save and load the state of the {names} as well",
        )
        return


def _needed(facts: RankFacts) -> list[str]:
    needs = []
    if facts.optimizers and not all(one.class_name in STATELESS for one in facts.optimizers):
        needs.append("optimizer")
    if facts.schedules:
        needs.append("schedule")
    if any(one.kind == "scaler" for one in facts.states):
        needs.append("scaler")
    return needs


def _with(contains: Sequence[str]) -> str:
    return " and ".join(contains)


def load_of(view: View, resumed: Sequence[RankFacts], saved: FileFacts) -> FileFacts | None:
    """Return where the resumed run loads a file before its first step, also if it was renamed."""
    before = {one.path for facts in view.ranks for one in facts.files if not one.is_save}
    for facts in resumed:
        for one in facts.files:
            if one.is_save or one.step:
                continue
            is_renamed = one.path not in before and one.keys == saved.keys
            if saved.path.startswith(one.path) or is_renamed:
                return one
    return None
