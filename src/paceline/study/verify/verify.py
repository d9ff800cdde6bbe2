"""All runs of ``paceline verify``."""

import ast
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ...analyze.verification.comparison import Difference
from ...analyze.verification.joined_runs import JoinedRuns
from ...analyze.verification.replayed_steps import (
    NOT_COMPARED,
    ReplayedSteps,
    describe_noise,
    draws_of,
)
from ...analyze.verification.runs_facts import ResumeError, VerifyRuns
from ...observe.facts.models import FLAT
from ...observe.facts.ranks import RankFacts
from ...observe.replays.joined_batches import CANNOT_JOIN
from ...observe.settings import VerifySettings
from ..trials import ScriptRequest
from .run_observed import WHOLE_PASS, ObservedRuns, RunFailedError

KEPT_MIB = 512  # of batches and initial parameters, of all ranks
FIRST_RUN_SHARE = 0.5  # of the time budget
ALONE_PASSES = 1


# Train the global batches of all ranks on one rank: in parts, or on two, if it can't hold them.

REPLAYS = 2  # runs, of a script that can be replayed
FEW = 4  # steps whose losses are enough to find a factor
DOUBTFUL = 0.01  # relative difference up to which rare effects of rounding are looked for
MANY_LAST_BITS = 32.0  # relative change of the parameters for it, in roundings of their dtype
LEAST_RANKS_FOR_TWO = 4  # below, two ranks are no comparison
CUT = "one rank: train the batches of the ranks one after the other"


@dataclass(frozen=True)
class _Way:
    """A way to train the batches of all ranks on fewer ranks.

    Attributes:
        ranks: Number of ranks.
        accumulates: Whether a global batch is trained in parts.
        what: Description of the run for the user.
    """

    ranks: int
    accumulates: bool
    what: str


def _ways(size: int, must_cut: bool) -> Iterator[_Way]:
    """Yield the ways: each needs less memory than the one before.

    must_cut: Whether only the batches of the ranks, one after the other, can be compared.
    """
    if not must_cut:
        yield _Way(1, False, "one rank: train the batches of all ranks")
    yield _Way(1, True, CUT)
    if size >= LEAST_RANKS_FOR_TWO and size % 2 == 0:
        yield _Way(2, True, "2 ranks: train the batches of all ranks in parts")


def run_replay(runs: ObservedRuns, found: VerifyRuns) -> None:
    """Train the same global batches on one rank, twice: with samples in two orders.

    If its gradients differ, the batches are trained once more, as the ranks had them: one after
    the other, with the random numbers of each rank.
    """
    reason = _not_comparable(found.ranks)
    if reason:
        found.notes.append(f"{NOT_COMPARED}: {reason}")
        return
    settings = VerifySettings("", replays=str(runs.folder / "ranks"))
    size = found.ranks[0].size  # the script's own batches are so many times as many
    settings = replace(settings, evaluated=size * settings.evaluated)
    cause = _cause_to_cut(found.ranks)
    way = _first_that_fits(runs, found, settings, cause)
    if way is None or found.replay is None:
        return
    if not found.replay.steps:
        found.notes += [f"one rank could not be compared: {one}" for one in found.replay.unseen]
        found.replay, found.replay_peers = None, []
        return
    settings = replace(settings, accumulates=way.accumulates)
    if not draws_of(found.ranks):  # others would be drawn for each sample
        _permute(runs, found, settings, way)
    elif way.accumulates and way.ranks == 1:
        _join(runs, found, replace(settings, accumulates=False, steps=FEW, max_steps=FEW))
    if (one := JoinedRuns(found).comparison.whole) is not None and one.size <= DOUBTFUL:
        one = _round(runs, found, settings, one)
    if not way.accumulates and one is not None:
        _cut(runs, found, replace(settings, accumulates=True))


def _round(
    runs: ObservedRuns, found: VerifyRuns, settings: VerifySettings, one: Difference
) -> Difference | None:
    """Return a small difference, or None if rounding makes such ones as well.

    Another maximum of almost equal values, or another side of a threshold, changes a gradient by
    far more than a rounding, and seldom: more of the last bits of the parameters are changed.
    """
    before = found.permuted
    if before is None or found.replay_peers:
        return one
    what = "one rank: is a small difference rounding?"
    settings = replace(settings, permutes=True, last_bits=MANY_LAST_BITS)
    rounded = _try(runs, found, "rounded", what, settings)
    if rounded is None:
        return one
    found.permuted = rounded
    rest = JoinedRuns(found).comparison.whole
    if rest is None:
        found.notes.append(
            f"{one.text}: this is rounding, as other last bits of the parameters change it as much"
        )
    else:
        found.permuted = before
    return rest and one


def _permute(runs: ObservedRuns, found: VerifyRuns, settings: VerifySettings, way: _Way) -> None:
    """Train the same once more with the samples in another order: the difference is rounding."""
    who = "one rank" if way.ranks == 1 else "2 ranks"
    what = f"{who}: the same with the samples in another order"
    permuted = replace(settings, permutes=True)
    found.permuted = _try(runs, found, "permuted", what, permuted, way.ranks)
    joined = JoinedRuns(found)
    noise = joined.replay.suspicious_noise(joined.steps[0]) if joined.steps else 0.0
    if noise:
        found.notes.append(describe_noise(noise, _trace(runs, settings, way.ranks)))


def _join(runs: ObservedRuns, found: VerifyRuns, settings: VerifySettings) -> None:
    """Train the first global batches as a whole, with other random numbers, for their losses."""
    what = "one rank: the first batches of all ranks as a whole"
    facts = _try(runs, None, "joint", what, settings)  # else the parts are compared
    found.joint = facts if facts is not None and facts.steps else None


def _cut(runs: ObservedRuns, found: VerifyRuns, settings: VerifySettings) -> None:
    """Train each global batch in the parts of the ranks: do they explain the difference?"""
    facts = _try(runs, found, "cut", CUT, settings)
    if facts is not None and facts.steps:
        found.cut = facts
    elif facts is not None:
        found.notes += [f"{CUT}: {reason}" for reason in facts.unseen]


def _first_that_fits(
    runs: ObservedRuns, found: VerifyRuns, settings: VerifySettings, cause: str
) -> _Way | None:
    """Run the replay in the first way that fits in memory; add a note if it is not the usual one.

    Args:
        runs, found, settings: The runs, what they have found, settings of a replay.
        cause: Why global batches have to be cut; "" if not.

    Returns:
        The way; None if the replay failed in all ways.
    """
    failed: RunFailedError | None = None
    for way in _ways(found.ranks[0].size, bool(cause)):
        try:
            tried = replace(settings, accumulates=way.accumulates)
            facts = runs.run("replay", way.what, tried, ranks=way.ranks)
        except RunFailedError as error:
            if not error.is_out_of_memory:
                found.notes.append(f"{way.what}: failed ({error.short})")
                return None
            failed = error
            runs.clear("replay")
            continue
        if not (facts[0].steps or way.accumulates):
            unjoined = next((one for one in facts[0].unseen if CANNOT_JOIN in one), "")
            if unjoined:
                cause = unjoined
                runs.clear("replay")
                continue
        found.replay, found.replay_peers = facts[0], facts[1:]
        if facts[0].steps and (failed is not None or cause):
            found.notes.append(_describe_way(way, found.ranks, cause, failed))
        return way
    assert failed is not None
    found.is_too_large = True
    found.notes.append(_too_large(found.ranks, failed))
    return None


def _describe_way(
    way: _Way, ranks: list[RankFacts], cause: str, failed: RunFailedError | None
) -> str:
    if way.ranks > 1:
        assert failed is not None
        return (
            f"one rank can't hold the model ({failed.short}): {len(ranks)} ranks were compared "
            "with 2 that train the same samples, and not with one process. A mistake that 2 ranks "
            "make as well is found only if it violates a relation between the ranks' gradients"
        )
    reason = cause
    if failed is not None:
        reason = f"one rank can't hold the global batch ({failed.short})"
    return (
        f"{reason}: one rank trained the batches of the {len(ranks)} ranks one after the other, "
        "and added their gradients. What compares samples of different ranks was not compared "
        "with one process"
    )


def _too_large(ranks: list[RankFacts], failed: RunFailedError) -> str:
    size = len(ranks)
    also = " nor do 2 ranks" if size >= LEAST_RANKS_FOR_TWO and size % 2 == 0 else ""
    sharded = any(one.is_sharded for facts in ranks for one in facts.models)
    kind = "sharded model" if sharded else "model"
    hint = "" if also else ". HINT: paceline verify -n 4 compares 4 ranks with 2"
    return (
        f"one rank does not hold the {kind}{also} ({failed.short}): the gradients of {size} ranks "
        "were compared with each other, and not with those of fewer ranks"
        f"{hint}"
    )


def _trace(runs: ObservedRuns, settings: VerifySettings, ranks: int) -> list[RankFacts]:
    """Train the first step twice with a list of its operators; without runs that fail."""
    traced = replace(settings, traces=True)
    what = "train the first batch again: is it the same?"
    tried = [_try(runs, None, name, what, traced, ranks) for name in ("again", "again-2")]
    return [facts for facts in tried if facts is not None]


def _not_comparable(ranks: list[RankFacts]) -> str:
    """Return why one rank can't train the same as all ranks; "" if it can."""
    if not any(one.steps for one in ranks):
        return "no step of an optimizer was seen"
    if not any(loader.dataset for one in ranks for loader in one.loaders):
        return "the script reads no DataLoader"
    if any(model.wrapper == FLAT for one in ranks for model in one.models):
        return f"{FLAT} flattens the parameters"
    return ""


def _cause_to_cut(ranks: list[RankFacts]) -> str:
    """Return why the batches of the ranks can't be trained as one; "" if they can."""
    drawn = draws_of(ranks)
    where = f" in {drawn[0].line}" if drawn and drawn[0].line else ""
    return f"the model or the loop draws random numbers{where}, others on each rank" * bool(drawn)


# Start the script again with a checkpoint that it has saved.

PASSES = 1
SAVES = re.compile(r"save|checkpoint|snapshot", re.IGNORECASE)


def run_resumed(runs: ObservedRuns, found: VerifyRuns) -> None:
    """Start the script again with a checkpoint of its first pass.

    The steps after it are compared with those of a run that went on without a break: all ranks'
    first run, or if that had saved nothing, a whole pass in which a checkpoint was saved.
    """
    settings, files_of = VerifySettings("", passes=PASSES), "ranks"
    what = "all ranks: one pass, to resume after it"
    is_saved = _saves(found.ranks)
    if not is_saved:
        if not saves_every_some_steps(Path(runs.asked.script)):
            return
        settings = replace(settings, batches=WHOLE_PASS)
        what = "all ranks: one whole pass, until a checkpoint is saved"
    try:
        interrupted = runs.run("interrupted", what, settings)
    except RunFailedError as error:
        found.notes.append(f"the script could not be run again: {error.short}")
        return
    if _saves(interrupted):
        files_of, found.interrupted = "interrupted", interrupted
    elif not is_saved:
        steps = max(len(one.steps) for one in interrupted)
        found.notes.append(
            f"the script saved no checkpoint in {steps} steps, so that it was not resumed: a "
            "smaller interval of steps allows it"
        )
        return
    found.is_continued = not is_saved
    try:
        what = "all ranks: start again with the saved checkpoint"
        found.resumed = runs.run("resumed", what, settings, files_of=files_of)
    except RunFailedError as error:
        if not error.lines:
            found.notes.append(f"the script could not be started again: {error.short}")
            return
        is_restoring = any(name == "load_state_dict" for name, _ in error.calls)
        found.resume_error = ResumeError(error.short, error.lines, is_restoring)


def resumed_runs(runs: ObservedRuns, found: VerifyRuns) -> int:
    """Return how many runs ``run_resumed`` needs if nothing fails."""
    is_saving = _saves(found.ranks) or saves_every_some_steps(Path(runs.asked.script))
    return 2 if is_saving else 0


def _saves(ranks: list[RankFacts]) -> bool:
    return any(file.is_save for one in ranks for file in one.files)


def saves_every_some_steps(script: Path) -> bool:
    """Return whether a script saves where a number modulo another one has some value."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    return any(
        isinstance(one, ast.If)
        and any(isinstance(part, ast.Mod) for part in ast.walk(one.test))
        and any(
            isinstance(part, ast.Call) and SAVES.search(ast.unparse(part.func))
            for line in one.body
            for part in ast.walk(line)
        )
        for one in ast.walk(tree)
    )


def run_verification(asked: ScriptRequest, say: Callable[[str], None]) -> VerifyRuns:
    """Run the script on all ranks and on one, and return what was observed.

    Args:
        asked: The request.
        say: Receives what happens now.

    Raises:
        ValueError: The script fails on all ranks.
    """
    start = time.monotonic()
    with ObservedRuns(asked, say) as runs:
        found = _run_all(runs)
        found.command = [asked.script, *asked.args]
        ranks = found.ranks
        if ranks[0].size > 1:
            runs.rest = REPLAYS + 1 + resumed_runs(runs, found)
            run_replay(runs, found)
            runs.rest = 1 + resumed_runs(runs, found)
            if not found.is_too_large:
                is_compared = _is_compared(found)
                _run_alone(runs, found, has_all=not is_compared)
                if not is_compared:
                    _compare_with_alone(runs, found)
        runs.rest = resumed_runs(runs, found)
        run_resumed(runs, found)
    found.seconds = time.monotonic() - start
    return found


def _run_all(runs: ObservedRuns) -> VerifyRuns:
    """Run all ranks; again with passes of full length if the script fails with shorter ones."""
    settings = VerifySettings("", keeps_mib=KEPT_MIB)
    what, limit_s = "all ranks: observe the training", FIRST_RUN_SHARE * runs.deadline.left_s
    try:
        ranks = runs.run("ranks", what, settings, limit_s=limit_s)
        return VerifyRuns(ranks, notes=_incomplete(ranks))
    except RunFailedError as error:
        failed = error
    settings = replace(settings, batches=WHOLE_PASS)
    runs.clear("ranks")
    try:
        ranks = runs.run("ranks", f"{what}, with passes of full length", settings)
    except RunFailedError:
        raise failed from None
    note = f"passes have their full length: with shorter ones the script failed ({failed.short})"
    return VerifyRuns(ranks, notes=[note, *_incomplete(ranks)])


def _is_compared(found: VerifyRuns) -> bool:
    """Return whether a step was compared with a replay, or is known not to be comparable."""
    view = JoinedRuns(found)
    return found.replay is not None and any(map(view.replay.joint, view.steps))


def _alone_settings(found: VerifyRuns, has_all: bool) -> VerifySettings:
    settings = VerifySettings("", passes=ALONE_PASSES)
    times = found.ranks[0].size if has_all else 1  # its batches may be parts of the global ones
    return replace(settings, batches=times * settings.batches)


def _run_alone(runs: ObservedRuns, found: VerifyRuns, has_all: bool) -> None:
    """Run the unchanged script on one rank.

    has_all: Whether it reads as many samples as all ranks, if its batches are those of a rank.
    """
    what = "one rank: the unchanged script"
    found.alone = _try(runs, found, "alone", what, _alone_settings(found, has_all))


def _compare_with_alone(runs: ObservedRuns, found: VerifyRuns) -> None:
    """Let the unchanged script on one rank stand for a replay, if it trains the same samples.

    So do scripts that divide a global batch, or accumulate batches until it is complete.
    """
    alone = found.alone
    if alone is None:
        return
    own = ReplayedSteps(found.ranks, alone, None, has_own_batches=True)
    if any(map(own.joint, JoinedRuns(found).steps)):
        found.replay, found.permuted, found.cut, found.replay_peers = alone, None, None, []
        what, settings = "one rank: the same once more", _alone_settings(found, has_all=True)
        found.again = _try(runs, found, "alone-2", what, settings)
        found.notes = [one for one in found.notes if not one.startswith(NOT_COMPARED)]


def _try(
    runs: ObservedRuns,
    found: VerifyRuns | None,
    name: str,
    what: str,
    settings: VerifySettings,
    ranks: int = 1,
) -> RankFacts | None:
    """Run fewer ranks; return the facts of the first, or None if the run fails.

    found: Receives a note if it fails; None: without one.
    """
    try:
        return runs.run(name, what, settings, ranks=ranks)[0]
    except RunFailedError as error:
        if found is not None:
            found.notes.append(f"{what}: failed ({error.short})")
        return None


def _incomplete(ranks: list[RankFacts]) -> list[str]:
    """Return notes on ranks without facts."""
    if len(ranks) < ranks[0].size:
        return [f"only {len(ranks)} of {ranks[0].size} ranks could be observed"]
    return []
