"""The ranks along named axes: places, groups of ranks, placement on nodes, and messages."""

import pytest

from paceline.cost.layout import Layout
from paceline.parallel.mesh import Mesh


def arranged(rank, nodes, text):
    mesh = Mesh(rank, len(nodes))
    said = mesh.arrange(Layout.parse(text), list(nodes))
    return mesh, said


def test_without_a_layout_every_rank_is_a_data_rank():
    mesh = Mesh(2, 4)
    assert (mesh.data_rank, mesh.data_size, mesh.model_size) == (2, 4, 1)
    assert mesh.sharing_samples == [2]
    assert mesh.first_of_data_ranks == [0, 1, 2, 3]
    assert mesh.name() == "rank 2"
    assert mesh.header() == {"axes": [("data", 4)], "place": [2]}


def test_axes_that_exchange_most_are_neighbours():
    mesh, said = arranged(5, "aaaabbbb", "pp2 x dp2 x tp2")
    assert not said
    assert mesh.place == {"stage": 1, "data": 0, "tensor": 1}
    assert mesh.name() == "rank 5 (data 0, stage 1, tensor 1)"
    assert mesh.ranks_along(("tensor",)) == [4, 5]
    assert mesh.ranks_along(("data",)) == [5, 7]
    assert mesh.ranks_along(("stage",)) == [1, 5]
    assert mesh.sharing_samples == [0, 1, 4, 5]
    assert mesh.first_of_data_ranks == [0, 2]


def test_ranks_of_a_node_need_not_follow_each_other():
    mesh, said = arranged(1, "abababab", "tp4")
    assert not said
    assert mesh.sharing_samples == [1, 3, 5, 7]
    assert (mesh.data_rank, mesh.place["tensor"]) == (1, 0)


def test_every_rank_has_its_own_place():
    places = {arranged(rank, "abcabcab", "d2 x dp2 x tp2")[0].name() for rank in range(8)}
    assert len({text.partition(" (")[2] for text in places}) == 8


def test_group_on_several_nodes_is_reported():
    _, said = arranged(0, "aabbcc", "tp3")
    assert said == [
        "the ranks of the axis tensor exchange in each layer, and ranks 0-2 are on several nodes. "
        "HINT: an extent that divides the 2 ranks of a node"
    ]
    assert not arranged(0, "aabb", "pp2")[1]  # stages exchange little
    (line,) = arranged(0, "abcd", "tp4")[1]
    assert "HINT: several ranks on each node, or a layout without the axis tensor" in line


def test_all_models_have_the_same_axes():
    mesh, _ = arranged(0, "aaaa", "tp2")
    assert mesh.arrange(Layout.parse("dp2 x tp2 x zero3"), list("aaaa")) == []
    with pytest.raises(ValueError, match=r"data 4 instead of data 2 x tensor 2. HINT: the same dp"):
        mesh.arrange(Layout.parse("data"), list("aaaa"))
    mesh, _ = arranged(0, "aaaa", "data")
    with pytest.raises(ValueError, match="data 2 x tensor 2 instead of data 4"):
        mesh.arrange(Layout.parse("tp2"), list("aaaa"))


def test_layout_that_the_ranks_do_not_fit():
    with pytest.raises(ValueError, match="a multiple of 4 ranks, and the job has 6"):
        arranged(0, "aaaaaa", "tp4")
