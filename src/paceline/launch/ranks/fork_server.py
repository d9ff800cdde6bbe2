"""The rank server: the process from which a host's ranks are forked, after one import of torch.

The rank server has one thread and only forks, waits and cleans up. The agent controls it over a
socket pair. When the agent's end closes for any reason, including ``kill -9``, the rank server
kills all ranks and their remaining descendants, clears the job folder, and exits, so that no
process is orphaned. The rank server is the subreaper of the ranks' descendants.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from ...record.ring.memory_sampler import memory_limits
from ...security import overlay
from .. import job_folder
from ..linux_processes import SUBREAPER, prctl
from .process_groups import RankGroups, end_children

MESSAGE_BYTES = 4096  # a rank's environment comes in a file, which has no such limit


# Detection of ranks killed by the kernel because the host or control group is out of memory.


class OomKillCounter:
    """Counter of the kernel's out-of-memory kills on this host."""

    def __init__(self) -> None:
        self._kills = _kills()

    def why(self, peak_bytes: int) -> str:
        """Return an explanation why a process was killed with SIGKILL, or "" if the kernel has not
        killed a process for lack of memory since the previous call.

        Args:
            peak_bytes: Peak memory of the process, in bytes.
        """
        before, self._kills = self._kills, _kills()
        if self._kills <= before:
            return ""
        reason = f"was killed by the kernel: out of memory. It had {_gib(peak_bytes)} at most"
        limits = memory_limits()
        if limits:
            allowed = min(limit for limit, _ in limits)
            reason += f"; its control group allows {_gib(allowed)} for all ranks of this node"
        return (
            f"{reason}. HINT: use fewer ranks per node or a smaller batch, or request more memory"
        )


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


@dataclass(frozen=True)
class RankStart:
    """Parameters for starting a rank.

    Attributes:
        environment: All environment variables of the rank.
        cpus: Hardware threads to which the rank is bound. Empty: not bound.
        memory: NUMA node from which memory is preferably allocated, or None.
        pipes: File descriptors of the stdout, stderr and status pipes.
    """

    environment: dict[str, str]
    cpus: Sequence[int]
    memory: int | None
    pipes: tuple[int, int, int]


def serve(channel: socket.socket, folder: Path) -> RankStart:
    """Serve the agent until its end closes. Returns only in a forked rank, with its RankStart."""
    prctl(SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the agent handles Ctrl-C
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    wake_out, wake_in = os.pipe()
    os.set_blocking(wake_in, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_in, warn_on_full_buffer=False)
    ranks, memory = RankGroups(), OomKillCounter()
    is_covered = False
    changes: Path | None = None  # of covered folders, if this process must remove them
    _send(channel, {"ready": True})
    while True:
        ready, _, _ = select.select([channel.fileno(), wake_out], [], [])
        if wake_out in ready:
            os.read(wake_out, 4096)
            _reap(channel, ranks, memory)
        if channel.fileno() not in ready:
            continue
        try:
            data, fds, _, _ = socket.recv_fds(channel, MESSAGE_BYTES, 4)
        except ConnectionError:
            data, fds = b"", []
        message: dict[str, Any] = json.loads(data) if data else {"end": 0.0, "orphan": True}
        if "end" in message:
            _end(folder, float(message["end"]), "orphan" in message, changes)
        if "signal" in message:
            ranks.signal(message["signal"], message["kind"], message["group"])
            continue
        start = _read_start(fds)
        request = start.environment.pop(overlay.VARIABLE, "")
        if request and not is_covered:
            changes = _cover(request, start.environment["GROUP_RANK"], folder)
            is_covered = True
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for fd in (wake_out, wake_in):
                os.close(fd)
            channel.close()
            return start
        ranks.add(pid)
        for fd in start.pipes:
            os.close(fd)
        _send(channel, {"pid": pid})


def send_start(channel: socket.socket, start: RankStart) -> None:
    """Ask the rank server to start a rank, and close this process's copies of the rank's pipes.

    The parameters travel in an anonymous file: an environment may be larger than the kernel's
    limit for a message.
    """
    parameters = {"environment": start.environment, "cpus": start.cpus, "memory": start.memory}
    try:
        with open(os.memfd_create("paceline-rank"), "wb+") as file:
            file.write(json.dumps(parameters).encode())
            file.flush()
            socket.send_fds(channel, [b'{"start": true}'], [*start.pipes, file.fileno()])
    finally:
        for pipe in start.pipes:
            os.close(pipe)


def _read_start(fds: list[int]) -> RankStart:
    *pipes, parameters = fds
    with open(parameters, "rb") as file:
        file.seek(0)
        found = json.load(file)
    return RankStart(
        found["environment"], found["cpus"], found["memory"], (pipes[0], pipes[1], pipes[2])
    )


def _reap(channel: socket.socket, ranks: RankGroups, memory: OomKillCounter) -> None:
    """Report each rank that ended, and whether memory ran out; reap other processes."""
    for pid, code, peak in ranks.take_exits():
        why = memory.why(peak) if code == -signal.SIGKILL else ""
        _send(channel, {"died": pid, "status": code, "at": time.monotonic(), "why": why})
    ranks.reap_others()


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the agent has ended; the next receive detects it
        channel.send(json.dumps(message).encode())


def _cover(request: str, node: str, folder: Path) -> Path | None:
    """Cover folders of the user for all ranks of this node; return what is to be removed."""
    try:
        return overlay.cover(request, node, folder)
    except OSError as error:
        sys.stderr.write(
            f"paceline: {socket.gethostname()}: the folders of the script cannot be covered "
            f"({error}): a rank that changes a file in them is stopped\n"
        )
        sys.stderr.flush()
        return None


def _end(folder: Path, grace: float, orphan: bool, changes: Path | None) -> NoReturn:
    """Kill all remaining processes, clean up, and exit."""
    signal.set_wakeup_fd(-1)
    end_children(grace)  # the parent adopts those that do not end, and prints them
    job_folder.clear(folder, orphan)
    overlay.remove_changes(changes)
    os._exit(0)
