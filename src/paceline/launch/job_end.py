"""Why Paceline ends a job of which no rank has failed."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class JobEnd:
    """The decision of an observer of the job: the hang detector, or the guard.

    Attributes:
        text: Message for the user, printed before the ranks are ended.
        exit_code: Exit code of the job, if it is not restarted.
        may_restart: Whether it may be restarted.
        silent_hosts: Names of hosts that do not answer.
    """

    text: str
    exit_code: int
    may_restart: bool = True
    silent_hosts: list[str] = field(default_factory=list)
