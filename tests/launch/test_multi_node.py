"""What the launcher of a job on several hosts prints about its layout."""

from types import SimpleNamespace

import pytest

from paceline.launch.multi_node import _print_layout
from paceline.launch.remote.start_commands import TOOLS


def layout(capsys, racks):
    hosts = [SimpleNamespace(name=name, hello={"rack": rack}) for name, rack in racks.items()]
    _print_layout(hosts, [2] * len(hosts), [("ib0", "10.0.0.1")] * len(hosts), TOOLS["srun"])
    return capsys.readouterr().err


@pytest.mark.parametrize("racks", [{"n1": "s.s1", "n2": "s.s1"}, {"n1": "s.s1", "n2": ""}])
def test_layout_of_hosts_at_one_or_unknown_switches(capsys, monkeypatch, racks):
    monkeypatch.delenv("PACELINE_RACKS", raising=False)
    said = layout(capsys, racks)
    assert "4 ranks on 2 nodes over srun, network ib0 (n1: 0-1, n2: 2-3; " in said
    assert "switch" not in said


def test_layout_names_leaf_switches(capsys, monkeypatch):
    monkeypatch.delenv("PACELINE_RACKS", raising=False)
    said = layout(capsys, {"n1": "s.s1", "n2": "s.s2"})
    assert "paceline: the nodes are at 2 leaf switches (s1: n1; s2: n2). HINT" in said
    monkeypatch.setenv("PACELINE_RACKS", "n[1-2] n3")
    assert "switches" not in layout(capsys, {"n1": "", "n2": ""})
    monkeypatch.setenv("PACELINE_RACKS", "n1 n2")
    assert "2 leaf switches (n1: n1; n2: n2)" in layout(capsys, {"n1": "", "n2": ""})
