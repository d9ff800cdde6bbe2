"""Which rank failed first, and telling it in plain words."""

import signal
from dataclasses import dataclass

from ...record.hooks.error_messages import find_peer_gone
from ...security.text import printable


@dataclass
class RankStatus:
    """One rank of one attempt, as far as the launcher knows."""

    rank: int
    host: str = ""  # its name, where the job has several
    exit_code: int | None = None  # negative: the signal that killed it
    ended_at: float | None = None
    exception: str | None = None
    raised_at: float | None = None
    exception_exit_code: int | None = (
        None  # the code it was about to end with when it told its exception
    )
    finished_code: int | None = None  # the code it announced before the interpreter's own end
    finished_at: float | None = None
    host_failure: str = ""  # what happened to its host, where it can no longer be asked
    stops_on_warning: bool = False  # whether it leaves on a warning
    stopped_at_step: int | None = (
        None  # the step of its checkpoint, where it has left before the end
    )

    @property
    def running(self) -> bool:
        return self.exit_code is None

    @property
    def failed(self) -> bool:
        if self.stopped_at_step is not None:
            return False  # whatever it died of then: its work so far is on the disk
        if self.raised_at is not None or self.finished_code:
            return True
        if self.exit_code is None or self.finished_code == 0:
            return False  # what dies after a finished script has done its work
        return self.exit_code != 0

    @property
    def killed(self) -> bool:
        """Whether something outside of the script has ended it: a signal, memory, its host."""
        code = self.exit_code
        return self.exception is None and not self.finished_code and code is not None and code < 0

    @property
    def is_consequence(self) -> bool:
        """Whether its own word is only that another rank has gone."""
        return find_peer_gone(self.exception or "") is not None

    @property
    def sort_key(self) -> tuple[bool, float]:
        """To sort failures by: causes before what follows from them, then by time. A killed
        rank's sockets close before its death is known, so time alone would mislead."""
        times = [t for t in (self.raised_at, self.ended_at) if t is not None]
        return self.is_consequence, min(times, default=float("inf"))

    @property
    def shell_exit_code(self) -> int:
        """As a shell would give it: 128 + n for a death by signal n."""
        codes = (
            self.finished_code,
            self.exception_exit_code,
            self.exit_code,
        )  # its own word before our signal
        code = next((code for code in codes if code is not None), 1)
        return 128 - code if code < 0 else code


def first_failure(ranks: list[RankStatus]) -> RankStatus | None:
    """The rank whose failure came first; the others' may only follow from it."""
    failed = [rank for rank in ranks if rank.failed]
    return min(failed, key=lambda rank: rank.sort_key, default=None)


def describe_failure(failed_rank: RankStatus, tail: list[str], others: int) -> str:
    """What happened to the first rank that failed."""
    if failed_rank.exception is not None:
        what = f"failed: {printable(failed_rank.exception)}"
    elif failed_rank.host_failure:
        what = printable(failed_rank.host_failure)
    elif failed_rank.exit_code is not None and failed_rank.exit_code < 0:
        what = f"was killed by {_signal_name(-failed_rank.exit_code)}"
    else:
        what = f"ended with exit code {failed_rank.exit_code}"
    where = f" on {printable(failed_rank.host)}" if failed_rank.host else ""
    lines = [f"paceline: rank {failed_rank.rank}{where} {what}"]
    if tail:
        lines.append(f"  last lines of rank {failed_rank.rank}:")
        lines += [f"    {printable(line)}" for line in tail]
    if failed_rank.exit_code == -signal.SIGKILL and not failed_rank.host_failure:
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
