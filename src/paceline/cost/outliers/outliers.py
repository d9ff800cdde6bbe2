"""What is odd in a machine: the host, the link, the version, the limit that differs or is low."""

from ..machine.machine_file import Machine
from .host_differences import facts
from .outlier import Odd as Odd
from .slow_hosts import hosts
from .slow_links import links


def odd(machine: Machine) -> list[Odd]:
    """Everything, facts first, then what is slow, the slowest first. Empty: nothing is odd."""
    speeds = [*hosts(machine), *links(machine)]
    return [*facts(machine), *sorted(speeds, key=lambda one: -one.by)]
