"""All runs of ``paceline verify``."""

import time
from collections.abc import Callable
from dataclasses import replace

from ...analyze.verification.replay import NOT_COMPARED, Replay
from ...analyze.verification.runs_facts import VerifyRuns
from ...analyze.verification.view import View
from ...record.training.facts.ranks import RankFacts
from ...record.training.settings import VerifySettings
from ..trials import ScriptRequest
from .replay import REPLAYS, run_replay
from .resume import resumed_runs, run_resumed
from .run_observed import WHOLE_PASS, ObservedRuns, RunFailedError

KEPT_MIB = 512  # of batches and initial parameters, of all ranks
FIRST_RUN_SHARE = 0.5  # of the time budget
ALONE_PASSES = 1


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
    view = View(found)
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
    own = Replay(found.ranks, alone, None, has_own_batches=True)
    if any(map(own.joint, View(found).steps)):
        found.replay, found.permuted, found.cut, found.replay_peers = alone, None, None, []
        what, settings = "one rank: the same once more", _alone_settings(found, has_all=True)
        found.again = _try(runs, found, "alone-2", what, settings)
        found.notes = [one for one in found.notes if not one.startswith(NOT_COMPARED)]


def _try(
    runs: ObservedRuns, found: VerifyRuns, name: str, what: str, settings: VerifySettings
) -> RankFacts | None:
    """Run one rank; add a note and return None if it fails."""
    try:
        return runs.run(name, what, settings, ranks=1)[0]
    except RunFailedError as error:
        found.notes.append(f"{what}: failed ({error.short})")
        return None


def _incomplete(ranks: list[RankFacts]) -> list[str]:
    """Return notes on ranks without facts."""
    if len(ranks) < ranks[0].size:
        return [f"only {len(ranks)} of {ranks[0].size} ranks could be observed"]
    return []
