"""Start the script again with a checkpoint that it has saved."""

import ast
import re
from dataclasses import replace
from pathlib import Path

from ...analyze.verification.runs_facts import ResumeError, VerifyRuns
from ...record.training.facts.ranks import RankFacts
from ...record.training.settings import VerifySettings
from .run_observed import WHOLE_PASS, ObservedRuns, RunFailedError

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
