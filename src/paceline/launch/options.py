"""The options with which a job is started: on which nodes, with how many ranks, or only shown."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


@dataclass(frozen=True)
class NodeOptions:
    """The options that choose the nodes, as typed.

    Attributes:
        hosts: Value of ``--hosts``, or None.
        hostfile: Value of ``--hostfile``, or None.
        launcher: Value of ``--launcher``, or None.
        env: Environment variables for all ranks, as NAME=VALUE or NAME.
        discovery: Value of ``--host-discovery-script``, or None.
    """

    hosts: str | None = None
    hostfile: Path | None = None
    launcher: str | None = None
    env: list[str] | None = None
    discovery: str | None = None

    def words(self) -> list[str]:
        """Return the options that select the nodes, as a user types them."""
        words = ["-H", self.hosts] if self.hosts else []
        words += ["--hostfile", str(self.hostfile)] if self.hostfile else []
        return words + (["--launcher", self.launcher] if self.launcher else [])


class Preview(Enum):
    """What is shown of a job that is not started: the option that asks for it."""

    PLAN = "--dry-run"
    MEMORY = "--show-memory"
    REHEARSAL = "--rehearse"
    LAYOUT = "--show-layout"


@dataclass(frozen=True)
class LaunchOptions:
    """How a job is started.

    Attributes:
        ranks: World size, or None for each node's default number of ranks. With a host discovery
            script, the largest world size.
        nodes: The options that choose the nodes.
        preview: What is shown in place of running the job; None: the job is run.
        min_ranks_per_host: Lower bound of each node's default number of ranks.
        excluded_hosts: Filled with the reason, by name, why hosts can't take part; the job then
            runs on the others. None: all hosts are needed.
        explain_default: Whether to print how many ranks are started by default, where this node
            has cores for more.
    """

    ranks: int | None = None
    nodes: NodeOptions = field(default_factory=NodeOptions)
    preview: Preview | None = None
    min_ranks_per_host: int = 1
    excluded_hosts: dict[str, str] | None = None
    explain_default: bool = False
