"""How a resumed run goes on: with other values than were saved, or with other samples."""

from collections.abc import Iterator, Sequence

from ....record.training.facts.events import FileFacts
from ....record.training.facts.ranks import RankFacts
from ....record.training.facts.samples import BatchFacts, Phase
from ....record.training.facts.steps import StepFacts
from ..mistakes import MISTAKES, Finding, Nature
from ..passes import Sample, streams
from ..relations import distance, vectors
from ..steps import shown, trained
from ..view import View, listed, unique
from .checkpoints import load_of

SAME = 1e-6  # relative difference of equal values
FIRST_STEPS = 3  # of the resumed run, whose learning rates are compared
OF_UPDATE = 1e-2  # difference of parameters, relative to the update of a step


def resumed_fails(view: View) -> Iterator[Finding]:
    """Find a script that fails when it is started again with the checkpoint that it has saved."""
    failed = view.runs.resume_error
    if failed is None:
        return
    yield Finding(
        MISTAKES["resume-differs"],
        unique(failed.lines),
        f"The script saves a checkpoint, and fails when it is started again: {failed.short}.",
        nature=None if failed.is_restoring else Nature.QUESTION,
        remedy="start the script a second time, and mend what fails there",
    )


def resumed_differs(view: View) -> Iterator[Finding]:
    """Find values of a resumed run that are not those that were saved."""
    resumed = view.runs.resumed
    if not resumed:
        return
    file = loaded_file(view, resumed)
    if file is None:
        return
    load = load_of(view, resumed, file)
    assert load is not None
    for rank, facts in enumerate(resumed):
        saving = next(one for one in view.saving if file in one.files)
        wrong = _different_values(saving, file, facts)
        if wrong:
            yield Finding(
                MISTAKES["resume-differs"],
                unique([load.line, *_restored(facts, "model")]),
                f"At the first forward of the resumed run, {listed(wrong)} on rank {rank} "
                f"{'is' if len(wrong) == 1 else 'are'} not as saved in {file.path}.",
                ranks=[rank],
                layer=wrong[0],
                values={"parameters": len(wrong), "path": file.path},
            )
            return
    for test in (_fresh_optimizer, _other_state, _other_rates, _other_update, _other_average):
        if (found := test(view, resumed, file)) is not None:
            yield found
            return


def _fresh_optimizer(view: View, resumed: Sequence[RankFacts], file: FileFacts) -> Finding | None:
    """Return a finding if the resumed run begins with an optimizer without its state."""
    load = load_of(view, resumed, file)
    before = {one.optimizer: one.state_tensors for one in view.unbroken[0].steps[: file.step]}
    for rank, facts in enumerate(resumed):
        for step in facts.steps:
            if step.index or step.state_tensors or before.get(step.optimizer, -1) <= 0:
                continue
            optimizer = next((o for o in facts.optimizers if o.key == step.optimizer), None)
            name = optimizer.class_name if optimizer is not None else "optimizer"
            # The state was loaded into another optimizer, which does not make the steps.
            restored = any(
                x.what == "optimizer" and x.key != step.optimizer for x in facts.restores
            )
            return Finding(
                MISTAKES["resume-differs"],
                unique(
                    [
                        *([optimizer.line] if optimizer and restored else []),
                        load.line if load else "",
                        *_restored(facts, "optimizer"),
                        optimizer.line if optimizer else "",
                        step.line,
                    ]
                ),
                f"The first step of the resumed run uses {name} without state, and not with the "
                f"moments that were saved in {file.path}.",
                ranks=[] if rank == 0 else [rank],
                values={"path": file.path},
                remedy="load the optimizer's state into the optimizer that makes the steps, after "
                "it is made",
            )
    return None


def _other_state(view: View, resumed: Sequence[RankFacts], file: FileFacts) -> Finding | None:
    """Return a finding if an optimizer begins with another state than without the interruption."""
    for rank, facts in enumerate(resumed):
        for first in [one for one in facts.steps if not one.index and one.state]:
            ours = view.unbroken[rank]
            after = [one for one in ours.steps[file.step :] if one.optimizer == first.optimizer]
            if not after or not after[0].state:
                continue
            expected = vectors(ours, after[0].state)
            found = vectors(facts, first.state)
            off = {
                name: distance(expected[name], found[name]) if name in found else 1.0
                for name in expected
            }
            name = max(off, key=lambda one: off[one], default="")
            if not name or off[name] <= 10 * SAME:
                continue
            parameter, _, key = name.partition(" ")
            load = load_of(view, resumed, file)
            made = next((x.line for x in facts.optimizers if x.key == first.optimizer), "")
            return Finding(
                MISTAKES["resume-differs"],
                unique([load.line if load else "", *_restored(facts, "optimizer"), made]),
                f"In the first step of the resumed run, the optimizer's {key} of "
                f"{shown(parameter)} is another one than without the interruption (relative "
                f"difference {off[name]:.2g}).",
                ranks=[] if rank == 0 else [rank],
                layer=shown(parameter),
                values={"difference": off[name], "path": file.path},
                remedy="save and load the whole state of the optimizer, on all ranks",
            )
    return None


def _other_rates(view: View, resumed: Sequence[RankFacts], file: FileFacts) -> Finding | None:
    """Return a finding if the first learning rates differ from those without interruption."""
    pairs = zip(view.unbroken[0].steps[file.step :], resumed[0].steps[:FIRST_STEPS], strict=False)
    for number, (expected, first) in enumerate(pairs, 1):
        rates = zip(expected.learning_rates, first.learning_rates, strict=False)
        off = [(a, b) for a, b in rates if abs(a - b) > SAME * max(abs(a), abs(b))]
        if not off:
            continue
        load = load_of(view, resumed, file)
        schedules = [one.line for one in resumed[0].schedules]
        ours, theirs = off[0]
        return Finding(
            MISTAKES["resume-differs"],
            unique([load.line if load else "", *_restored(resumed[0], "schedule"), *schedules]),
            f"The learning rate in step {number} of the resumed run is {theirs:.6g}; without the "
            f"interruption it is {ours:.6g}.",
            step=number,
            values={"rate": theirs, "expected": ours},
            remedy="save and load the state of the learning-rate schedule",
        )
    return None


def _other_update(view: View, resumed: Sequence[RankFacts], file: FileFacts) -> Finding | None:
    """Return a finding if the first step changes parameters otherwise, with the same gradient."""
    for rank, facts in enumerate(resumed):
        steps = view.unbroken[rank].steps
        if file.step >= len(steps) or not facts.steps:
            continue
        expected, first = steps[file.step], facts.steps[0]
        ours, theirs = view.unbroken[rank], facts
        if not _are_equal(ours, expected.before, theirs, first.before):
            continue
        if not _are_equal(ours, expected.gradients, theirs, first.gradients):
            continue
        off = _off(ours, expected, theirs, first)
        name = max(off, key=lambda one: off[one], default="")
        if not name or off[name] <= OF_UPDATE:
            continue
        load = load_of(view, resumed, file)
        optimizer = next((o for o in facts.optimizers if o.key == first.optimizer), None)
        return Finding(
            MISTAKES["resume-differs"],
            unique(
                [
                    load.line if load else "",
                    *_restored(facts, "optimizer"),
                    optimizer.line if optimizer else "",
                ]
            ),
            f"The first step of the resumed run has the parameters and the gradient of the run "
            f"without interruption, and changes {shown(name)} by another value (off by "
            f"{100 * off[name]:.2g} % of the update): the optimizer has another state or settings.",
            ranks=[] if rank == 0 else [rank],
            layer=shown(name),
            values={"difference": off[name]},
            remedy="save and load the whole state of the optimizer",
        )
    return None


def _other_average(view: View, resumed: Sequence[RankFacts], file: FileFacts) -> Finding | None:
    """Return a finding if averaged weights of the resumed run differ, and its parameters do not."""
    for rank, facts in enumerate(resumed):
        ours = view.unbroken[rank]
        expected = {(x.name, x.step): x for x in ours.states if x.kind == "average"}
        for state in facts.states:
            at = file.step + state.step
            known = expected.get((state.name, at)) if state.kind == "average" else None
            if known is None or not 0 < state.step <= len(facts.steps) or at > len(ours.steps):
                continue
            rows, others = ours.steps[at - 1].parameters, facts.steps[state.step - 1].parameters
            if not rows or not _are_equal(ours, rows, facts, others):
                continue
            if _are_equal(ours, known.rows, facts, state.rows):
                continue
            load = load_of(view, resumed, file)
            return Finding(
                MISTAKES["checkpoint-incomplete"],
                unique([load.line if load else "", file.line, state.line]),
                f"After {state.step} steps of the resumed run, the parameters are those of the "
                f"run without interruption, and the averaged weights {state.name} are not: they "
                f"are not saved in {file.path}, or not loaded.",
                ranks=[] if rank == 0 else [rank],
                values={"path": file.path},
                remedy="save and load the state of the averaged weights as well",
            )
    return None


def _are_equal(
    ours: RankFacts, rows: dict[str, int], theirs: RankFacts, other_rows: dict[str, int]
) -> bool:
    one, two = vectors(ours, rows), vectors(theirs, other_rows)
    return one.keys() == two.keys() and all(distance(one[n], two[n]) <= 10 * SAME for n in one)


def _off(
    ours: RankFacts, expected: StepFacts, theirs: RankFacts, first: StepFacts
) -> dict[str, float]:
    """Return by parameter the difference after the step, relative to the update."""
    before, after = vectors(ours, expected.before), vectors(ours, expected.parameters)
    other = vectors(theirs, first.parameters)
    found = {}
    for name in before.keys() & after.keys() & other.keys():
        update = distance(after[name], before[name])
        difference = distance(after[name], other[name])
        if update > 0 and difference > SAME:
            found[name] = difference / update
    return found


def resumed_samples(view: View) -> Iterator[Finding]:
    """Find a resumed run that trains samples again, or skips some."""
    resumed = view.runs.resumed
    if not resumed or (file := loaded_file(view, resumed)) is None:
        return
    for rank, facts in enumerate(resumed):
        expected = _first_samples(view.unbroken[rank], file.step)
        first = _first_samples(facts, 0)
        if (
            not expected
            or not first
            or expected == first
            or rank >= len(view.unbroken_training[0].loaders)
        ):
            continue
        places, wanted = _places(view, rank, first), _places(view, rank, expected)
        right = {*wanted, *_following(view, rank, file.step)}
        load = load_of(view, resumed, file)
        stream = streams(resumed, Phase.TRAINING)[0]
        lines = unique([stream.first.facts.line, load.line if load else "", *stream.lines])
        if not places and wanted and _is_elsewhere(view, rank, wanted[0], first):
            yield Finding(
                MISTAKES["resume-repeats-samples"],
                lines,
                f"Without the interruption, batch {wanted[0][1] + 1} of epoch {wanted[0][0] + 1} "
                f"comes after {file.path} is written. The resumed run begins with other samples: "
                "the rest of the epoch is left out, or divided otherwise.",
                ranks=[] if rank == 0 else [rank],
                values={"epoch": wanted[0][0] + 1, "expected": wanted[0][1] + 1},
            )
            return
        if not places or not wanted or set(places) & right:
            continue
        place, after = places[0], wanted[0]
        again = place < after
        yield Finding(
            MISTAKES["resume-repeats-samples"],
            lines,
            f"The resumed run begins with batch {place[1] + 1} of epoch {place[0] + 1}; without "
            f"the interruption, batch {after[1] + 1} of epoch {after[0] + 1} comes after "
            f"{file.path} is written: samples are " + ("trained again." if again else "left out."),
            ranks=[] if rank == 0 else [rank],
            values={"epoch": place[0] + 1, "batch": place[1] + 1, "expected": after[0] + 1},
        )
        return


def _is_elsewhere(
    view: View, rank: int, wanted: tuple[int, int], samples: Sequence[Sample]
) -> bool:
    """Return whether most samples of a batch are not of the rest of an epoch, as far as known.

    wanted: Epoch and batch that begin the rest.
    """
    made = view.unbroken_training[0].passes[wanted[0]].ranks[rank]
    plan = made.facts.planned
    if wanted[1] == 0 or (plan is None and not made.facts.is_complete):
        return False
    batches: Sequence[Sequence[Sample]] = plan or [*map(_samples, made.batches)]
    rest = {one for batch in batches[wanted[1] :] for one in batch}
    return sum(one in rest for one in samples) < len(samples) / 2


def _first_samples(facts: RankFacts, step: int) -> list[Sample]:
    """Return the samples of the first backward of a step; [] if they are not known.

    A script may read batches that it does not train: the last one is trained.
    """
    if step >= len(facts.steps) or not facts.steps[step].backwards:
        return []
    batches = trained(facts, facts.steps[step].backwards[0])
    return _samples(facts.batches[batches[-1]]) if batches else []


def _following(view: View, rank: int, step: int) -> list[tuple[int, int]]:
    """Return epoch and number of the batch after the last one before a step, by the script's count.

    The observed run may have left out this batch, to shorten the epoch.
    """
    facts = view.unbroken[rank]
    backwards = facts.steps[step - 1].backwards if 0 < step <= len(facts.steps) else []
    batches = trained(facts, backwards[-1]) if backwards else []
    if not batches:
        return []
    last = facts.batches[batches[-1]]
    return [
        (at, last.number + 1)
        for at, one in enumerate(view.unbroken_training[0].passes)
        if (made := one.ranks.get(rank)) is not None
        and (made.loader.key, made.facts.number) == (last.loader, last.pass_number)
    ]


def _samples(batch: BatchFacts) -> list[Sample]:
    if batch.indices is not None:
        return list(batch.indices)
    return [tuple(each) for each in zip(*batch.contents, strict=True)]


def _places(view: View, rank: int, samples: list[Sample]) -> list[tuple[int, int]]:
    """Return epoch and batch of all batches that have these samples."""
    found = set()
    for at, one in enumerate(view.unbroken_training[0].passes):
        made = one.ranks.get(rank)
        if made is None:
            continue
        plan: Sequence[Sequence[Sample]] = made.facts.planned or [*map(_samples, made.batches)]
        found |= {(at, number) for number, batch in enumerate(plan) if list(batch) == samples}
    return sorted(found)


def _restored(facts: RankFacts, what: str) -> list[str]:
    """Return the lines that restored a kind of state before the first step."""
    return [one.line for one in facts.restores if one.what == what and one.step == 0]


def loaded_file(view: View, resumed: Sequence[RankFacts]) -> FileFacts | None:
    """Return the last file that N ranks saved and the resumed run loaded."""
    saved = [
        one
        for facts in view.saving
        for one in facts.files
        if one.is_save and load_of(view, resumed, one) is not None
    ]
    return max(saved, key=lambda one: one.step, default=None)


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
