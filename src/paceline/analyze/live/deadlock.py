"""Find the ranks of a running job that wait in collectives which can't complete.

A rank that is in no collective may sleep, download or wait for a file system: it may still arrive,
so the ranks that wait for it are not deadlocked.
"""

from collections import Counter
from collections.abc import Collection

from ...record.ring.states import ROOTED_OPS
from ..figures.losses import collective_name
from .current_states import BlockedCollective
from .live_view import View

# Their members do not all wait for each other: most wait for the root only.
_ROOTED = {collective_name(op) for op in ROOTED_OPS}


def find_deadlocked_ranks(view: View, stopped: Collection[int] = ()) -> list[int]:
    """Return the ranks that wait in a collective which can't complete, sorted.

    A collective can't complete if members are in different collectives with the same number, or if
    a member that has not begun it has exited, is stopped, is on a host that does not answer, or
    waits in another collective that can't complete.

    Args:
        view: State of the job.
        stopped: Ranks whose process is stopped by a signal.
    """
    absent_for_good = {now.rank for now in view.now if now.process == "ended"} | {*stopped}
    blocked: dict[tuple[str | None, int | None, str | None], BlockedCollective] = {
        (one.group, one.number, one.collective): one for one in view.standing
    }
    waiting = {
        now.rank: one
        for now in view.now
        if now.doing == "exchange"
        and (one := blocked.get((now.group, now.number, now.collective))) is not None
    }
    counts = Counter((one.group, one.number) for one in view.standing)
    # Begin with all ranks that wait, and remove those whose collective may complete.
    stuck = set(waiting)
    while True:
        never = stuck | absent_for_good
        free = {
            rank
            for rank in stuck
            if counts[waiting[rank].group, waiting[rank].number] == 1
            and _may_complete(waiting[rank], never, absent_for_good, bool(view.silent_hosts))
        }
        if not free:
            return sorted(stuck)
        stuck -= free


def _may_complete(
    one: BlockedCollective, never: set[int], absent_for_good: set[int], hosts_silent: bool
) -> bool:
    """Return whether the collective may complete if the ranks in ``never`` do not arrive.

    absent_for_good: Ranks that take no further part, even in a collective that they have begun.
    """
    awaited = [rank in never for rank in one.absent]
    awaited += [hosts_silent] * one.unseen
    awaited += [True for rank in one.inside if rank in absent_for_good]
    return not all(awaited) or not awaited if one.collective in _ROOTED else not any(awaited)
