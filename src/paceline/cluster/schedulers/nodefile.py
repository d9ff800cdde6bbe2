"""Reader of schedulers' node files: one host per line, repeated for each of its slots."""

from collections import Counter
from pathlib import Path

from .env_numbers import Environment


def read_nodefile(environment: Environment, variable: str) -> dict[str, int]:
    """Return the number of lines of each host, in the order of the file.

    ``variable``: environment variable with the path of the file.

    Raises:
        ValueError: The file cannot be read or names no host.
    """
    path = environment[variable]
    try:
        lines = Path(path).read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(
            f"the hosts of this allocation can't be read from {variable}={path}: {why}. "
            "HINT: if the allocation has ended, unset its environment variables, or name hosts "
            "with -H"
        ) from None
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise ValueError(
            f"{variable}={path} names no host. HINT: check whether the allocation has ended"
        )
    return count_hosts(names)


def count_hosts(names: list[str]) -> dict[str, int]:
    """Count each name, in the order of first mention."""
    return dict(Counter(names))
