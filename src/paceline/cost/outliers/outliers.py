"""Find the outliers of a machine: hosts, links, versions and limits that differ or are too low."""

from ..machine.machine_file import Machine
from .host_differences import host_differences
from .outlier import Outlier as Outlier
from .slow_hosts import find_slow_hosts
from .slow_links import find_slow_links


def find_outliers(machine: Machine) -> list[Outlier]:
    """Return all outliers: facts first, then slow hosts and links, the slowest first."""
    speeds = [*find_slow_hosts(machine), *find_slow_links(machine)]
    return [*host_differences(machine), *sorted(speeds, key=lambda one: -one.by)]
