"""Live view of a running job in the terminal; colours obey NO_COLOR.

Each state has a sign in addition to its colour, so that the bars can be read without colours.
"""

import itertools
import shlex
from collections.abc import Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...analyze.live.current_states import BlockedCollective, RankState
from ...analyze.live.live_view import LiveView
from ...analyze.records.stacks import STACK_NOT_PERMITTED, innermost_user_frame
from ...analyze.records.state_timeline import STATES
from ...plurals import named_ranks, shared_place
from ...security.text import printable
from ..figure_names import STATE_NAMES
from ..numbers import amount, counted, elapsed, of_group
from ..verdict import capitalized
from .draw import STATE_COLOURS

MAX_RANK_ROWS = 16  # most ranks with one row each; larger jobs get one row per host, and MOST ranks
MAX_LISTED_RANKS = 8
LINES = 8  # most lines about what ranks do now
SIGNS = {
    "useful": "█",
    "input": "▒",
    "checkpoint": "▚",
    "validation": "▞",
    "starved": "○",
    "other": "·",
    "bubble": "▫",
    "wait": "░",
    "transfer": "▓",
}
# Short names of states for narrow terminals, so that the bars have room, and shorter ones for
# terminals in which these are still too wide.
_SHORT = {"checkpoint": "save", "validation": "eval"}
_SHORTER = {
    **_SHORT,
    "useful": "use",
    "input": "inp",
    "starved": "core",
    "other": "oth",
    "bubble": "bub",
}
_SHORTER |= {"transfer": "trans"}
_LEAST_BAR, _MOST_BAR = 8, 60
_SEEN = 0.005  # a state with a smaller share on every rank gets no column
_SLOWER = 0.02  # relative to the mean; a smaller excess of the slowest rank is not shown
_LONG_WAIT = 0.02  # share of a rank's time; shorter waits are not shown
_AT_ONCE = 1.0  # s; shorter durations are not shown, because they end before a user reads them


def render(
    view: LiveView, width: int, rows: int = MAX_RANK_ROWS + MAX_LISTED_RANKS
) -> RenderableType:
    """Return the live view for a terminal.

    Args:
        width: Width of the terminal in columns.
        rows: Maximum number of rows of the table.
    """
    parts: list[RenderableType] = [*_head(view)]
    if view.states:
        parts += [Text(), _table(view, width, rows), Text()]
    elif view.step > 0:
        parts.append(Text("no shares yet: they need two steps on every rank"))
    else:
        parts.append(Text("starting: no step has ended yet"))
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="bright_black")
    facts.add_column()
    for head, lines, style in (
        ("slowest", _slowest(view), ""),
        ("waits", _waits(view), ""),
        ("blocked", [standing_in_words(call, view) for call in view.standing[:3]], "bold red"),
        ("now", _doing(view), ""),
    ):
        for i, line in enumerate(lines):
            facts.add_row("" if i else head, Text(line, style=style))
    parts.append(facts)
    if view.missing_ranks and not view.silent_hosts:
        parts.append(_warning(f"no record of {named_ranks(view.missing_ranks)}"))
    parts += [_warning(note) for note in view.notes]
    return Group(*parts)


def _head(view: LiveView) -> list[Text]:
    command = Text(shlex.join(view.command) or "a job", style="bold", no_wrap=True)
    command.overflow = "ellipsis"
    hosts = [_short(host) for host in dict.fromkeys(view.hosts)]
    named = ", ".join(hosts[:4]) + (", ..." if len(hosts) > 4 else "")
    where = f" on {named}" if len(hosts) == 1 else f" on {len(hosts)} nodes ({named})"
    facts = [f"{counted(view.size, 'rank')}{where}"]
    since = "since its last restart" if view.attempt else "since its start"
    facts.append(f"{elapsed(view.elapsed_s)} {since}")
    if view.attempt:
        facts.append(counted(view.attempt, "restart"))
    if view.step:
        facts.append(f"step {view.step}")
    lines = [command, Text(" · ".join(facts))]
    if view.window_s is not None and view.steps_per_s is not None:
        speed = Text(f"{amount(view.steps_per_s)} steps/s", style="bold")
        if view.samples_per_s is not None:
            speed.append(f" · {amount(view.samples_per_s)} samples/s")
        covers = f"{_when(view)}, steps {view.first_step} to {view.last_step}"
        lines.append(speed.append(f" · {covers}", style="not bold"))
    return lines


def _when(view: LiveView) -> str:
    """Return the period of time that the shares cover, in words."""
    length = elapsed(view.window_s or 0.0)
    ago = min((now.last_s for now in view.now if now.last_s is not None), default=0.0)
    return f"the last {length}" if ago < _AT_ONCE else f"{length} until {elapsed(ago)} ago"


def _table(view: LiveView, width: int, most: int) -> Table:
    """Return a table of the states' shares: one row per rank.

    If there are many ranks, the table has one row per host, and one for each of some ranks.
    """
    shown = [n for n in STATES if max(rank[n] for rank in view.states) >= _SEEN or n == "useful"]
    rows = _rows(view, most)
    longest = max(len(name) for name, _ in [("rank", {}), *rows])
    label = min(longest, 14 if width < 100 else 24)
    for names in ({}, _SHORT, _SHORTER):
        heads = [f"{SIGNS[state]} {names.get(state, STATE_NAMES[state])}" for state in shown]
        taken = label + sum(max(len(head), 5) for head in heads) + 2 * (len(heads) + 1)
        if width - taken >= (_LEAST_BAR if names is _SHORTER else 2 * _LEAST_BAR):
            break
    bar = min(max(width - taken, _LEAST_BAR), _MOST_BAR)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("rank", width=label, no_wrap=True, overflow="ellipsis")
    table.add_column("", width=bar, no_wrap=True)
    for name, head in zip(shown, heads, strict=True):
        table.add_column(Text(head, style=STATE_COLOURS[name]), justify="right", no_wrap=True)
    for name, shares in rows:
        cells = [f"{100 * shares[state]:.0f} %" for state in shown]
        table.add_row(Text(_cropped(name, label)), _bar(shares, bar), *cells)
    return table


def _rows(view: LiveView, most: int) -> list[tuple[str, dict[str, float]]]:
    several = len(set(view.hosts)) > 1
    names = {
        rank: " ".join(
            filter(
                None, [str(rank), shared_place([rank], view.mesh), _short(host) if several else ""]
            )
        )
        for rank, host in zip(view.ranks, view.hosts, strict=True)
    }
    shares = dict(zip(view.ranks, view.states, strict=True))
    if len(view.ranks) <= min(MAX_RANK_ROWS, most):
        return [(names[rank], shares[rank]) for rank in view.ranks]
    rows = []
    for host in dict.fromkeys(view.hosts):
        states = [s for s, h in zip(view.states, view.hosts, strict=True) if h == host]
        mean = {state: sum(rank[state] for rank in states) / len(states) for state in STATES}
        rows.append((_short(host), mean))
    ranks = min(MAX_LISTED_RANKS, max(2, most - min(len(rows), most // 2)))
    if len(rows) > most - ranks:  # keep the hosts that wait least: the others wait for them
        rows = sorted(rows, key=lambda row: row[1]["wait"])[: max(1, most - ranks)]
    return rows + [(names[rank], shares[rank]) for rank in _telling(view, ranks)]


def _short(host: str) -> str:
    return host.partition(".")[0] or host


def _cropped(name: str, width: int) -> str:
    """Shorten a name in its middle, because names of hosts often differ only at their ends."""
    front = (width - 1) // 2
    return name if len(name) <= width else f"{name[:front]}…{name[front + 1 - width :]}"


def _telling(view: LiveView, number: int) -> list[int]:
    """Return the ranks to show: those that are behind, then those that others wait for."""
    caused = dict(zip(view.ranks, view.caused, strict=True))
    steps = {now.rank: now.step for now in view.now}
    behind = max(steps.values()) - 1  # one step less is normal: some ranks have just ended a step
    order = sorted(view.ranks, key=lambda rank: (min(steps[rank], behind), -caused[rank]))
    return sorted(order[:number])


def _bar(shares: dict[str, float], width: int) -> Text:
    text, reached, drawn = Text(), 0.0, 0
    for state in STATES:
        reached += shares[state]
        upto = min(width, round(reached * width))
        text.append(SIGNS[state] * (upto - drawn), style=STATE_COLOURS[state])
        drawn = max(drawn, upto)
    return text


def _slowest(view: LiveView) -> list[str]:
    excess = view.slowest_excess or 0.0
    if view.slowest_rank is None or view.slowest_real is False or excess < _SLOWER:
        return []
    more = f"{100 * excess:.0f} % more time outside communication than the mean"
    return [f"{view.named([view.slowest_rank])} spends {more}"]


def _waits(view: LiveView) -> list[str]:
    return [
        f"{view.named([pair.rank])} for {view.named([pair.waited_for])}: "
        f"{100 * pair.share:.0f} % of its time"
        for pair in view.waited_for
        if pair.share >= _LONG_WAIT
    ]


def standing_in_words(blocked: BlockedCollective, view: LiveView) -> str:
    """Describe a collective that only some ranks have entered, and why it does not proceed."""
    now = {rank.rank: rank for rank in view.now}
    halted = [rank for rank in blocked.inside if now[rank].process == "stopped"]
    waiting = [rank for rank in blocked.inside if rank not in halted] or blocked.inside
    have = "has" if len(waiting) == 1 else "have"
    where = f"{blocked.collective} {blocked.number}{of_group(blocked.group)}"
    sentences = [f"{view.named(waiting)} {have} waited in {where} for {elapsed(blocked.for_s)}."]
    sentences += [
        f"{view.named([rank])}{_at(now[rank], view)} has not entered it: {_absent(now[rank])}."
        for rank in blocked.absent[:3]
    ]
    if len(blocked.absent) > 3:
        have = "has" if len(blocked.absent) == 4 else "have"
        sentences.append(f"{view.named(blocked.absent[3:])} {have} not entered it either.")
    if halted:
        are = "is" if len(halted) == 1 else "are"
        sentences.append(f"{view.named(halted)} {are} in it, but stopped by a signal (SIGSTOP).")
    if blocked.unseen:
        sentences.append(f"Paceline has no record of {counted(blocked.unseen, 'other member')}.")
    return " ".join(map(capitalized, sentences))


def _absent(now: RankState) -> str:
    if now.process == "ended":
        return f"its process has ended{_since(now)}"
    doing = _newest(now)
    if now.doing not in ("script", "starting"):
        has_been = now.for_s is not None and now.for_s >= _AT_ONCE
        doing = f"{'has been' if has_been else 'is'} {_told(_plain(now), now)}"
    if now.process == "stopped":
        return f"its process is stopped by a signal (SIGSTOP). The rank {doing}"
    return f"it {doing}"


def _newest(now: RankState) -> str:
    if now.last is None or now.last_s is None:
        return "has not ended any recorded operation"
    return f"last ended {now.last}, {elapsed(now.last_s)} ago"


def _since(now: RankState) -> str:
    return f" (last operation: {now.last})" if now.last is not None else ""


def _doing(view: LiveView) -> list[str]:
    """Return what ranks do now: one line for all ranks that do the same."""
    same: dict[str, list[RankState]] = {}
    for now in view.now:
        same.setdefault(_kind(now), []).append(now)
    lines = []
    for kind, ranks in same.items():
        longest = max(ranks, key=lambda now: now.for_s or 0.0)
        lines.append(f"{view.named([now.rank for now in ranks])}: {_told(kind, longest)}")
    more = len(lines) - LINES
    return [*lines[:LINES], f"... {counted(more, 'more line')} (--json)"] if more > 0 else lines


def doing_in_words(now: RankState) -> str:
    """Return what one rank does now, and for how long, in words."""
    return _told(_kind(now), now)


def _kind(now: RankState) -> str:
    """Return what a rank does, without durations."""
    if now.process == "ended":
        return "ended"
    halted = "stopped by a signal (SIGSTOP), " if now.process == "stopped" else ""
    return halted + _plain(now)


def _plain(now: RankState) -> str:
    long = now.for_s is not None and now.for_s >= _AT_ONCE
    what = f"{now.collective} {now.number}" if now.number is not None else f"{now.collective}"
    if now.in_background:
        return f"in {what}{of_group(now.group)} in another thread"
    if now.doing == "starting":
        return "starting"
    if now.doing == "input":
        return "waiting for a batch"
    if now.doing == "checkpoint":
        return "saving a checkpoint"
    if now.doing == "exchange" or (now.doing == "flight" and long):
        return f"in {what if long else now.collective}{of_group(now.group)}"
    if now.doing == "flight":
        return f"computing, {now.collective}{of_group(now.group)} in flight"
    if now.last_s is not None and now.last_s >= _AT_ONCE:
        return f"last ended {now.last}"
    return "computing"


def _told(kind: str, now: RankState) -> str:
    if now.process == "ended" or (now.doing == "starting" and not now.in_background):
        return f"{kind}{_since(now)}"
    if now.for_s is not None:
        return f"{kind} for {elapsed(now.for_s)}" if now.for_s >= _AT_ONCE else kind
    if now.last_s is not None and now.last_s >= _AT_ONCE:
        return f"{kind}, {elapsed(now.last_s)} ago"
    return kind


def _at(now: RankState, view: LiveView) -> str:
    return f" on {_short(now.host)}" if len(set(view.hosts)) > 1 else ""


def _warning(text: str) -> Text:
    return Text(text, style="yellow")


MAX_LISTED_RANKS = 32


def hang_report(
    view: LiveView | None,
    stacks: Mapping[int, str],
    busy: set[int],
    still_s: float,
    silent: Sequence[str] = (),
) -> str:
    """Return the report as text.

    view: State of all ranks; None if no rank has a record.
    stacks: Python stack of each rank.
    busy: Ranks that use CPU time.
    still_s: Seconds without progress on any rank.
    silent: Hosts that do not answer.
    """
    lines = [f"paceline: no rank has made progress for {elapsed(still_s)}"]
    lines += [f"  {line}" for line in likely_causes(view, silent)]
    ranks = view.ranks if view is not None else sorted(stacks)
    now = {now.rank: now for now in view.now} if view is not None else {}
    places = view.mesh if view is not None else {}
    several = bool(silent) or (view is not None and len(set(view.hosts)) > 1)
    for rank in _ordered_ranks(ranks, view)[:MAX_LISTED_RANKS]:
        what = doing_in_words(now[rank]) if rank in now else "no record"
        using = ", using CPU time" if rank in busy else ""
        where = _position(stacks.get(rank, ""))
        host = now[rank].host if several and rank in now else ""
        named = named_ranks([rank], places=places, host=host)
        lines.append(f"    {named}: {what}{using}{where}")
    if len(ranks) > MAX_LISTED_RANKS:
        lines.append(f"    ... and {counted(len(ranks) - MAX_LISTED_RANKS, 'more rank')}")
    return "\n".join(map(printable, lines)) + "\n"


def _position(stack: str) -> str:
    frame = innermost_user_frame(stack)
    if frame is not None:
        return f"; at {frame}"
    return f"; {STACK_NOT_PERMITTED}" if stack == STACK_NOT_PERMITTED else ""


def likely_causes(view: LiveView | None, silent: Sequence[str]) -> list[str]:
    """Return sentences about what the job waits for, the likeliest cause first."""
    found = [
        f"Node {host} does not answer: it may have lost power or its network connection."
        for host in silent
    ]
    if view is None:
        return [
            *found,
            "Paceline knows only the stacks: the script does not call paceline.init() and is not "
            "recorded. HINT: paceline run --record DIR also shows each rank's operation",
        ]
    mismatches = _mismatches(view)
    found += mismatches
    if not mismatches:
        found += [standing_in_words(blocked, view) for blocked in view.standing[:3]]
    if view.missing_ranks:
        has = "it has" if len(view.missing_ranks) == 1 else "they have"
        why = "." if silent else f": {has} not joined the job."
        found.append(f"Paceline has no record of {named_ranks(view.missing_ranks)}{why}")
    if not found:
        found += [
            f"{view.named([now.rank]).capitalize()} is stopped by a signal (SIGSTOP)."
            for now in view.now
            if now.process == "stopped"
        ]
    if not found and all(now.doing == "input" for now in view.now):
        found.append("Every rank waits for a batch: the data loaders return none.")
    waits = [now for now in view.now if now.doing == "input" and now.for_s is not None]
    if not found and waits:
        verb = "waits" if len(waits) == 1 else "wait"
        found.append(f"{view.named([now.rank for now in waits])} {verb} for a batch.".capitalize())
    if view.standing and all(not blocked.absent for blocked in view.standing) and not silent:
        complete = [blocked for blocked in view.standing if len(blocked.inside) == len(view.ranks)]
        if complete and not mismatches:
            found.append(
                "All ranks of the group have entered the collective: the network between them may "
                "be down."
            )
    return found or ["No rank is known to wait in a collective. See the line of each rank below."]


def _mismatches(view: LiveView) -> list[str]:
    """Name the ranks that are in different collectives with the same number in one group."""
    return [
        f"Ranks disagree about collective {blocked.number}: {_are_in(blocked, view)}, "
        f"{_are_in(other, view)}."
        for blocked, other in itertools.combinations(view.standing, 2)
        if (blocked.group, blocked.number) == (other.group, other.number)
    ]


def _are_in(blocked: BlockedCollective, view: LiveView) -> str:
    are = "is" if len(blocked.inside) == 1 else "are"
    return f"{view.named(blocked.inside)} {are} in {blocked.collective}"


def find_computing_ranks(view: LiveView | None, busy: set[int]) -> list[int]:
    """Return the ranks that compute outside of collectives and loaders.

    They may be slow rather than stuck.
    """
    if view is None:
        return sorted(busy)
    free = {now.rank for now in view.now if now.doing in ("script", "starting", "checkpoint")}
    return sorted(free & busy)


def _ordered_ranks(ranks: Sequence[int], view: LiveView | None) -> list[int]:
    """Return all ranks; if there are more than can be listed, the missing ones first."""
    if view is None or len(ranks) <= MAX_LISTED_RANKS:
        return list(ranks)
    missed = {rank for blocked in view.standing for rank in blocked.absent}
    missed |= {now.rank for now in view.now if now.process != "running"}
    return sorted(ranks, key=lambda rank: (rank not in missed, rank))
