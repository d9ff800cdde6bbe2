"""Deferred construction gives the numbers of an ordinary one, one tensor at a time."""

import pytest
import torch
from torch import nn

from paceline.parallel import deferred as deferred_module
from paceline.parallel.deferred import deferred, forget_recordings, is_deferred
from paceline.parallel.materialization import Materialization


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 24, padding_idx=0)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(24, 4, 48) for _ in range(2))
        self.lstm, self.norm = nn.LSTM(24, 24), nn.BatchNorm1d(24)
        self.ortho = nn.utils.parametrizations.weight_norm(nn.Linear(24, 24))
        self.head = nn.Linear(24, 50, bias=False)
        self.head.weight = self.embed.weight
        self.loaded = nn.Parameter(torch.empty(3))
        with torch.no_grad():
            self.loaded.copy_(torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("mask", torch.arange(24).float().mul(0.1).sin())
        for layer in self.layers:
            nn.init.trunc_normal_(layer.linear1.weight, std=0.02)
            nn.init.orthogonal_(layer.linear2.weight)
            layer.self_attn.in_proj_weight.data.normal_(0, 0.02)
        self.scale = nn.Parameter(torch.randn(7) * 2 + 1)
        self.slices = nn.Parameter(torch.zeros(4, 6))
        nn.init.uniform_(self.slices.data[:, 2:4])


class Reinitialized(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
        self.apply(self.set_weights)

    def set_weights(self, module):
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            module.bias.data.zero_()


def built(make, later=False):
    torch.manual_seed(7)
    if not later:
        return make()
    with deferred():
        return make()


@pytest.mark.parametrize("make", [Model, Reinitialized])
def test_deferred_model_has_the_numbers_of_an_ordinary_one(make):
    expected, after = built(make).state_dict(), torch.randn(3)
    model = built(make, later=True)
    assert torch.equal(torch.randn(3), after)
    assert is_deferred(model)
    assert all(p.device.type == "meta" for p in model.parameters())
    parameters = list(model.parameters())
    state = torch.get_rng_state()
    Materialization(model).run()
    assert torch.equal(state, torch.get_rng_state())
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]
    assert not is_deferred(model)


def test_materialization_holds_one_tensor_at_a_time():
    expected = dict(built(Reinitialized).named_parameters())
    model = built(Reinitialized, later=True)
    kept = {}
    plan = Materialization(model)
    plan.run(lambda name, tensor: kept.update({name: tensor[::2].clone()}))
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[name], expected[name][::2]) for name in kept)
    assert plan.peak_bytes <= max(p.nbytes for p in expected.values())


def test_value_that_is_computed_later_is_an_error():
    with pytest.raises(ValueError, match=r"reads the value of a tensor.*HINT: "), deferred():
        torch.ones(3).sum().item()


def test_generator_of_its_own_is_an_error():
    with pytest.raises(ValueError, match=r"a generator of its own. HINT: "), deferred():
        torch.empty(3).normal_(generator=torch.Generator())


def test_recordings_are_freed_when_their_models_are_computed_or_dropped():
    forget_recordings()
    before = len(deferred_module._recordings)
    computed, kept = built(Reinitialized, later=True), built(Reinitialized, later=True)
    dropped = built(Reinitialized, later=True)
    Materialization(computed).run()
    del dropped
    forget_recordings()
    assert len(deferred_module._recordings) == before + 1
    assert is_deferred(kept)
