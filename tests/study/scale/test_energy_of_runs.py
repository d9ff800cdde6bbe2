"""The energy of a run is that of its measured steps, on its cores."""

from types import SimpleNamespace

import pytest

from paceline.analyze.records.state_timeline import Window
from paceline.analyze.scaling.study_model import HostPlacement, RunFigures, Spread, StateSeconds
from paceline.cluster.energy import EnergyUse
from paceline.study.scale import run_setup


class Meter:
    """A meter that reads 1 J a second for each of the cores that are charged."""

    def __init__(self):
        self.notes = ["memory is not readable"]

    def charged(self, threads):
        self.threads = threads
        times, joules = [0.0, 100.0], [0.0, 100.0 * len(threads or ())]
        node = EnergyUse("node", joules[-1], True, "how", "", times, joules)
        part = EnergyUse("processors", 7.0, True, "how", "node", times, joules)
        return [node, part]


@pytest.fixture
def figures(monkeypatch):
    def find_window(records, steps):
        assert steps == (5, 9)
        return Window(int(20e9), int(30e9))

    monkeypatch.setattr(run_setup, "find_window", find_window)
    placement = [HostPlacement("a", "0", "0-1"), HostPlacement("a", "1", "2-3")]
    seconds = StateSeconds(useful=0.1)
    return RunFigures(5, 4, True, [0.1] * 4, 8, 8, seconds, {}, Spread(), placement=placement)


def test_only_the_measured_steps_and_the_cores_of_the_ranks_are_charged(figures):
    meter = Meter()
    readings, notes = run_setup.measured_energy(meter, SimpleNamespace(records=[]), figures, 1)
    assert meter.threads == [0, 1, 2, 3]
    (one,) = readings  # the processors are a part of the node
    assert (one.source, one.is_estimate) == ("node", True)
    assert one.joules == pytest.approx(40)
    assert notes == meter.notes


def test_the_energy_of_several_nodes_is_not_measured(figures):
    found = run_setup.measured_energy(Meter(), SimpleNamespace(records=[]), figures, 2)
    assert found == ([], [run_setup.SEVERAL_NODES])
