"""States of models of which ranks hold different parts: saved by owners, whole when merged."""

import copy
import re
from collections import deque

import numpy as np
import pytest
import thread_ranks
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from paceline.checkpoint.shard_copies import ShardDigests, name_copies
from paceline.checkpoint.sharded_tensor import PieceError, whole
from paceline.checkpoint.shared_state import merge_owned
from paceline.cost.layout import Layout
from paceline.parallel.mesh import Mesh
from paceline.parallel.strategy.distributed_model import DistributedModel, Part
from paceline.parallel.strategy.model_state import OwnedState, WholeModel
from paceline.world.restoring import load_part


class Rows(DistributedModel):
    """Rows of the weight on the tensor axis as plain tensors; the bias is on all ranks."""

    def __init__(self, module, mesh):
        super().__init__(module, DistributedModel(module))
        self.mesh = mesh

    def parted_axes(self, name):
        return frozenset({"tensor"} if name == "weight" else ())

    def part_of(self, name):
        at = self.mesh.place["tensor"]
        return Part((4, 3), (2 * at, 0), (2, 3)) if name == "weight" else None


def trained(value=1.0):
    torch.manual_seed(3)
    model = nn.Linear(3, 4)
    # the optimizer's order is not the model's
    optimizer = torch.optim.Adam([model.bias, model.weight], lr=0.1)
    model(torch.full((2, 3), value)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def divided(rank):
    """Return what one of four ranks (dp2 x tp2) holds of the trained model."""
    mesh = Mesh(rank, 4)
    mesh.arrange(Layout.parse("dp2 x tp2"), ["node"] * 4)
    model, optimizer = trained()
    owned = OwnedState(mesh, [])
    owned.note_optimizer(optimizer, model)
    before = WholeModel.of(model)
    rows = slice(2 * mesh.place["tensor"], 2 * mesh.place["tensor"] + 2)
    part = nn.Parameter(model.weight.data[rows].clone())
    state = optimizer.state.pop(model.weight)
    optimizer.state[part] = {k: v[rows].clone() if v.dim() else v for k, v in state.items()}
    optimizer.param_groups[0]["params"][1] = part
    model.weight = part
    owned.models = [Rows(model, mesh)]
    owned.note_model(owned.models[0], before)
    return owned, model, optimizer


def saved():
    """Return the merged state of all ranks."""
    ranks = [divided(rank) for rank in range(4)]
    split = [[owned.split(m), owned.split(o)] for owned, m, o in ranks]
    shared = {"models": [split[0][0][0]], "optimizers": [split[0][1][0]]}
    for of_rank in split:
        assert of_rank[0][0].keys() == shared["models"][0].keys() == {"bias"}
    own = [{"owned": {"models": [m[1]], "optimizers": [o[1]]}} for m, o in split]
    assert [bool(m[1]) for m, _ in split] == [True, True, False, False]  # copies are saved once
    merge_owned(shared, own)
    return shared


def test_merged_state_is_that_of_the_whole_model():
    model, optimizer = trained()
    shared = saved()
    for name, value in model.state_dict().items():
        assert torch.equal(whole(shared["models"][0][name]), value)
    expected, found = optimizer.state_dict(), shared["optimizers"][0]
    assert found["param_groups"] == expected["param_groups"]
    assert list(found["state"]) == [0, 1]
    for number, states in expected["state"].items():
        for name, value in states.items():
            assert torch.equal(whole(found["state"][number][name]), value)


@pytest.mark.parametrize("rank", [0, 3])
def test_each_rank_restores_its_part(rank):
    shared = saved()
    owned, model, optimizer = divided(rank)
    expected = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for tensor in (*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())):
        tensor.data.zero_()
    model.load_state_dict({k: whole(v) for k, v in owned.local(model, shared["models"][0]).items()})
    optimizer.load_state_dict(owned.local(optimizer, shared["optimizers"][0]))
    for name, value in expected[0].items():
        assert torch.equal(model.state_dict()[name], value)
    for number, states in expected[1]["state"].items():
        for name, value in states.items():
            assert torch.equal(optimizer.state_dict()["state"][number][name], value)


def test_missing_part_is_an_error():
    owned, model, _ = divided(0)
    shared, own = owned.split(model)
    with pytest.raises(PieceError, match="not complete"):
        merge_owned({"models": [shared]}, [{"owned": {"models": [own]}}])
    with pytest.raises(PieceError, match="other models"):
        merge_owned({"models": []}, [{"owned": {"models": [own]}}])


def test_optimizer_of_several_models_is_refused():
    mesh = Mesh(0, 4)
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"the SGD holds parameters that the Linear .*HINT: one"):
        OwnedState(mesh, []).note_optimizer(optimizer, first)


def refusals(change, of_optimizer=False):
    """Return the messages of the four ranks and of one process for a changed state."""
    shared = saved()
    number = int(of_optimizer)
    state = shared["optimizers" if number else "models"][0]
    change(state)
    found = []
    for owned, *parts in [(None, *trained()), *map(divided, range(4))]:
        before = copy.deepcopy(parts[number].state_dict())
        with pytest.raises(ValueError, match="HINT") as error:
            load_part(parts[number], copy.copy(state), "parts", owned)
        found.append(str(error.value))
        assert repr(parts[number].state_dict()) == repr(before)
    return found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.update(extra=torch.zeros(2)), "extra of the checkpoint is unknown"),
        (lambda s: s.pop("weight"), "weight is missing in the checkpoint"),
        (lambda s: s.update(weight=torch.zeros(5, 3)), r"has shape \(5, 3\) .* and \(4, 3\) in"),
        (lambda s: s.update(weight=torch.zeros(2, 3)), r"has shape \(2, 3\) .* and \(4, 3\) in"),
        (lambda s: s.update(bias=torch.zeros(2)), r"has shape \(2,\) .* and \(4,\) in"),
    ],
)
def test_state_of_another_model_is_refused_on_all_ranks_alike(change, said):
    found = refusals(change)
    assert len(set(found)) == 1
    assert re.search(f"this script's parts: .*{said}.*HINT: ", found[0])


def second_group(state):
    state["param_groups"].append({**state["param_groups"][0], "params": []})


def other_shape(state):
    state["state"][1]["exp_avg"] = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (second_group, r"are \[2, 0\] in the checkpoint and \[2\] in the script"),
        (lambda s: s["param_groups"][0]["params"].append(2), r"are \[3\] in the checkpoint"),
        (lambda s: s["state"].update({7: {}}), "a state of parameter 7 .*, which has 2 parameters"),
        (other_shape, r"parameter 1 has shape \(2, 3\) in the checkpoint, and .* \(4, 3\) in"),
    ],
)
def test_state_of_another_optimizer_is_refused_on_all_ranks_alike(change, said):
    found = refusals(change, of_optimizer=True)
    assert len(set(found)) == 1
    assert re.search(f"this script's parts: .*{said}.*HINT: ", found[0])


def test_state_that_the_ranks_parts_do_not_form_is_refused():
    owned, model, optimizer = divided(0)
    optimizer.state[model.weight]["row_var"] = torch.ones(2, 1)
    with pytest.raises(ValueError, match=r"row_var of weight has shape \(2, 1\).*HINT: torch.opt"):
        owned.split(optimizer)


def test_copies_that_differ_are_found():
    digests = []
    for rank in range(4):
        owned, model, optimizer = divided(rank)
        if rank == 3:
            model.weight.data[1] += 1
            optimizer.state[model.weight]["exp_avg"] += 1
        digests.append(ShardDigests())
        owned.add_digests(digests[-1], ("models", 0), model)
        owned.add_digests(digests[-1], ("optimizers", 0), optimizer)
    assert name_copies([one.of_tensors for one in digests]) == [
        (("models", 0), ("weight",), 3, 1),
        (("optimizers", 0), ("state", "weight", "exp_avg"), 3, 1),
    ]


def test_value_that_ranks_have_saved_differently_is_an_error():
    own = [{"owned": {"models": [{"scale": torch.tensor(float(n))}]}} for n in (0, 1)]
    with pytest.raises(PieceError, match="it differs"):
        merge_owned({"models": [{}]}, own)


def values_of_all_kinds(last):
    nan = float("nan")
    return {
        "number": nan,
        "tensor": torch.tensor([nan, 1.0]),
        "list": [torch.arange(3), (torch.zeros(2), deque([nan, last]))],
        "array": np.array([nan, last]),
        "texts": ["a", {"b", "c"}, None],
        "nested": [{"sparse": torch.eye(2).to_sparse(), "none": np.empty((0, 2))}],
    }


def test_equal_values_of_any_kind_are_joined():
    own = [{"owned": {"models": [values_of_all_kinds(1.0)]}} for _ in range(3)]
    shared = {"models": [{}]}
    merge_owned(shared, own)
    assert shared["models"][0].keys() == values_of_all_kinds(1.0).keys()


@pytest.mark.parametrize("name", ["list", "array"])
def test_error_of_a_value_that_differs_names_it(name):
    own = [{"owned": {"models": [{name: values_of_all_kinds(n)[name]}]}} for n in (1.0, 2.0)]
    with pytest.raises(PieceError, match=f"have saved '{name}', and it differs. HINT: load an"):
        merge_owned({"models": [{}]}, own)


def test_shards_of_parts_are_joined():
    """The data ranks hold shards of what a rank has on the tensor axis."""

    def split(world):
        mesh = world.mesh
        mesh.arrange(Layout.parse("dp2 x tp2"), ["node"] * 4)
        model, _ = trained()
        owned = OwnedState(mesh, [])
        before = WholeModel.of(model)
        rows = slice(2 * mesh.place["tensor"], 2 * mesh.place["tensor"] + 2)
        over = mesh.device_mesh("cpu")["data"]
        part = distribute_tensor(model.weight.data[rows], over, [Shard(0)], src_data_rank=None)
        model.weight = nn.Parameter(part)
        owned.models = [Rows(model, mesh)]
        owned.note_model(owned.models[0], before)
        shared, own = owned.split(model)
        assert model.weight.to_local().shape == (1, 3)
        pieces.append({"owned": {"models": [copy.deepcopy(own)]}})
        world.any(False)  # all ranks have split
        together = {"models": [dict(shared)]}
        merge_owned(together, pieces)
        weight = model.weight.to_local().clone()
        model.weight.to_local().data.zero_()
        load_part(model, together["models"][0], "models", owned)
        assert torch.equal(model.weight.to_local(), weight)
        return whole(together["models"][0]["weight"])

    pieces = []
    for found in thread_ranks.run(split, 4):
        assert torch.equal(found, trained()[0].weight)
