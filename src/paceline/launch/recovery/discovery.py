"""Hosts of an elastic job, from the program of ``--host-discovery-script``."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from ...cluster.schedulers.hostfile import Host, parse_hosts
from ...security.processes import program_command
from ...security.text import printable

INTERVAL_S = 5.0  # between two runs of the script
MAX_SECONDS = 60.0
MAX_OUTPUT_BYTES = 1 << 20


def discover_hosts(script: str) -> list[Host]:
    """Return the hosts that the script prints, one a line: "host" or "host:slots".

    Raises:
        ValueError: The script fails, takes too long, or names no hosts.
    """
    name = f"--host-discovery-script {script}"
    try:
        ended = subprocess.run(
            program_command(script), stdout=subprocess.PIPE, timeout=MAX_SECONDS, check=False
        )
    except OSError as error:
        is_here = isinstance(error, FileNotFoundError) and Path(script).exists()
        hint = f"./{script}" if is_here else f"chmod +x {script}"
        raise ValueError(f"{name} can't be started: {error.strerror}. HINT: {hint}") from None
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{name} did not end within {MAX_SECONDS:g} s. HINT: it prints the hosts once, and ends"
        ) from None
    lines = ended.stdout[:MAX_OUTPUT_BYTES].decode(errors="replace").split()
    if ended.returncode or not lines:
        what = f"ended with exit code {ended.returncode}" if ended.returncode else "named no hosts"
        raise ValueError(f"{name} {what}. HINT: it prints one host a line: host1:4")
    try:
        return parse_hosts(",".join(lines))
    except ValueError as mistake:
        raise ValueError(f"{name} printed {str(mistake).removeprefix('-H ')}") from None


class HostDiscovery:
    """Runs the script again and again, in a thread, for hosts that the job does not have yet.

    Args:
        script: The script.
        known: Names of the job's hosts.
        add: Called with each host that the script names for the first time.
    """

    def __init__(self, script: str, known: Iterable[str], add: Callable[[Host], None]) -> None:
        self._script, self._known, self._add = script, set(known), add
        self._closing = threading.Event()
        self._reported = ""
        threading.Thread(target=self._watch, daemon=True).start()

    def close(self) -> None:
        """Add no more hosts. A script that runs is ended with the other children of the job."""
        self._closing.set()

    def _watch(self) -> None:
        while not self._closing.wait(INTERVAL_S):
            try:
                found = discover_hosts(self._script)
            except ValueError as mistake:
                self._report(str(mistake))
                continue
            for host in found:
                if host.name not in self._known and not self._closing.is_set():
                    self._known.add(host.name)
                    self._add(host)

    def _report(self, mistake: str) -> None:
        """Print why no hosts are known; once for each reason."""
        if mistake != self._reported and not self._closing.is_set():
            self._reported = mistake
            sys.stderr.write(f"paceline: warning: {printable(mistake)}; the hosts stay the same\n")
