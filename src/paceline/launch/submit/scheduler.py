"""What paceline submit needs to know of a scheduler: how it names what all of them have."""

from collections.abc import Callable
from dataclasses import dataclass

from .batch_options import Batch


@dataclass(frozen=True)
class Scheduler:
    """One scheduler: mostly its table of option names."""

    title: str
    mark: str  # what its lines in a script begin with
    trial: str  # the number of an array's job, in the shell's words
    options: Callable[[Batch], list[str]]  # raises ValueError for what it has no way to say
    command: Callable[[Batch], list[str]]
    by_file: bool  # the command wants the script's name after it, not its text on standard input
    identity: str  # finds the job's number in what the command said
    output: Callable[[Batch, str], str]  # where a job's output goes
    no_warning: str | None = None  # why there is no signal before the limit
    can_ask: bool = False  # a job can ask it when it ends, and to be queued again: launch.later
