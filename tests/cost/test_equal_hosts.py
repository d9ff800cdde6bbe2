"""Equal hosts are rarely called slow, and slow ones are found."""

import numpy as np
import pytest

from paceline.cost.machine.machine_file import Figure
from paceline.cost.machine.named_figures import NamedFigure
from paceline.cost.outliers import FALSE_SLOW_LEVEL, differ, find_slower


class Hosts:
    """Hosts of a machine: five repetitions on each, which differ less than the hosts do."""

    def __init__(self, seed, between=0.025, within=0.01):
        self.rng, self.between, self.within = np.random.default_rng(seed), between, within

    def measure(self, count, slow=0.0):
        members = []
        for i in range(count):
            level = (1 + self.rng.normal(0, self.between)) * (1 - slow * (i == 0))
            values = level + self.within * self.rng.standard_t(3, 5)
            low, middle, high = np.percentile(values, [25, 50, 75])
            figure = Figure(middle, low, high, 5, "B/s")
            members.append(NamedFigure("rate", (f"host{i}",), "", "", figure, True, 0.03))
        return members

    def named(self, count, slow=0.0):
        members = self.measure(count, slow)
        found = [differ(members)] if count == 2 else find_slower(members)
        return [one.named.hosts[0] for one in found if one is not None]


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 3, 4, 8, 64])
def test_equal_hosts_are_rarely_slow(count):
    hosts, cases = Hosts(1), 300
    wrong = sum(bool(hosts.named(count)) for _ in range(cases))
    assert wrong / cases <= FALSE_SLOW_LEVEL + 2 * (0.05 * 0.95 / cases) ** 0.5


@pytest.mark.parametrize("count", [2, 3, 4, 8, 64])
def test_slow_host_is_found(count):
    hosts, cases = Hosts(2), 100
    assert sum("host0" in hosts.named(count, slow=0.25) for _ in range(cases)) >= 0.9 * cases
