"""Whether all ranks see the same folder: rank 0 writes a token, and each rank looks for it.

A path like /tmp/run is a different folder on each node. Ranks would then write shards that no other
node sees, and the checkpoint would lack them.
"""

import contextlib
import os
import secrets
import time
from pathlib import Path

from ..plurals import named_ranks
from .files import open_regular

SEEN_TIMEOUT_S = 5.0  # for file systems that show new files to other nodes late
_POLL_S = 0.05


def write_token(directory: Path) -> int:
    """Write a token with a random name, and return the number in its name.

    Raises:
        OSError: The token can't be written.
    """
    number = secrets.randbits(62)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    os.close(open_regular(_token(directory, number), flags, follow_links=False, mode=0o666))
    return number


def sees_token(directory: Path, number: int) -> bool:
    """Return whether the token is in this rank's folder; wait for it up to SEEN_TIMEOUT_S."""
    deadline = time.monotonic() + SEEN_TIMEOUT_S
    while not _is_listed(_token(directory, number)):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _is_listed(path: Path) -> bool:
    try:
        # NFS may answer the look-up of a name from its cache; for a listing it asks the server.
        return path.name in os.listdir(path.parent)
    except OSError:
        return False


def remove_token(directory: Path, number: int) -> None:
    """Remove the token. Ignore errors: ``remove_unfinished`` removes it at the next start."""
    with contextlib.suppress(OSError):
        _token(directory, number).unlink()


def describe_ranks(nodes: list[str], ranks: list[int]) -> str:
    """Return ranks with their nodes: "ranks 2-3 (node1), rank 4 (node2)".

    Args:
        nodes: Node of each rank.
        ranks: The ranks.
    """
    by_node: dict[str, list[int]] = {}
    for rank in ranks:
        by_node.setdefault(nodes[rank], []).append(rank)
    return ", ".join(f"{named_ranks(members)} ({node})" for node, members in by_node.items())


def _token(directory: Path, number: int) -> Path:
    return directory / f".step-token-{number:016x}.tmp"
