"""Files of a scheduler that name a host a line, once for each slot."""

from pathlib import Path

from .env_numbers import Environment


def read(environment: Environment, variable: str) -> dict[str, int]:
    """Lines of each host, in the file's order, of the file that the variable names."""
    path = environment[variable]
    try:
        lines = Path(path).read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ValueError(
            f"the hosts of this allocation can't be read from {variable}={path}: {why}. "
            "HINT: has the allocation ended? Outside of it, unset its variables or name hosts by -H"
        ) from None
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise ValueError(f"{variable}={path} names no host. HINT: has the allocation ended?")
    return tally(names)


def tally(names: list[str]) -> dict[str, int]:
    """How often each name comes, in the order of first mention."""
    counts: dict[str, int] = {}
    for name in names:
        counts[name] = counts.get(name, 0) + 1
    return counts
