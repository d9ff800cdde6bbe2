"""Detection of ranks killed by the kernel because the host or control group is out of memory."""

from pathlib import Path

from ...cluster.topology.local_resources import memory_limits


class OomKillCounter:
    """Counter of the kernel's out-of-memory kills on this host."""

    def __init__(self) -> None:
        self._kills = _kills()

    def why(self, most: int) -> str:
        """Return an explanation why a process was killed with SIGKILL, or "" if the kernel has not
        killed a process for lack of memory since the previous call.

        Args:
            most: Peak memory of the process, in bytes.
        """
        before, self._kills = self._kills, _kills()
        if self._kills <= before:
            return ""
        told = f"was killed by the kernel: out of memory. It had {_gib(most)} at most"
        limits = memory_limits()
        if limits:
            allowed = min(limit for limit, _ in limits)
            told += f"; its control group allows {_gib(allowed)} for all ranks of this node"
        return f"{told}. HINT: use fewer ranks per node or a smaller batch, or request more memory"


def _kills() -> int:
    """Return the number of out-of-memory kills on this host since boot."""
    try:
        for line in Path("/proc/vmstat").read_text().splitlines():
            name, _, count = line.partition(" ")
            if name == "oom_kill":
                return int(count)
    except (OSError, ValueError):
        pass
    return 0


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
