"""Rules that name a line of the user's code: where time goes that no other cause explains."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ....plurals import counted
from ...records.rank_lines import SampledLine
from ..descriptions import SCRIPT, CauseKind
from ..evidence import MIN_SHARE, Evidence, NamedCause
from ..line_profile import Doing, Entry, LineProfile, LineTime

MIN_LINE_SHARE = 0.1  # of a step, outside of torch's operators
MAX_LINE_CAUSES = 3
ALL_STEPS = 0.9  # of a step's time within a line: then all steps are
MIN_OF_WAITS = 0.3  # of the waits for a rank: then its line is their reason
MIN_EXCESS = 0.3  # of a rank's time in a line of its own work, that other ranks do not have
MIN_OTHER_EXCESS = 0.7  # the same in a line with operators, where ranks differ by chance
MIN_SAMPLES = 5  # of a rank in a line

# What a line does by itself. Operators, other ranks and a lack of cores are other causes'.
_OWN_WORK = (
    *(Doing.PYTHON, Doing.LIBRARY, Doing.SHORT_CALLS, Doing.FILE, Doing.WAIT, Doing.GARBAGE),
)


@dataclass(frozen=True)
class LineCause:
    """A cause that names a line, with its share of a step's time."""

    share: float
    named: NamedCause


def lines_in_state(profile: LineProfile, *states: str) -> list[dict[str, object]]:
    """Return five lines with their shares of the time in these states.

    Lines of the function with most time come first, the longest of them at the beginning.
    """
    return _lines_of(profile, [entry for entry in profile.times if entry.state in states])


def _lines_of(profile: LineProfile, entries: Collection[Entry]) -> list[dict[str, object]]:
    whole = profile.share(entries)
    lines = [time for time in profile.lines(entries) if time.share > 0]
    functions: dict[tuple[str, str], float] = defaultdict(float)
    for time in lines:
        functions[_function(time.line)] += time.share
    lines.sort(key=lambda time: (-functions[_function(time.line)], -time.share))
    return [time.line.evidence(time.share / whole, time.what) for time in lines[:5]]


def _function(line: SampledLine) -> tuple[str, str]:
    return line.file, line.function


def waiting_lines(profile: LineProfile, state: str) -> list[dict[str, object]]:
    """Return five lines that wait on no core in a state, as ``lines_in_state``."""
    waits = [entry for entry in profile.times if entry.state == state and entry.doing == Doing.WAIT]
    return _lines_of(profile, waits)


def activity_in_state(profile: LineProfile, state: str) -> Doing | None:
    """Return what the first function of ``lines_in_state`` mostly does while it has a core.

    None without samples.
    """
    functions: dict[tuple[str, str], dict[Doing, float]] = defaultdict(lambda: defaultdict(float))
    for entry, share in profile.times.items():
        line = profile.own_line(entry)
        if entry.state == state and line is not None:
            functions[_function(line)][entry.doing] += share
    if not functions:
        return None
    of_most = max(functions.values(), key=lambda doing: sum(doing.values()))
    on_core = {doing: share for doing, share in of_most.items() if doing != Doing.CORE}
    return max(on_core, key=lambda doing: on_core[doing], default=None)


def loader_lines(e: Evidence) -> list[dict[str, object]]:
    """Return the lines in which batches are made: of the loader workers, or of the ranks."""
    profile = e.line_profile
    if profile is None:
        return []
    workers = [worker for worker in profile.worker_lines() if worker.doing != Doing.COLLECTIVE]
    whole = sum(worker.share for worker in workers)
    if whole:
        return [worker.line.evidence(worker.share / whole, worker.what) for worker in workers[:5]]
    return lines_in_state(profile, "input")


def mostly_in(lines: Sequence[Mapping[str, object]]) -> str:
    """Return ", mostly in line 7: code" for the first of the lines; "" without one."""
    return f", mostly in line {lines[0]['line']}: {lines[0]['code']}" if lines else ""


def at_line(lines: Sequence[Mapping[str, object]]) -> str:
    """Return " (line 7: code)" for the first of the lines; "" without one."""
    return f" (line {lines[0]['line']}: {lines[0]['code']})" if lines else ""


# Work of one rank


def work_of_one_rank(
    e: Evidence, rank: int, is_only_there: bool = False
) -> list[dict[str, object]]:
    """Return the lines with which a rank was busy while others waited for it, and they were not.

    The lines are of one function. Their shares are of the waits for the rank. Empty if no function
    explains the waits. is_only_there: Whether other ranks must not execute the lines at all.
    """
    profile = e.line_profile
    waited = profile.waited.get(rank, {}) if profile is not None else {}
    whole = sum(waited.values())
    if profile is None or not whole:
        return []
    functions: dict[tuple[str, str], list[LineTime]] = defaultdict(list)
    for time in profile.lines():
        if time.line in waited and _is_of_one_rank(profile, time, rank, is_only_there):
            functions[_function(time.line)].append(time)
    most = max(
        functions.values(), key=lambda lines: sum(waited[time.line] for time in lines), default=[]
    )
    if sum(waited[time.line] for time in most) < MIN_OF_WAITS * whole:
        return []
    most.sort(key=lambda time: -waited[time.line])
    return [time.line.evidence(waited[time.line] / whole, time.what) for time in most[:5]]


def _is_of_one_rank(profile: LineProfile, time: LineTime, rank: int, is_only_there: bool) -> bool:
    """Return whether a rank spends time in a line that the other ranks do not spend there."""
    mine = time.own[profile.ranks.index(rank)]
    others = [own for r, own in zip(profile.ranks, time.own, strict=True) if r != rank]
    if not mine or not others or mine * profile.samples / len(profile.ranks) < MIN_SAMPLES:
        return False
    excess = 1 - sum(others) / len(others) / mine
    may_differ = time.main_activity in _OWN_WORK and not is_only_there
    return excess >= (MIN_EXCESS if may_differ else MIN_OTHER_EXCESS)


def sentence_of_rank(rank: int, lines: list[dict[str, object]], when: str) -> str:
    """Say which line of a rank the others wait for."""
    place = f"rank {rank}{f', {when},' if when else ''} is busy in {lines[0]['function']}"
    return f"{place}{mostly_in(lines)}, and all others wait for it"


def late_rank(e: Evidence) -> LineCause | None:
    """Return the cause if others wait for the work of one rank, with its line."""
    profile = e.line_profile
    if profile is None or len(profile.ranks) < 2:
        return None
    found = {rank: work_of_one_rank(e, rank, is_only_there=True) for rank in profile.waited}
    waits = {
        rank: sum(profile.waited[rank].values()) * sum(float(str(line["share"])) for line in lines)
        for rank, lines in found.items()
    }
    rank = max(waits, key=lambda one: waits[one], default=None)
    if rank is None:
        return None
    lines = found[rank]
    # Of the time of the others.
    share = min(waits[rank] * len(profile.ranks) / (len(profile.ranks) - 1), 1.0)
    if share < MIN_SHARE:
        return None
    when = e.describe_lateness(rank)
    place = profile.ranks.index(rank)
    host = e.report.hosts[place] if place < len(e.report.hosts) else ""
    evidence = {"rank": rank, "host": host, "when": when, "lines": lines}
    named = ("slow-rank", sentence_of_rank(rank, lines, when), evidence)
    return LineCause(share, named)


# Work of all ranks


def unexplained_lines(
    e: Evidence, explained: Iterable[NamedCause], states: Mapping[str, tuple[str, ...]]
) -> list[LineCause]:
    """Return the functions that take MIN_LINE_SHARE of a step in time that no cause explains.

    Time within torch's operators, in communication, and without a core does not count. The time of
    a function is that of its own lines; where many functions take a little, it is the innermost
    line that called them and is not the training loop's.

    Args:
        e: What is known about the runs.
        explained: Causes that are known already.
        states: By id of a cause, the states whose time it explains.
    """
    profile = e.line_profile
    if profile is None:
        return []
    explained, loops = list(explained), library_loops(profile)
    left = {
        entry
        for entry in profile.times
        if entry.doing in _OWN_WORK
        and (own := profile.own_line(entry)) is not None
        and not (entry.state == "other" and (own.file, own.line) in loops)  # the rule "script"
        and not (entry.state == "input" and entry.doing == Doing.WAIT)  # for the loader
        and not any(
            entry.state in states[cause[0]] or _explains(profile, cause, entry)
            for cause in explained
        )
    }
    found: list[LineCause] = []
    while len(found) < MAX_LINE_CAUSES:
        chosen = _largest_function(profile, left) or _innermost_caller(profile, left)
        if not chosen:
            break
        left -= set(chosen[1])
        found.append(_named(profile, *chosen))
    return found


def _explains(profile: LineProfile, cause: NamedCause, entry: Entry) -> bool:
    name, _, evidence = cause
    if name in ("script", "interpreter") and entry.doing == Doing.WAIT:
        return True
    if name == "garbage-collection" and entry.doing == Doing.GARBAGE:
        return True
    if name == "slow-rank" and entry.rank == evidence.get("rank"):
        own = profile.own_line(entry)
        functions = {(line["file"], line["function"]) for line in evidence.get("lines", [])}
        return own is not None and _function(own) in functions
    return False


def _is_enough(profile: LineProfile, entries: Iterable[Entry]) -> bool:
    share = profile.share(entries)
    return share >= MIN_LINE_SHARE and share * profile.samples >= MIN_SAMPLES


_Chosen = tuple[SampledLine, list[Entry]]


def _largest_function(profile: LineProfile, entries: Collection[Entry]) -> _Chosen | None:
    """Return the function with most own time, if that is enough, by its longest line."""
    functions: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for entry in entries:
        line = profile.own_line(entry)
        assert line is not None
        functions[_function(line)].append(entry)
    most = max(functions.values(), key=profile.share, default=[])
    if not _is_enough(profile, most):
        return None
    return profile.lines(most)[0].line, most


def _innermost_caller(profile: LineProfile, entries: Collection[Entry]) -> _Chosen | None:
    """Return the innermost line with enough time below it, that is not the training loop's."""
    loops = training_loop(profile)
    depth: dict[SampledLine, int] = {}
    below: dict[SampledLine, list[Entry]] = defaultdict(list)
    for entry in entries:
        lines = profile.stacks[entry.stack].lines
        for at, line in enumerate(reversed(lines)):
            if _function(line) not in loops and entry not in below[line][-1:]:
                below[line].append(entry)
                depth[line] = max(depth.get(line, 0), at)
    enough = [line for line, found in below.items() if _is_enough(profile, found)]
    if not enough:
        return None
    line = max(enough, key=lambda one: (depth[one], profile.share(below[one])))
    return line, below[line]


def training_loop(profile: LineProfile) -> set[tuple[str, str]]:
    """Return the file and name of the functions that are on all stacks, from the outermost."""
    chains = [
        [_function(line) for line in reversed(stack.lines)]
        for stack in {entry.stack: profile.stacks[entry.stack] for entry in profile.times}.values()
        if stack.lines
    ]
    found: set[tuple[str, str]] = set()
    for places in zip(*chains, strict=False):
        if len(set(places)) > 1:
            break
        found.add(places[0])
    return found


def library_loops(profile: LineProfile) -> set[tuple[str, int]]:
    """Return the file and number of lines within which all steps run.

    They call a library that has the training loop, and so do the lines that lead to them.
    """
    found = (time for time in profile.lines() if time.inclusive_share >= ALL_STEPS)
    return {(time.line.file, time.line.line) for time in found}


def _named(profile: LineProfile, line: SampledLine, entries: list[Entry]) -> LineCause:
    share = profile.share(entries)
    lines = profile.lines(entries)
    doing: dict[Doing, float] = defaultdict(float)
    for entry in entries:
        doing[entry.doing] += profile.times[entry]
    main = max(doing, key=lambda kind: doing[kind])
    main_lines = [time for time in lines if time.share > 0 and time.main_activity == main]
    what = main_lines[0].what if main_lines else ""
    executions = max((time.executions or 0.0 for time in lines if time.share > 0), default=0.0)
    shown = [time for time in lines if time.line == line] + [
        time for time in lines if time.line != line
    ]
    evidence: dict[str, Any] = {
        "lines": [
            time.line.evidence((time.share or time.inclusive_share) / share, time.what)
            for time in shown[:5]
        ],
        "doing": str(main),
        "what": what,
        "executions_a_step": executions or None,
        "by_rank": [sum(profile.times[e] for e in entries if e.rank == r) for r in profile.ranks],
    }
    sentence = f"{line.function} {_does(main, what, executions)}, mostly in line {line.line}"
    return LineCause(share, ("line", f"{sentence}: {line.code}", evidence))


def _does(doing: Doing, what: str, executions: float) -> str:
    times = f", {counted(int(executions), 'time')} a step" if executions > 1 else ""
    return {
        Doing.PYTHON: f"computes in Python{times}",
        Doing.SHORT_CALLS: f"calls small operators of torch one after another{times}",
        Doing.LIBRARY: f"calls {what or 'a library'}{times}",
        Doing.FILE: f"reads or writes files{f' ({what})' if what else ''}{times}",
        Doing.WAIT: f"waits{f' ({what})' if what else ''} on no core{times}",
        Doing.GARBAGE: "makes Python collect garbage",
    }[doing]


# Descriptions

CAUSES = (
    CauseKind(
        "line",
        SCRIPT,
        "one function of the script",
        "a function of the user's code takes 10 % of a step outside of torch's operators, in time "
        "that no other cause explains; with the line, and with what it does: Python code, many "
        "short calls of torch, a library, files, waiting, or garbage collection",
    ),
)
