"""Find the outliers of a machine: hosts, links, versions and limits that differ or are too low."""

from ..machine.machine_file import Machine
from .host_differences import facts
from .outlier import Odd as Odd
from .slow_hosts import hosts
from .slow_links import links


def odd(machine: Machine) -> list[Odd]:
    """Return all outliers: facts first, then slow hosts and links, the slowest first."""
    speeds = [*hosts(machine), *links(machine)]
    return [*facts(machine), *sorted(speeds, key=lambda one: -one.by)]
