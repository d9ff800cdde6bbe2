"""Detect that the kernel killed a rank because the host or its control group ran out of memory."""

from pathlib import Path

from ...cluster.topology.local_resources import memory_limits


class OomKillCounter:
    """Count the kernel's out-of-memory kills on this host."""

    def __init__(self) -> None:
        self._kills = _kills()

    def why(self, most: int) -> str:
        """Explain the end of a process that was killed with SIGKILL, given its peak memory in
        bytes; "" if memory was not the reason.
        """
        before, self._kills = self._kills, _kills()
        if self._kills <= before:
            return ""
        told = f"was killed by the kernel: out of memory. It had {_gib(most)} at most"
        limits = memory_limits()
        if limits:
            allowed = min(limit for limit, _ in limits)
            told += f"; its control group allows {_gib(allowed)} for all ranks here"
        return f"{told}. HINT: fewer ranks on a host, a smaller batch, or more memory for the job"


def _kills() -> int:
    """Return the number of out-of-memory kills on this host since it was booted."""
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
