"""Checkpoints: who writes them, and how a resumed run goes on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ....observe.facts.events import FileFacts
from ....observe.facts.ranks import RankFacts
from ....observe.facts.samples import BatchFacts, Phase
from ..joined_runs import JoinedRuns, listed
from ..mistakes import Finding, Mistake, Nature, by_id
from ..passes import Sample, streams
from ..relations import EQUAL_WITHIN, differing_ranks, distance, vectors
from ..steps import shown, trained

FIRST_STEPS = 3  # of the resumed run, whose learning rates are compared

MISTAKES = by_id(
    Mistake(
        "checkpoint-incomplete",
        "A checkpoint does not contain what a resumed run needs",
        "states, rates and averages of the resumed run, and the states in the checkpoint",
        "save model, optimizer, scheduler, averaged weights, epoch and position",
        explains=("resume-differs",),
        is_late=True,
    ),
    Mistake(
        "checkpoint-written-by-all",
        "Several ranks write the same checkpoint",
        "the ranks that write a file",
        "save on rank 0 only, or to a file of each rank",
        is_late=True,
    ),
    Mistake(
        "resume-differs",
        "A resumed run goes on with other values than were saved",
        "values, learning rates and optimizer states of the resumed run",
        "load all states on all ranks before the first step",
        is_late=True,
    ),
    Mistake(
        "resume-repeats-samples",
        "A resumed run repeats or skips samples",
        "the samples of the resumed run",
        "save the epoch and the position in it, and go on from there",
        is_late=True,
    ),
)


def written_by_all(joined: JoinedRuns) -> Iterator[Finding]:
    """Find files that several ranks write at the same time."""
    writers: dict[tuple[str, int], dict[int, FileFacts]] = {}
    for rank, facts in enumerate(joined.ranks):
        for one in facts.files:
            if one.is_save and not one.is_distributed:
                writers.setdefault((one.path, one.step), {})[rank] = one
    for (path, step), by_rank in writers.items():
        if len(by_rank) < 2:
            continue
        line = next(iter(by_rank.values())).line
        yield Finding(
            MISTAKES["checkpoint-written-by-all"],
            [line],
            f"{len(by_rank)} ranks write {path} after {step} steps: a file that several processes "
            "write at the same time can be damaged.",
            ranks=sorted(by_rank),
            step=step or None,
            values={"path": path, "ranks": len(by_rank)},
        )


def load_of(joined: JoinedRuns, resumed: Sequence[RankFacts], saved: FileFacts) -> FileFacts | None:
    """Return where the resumed run loads a file before its first step, also if it was renamed."""
    before = {one.path for facts in joined.ranks for one in facts.files if not one.is_save}
    for facts in resumed:
        for one in facts.files:
            if one.is_save or one.step:
                continue
            is_renamed = one.path not in before and one.keys == saved.keys
            if saved.path.startswith(one.path) or is_renamed:
                return one
    return None


def resumed_fails(joined: JoinedRuns) -> Iterator[Finding]:
    """Find a script that fails when it is started again with the checkpoint that it has saved."""
    failed = joined.runs.resume_error
    if failed is None:
        return
    yield Finding(
        MISTAKES["resume-differs"],
        failed.lines,
        f"The script saves a checkpoint, and fails when it is started again: {failed.short}.",
        nature=None if failed.is_restoring else Nature.QUESTION,
        remedy="start the script a second time, and mend what fails there",
    )


@dataclass(frozen=True)
class _Resumed:
    """A resumed run and the one without interruption.

    Attributes:
        joined: The runs.
        ranks: The resumed run.
        file: The checkpoint.
        line: The line that loads it.
    """

    joined: JoinedRuns
    ranks: Sequence[RankFacts]
    file: FileFacts
    line: str

    def finding(
        self, facts: RankFacts, what: str, lines: Sequence[str], text: str, **more: Any
    ) -> Finding:
        """Return a finding about a state of a rank. what: Such as "optimizer"."""
        restored = [one.line for one in facts.restores if one.what == what and one.step == 0]
        saved = [one for one in self.joined.saving[0].files if one.is_save]
        together = {each for one in saved if one.step == self.file.step for each in one.contains}
        places = [self.line, *restored, *lines]
        kind = "resume-differs"
        if what not in {"model", *together}:
            kind, places = "checkpoint-incomplete", [self.file.line, *places]
            if together:
                text += f" {self.file.path} has the state of {listed(sorted(together))}."
        of_rank = [] if facts.rank == 0 else [facts.rank]
        return Finding(MISTAKES[kind], places, text, ranks=of_rank, **more)


def _resumed(joined: JoinedRuns) -> _Resumed | None:
    ranks = joined.runs.resumed or []
    file = loaded_file(joined, ranks)
    load = load_of(joined, ranks, file) if file is not None else None
    return _Resumed(joined, ranks, file, load.line) if file is not None and load else None


def resumed_differs(joined: JoinedRuns) -> Iterator[Finding]:
    """Find values of a resumed run that are not those that were saved."""
    if (run := _resumed(joined)) is not None:
        tests = (_other_values, _other_state, _other_rates, _other_average)
        found = [one for test in tests if (one := test(run)) is not None]
        yield from found[:1]


def _other_values(run: _Resumed) -> Finding | None:
    """Return a finding if parameters at the first forward are not those of the checkpoint."""
    for facts in run.ranks:
        saving = next(one for one in run.joined.saving if run.file in one.files)
        wrong = _different_values(saving, run.file, facts)
        if wrong:
            return run.finding(
                facts,
                "model",
                [],
                f"At the first forward of the resumed run, {listed(wrong)} on rank {facts.rank} "
                f"{'is' if len(wrong) == 1 else 'are'} not as saved in {run.file.path}.",
                layer=wrong[0],
                values={"parameters": len(wrong), "path": run.file.path},
            )
    return None


def _other_state(run: _Resumed) -> Finding | None:
    """Return a finding if an optimizer begins with another state than without the interruption."""
    for ours, facts in zip(run.joined.unbroken, run.ranks, strict=False):
        for first in [one for one in facts.steps if not one.index]:
            later = ours.steps[run.file.step :]
            after = [one for one in later if one.optimizer == first.optimizer]
            expected = vectors(ours, after[0].state) if after else {}
            found = vectors(facts, first.state)
            off = {
                name: distance(expected[name], found[name]) if name in found else 1.0
                for name in expected
            }
            name = max(off, key=lambda one: off[one], default="")
            if not name or off[name] <= 10 * EQUAL_WITHIN:
                continue
            number, _, key = name.partition(" ")
            groups = [one.parameters for one in ours.optimizers if one.key == first.optimizer]
            parameters = [each for groups_of in groups for group in groups_of for each in group]
            layer = shown(parameters[int(number)] if int(number) < len(parameters) else number)
            made = [x.line for x in facts.optimizers if x.key == first.optimizer]
            what = f"another one than without the interruption (off by {off[name]:.2g} of it)"
            return run.finding(
                facts,
                "optimizer",
                [*made, first.line],
                f"In the first step of the resumed run, the optimizer's {key} of {layer} is "
                + (f"{what}." if name in found else f"missing: it is not that of {run.file.path}."),
                layer=layer,
                values={"difference": off[name], "path": run.file.path},
                remedy="save the whole state of the optimizer, and load it on all ranks into the "
                "optimizer that makes the steps",
            )
    return None


def _other_rates(run: _Resumed) -> Finding | None:
    """Return a finding if the first learning rates differ from those without interruption."""
    facts, expected = run.ranks[0], run.joined.unbroken[0].steps[run.file.step :]
    pairs = zip(expected, facts.steps[:FIRST_STEPS], strict=False)
    for number, (one, first) in enumerate(pairs, 1):
        rates = zip(one.learning_rates, first.learning_rates, strict=False)
        off = [(a, b) for a, b in rates if abs(a - b) > EQUAL_WITHIN * max(abs(a), abs(b))]
        if off:
            return run.finding(
                facts,
                "schedule",
                [schedule.line for schedule in facts.schedules],
                f"The learning rate in step {number} of the resumed run is {off[0][1]:.6g}; "
                f"without the interruption it is {off[0][0]:.6g}.",
                step=number,
                values={"rate": off[0][1], "expected": off[0][0]},
                remedy="save and load the state of the learning-rate schedule",
            )
    return None


def _other_average(run: _Resumed) -> Finding | None:
    """Return a finding if averaged weights of the resumed run differ, and its parameters do not."""
    for ours, facts in zip(run.joined.unbroken, run.ranks, strict=False):
        expected = {(x.name, x.step): x for x in ours.states if x.kind == "average"}
        for state in facts.states:
            at = run.file.step + state.step
            known = expected.get((state.name, at)) if state.kind == "average" else None
            if known is None or not 0 < state.step <= len(facts.steps) or at > len(ours.steps):
                continue
            rows = [ours.steps[at - 1].parameters, facts.steps[state.step - 1].parameters]
            if not rows[0] or differing_ranks([ours, facts], rows, 10 * EQUAL_WITHIN):
                continue
            if not differing_ranks([ours, facts], [known.rows, state.rows], 10 * EQUAL_WITHIN):
                continue
            return run.finding(
                facts,
                "average",
                [state.line],
                f"After {state.step} steps of the resumed run, the parameters are those of the "
                f"run without interruption, and the averaged weights {state.name} are not: they "
                f"are not saved, or not loaded.",
                values={"path": run.file.path},
                remedy="save and load the state of the averaged weights as well",
            )
    return None


def resumed_samples(joined: JoinedRuns) -> Iterator[Finding]:
    """Find a resumed run that trains samples again, or skips some."""
    if (run := _resumed(joined)) is None or not joined.unbroken_training:
        return
    for rank, facts in enumerate(run.ranks):
        expected = _first_samples(joined.unbroken[rank], run.file.step)
        first = _first_samples(facts, 0)
        is_known = bool(expected and first) and rank < len(joined.unbroken_training[0].loaders)
        places, wanted = _places(joined, rank, first), _places(joined, rank, expected)
        if not is_known or expected == first or not wanted:
            continue
        epoch, number = wanted[0]
        text = (
            f"Without the interruption, batch {number + 1} of epoch {epoch + 1} comes after "
            f"{run.file.path} is written. The resumed run begins with "
        )
        if places:
            if set(places) & {*wanted, *_following(joined, rank, run.file.step)}:
                continue
            again = "trained again" if places[0] < wanted[0] else "left out"
            text += f"batch {places[0][1] + 1} of epoch {places[0][0] + 1}: samples are {again}."
        elif _is_elsewhere(joined, rank, wanted[0], first):
            text += "other samples: the rest of the epoch is left out, or divided otherwise."
        else:
            continue
        stream = streams(run.ranks, Phase.TRAINING)[0]
        yield Finding(
            MISTAKES["resume-repeats-samples"],
            [stream.first.facts.line, run.line, *stream.lines],
            text,
            ranks=[] if rank == 0 else [rank],
            values={"epoch": epoch + 1, "batch": number + 1},
        )


def _is_elsewhere(
    joined: JoinedRuns, rank: int, wanted: tuple[int, int], samples: Sequence[Sample]
) -> bool:
    """Return whether most samples of a batch are not of the rest of an epoch, as far as known.

    wanted: Epoch and batch that begin the rest.
    """
    made = joined.unbroken_training[0].passes[wanted[0]].ranks[rank]
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


def _following(joined: JoinedRuns, rank: int, step: int) -> list[tuple[int, int]]:
    """Return epoch and number of the batch after the last one before a step, by the script's count.

    The observed run may have left out this batch, to shorten the epoch.
    """
    facts = joined.unbroken[rank]
    backwards = facts.steps[step - 1].backwards if 0 < step <= len(facts.steps) else []
    batches = trained(facts, backwards[-1]) if backwards else []
    if not batches:
        return []
    last = facts.batches[batches[-1]]
    return [
        (at, last.number + 1)
        for at, one in enumerate(joined.unbroken_training[0].passes)
        if (made := one.ranks.get(rank)) is not None
        and (made.loader.key, made.facts.number) == last.pass_key
    ]


def _samples(batch: BatchFacts) -> list[Sample]:
    return [*(batch.by_sample if batch.indices is None else batch.indices)]


def _places(joined: JoinedRuns, rank: int, samples: list[Sample]) -> list[tuple[int, int]]:
    """Return epoch and batch of all batches that have these samples."""
    found = set()
    for at, one in enumerate(joined.unbroken_training[0].passes):
        own = one.ranks.get(rank)
        if own is None:
            continue
        plan: Sequence[Sequence[Sample]] = own.facts.planned or [*map(_samples, own.batches)]
        found |= {(at, number) for number, batch in enumerate(plan) if list(batch) == samples}
    return sorted(found)


def loaded_file(joined: JoinedRuns, resumed: Sequence[RankFacts]) -> FileFacts | None:
    """Return the last file that N ranks saved and the resumed run loaded."""
    saved = [
        one
        for facts in joined.saving
        for one in facts.files
        if one.is_save and load_of(joined, resumed, one) is not None
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
            if key is not None and distance(values, saved[key]) > EQUAL_WITHIN:
                wrong.append(shown(name))
    return wrong
