"""Records of sharded models name the block of each gather, and knobs change when they come."""

import json
from functools import partial
from types import SimpleNamespace

import pytest
import ranks

from paceline.knobs.settings import Setting, write_settings
from paceline.record.hooks import block_labels, hook_failures
from paceline.record.hooks.block_labels import FURTHER_BLOCKS, BlockLabels
from paceline.record.ring.states import FIRST_BLOCK_PEER, NO_PEER

TRAINED = """
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(
                nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
            self.last = nn.Linear(8, 1)
        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.last(x)

    def train(model, optimizer):
        for _ in range(6):
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
"""
BY_PACELINE = """
    import paceline

    world = paceline.init(progress=False)
    torch.manual_seed(world.rank)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(*world.distribute(model, optimizer, layout="zero3"))
"""
BY_SCRIPT = """
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Net()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.set_force_sum_reduction_for_comms(True)  # gloo has no mean
    torch.manual_seed(dist.get_rank())
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    total = sum(p.full_tensor().double().sum() for p in model.parameters())
    print(f"sum {total.item():.9f}", flush=True)
    dist.destroy_process_group()
"""


def blocks_of(folder, script, **settings):
    """Return what a script prints, and the blocks in its report by name; run on two ranks."""
    launcher = f"paceline --record {folder / 'record'}"
    if settings:
        path = folder / "settings.toml"
        knobs = {name.replace("_", "-"): Setting(value) for name, value in settings.items()}
        write_settings(path, knobs, {})
        launcher += f" --settings {path}"
    done = ranks.run(ranks.write(folder, TRAINED + script), launcher=launcher)
    words = [ranks.PACELINE, "report", folder / "record", "--json"]
    said = ranks.run_command(words, folder, ranks.environment())
    found = json.loads(said.stdout)["blocks"]
    return done, {one["name"]: {c["kind"]: c for c in one["calls"]} for one in found}


@pytest.mark.parametrize("script", [BY_PACELINE, BY_SCRIPT], ids=["paceline", "script"])
def test_record_names_the_blocks_of_gathers_and_reductions(tmp_path, script):
    _, blocks = blocks_of(tmp_path, script)
    assert set(blocks) == {"(root)", "layers.0", "layers.1", "layers.2"}
    layer, root = blocks["layers.1"], blocks["(root)"]
    assert {kind: one["count"] for kind, one in layer.items()} == {
        "forward gather": 1, "backward gather": 1, "reduction": 1,
    }  # fmt: skip
    assert layer["forward gather"]["bytes"] == 4 * (8 * 8 + 8)
    assert set(root) == {"forward gather", "reduction"}  # not resharded after the forward


@pytest.mark.long
def test_knobs_change_the_gathers_and_not_the_numbers(tmp_path):
    said = []
    for name, settings in (
        ("plain", {}), ("kept", {"sharded_keep_gathered": True}), ("ahead", {"sharded_prefetch": 2})
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        done, blocks = blocks_of(tmp_path / name, BY_SCRIPT, **settings)
        said.append(ranks.untagged(done.stdout))
        assert ("backward gather" in blocks["layers.1"]) == (name != "kept")
        assert blocks["layers.1"]["forward gather"]["count"] == 1
    assert said[0] == said[1] == said[2]


def test_record_of_a_script_with_world_says_that_a_knob_was_set(tmp_path):
    blocks_of(tmp_path, BY_PACELINE, sharded_prefetch=2)
    for record in (tmp_path / "record").glob("*.ring"):
        assert b'"sharded-prefetch": {"set": true' in record.read_bytes()


class Recorded:
    """The part of a recorder that labels need."""

    def __init__(self):
        self.block_peer, self.hook_calls, self.names = NO_PEER, 0, []

    def update_header(self, blocks):
        self.names = list(blocks)


def test_header_has_room_for_a_limited_number_of_names():
    recorder = Recorded()
    labels = BlockLabels(recorder)
    peers = [labels.peer_of(SimpleNamespace(_module_fqn=f"layers.{i}")) for i in range(2000)]
    assert peers[:2] == [FIRST_BLOCK_PEER, FIRST_BLOCK_PEER - 1]
    assert recorder.names[:2] == ["layers.0", "layers.1"]
    assert recorder.names[-1] == FURTHER_BLOCKS
    assert recorder.names.count(FURTHER_BLOCKS) == 1
    assert peers[-1] == peers[-2] == FIRST_BLOCK_PEER - len(recorder.names) + 1
    long = Recorded()
    labels = BlockLabels(long)
    for i in range(500):
        labels.peer_of(SimpleNamespace(_module_fqn=f"{i}." * 100))
    assert sum(map(len, long.names)) <= block_labels.MAX_NAMES_CHARS + len(FURTHER_BLOCKS)


def test_label_ends_with_the_call_also_if_it_raises():
    recorder = Recorded()

    def unshard(group):
        assert recorder.block_peer == FIRST_BLOCK_PEER
        raise RuntimeError("of the script")

    call = partial(BlockLabels(recorder).call_labelled, unshard)
    with pytest.raises(RuntimeError, match="of the script"):
        call(SimpleNamespace(_module_fqn="layers.0"))
    assert recorder.block_peer == NO_PEER


def test_failure_of_the_hook_does_not_reach_the_script(monkeypatch):
    monkeypatch.setattr(hook_failures, "failed_hooks", failed := {})
    monkeypatch.setattr(block_labels, "failed_hooks", failed)
    recorder = Recorded()
    call = partial(BlockLabels(recorder).call_labelled, lambda group, value: value)
    assert call(SimpleNamespace(), 7) == 7  # has no name, as in another version of PyTorch
    assert list(failed) == [block_labels.HOOK]
    assert call(SimpleNamespace(), 8) == 8
