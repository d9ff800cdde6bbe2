"""Checkpoints: who writes them, what they contain, and how a resumed run goes on."""

from collections.abc import Iterator, Sequence

from ....record.training.facts import FileFacts, Phase, RankFacts
from ..mistakes import MISTAKES, Certainty, Finding
from ..passes import Stream, streams
from ..relations import distance, vectors
from ..steps import shown
from ..view import View, listed, unique

SAME = 1e-6  # relative difference of equal values
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
        load = _load_of(view, resumed, one)
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
            certainty=None if is_loaded else Certainty.QUESTION,
            remedy=f"save and load the state of the {names} as well",
        )
        return


def resumed_differs(view: View) -> Iterator[Finding]:
    """Find values of a resumed run that are not those that were saved."""
    resumed = view.runs.resumed
    if not resumed:
        return
    file = _loaded_file(view, resumed)
    if file is None:
        return
    load = _load_of(view, resumed, file)
    assert load is not None
    for rank, facts in enumerate(resumed):
        saving = next(one for one in view.saving if file in one.files)
        wrong = _different_values(saving, file, facts)
        if wrong:
            yield Finding(
                MISTAKES["resume-differs"],
                unique([load.line]),
                f"At the first forward of the resumed run, {listed(wrong)} on rank {rank} "
                f"{'is' if len(wrong) == 1 else 'are'} not as saved in {file.path}.",
                ranks=[rank],
                layer=wrong[0],
                values={"parameters": len(wrong), "path": file.path},
            )
            return
    if (fresh := _fresh_optimizer(view, resumed, file)) is not None:
        yield fresh
        return
    steps = view.ranks[0].steps
    if file.step >= len(steps) or not resumed[0].steps:
        return
    expected, first = steps[file.step], resumed[0].steps[0]
    for ours, theirs in zip(expected.learning_rates, first.learning_rates, strict=False):
        if abs(ours - theirs) > SAME * max(abs(ours), abs(theirs)):
            yield Finding(
                MISTAKES["resume-differs"],
                unique([load.line, *(one.line for one in resumed[0].schedules)]),
                f"The first learning rate of the resumed run is {theirs:.6g}; without the "
                f"interruption it is {ours:.6g}.",
                values={"rate": theirs, "expected": ours},
                remedy="save and load the state of the learning-rate schedule",
            )
            return


def _fresh_optimizer(view: View, resumed: Sequence[RankFacts], file: FileFacts) -> Finding | None:
    """Return a finding if the resumed run begins with an optimizer without its state."""
    load = _load_of(view, resumed, file)
    before = {one.optimizer: one.state_tensors for one in view.ranks[0].steps[: file.step]}
    for rank, facts in enumerate(resumed):
        for step in facts.steps:
            if step.index or step.state_tensors or before.get(step.optimizer, -1) <= 0:
                continue
            optimizer = next((o for o in facts.optimizers if o.key == step.optimizer), None)
            name = optimizer.class_name if optimizer is not None else "optimizer"
            return Finding(
                MISTAKES["resume-differs"],
                unique([load.line if load else "", optimizer.line if optimizer else "", step.line]),
                f"The first step of the resumed run uses {name} without state, and not with the "
                f"moments that were saved in {file.path}.",
                ranks=[] if rank == 0 else [rank],
                values={"path": file.path},
                remedy="load the optimizer's state into the optimizer that makes the steps, after "
                "it is made",
            )
    return None


def resumed_samples(view: View) -> Iterator[Finding]:
    """Find a resumed run that trains the samples of an epoch again, or skips some."""
    resumed = view.runs.resumed
    if not resumed or (file := _loaded_file(view, resumed)) is None:
        return
    again = streams(resumed, Phase.TRAINING)
    for stream, before in zip(again, view.training, strict=False):
        order, passes = _first_order(stream), _orders(before)
        done = file.pass_number  # passes that had begun when the file was written
        if not order or len(passes) < 2 or len({tuple(one) for one in passes}) < 2:
            continue  # without a random order, epochs cannot be told apart
        at = next((n for n, one in enumerate(passes) if one == order), None)
        if at is None or at >= done:
            continue
        is_inside = at == done - 1 and _ended_inside(before, file)
        if at == done - 1 and not is_inside and not _is_over(before, at, file):
            continue
        load = _load_of(view, resumed, file)
        assert load is not None
        yield Finding(
            MISTAKES["resume-repeats-samples"],
            unique([stream.first.facts.line, load.line, *stream.lines]),
            f"The resumed run begins with the order of epoch {at + 1}, which was "
            f"{'begun' if is_inside else 'trained'} before {file.path} was written, in epoch "
            f"{done}.",
            values={"epoch": at + 1, "saved_in": done},
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


def _loaded_file(view: View, resumed: Sequence[RankFacts]) -> FileFacts | None:
    """Return the last file that N ranks saved and the resumed run loaded."""
    saved = [
        one
        for facts in view.saving
        for one in facts.files
        if one.is_save and _load_of(view, resumed, one) is not None
    ]
    return max(saved, key=lambda one: one.step, default=None)


def _load_of(view: View, resumed: Sequence[RankFacts], saved: FileFacts) -> FileFacts | None:
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


def _different_values(saving: RankFacts, file: FileFacts, resumed: RankFacts) -> list[str]:
    """Return parameters of the resumed run that differ from the file's."""
    if not file.rows:
        return []
    wrong = []
    saved = vectors(saving, file.rows)
    for model in resumed.models:
        first = vectors(resumed, model.first)
        for name, values in first.items():
            key = next(
                (k for k in (name, f"{model.key}/{name}", f"module.{name}") if k in saved), None
            )
            if key is not None and distance(values, saved[key]) > SAME:
                wrong.append(shown(name))
    return wrong


def _orders(stream: Stream) -> list[list[int]]:
    found = []
    for one in stream.passes:
        made = one.ranks[min(one.ranks)]
        found.append([at for batch in made.facts.planned or [] for at in batch])
    return found


def _first_order(stream: Stream) -> list[int]:
    orders = _orders(stream)
    return orders[0] if orders else []


def _ended_inside(stream: Stream, file: FileFacts) -> bool:
    """Return whether the file was written before the last batch of its pass."""
    made = stream.passes[min(file.pass_number, len(stream.passes)) - 1]
    last = made.ranks[min(made.ranks)].batches[-1]
    return file.step <= last.step


def _is_over(stream: Stream, number: int, file: FileFacts) -> bool:
    """Return whether a pass had ended when the file was written."""
    made = stream.passes[number]
    return file.step > made.ranks[min(made.ranks)].batches[-1].step
