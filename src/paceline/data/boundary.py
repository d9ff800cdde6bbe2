"""Read no file outside of a dataset's folder.

The author of a dataset chooses its links, the files that its arrays refer to, and the paths in its
tables. Each could lead to a file of the user, whose content would then be in the packed dataset.
"""

import os
from pathlib import Path

from ..security.text import printable


class Boundary:
    """The folder in which all files of a dataset have to lie.

    It is the folder that the user named, or the one of the named file, after links in that path.
    Of the folder of a named file, hidden files and folders are excluded: it may be a home folder.

    Args:
        path: File or folder that the user named.
        follow_links: Whether files outside of the folder are read as well.
    """

    def __init__(self, path: str | os.PathLike[str], follow_links: bool = False) -> None:
        self.follow_links = follow_links
        self.path = Path(path).resolve()
        self._with_hidden = self.path.is_dir()
        self.folder = self.path if self._with_hidden else self.path.parent

    def contains(self, path: str | os.PathLike[str]) -> bool:
        """Return whether a path may be read, after all links in it."""
        real = Path(os.path.realpath(path))
        if self.follow_links or real == self.path:
            return True
        if not real.is_relative_to(self.folder):
            return False
        parts = real.relative_to(self.folder).parts
        return self._with_hidden or not any(part.startswith(".") for part in parts)

    def check(self, path: str | os.PathLike[str], referrer: str) -> None:
        """Check that a path may be read.

        Args:
            referrer: What refers to the path, for the error message.

        Raises:
            ValueError: It is outside of the folder.
        """
        if self.contains(path):
            return
        real = os.path.realpath(path)
        where = f"{referrer} refers to {real}, which is no file of the dataset in {self.folder}"
        raise ValueError(
            printable(f"{where}. HINT: --follow-links (follow_links=True in Python)")
            + ", if you trust the author of the dataset"
        )
