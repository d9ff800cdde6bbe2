"""Runs of the user's script, each a separate ``paceline run`` process."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from ...security.processes import python_command
from ...security.removal import TemporaryFolder
from .deadline import MINUTE_S, Deadline
from .overlay import Overlay


@dataclass(frozen=True)
class ScriptRequest:
    """The user's request to a command that runs a script several times.

    Attributes:
        script: The script, same as for ``paceline run``.
        args: Arguments of the script.
        where: Options of ``paceline run`` that select the hosts and how they are reached.
        options: Other options of ``paceline run``.
        ranks: Number of ranks, or None if ``where`` determines it.
        minutes: Time budget of all runs, in minutes.
    """

    script: str
    args: list[str]
    where: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)
    ranks: int | None = None
    minutes: float = 5.0


class ScriptRuns:
    """Runs in a temporary folder, which is removed at the end.

    Args:
        asked: The request.
        say: Receives what happens now.
        prefix: Beginning of the folder's name.

    Attributes:
        folder: The temporary folder.
        overlay: Covers the folders that the script writes to, or None if that is not possible.
        deadline: When the last run ends.
    """

    folder: Path
    overlay: Overlay | None

    def __init__(self, asked: ScriptRequest, say: Callable[[str], None], prefix: str) -> None:
        self.asked, self.say = asked, say
        self.deadline = Deadline.after(MINUTE_S * asked.minutes)
        self._prefix = prefix

    def __enter__(self) -> Self:
        self._temporary = TemporaryFolder(self._prefix)
        self.folder = self._temporary.path
        self.overlay = Overlay.prepare(self.asked.script, self.asked.args, self.folder)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._temporary.remove()

    def remove(self, path: Path) -> None:
        """Remove a folder of the runs, which may contain overlays."""
        self._temporary.remove_inside(path)

    @property
    def covered(self) -> tuple[str, ...]:
        """Folders that the overlay covers."""
        return self.overlay.folders if self.overlay is not None else ()

    def command(
        self, options: list[str], record: Path, changes: Path, ranks: int | None = None
    ) -> list[str]:
        """Return the command of a run.

        Args:
            options: Options of ``paceline run``, in addition to the user's.
            record: Folder of the record.
            changes: Folder for what the script writes to covered folders.
            ranks: Number of ranks, on the first host, if not all.
        """
        asked = self.asked
        where = list(asked.where) if ranks is None else _on_first_host(asked.where, ranks)
        ranks = ranks or asked.ranks
        where += [] if ranks is None else ["-n", str(ranks)]
        words = python_command("-m", "paceline", "run", *where, *asked.options, *options)
        words += ["--record", str(record), "--", asked.script, *asked.args]
        return words if self.overlay is None else self.overlay.command(changes, words)


def _on_first_host(where: list[str], ranks: int) -> list[str]:
    """Return the options with only the first host and some ranks on it, if they name hosts."""
    found = list(where)
    for at, word in enumerate(where):
        if word == "-H":
            found[at + 1] = where[at + 1].split(",")[0].partition(":")[0] + f":{ranks}"
    return found
