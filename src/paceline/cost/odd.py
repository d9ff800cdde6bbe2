"""What is odd in a machine: the host, the link, the version, the limit that differs or is low."""

from .machine import Machine
from .odd_facts import facts
from .odd_hosts import hosts
from .odd_links import links
from .oddity import Odd as Odd


def odd(machine: Machine) -> list[Odd]:
    """Everything, facts first, then what is slow, the slowest first. Empty: nothing is odd."""
    speeds = [*hosts(machine), *links(machine)]
    return [*facts(machine), *sorted(speeds, key=lambda one: -one.by)]
