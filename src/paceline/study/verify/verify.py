"""All runs of ``paceline verify``."""

import time
from collections.abc import Callable
from dataclasses import replace

from ...analyze.verification.replay import NOT_COMPARED, Replay
from ...analyze.verification.runs_facts import VerifyRuns
from ...analyze.verification.same_batches import trains_same_batches
from ...record.training.facts.ranks import RankFacts
from ...record.training.settings import VerifySettings
from ..script_runs.script_runs import ScriptRequest
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
                _run_alone(runs, found)
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


def _run_alone(runs: ObservedRuns, found: VerifyRuns) -> None:
    """Run the unchanged script on one rank."""
    what = "one rank: the unchanged script"
    settings = VerifySettings("", passes=ALONE_PASSES)
    found.alone = _try(runs, found, "alone", what, settings)


def _compare_with_alone(runs: ObservedRuns, found: VerifyRuns) -> None:
    """Let the unchanged script on one rank stand for a replay, if it trains the same samples."""
    alone = found.alone
    if found.replay is not None or alone is None or Replay(found.ranks, alone, None).obstacle:
        return
    if trains_same_batches(found.ranks, alone):
        found.replay = alone
        settings = VerifySettings("", passes=ALONE_PASSES)
        found.again = _try(runs, found, "alone-2", "one rank: the same once more", settings)
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
