"""The rack of a host, from the user's setting or from Slurm."""

import pytest

from paceline.cluster.topology.racks import rack_of


def test_rack_from_user_setting():
    said = {"PACELINE_RACKS": "n[01-02],m1 n[03-04]", "SLURM_TOPOLOGY_ADDR": "s0.s1.n03"}
    assert rack_of("n01", said) == rack_of("m1", said) == "n[01-02],m1"
    assert rack_of("n03.cluster.org", said) == "n[03-04]"
    with pytest.raises(ValueError, match=r"does not have n05. HINT: every host in one rack"):
        rack_of("n05", said)
    with pytest.raises(ValueError, match=r"n\[1"):
        rack_of("n1", {"PACELINE_RACKS": "n[1"})


def test_rack_from_slurm_topology():
    assert rack_of("n03", {"SLURM_TOPOLOGY_ADDR": "s0.s1.n03"}) == "s0.s1"
    assert rack_of("n03", {"SLURM_TOPOLOGY_ADDR": "n03"}) == ""  # no topology plugin
    assert rack_of("n03", {"SLURM_TOPOLOGY_ADDR": "s0.s1.n01"}) == ""  # inherited from another host
    assert rack_of("n03", {}) == ""
