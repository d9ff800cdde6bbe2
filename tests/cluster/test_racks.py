"""The rack of a host, from the user's setting or from Slurm."""

import pytest

from paceline.cluster.topology.racks import rack_of, rack_or_unknown, spread_over_switches


def test_rack_from_user_setting():
    said = {"PACELINE_RACKS": "n[01-02],m1 n[03-04]", "SLURM_TOPOLOGY_ADDR": "s0.s1.n03"}
    assert rack_of("n01", said) == rack_of("m1", said) == "n[01-02],m1"
    assert rack_of("n03.cluster.org", said) == "n[03-04]"
    with pytest.raises(
        ValueError, match=r"does not contain n05. HINT: list every node in one rack"
    ):
        rack_of("n05", said)
    with pytest.raises(ValueError, match=r"n\[1"):
        rack_of("n1", {"PACELINE_RACKS": "n[1"})


def test_rack_from_slurm_topology():
    assert rack_of("n03", {"SLURM_TOPOLOGY_ADDR": "s0.s1.n03"}) == "s0.s1"
    assert rack_of("n03", {"SLURM_TOPOLOGY_ADDR": "n03"}) == ""  # no topology plugin
    assert rack_of("n03", {"SLURM_TOPOLOGY_ADDR": "s0.s1.n01"}) == ""  # inherited from another host
    assert rack_of("n03", {}) == ""


def test_hosts_at_several_leaf_switches_are_named():
    racks = {"n1": "s0.s1", "n2": "s0.s1", "n3": "s0.s2"}
    said = spread_over_switches(racks)
    assert said.startswith("the nodes are at 2 leaf switches (s1: n1 n2; s2: n3). HINT: paceline")
    racks = {f"n{number}": f"n[{number // 20}]" for number in range(200)}
    said = spread_over_switches(racks)
    assert "10 leaf switches (n[0]: n0 n1 n2 n3 n4 n5 n6 n7 and 12 more; n[1]: " in said
    assert "; 2 more). HINT" in said


def test_one_or_unknown_leaf_switch_is_not_reported():
    assert spread_over_switches({"n1": "s0.s1", "n2": "s0.s1"}) == ""
    assert spread_over_switches({"n1": "s0.s1", "n2": ""}) == ""
    assert spread_over_switches({"n1": "", "n2": ""}) == ""
    assert rack_or_unknown("n5", {"PACELINE_RACKS": "n[1-4]"}) == ""
