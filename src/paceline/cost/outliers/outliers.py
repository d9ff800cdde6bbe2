"""Find the outliers of a machine: hosts, links, versions and limits that differ or are too low."""

from ..machine.machine_file import Machine
from .host_differences import host_differences
from .outlier import Outlier as Outlier
from .slow_hosts import slow_hosts
from .slow_links import slow_links


def find_outliers(machine: Machine) -> list[Outlier]:
    """Return all outliers: facts first, then slow hosts and links, the slowest first."""
    speeds = [*slow_hosts(machine), *slow_links(machine)]
    return [*host_differences(machine), *sorted(speeds, key=lambda one: -one.by)]
