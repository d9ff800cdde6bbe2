"""Description of a batch scheduler for ``paceline submit``: commands, options and directives."""

from collections.abc import Callable
from dataclasses import dataclass

from .batch_options import Batch


@dataclass(frozen=True)
class Scheduler:
    """A batch scheduler.

    Attributes:
        title: Name of the scheduler in messages.
        mark: Prefix of the scheduler's directives in a script.
        trial: Shell expression for the index of a job in an array.
        options: Return the scheduler's options for a job. Raises ValueError for a request that
            the scheduler does not support.
        command: Return the command that submits a job.
        by_file: Whether the command takes the script's file name as an argument. Otherwise it
            reads the script from standard input.
        identity: Regular expression that matches the job number in the command's output.
        query: Return the command that prints the state of a job, given its number.
        state: Regular expression that matches the state in that command's output.
        ended: States of jobs that neither wait nor run.
        output: Return the file that receives a job's output, given the job and its number.
        no_warning: Reason why the scheduler sends no signal before the time limit; None if it
            sends one.
        can_ask: Whether a job can query its end time from the scheduler, and can requeue itself
            (see ``launch.requeue``).
    """

    title: str
    mark: str
    trial: str
    options: Callable[[Batch], list[str]]
    command: Callable[[Batch], list[str]]
    by_file: bool
    identity: str
    query: Callable[[str], list[str]]
    state: str
    ended: tuple[str, ...]
    output: Callable[[Batch, str], str]
    no_warning: str | None = None
    can_ask: bool = False
