"""Hosts of an elastic job, from the script of ``--host-discovery-script``."""

import subprocess

from ....cluster.schedulers.hostfile import Host, parse_hosts
from ....security.processes import program_command

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
        raise ValueError(
            f"{name} can't be started: {error.strerror}. HINT: chmod +x {script}"
        ) from None
    except subprocess.TimeoutExpired:
        raise ValueError(
            f"{name} did not end within {MAX_SECONDS:g} s. HINT: it prints the hosts once, and ends"
        ) from None
    lines = ended.stdout[:MAX_OUTPUT_BYTES].decode(errors="replace").split()
    if ended.returncode or not lines:
        what = f"ended with exit code {ended.returncode}" if ended.returncode else "named no hosts"
        raise ValueError(f"{name} {what}. HINT: it prints one host a line: host1:4")
    return parse_hosts(",".join(lines))
