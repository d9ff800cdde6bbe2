"""The runs of ``paceline verify``: in each, all ranks observe their training."""

import ast
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..analyze.verification.comparison import Difference
from ..analyze.verification.joined_runs import JoinedRuns
from ..analyze.verification.replayed_steps import (
    NOT_COMPARED,
    ReplayedSteps,
    describe_noise,
    draws_of,
)
from ..analyze.verification.runs_facts import ResumeError, VerifyRuns
from ..launch.job import Job, check, preloads
from ..observe.facts.models import FLAT
from ..observe.facts.ranks import RankFacts, read_facts
from ..observe.replays.joined_batches import CANNOT_JOIN
from ..observe.settings import NOT_SHARED, VARIABLE, VerifySettings
from ..observe.user_lines import is_users_file, place
from ..report.numbers import elapsed
from ..security.files import open_regular
from ..security.shared_folder import write_token
from .script_runs.launcher_server import MODULES, LauncherServer
from .script_runs.run_process import MAX_LOG_BYTES, error_line, last_lines
from .trials import ScriptRequest, Trials, TrialSpec, on_first_host

FIRST_GUESS = 4  # runs of a script that saves no checkpoint
WHOLE_PASS = 1 << 30  # batches: passes are not shortened
CALL = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
# Imported once for all runs.
OBSERVED = (
    *("paceline.cli", "paceline.record.hooks.torch_patches"),
    "paceline.observe.training_observer",
)
# What a run prints whose rank has not enough memory: torch, the system, the launcher.
_NO_MEMORY = re.compile(
    r"(?i)out of memory|OutOfMemoryError|MemoryError|(can't|cannot) allocate memory|signal 9\b"
)


class RunFailedError(ValueError):
    """A run failed.

    Attributes:
        short: The error in one line.
        calls: Function and "FILE:LINE" of the calls that failed, as far as they were printed, the
            innermost last.
        is_out_of_memory: Whether a rank had not enough memory.
    """

    def __init__(self, text: str, short: str, calls: Sequence[tuple[str, str]] = ()) -> None:
        super().__init__(text)
        self.short, self.calls = short, list(calls)
        self.is_out_of_memory = _NO_MEMORY.search(text) is not None

    @property
    def lines(self) -> list[str]:
        """The lines of the user's code, the innermost first."""
        return [line for _, line in reversed(self.calls) if is_users_file(line.rpartition(":")[0])]


class ObservedRuns(Trials):
    """Runs the script in a temporary folder, which is removed at the end.

    Attributes:
        rest: Number of runs that are expected after the present one.
    """

    def __init__(self, asked: ScriptRequest, say: Callable[[str], None]) -> None:
        super().__init__(asked, say, "paceline-verify-")
        self.server = LauncherServer(_modules(asked))
        self._number, self._start_s = 0, time.monotonic()
        self.rest = FIRST_GUESS

    def _announce(self, what: str) -> None:
        """Say which run begins, of how many, and how long all take: at first, the time limit."""
        taken_s, done = time.monotonic() - self._start_s, self._number
        self._number, self.rest = done + 1, max(self.rest - 1, 0)
        number = f"run {self._number} of about {self._number + self.rest}"
        if not done:
            number += f", at most {elapsed(60 * self.asked.minutes)} to the end"
        else:
            left_s = min(taken_s / done * (1 + self.rest), self.deadline.left_s)
            number += f", about {elapsed(left_s)} to the end"
        self.say(f"{what} ({number})")

    def run(
        self,
        name: str,
        what: str,
        settings: VerifySettings,
        ranks: int | None = None,
        files_of: str = "",
        limit_s: float = math.inf,
    ) -> list[RankFacts]:
        """Run the script once, and return the facts of its ranks.

        Args:
            name: Name of the run's folder.
            what: Description of the run for the user.
            settings: Settings of the run; its folders are set here.
            ranks: Number of ranks, if not all.
            files_of: Name of an earlier run whose files the script finds.
            limit_s: Maximum duration, if less than the rest of the time budget is meant.

        Raises:
            RunFailedError: The script failed, or its time was over.
            ValueError: Not all nodes share the folder of the runs.
        """
        folder = self.folder / name
        if not self.deadline.left_s:
            raise RunFailedError("the time was over before this run", "no time left")
        folder.mkdir()
        token = write_token(folder)
        settings = replace(settings, folder=str(folder), covered=self.covered, token=token)
        log = self.folder / f"{name}.log"
        spec = TrialSpec(
            folder / "record",
            log,
            ["--env", f"{VARIABLE}={settings.to_json()}"],
            ranks=ranks,
            where=None if ranks is None else on_first_host(self.asked.where, ranks),
            changes=files_of or name,
            limit_s=limit_s,
        )
        self._announce(what)
        code = self.run_trial(spec).code
        self.remove(folder / "record")
        found = _facts_in(folder)
        ended = {facts.ended for facts in found}
        # A rank that fails after others have reached the limit has lost its peers.
        if found and (ended <= {"limit", "script"} or "limit" in ended):
            return found
        last = last_lines(log)
        _check_shared(last)
        text = "".join(f"\n    {line}" for line in last)
        if code is None:
            raise RunFailedError(f"the time was over:{text}", "the time was over")
        short = error_line(last) or f"exit code {code}"
        calls = _failed_calls(log)
        raise RunFailedError(f"the script ended with exit code {code}:{text}", short, calls)

    def clear(self, name: str) -> None:
        """Remove what a failed run has left."""
        self.remove(self.folder / name)
        self.remove_changes(name)


def _modules(asked: ScriptRequest) -> list[str]:
    """Return the modules that all runs import, as far as they do not depend on the script."""
    job = Job(name=asked.script, module="-m" in asked.options, fresh="--fresh" in asked.options)
    try:
        found = preloads(job, check(job))
    except ValueError:
        return []  # the first run has the same error
    return [*MODULES, *found, *OBSERVED] if found else []


def _failed_calls(log: Path) -> list[tuple[str, str]]:
    """Return the calls of the first traceback in a log."""
    found: list[tuple[str, str]] = []
    with open(open_regular(log), errors="replace") as file:
        lines = file.read(MAX_LOG_BYTES).splitlines()
    for line in lines:
        if "Traceback (most recent call last)" in line and found:
            break
        if (match := CALL.search(line)) is not None:
            found.append((match[3], place(match[1], int(match[2]))))
    return found


def _check_shared(last: list[str]) -> None:
    """Raise ValueError if a rank's node does not share the folder of the runs."""
    for line in last:
        _, found, rest = line.partition(NOT_SHARED)
        if found:
            raise ValueError(f"{found.removeprefix('paceline: ')}{rest}")


def _facts_in(folder: Path) -> list[RankFacts]:
    """Return the facts of all ranks, in order; those before the first that has none."""
    found: list[RankFacts] = []
    try:
        while len(found) < (found[0].size if found else 1):
            found.append(read_facts(folder, len(found)))
    except OSError:
        pass  # a rank without facts
    return found


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
    size = found.ranks[0].size  # global batches have as many of the script's batches
    settings = replace(settings, evaluated=size * settings.evaluated)
    cause = _cause_to_cut(found.ranks)
    way = _first_that_fits(runs, found, settings, cause)
    if way is None or found.replay is None:
        return
    if not found.replay.steps:
        found.notes += [
            f"one rank could not be compared: {reason}" for reason in found.replay.unseen
        ]
        found.replay, found.replay_peers = None, []
        return
    settings = replace(settings, accumulates=way.accumulates)
    if not draws_of(found.ranks):  # others would be drawn for each sample
        _permute(runs, found, settings, way)
    elif way.accumulates and way.ranks == 1:
        _join(runs, found, replace(settings, accumulates=False, steps=FEW, max_steps=FEW))
    difference = JoinedRuns(found).comparison.whole
    if difference is not None and difference.size <= DOUBTFUL:
        difference = _round(runs, found, settings, difference)
    if not way.accumulates and difference is not None:
        _cut(runs, found, replace(settings, accumulates=True))


def _round(
    runs: ObservedRuns, found: VerifyRuns, settings: VerifySettings, difference: Difference
) -> Difference | None:
    """Return a small difference, or None if rounding makes such ones as well.

    Another maximum of almost equal values, or another side of a threshold, changes a gradient by
    far more than a rounding, and seldom: more of the last bits of the parameters are changed.
    """
    before = found.permuted
    if before is None or found.replay_peers:
        return difference
    settings = replace(settings, permutes=True, last_bits=MANY_LAST_BITS)
    what = "one rank: is a small difference rounding?"
    found.permuted = _try(runs, found, "rounded", what, settings) or before
    if found.permuted is before or JoinedRuns(found).comparison.whole is not None:
        found.permuted = before
        return difference
    found.notes.append(
        f"{difference.text}: this is rounding, as other last bits of the parameters change it as "
        "much"
    )
    return None


def _permute(runs: ObservedRuns, found: VerifyRuns, settings: VerifySettings, way: _Way) -> None:
    """Train the same once more with the samples in another order: the difference is rounding."""
    who = "one rank" if way.ranks == 1 else "2 ranks"
    what = f"{who}: the same with the samples in another order"
    permuted = replace(settings, permutes=True)
    found.permuted = _try(runs, found, "permuted", what, permuted, way.ranks)
    joined = JoinedRuns(found)
    if joined.steps and (noise := joined.replay.suspicious_noise(joined.steps[0])):
        found.notes.append(describe_noise(noise, _trace(runs, settings, way.ranks)))


def _join(runs: ObservedRuns, found: VerifyRuns, settings: VerifySettings) -> None:
    """Train the first global batches as a whole, with other random numbers, for their losses."""
    what = "one rank: the first batches of all ranks as a whole"
    facts = _try(runs, None, "joint", what, settings)
    found.joint = facts if facts and facts.steps else None  # None: the parts are compared


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

    Return the way; None if the replay failed in all ways. cause: Why global batches have to be cut;
    "" if not.
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
            unjoined = next((reason for reason in facts[0].unseen if CANNOT_JOIN in reason), "")
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
    reason = f"one rank can't hold the global batch ({failed.short})" if failed else cause
    return (
        f"{reason}: one rank trained the batches of the {len(ranks)} ranks one after the other, "
        "and added their gradients. What compares samples of different ranks was not compared "
        "with one process"
    )


def _too_large(ranks: list[RankFacts], failed: RunFailedError) -> str:
    size = len(ranks)
    also = " nor do 2 ranks" if size >= LEAST_RANKS_FOR_TWO and size % 2 == 0 else ""
    sharded = any(model.is_sharded for facts in ranks for model in facts.models)
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
    if not any(facts.steps for facts in ranks):
        return "no step of an optimizer was seen"
    if not any(loader.dataset for facts in ranks for loader in facts.loaders):
        return "the script reads no DataLoader"
    if any(model.wrapper == FLAT for facts in ranks for model in facts.models):
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
        steps = max(len(facts.steps) for facts in interrupted)
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
    return any(file.is_save for facts in ranks for file in facts.files)


def saves_every_some_steps(script: Path) -> bool:
    """Return whether a script saves where a number modulo another one has some value."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    return any(
        isinstance(node, ast.If)
        and any(isinstance(part, ast.Mod) for part in ast.walk(node.test))
        and any(
            isinstance(part, ast.Call) and SAVES.search(ast.unparse(part.func))
            for line in node.body
            for part in ast.walk(line)
        )
        for node in ast.walk(tree)
    )


# All runs, one after the other.

KEPT_MIB = 512  # of batches and initial parameters, of all ranks
FIRST_RUN_SHARE = 0.5  # of the time budget


def run_verification(asked: ScriptRequest, say: Callable[[str], None]) -> VerifyRuns:
    """Run the script on all ranks and on one, and return what was observed.

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
                settings = _alone_settings(found, has_all=not is_compared)
                found.alone = _try(runs, found, "alone", "one rank: the unchanged script", settings)
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
    """Return the settings of a run of the unchanged script on one rank.

    has_all: Whether it reads as many samples as all ranks, if its batches are those of a rank.
    """
    settings = VerifySettings("", passes=PASSES)
    times = found.ranks[0].size if has_all else 1  # its batches may be parts of the global ones
    return replace(settings, batches=times * settings.batches)


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
        found.notes = [note for note in found.notes if not note.startswith(NOT_COMPARED)]


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
