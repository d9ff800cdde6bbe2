"""Knobs that send less: what a step omits is sent later, and models reach the same quality."""

import re

import pytest
import ranks
import torch

from paceline.knobs.settings import Setting, write_settings

# Each rank has its own data and prints its final loss.
DESCENDS = """
    import sys
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    model = DistributedDataParallel(net, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    target = torch.randn(32, 8)
    torch.manual_seed(1 + dist.get_rank())
    x = torch.randn(256, 32)
    y = torch.tanh(x @ target)
    for step in range(int(sys.argv[2])):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    print("loss", float(loss), flush=True)
    torch.save(net.state_dict(), f"{sys.argv[1]}-{dist.get_rank()}")
    dist.destroy_process_group()
    """


def trained(folder, steps, knobs, script=DESCENDS):
    """Return the models and the last losses of both ranks."""
    settings = folder / "settings.toml"
    write_settings(settings, {knob: Setting(value) for knob, value in knobs.items()}, {})
    launcher = f"paceline --settings {settings}" if knobs else "paceline"
    done = ranks.run(ranks.write(folder, script), folder / "model", steps, launcher=launcher)
    losses = [float(one) for one in re.findall(r"loss ([\d.]+)", done.stdout)]
    return [torch.load(folder / f"model-{rank}") for rank in range(2)], losses


def close(one, other, **bounds):
    return all(torch.allclose(one[name], other[name], **bounds) for name in one)


@pytest.mark.parametrize(
    "knobs", [{"compress-topk": 1.0}, pytest.param({"average-every": 1}, marks=pytest.mark.long)]
)
def test_compression_without_loss_gives_same_result(tmp_path, knobs):
    (expected, _), _ = trained(tmp_path, 12, {})
    (found, other), _ = trained(tmp_path, 12, knobs)
    assert close(found, expected, rtol=1e-4, atol=1e-5)
    assert close(found, other, rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("knobs", [{"compress-topk": 0.02}, {"compress-powersgd": 1}])
def test_lossy_compression_reaches_same_loss(tmp_path, knobs):
    """The weights differ in between, but the loss falls as far."""
    (plain, _), before = trained(tmp_path, 300, {})
    (found, other), losses = trained(tmp_path, 300, knobs)
    assert not close(found, plain, rtol=1e-3, atol=1e-4)
    assert close(found, other, rtol=0, atol=0)  # identical on both ranks
    first = trained(tmp_path, 1, {})[1]
    gone = (sum(first) - sum(losses)) / (sum(first) - sum(before))
    assert gone > 0.9, (first, before, losses)


@pytest.mark.parametrize("backend", ["gloo", "paceline"])
def test_powersgd_with_several_buckets_trains(tmp_path, backend):
    script = DESCENDS.replace('"gloo"', f'"{backend}"').replace(
        "torch.nn.Linear(32, 64)",
        "*(torch.nn.Linear(32, 32) for _ in range(4)), torch.nn.Linear(32, 64)",
    )
    (one, other), _ = trained(tmp_path, 12, {"compress-powersgd": 2}, script)
    assert close(one, other, rtol=0, atol=0)


def test_local_sgd_ranks_are_equal_only_after_averaging(tmp_path):
    (one, other), _ = trained(tmp_path, 4 + 2 * 5, {"average-every": 5})
    assert close(one, other, rtol=0, atol=0)
    (one, other), _ = trained(tmp_path, 4 + 2 * 5 + 3, {"average-every": 5})
    assert not close(one, other, rtol=1e-4, atol=1e-5)


SUMS = """
    import sys
    import torch, torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    net = torch.nn.Linear(8, 1, bias=False)
    torch.nn.init.zeros_(net.weight)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    gradient = torch.arange(1.0, 9.0) * (1 + rank)
    steps = int(sys.argv[2])
    for _ in range(steps):
        optimizer.zero_grad()
        model(gradient[None]).sum().backward()  # which has this gradient in every step
        optimizer.step()
    state = next(hook for hook in model._comm_hooks)[1]
    (left,) = state.left.values()
    print("loss", 0.0)
    torch.save({"weight": net.weight[0], "left": left, "all": steps * gradient},
               f"{sys.argv[1]}-{rank}")
    dist.destroy_process_group()
    """


def test_topk_sent_plus_residual_equals_all_gradients(tmp_path):
    found, _ = trained(tmp_path, 40, {"compress-topk": 0.125}, SUMS)  # one number per step
    sent = sum(one["all"] - one["left"] for one in found) / 2
    torch.testing.assert_close(-found[0]["weight"], sent)
    assert (sent > 0).all(), "the small ones never have their turn"
    assert any((one["left"] != 0).any() for one in found)
