"""Which rank failed first, and telling it in plain words."""

import signal
from dataclasses import dataclass

from ...record.hooks.error_messages import find_peer_gone
from ...security.text import printable


@dataclass
class Watched:
    """One rank of one attempt, as far as the launcher knows."""

    rank: int
    host: str = ""  # its name, where the job has several
    exit_code: int | None = None  # negative: the signal that killed it
    ended_at: float | None = None
    exception: str | None = None
    raised_at: float | None = None
    ends_with: int | None = None  # the code it was about to end with when it told its exception
    finished: int | None = None  # the code it announced before the interpreter's own end
    finished_at: float | None = None
    lost: str = ""  # what happened to its host, where it can no longer be asked
    leaves: bool = False  # whether it leaves on a warning
    left: int | None = None  # the step of its checkpoint, where it has left before the end

    @property
    def running(self) -> bool:
        return self.exit_code is None

    @property
    def failed(self) -> bool:
        if self.left is not None:
            return False  # whatever it died of then: its work so far is on the disk
        if self.raised_at is not None or self.finished:
            return True
        if self.exit_code is None or self.finished == 0:
            return False  # what dies after a finished script has done its work
        return self.exit_code != 0

    @property
    def killed(self) -> bool:
        """Whether something outside of the script has ended it: a signal, memory, its host."""
        code = self.exit_code
        return self.exception is None and not self.finished and code is not None and code < 0

    @property
    def follows(self) -> bool:
        """Whether its own word is only that another rank has gone."""
        return find_peer_gone(self.exception or "") is not None

    @property
    def order(self) -> tuple[bool, float]:
        """To sort failures by: causes before what follows from them, then by time. A killed
        rank's sockets close before its death is known, so time alone would mislead."""
        times = [t for t in (self.raised_at, self.ended_at) if t is not None]
        return self.follows, min(times, default=float("inf"))

    @property
    def code(self) -> int:
        """As a shell would give it: 128 + n for a death by signal n."""
        told = (self.finished, self.ends_with, self.exit_code)  # its own word before our signal
        code = next((code for code in told if code is not None), 1)
        return 128 - code if code < 0 else code


def first(ranks: list[Watched]) -> Watched | None:
    """The rank whose failure came first; the others' may only follow from it."""
    failed = [rank for rank in ranks if rank.failed]
    return min(failed, key=lambda rank: rank.order, default=None)


def describe(dead: Watched, tail: list[str], others: int) -> str:
    """What happened to the first rank that failed."""
    if dead.exception is not None:
        what = f"failed: {printable(dead.exception)}"
    elif dead.lost:
        what = printable(dead.lost)
    elif dead.exit_code is not None and dead.exit_code < 0:
        what = f"was killed by {_signal_name(-dead.exit_code)}"
    else:
        what = f"ended with exit code {dead.exit_code}"
    where = f" on {printable(dead.host)}" if dead.host else ""
    lines = [f"paceline: rank {dead.rank}{where} {what}"]
    if tail:
        lines.append(f"  last lines of rank {dead.rank}:")
        lines += [f"    {printable(line)}" for line in tail]
    if dead.exit_code == -signal.SIGKILL and not dead.lost:
        lines.append("  HINT: where nobody killed it, the system was out of memory (dmesg says so)")
    if others:
        lines.append(
            f"  The other {others} ranks were ended."
            if others > 1
            else "  The other rank was ended."
        )
    return "\n".join(lines) + "\n"


def _signal_name(number: int) -> str:
    try:
        return f"{signal.Signals(number).name} (signal {number})"
    except ValueError:
        return f"signal {number}"
