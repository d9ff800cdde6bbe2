"""All runs of ``paceline verify``."""

import time
from collections.abc import Callable

from ...analyze.verification.runs_facts import VerifyRuns
from ...record.training.facts import RankFacts
from ...record.training.settings import VerifySettings
from .run_observed import ObservedRuns, RunFailedError, VerifyRequest

__all__ = ["VerifyRequest", "run_verification"]


def run_verification(asked: VerifyRequest, say: Callable[[str], None]) -> VerifyRuns:
    """Run the script on all ranks and on one, and return what was observed.

    Args:
        asked: The request.
        say: Receives what happens now.

    Raises:
        ValueError: The script fails on all ranks.
    """
    start = time.monotonic()
    with ObservedRuns(asked, say) as runs:
        ranks = runs.run("ranks", "all ranks: observe the training", VerifySettings(""))
        found = VerifyRuns(ranks, command=[asked.script, *asked.args])
        found.notes += _incomplete(ranks)
    found.seconds = time.monotonic() - start
    return found


def _incomplete(ranks: list[RankFacts]) -> list[str]:
    """Return notes on ranks without facts, and on what could not be observed."""
    if len(ranks) < ranks[0].size:
        return [f"only {len(ranks)} of {ranks[0].size} ranks could be observed"]
    return []
