"""The options with which a job is started: nodes, ranks and how these run, or only shown."""

from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from .guard.request import GuardRequest


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


AUTO = "auto"  # bind ranks only if the cores are reserved for this job


@dataclass(frozen=True, kw_only=True)
class RankSettings:
    """How each rank runs, and when it hangs.

    Attributes:
        bind: What ranks are bound to: AUTO or one of ``binding_plan.KINDS``.
        threads: Value of OMP_NUM_THREADS; None: derived from the binding.
        cpus_per_rank: Cores per rank, or None.
        smt: Whether a rank has one thread per hardware thread of its cores.
        fresh: Whether each rank gets a new Python interpreter.
        hang_timeout: Seconds without progress before the job is considered hung; 0: never. None:
            300, and the job is ended only if ranks wait in a collective that can't complete.
    """

    bind: str = AUTO
    threads: int | None = None
    cpus_per_rank: int | None = None
    smt: bool | None = None
    fresh: bool = False
    hang_timeout: float | None = None


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
        guard: What the user wants of the guard, or None.
        explain_default: Whether to print how many ranks are started by default, where this node
            has cores for more.
    """

    ranks: int | None = None
    nodes: NodeOptions = field(default_factory=NodeOptions)
    preview: Preview | None = None
    min_ranks_per_host: int = 1
    excluded_hosts: dict[str, str] | None = None
    guard: GuardRequest | None = None
    explain_default: bool = False
