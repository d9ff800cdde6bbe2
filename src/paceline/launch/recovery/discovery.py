"""Hosts of an elastic job, from the program of ``--host-discovery-script``."""

import errno
import os
import selectors
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ...cluster.schedulers.hostfile import Host, parse_hosts
from ...security.processes import program_command
from ...security.text import printable

INTERVAL_S = 5.0  # between two runs of the script
SCRIPT_TIMEOUT_S = 60.0
MAX_OUTPUT_BYTES = 1 << 20


def discover_hosts(script: str) -> list[Host]:
    """Return the hosts that the script prints, one a line: "host" or "host:slots".

    Raises:
        ValueError: The script fails, takes too long, or names no hosts.
    """
    name = f"--host-discovery-script {script}"
    try:
        output, code = _run(script)
    except OSError as error:
        raise ValueError(f"{name} can't be started: {_why_not(script, error)}") from None
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{name} did not end within {SCRIPT_TIMEOUT_S:g} s. HINT: it prints the hosts once, "
            "and ends"
        ) from None
    if len(output) > MAX_OUTPUT_BYTES:
        raise ValueError(
            f"{name} printed more than {MAX_OUTPUT_BYTES >> 20} MiB. HINT: it prints the hosts "
            "once, one host a line"
        )
    lines = output.decode(errors="replace").split()
    if code or not lines:
        what = f"ended with exit code {code}" if code else "named no hosts"
        raise ValueError(f"{name} {what}. HINT: it prints one host a line: host1:4")
    try:
        return parse_hosts(",".join(lines))
    except ValueError as mistake:
        raise ValueError(f"{name} printed {str(mistake).removeprefix('-H ')}") from None


def _run(script: str) -> tuple[bytes, int]:
    """Return the output of the script and its exit code. More than MAX_OUTPUT_BYTES end it.

    Raises:
        OSError: It can't be started.
        subprocess.TimeoutExpired: It takes longer than SCRIPT_TIMEOUT_S.
    """
    until = time.monotonic() + SCRIPT_TIMEOUT_S
    started = subprocess.Popen(
        program_command(script), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    with started as process, selectors.DefaultSelector() as selector:
        assert process.stdout is not None
        selector.register(process.stdout, selectors.EVENT_READ)
        output = bytearray()
        try:
            while len(output) <= MAX_OUTPUT_BYTES:
                if not selector.select(max(until - time.monotonic(), 0.0)):
                    raise subprocess.TimeoutExpired(script, SCRIPT_TIMEOUT_S)
                data = os.read(process.stdout.fileno(), 1 << 16)
                if not data:
                    return bytes(output), process.wait(max(until - time.monotonic(), 0.0))
                output += data
            return bytes(output), 0
        finally:
            process.kill()


def _why_not(script: str, error: OSError) -> str:
    """Return why a script can't be started, and a hint."""
    first_line = "HINT: the first line of a script names its interpreter: #!/bin/sh"
    path = Path(script)
    if error.errno == errno.ENOEXEC:
        return f"{error.strerror}. {first_line}"
    if not path.exists():
        where = "" if "/" in script else ", on PATH or in the working directory"
        return f"there is no such file{where}. HINT: use the absolute path of the script"
    if path.is_dir():
        return "it is a directory. HINT: use the path of the script"
    if "/" not in script:
        return f"it is not on PATH. HINT: ./{script}"
    if not os.access(path, os.X_OK):
        return f"it is not executable. HINT: chmod +x {shlex.quote(script)}"
    return f"{error.strerror}. {first_line}"


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
