"""Hosts that are Linux namespaces of this machine (tests/bed), with links that tc limits."""

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))
import flood  # noqa: F401  for strangers.py
from common import BIN, SCRIPTS

import bed

CONGESTION = "net.ipv4.tcp_congestion_control"


def require(missing: list[str]) -> None:
    """Exit with a hint if packages are missing."""
    if missing:
        sys.exit(f"this needs {', '.join(missing)}. HINT: make test-packages, and run as root")


@contextlib.contextmanager
def open_hosts(count: int) -> Iterator[bed.Hosts]:
    """Yield the hosts host0, from which commands are started, and host1 to host``count``."""
    require(bed.missing())
    with contextlib.closing(bed.Hosts(count)) as hosts:
        yield hosts


def limit_link(hosts: bed.Hosts, name: str, mbit: int, burst: str, latency: str) -> None:
    """Limit what a host sends, in Mbit/s."""
    hosts.run(name, "tc", "qdisc", "del", "dev", "eth0", "root", check=False)
    shape = ["tc", "qdisc", "add", "dev", "eth0", "root", "tbf", "rate", f"{mbit}mbit"]
    hosts.run(name, *shape, "burst", burst, "latency", latency)


def limit_links(hosts: bed.Hosts, mbit: int) -> None:
    """Limit what each host sends, with a congestion control that goes by losses, as clusters have.

    BBR, where a machine has it, pauses for a fifth of a second every ten to measure the latency.
    """
    for name in hosts.names[1:]:
        cubic = ["sysctl", "-q", "-w", f"{CONGESTION}=cubic"]
        if hosts.run(name, *cubic, check=False).returncode:  # only what every user may choose
            hosts.run(name, "sysctl", "-q", "-w", f"{CONGESTION}=reno")
        limit_link(hosts, name, mbit, "128kb", "100ms")


def result_on_hosts(
    hosts: bed.Hosts, where: str, mbit: int, script: str, options: list[Any], *words: Any
) -> dict[str, Any]:
    """Run a script of ``benchmarks/scripts`` on hosts; return the JSON that it writes.

    Args:
        hosts: The hosts.
        where: Hosts and their ranks, as for ``paceline run -H``.
        mbit: Rate of the links, which interfaces limited by tc don't report.
        script: Path below ``benchmarks/scripts``. Its first argument is the file that it writes.
        options: Further options of ``paceline run``.
        *words: Further arguments of the script.
    """
    folder = hosts.new_folder()
    shutil.copy(SCRIPTS / script, folder)
    command = [BIN / "paceline", "run", "--fresh", "-H", where, *link_option(mbit), *options]
    arguments = [Path(script).name, folder / "found.json", *words]
    hosts.run("host0", *command, *arguments, cwd=folder, timeout=1800)
    return dict(json.loads((folder / "found.json").read_text()))


def link_option(mbit: int) -> list[str]:
    """Return the option of ``paceline run`` that tells ranks the rate of links limited by tc."""
    return ["--env", f"PACELINE_LINK_MBIT={mbit}"]
