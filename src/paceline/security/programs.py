"""Start other programs, never from the working directory.

An empty or relative entry of PATH means the working directory: in ``/tmp``, a file ``srun`` of
another user would be executed. Such entries are ignored.
"""

import errno
import os
import shutil


def find_program(name: str) -> str | None:
    """Return the path of a program on PATH, or None. A name with ``/`` is a path."""
    given = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return shutil.which(name, path=os.pathsep.join(filter(os.path.isabs, given)))


def program_command(name: str, *words: str) -> list[str]:
    """Return the command that starts a program on PATH.

    Raises:
        FileNotFoundError: It is not on PATH.
    """
    found = find_program(name)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
    return [found, *words]
