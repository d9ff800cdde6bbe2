"""Commits of an elastic training that outlive its ranks.

Horovod's ranks survive the loss of another one, and keep commits in their memory. Here all ranks
start again, so commits are written to the job's folder in the memory of each node, which lasts
until the job ends. Only this user can access that folder. A commit is one file, written by the
first rank of the node, complete or absent:

    JOB-FOLDER/elastic/commit-RUN-ATTEMPT-NUMBER.pt

RUN numbers the calls of functions that ``hvd.elastic.run`` decorates: a script may train several
models one after the other, and each continues from its own commits.
"""

import os
import re
from pathlib import Path
from typing import Any

from .....plurals import counted
from .....record.ring.launcher_messages import notify
from .....security.files import error_reason
from .....security.folders import Folder
from ..functions import allgather_object, broadcast_tree
from ..mpi_ops import rank
from ..objects import load_data, write_data

_NAME = re.compile(r"commit-(\d{1,6})-(\d{1,6})-(\d{1,12})\.pt")
SUBFOLDER = "elastic"


class CommitStore:
    """The commits of a job, on this node.

    Args:
        folder: The folder of commits.
        run: Number of this training in the script, the same in all attempts.
        attempt: Number of this attempt of the job.
        writes: Whether this rank writes the commits of its node.

    Attributes:
        number: Number of the last commit.
    """

    def __init__(self, folder: Folder, run: int, attempt: int, writes: bool) -> None:
        self._folder, self._run, self._attempt, self._writes = folder, run, attempt, writes
        self.number = 0
        self._failed = False

    @classmethod
    def of_job(cls, run: int) -> "CommitStore | None":
        """Return the store of this job's training ``run``; None if its ranks are not restarted."""
        place, restarts = os.environ.get("PACELINE_RECORD"), _number("TORCHELASTIC_MAX_RESTARTS")
        if place is None or not restarts or "PACELINE_STORE_PORT" not in os.environ:
            return None
        with Folder.open(Path(place)) as job:
            folder = job.subfolder(SUBFOLDER, make=True)
        attempt = _number("TORCHELASTIC_RESTART_COUNT")
        return cls(folder, run, attempt, os.environ.get("LOCAL_RANK") == "0")

    def newest(self) -> Any:
        """Return the newest commit of all nodes on every rank; None without one. Collective.

        Raises:
            ValueError: The commit is damaged.
        """
        found = self._find()
        own = max(found) if found and self._writes else None
        newest = allgather_object(own, name="elastic.commits")
        candidates = [(one, -number) for number, one in enumerate(newest) if one is not None]
        if not candidates:
            return None
        chosen, source = max(candidates)
        root = -source
        self.number = chosen[1]
        problem, tree = "", None
        if rank() == root:
            try:
                tree = self._read(found[chosen])
            except (OSError, ValueError) as error:
                problem = f"the last commit can't be read: {error_reason(error)}"
        if first := next(filter(None, allgather_object(problem, name="elastic.problem")), ""):
            raise ValueError(f"{first}. HINT: start the job again; it begins from the first epoch")
        if rank() == 0:
            notify(
                f"paceline: the training continues from commit {self.number} of attempt "
                f"{chosen[0] + 1}\n"
            )
        return broadcast_tree(tree, root, "elastic.commit")

    def write(self, tree: Any) -> None:
        """Write a commit, and remove older ones. A failure is printed; the older one remains."""
        self.number += 1
        if not self._writes:
            return
        folder, name = self._folder, self._name(self._attempt, self.number)
        try:
            with folder.replacing(name) as new, open(new.fd, "wb", closefd=False) as file:
                write_data(tree, "the state", file)
            for other in self._find().values():
                if other != name:
                    folder.remove(other)
        except (OSError, RuntimeError, ValueError) as error:
            if not self._failed:
                notify(
                    f"paceline: commit {self.number} can't be written to {folder.path} "
                    f"({error_reason(error)}): a restart continues from the last one that was "
                    f"written ({counted(len(self._find()), 'commit')})\n"
                )
            self._failed = True

    def _name(self, attempt: int, number: int) -> str:
        return f"commit-{self._run}-{attempt}-{number}.pt"

    def _find(self) -> dict[tuple[int, int], str]:
        """Return the names of this training's commits on this node, by attempt and number."""
        matches = {name: _NAME.fullmatch(name) for name in self._folder.names()}
        return {
            (int(m[2]), int(m[3])): name
            for name, m in matches.items()
            if m is not None and int(m[1]) == self._run
        }

    def _read(self, name: str) -> Any:
        with open(self._folder.open_file(name), "rb") as file:
            return load_data(file, "the last commit")


def _number(variable: str) -> int:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else 0
