"""Batch normalization over all ranks, over ghost batches, and group normalization in its place."""

import ast
import copy

import pytest
import ranks
import torch
from torch import nn

from paceline.checkpoint.saver import load_checkpoint
from paceline.optim.norms import GlobalBatchNorm, convert_norms

SCRIPT = """
    import sys
    import torch
    from torch import nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    out, layout, accumulate = sys.argv[1], sys.argv[2], int(sys.argv[3])
    world = paceline.init(seed=3, progress=False)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(13, 3, 6, generator=g, dtype=torch.float64)
    y = x.sum((1, 2)).unsqueeze(1)
    # the last batch has one sample: other ranks have none
    loader = world.shard(DataLoader(TensorDataset(x, y), shuffle=True), global_batch=12)
    validation = world.shard(DataLoader(TensorDataset(x, y), batch_size=5), every_sample_once=True)

    def block(a, b):
        return nn.Sequential(nn.Conv1d(a, b, 3, padding=1), nn.BatchNorm1d(b), nn.ReLU())

    torch.manual_seed(world.rank)
    model = nn.Sequential(block(3, 6), block(6, 6), nn.Flatten(), nn.Linear(36, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model, optimizer = world.distribute(
        model, optimizer, layout=layout, norm="sync", accumulate=accumulate)
    losses = []
    for epoch in world.epochs(4):
        for a, b in world.batches(loader):
            loss = nn.functional.mse_loss(model(a), b)
            world.backward(loss)
            world.step(optimizer)
            losses.append(world.mean(loss * len(a), len(a)))
        score = world.meter()
        for a, b in world.batches(validation):
            score.add(error=(model(a) - b).square().sum(), count=len(a))
        losses.append(score.ratio("error", "count"))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_model_state_dict(getattr(model, "module", model), options=options)
    if world.rank == 0:
        torch.save((losses, state), out)
"""


def train(folder, number, layout, launcher="paceline"):
    script, out = ranks.write(folder, SCRIPT), folder / f"{number}-{layout}.pt"
    ranks.run(script, out, layout, 1, ranks=number, launcher=launcher)
    return torch.load(out)


def test_training_equals_one_process_also_where_ranks_have_no_samples(tmp_path):
    losses, state = train(tmp_path, 1, "data", "python")
    for layout in ("data", "zero3"):
        found, others = train(tmp_path, 3, layout)
        assert found[-1] == pytest.approx(losses[-1], rel=1e-9)
        for name, tensor in state.items():
            torch.testing.assert_close(others[name], tensor, rtol=1e-9, atol=1e-12, msg=name)


def images():
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU()).double()


@pytest.mark.parametrize("momentum", [0.1, None])
def test_ghost_batches_are_normalized_by_themselves(momentum):
    torch.manual_seed(0)
    plain = nn.BatchNorm2d(4, momentum=momentum).double()
    model = nn.Sequential(copy.deepcopy(plain))
    assert convert_norms(model, "ghost:3") == ["0"]
    x = torch.randn(6, 4, 5, 5, dtype=torch.float64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    halves = [copy.deepcopy(plain) for _ in range(2)]
    found = model(x)
    expected = torch.cat([norm(part) for norm, part in zip(halves, other.chunk(2), strict=True)])
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    found.backward(weights)
    expected.backward(weights)
    torch.testing.assert_close(x.grad, other.grad)
    torch.testing.assert_close(model[0].weight.grad, sum(norm.weight.grad for norm in halves))
    mean = torch.stack([norm.running_var for norm in halves]).mean(0)
    torch.testing.assert_close(model[0].running_var, mean)
    assert model[0].num_batches_tracked == 1
    assert torch.equal(model.eval()(x[:1]), plain_of(model[0])(x[:1]))


def test_ghost_batches_without_running_statistics_are_normalized_by_themselves():
    plain = nn.BatchNorm1d(4, track_running_stats=False).double()
    model = nn.Sequential(copy.deepcopy(plain))
    convert_norms(model, "ghost:3")
    x = torch.randn(6, 4, dtype=torch.float64)
    torch.testing.assert_close(model(x), torch.cat([plain(part) for part in x.chunk(2)]))


def plain_of(norm):
    plain = nn.BatchNorm2d(norm.num_features).double()
    plain.load_state_dict(norm.state_dict())
    return plain.eval()


@pytest.mark.parametrize("norm", ["sync", "ghost:2", "group:3"])
def test_parameters_of_an_optimizer_stay_valid(norm):
    model = images()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model[1].weight.detach().clone()
    names = [name for name, _ in model.named_parameters()]
    assert convert_norms(model, norm) == ["1"]
    assert [name for name, _ in model.named_parameters()] == names
    model(torch.randn(4, 3, 8, 8, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    assert not torch.equal(model[1].weight, before)
    assert ("1.running_mean" in model.state_dict()) == (norm != "group:3")


def test_layer_that_is_used_twice_stays_one_layer():
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm)
    convert_norms(model, "sync")
    assert model[1] is model[3]


@pytest.mark.parametrize(
    ("norm", "change", "message"),
    [
        ("group:4", None, "does not divide the 6 channels of 1. HINT: 3 or 6"),
        ("group:2", lambda m: m.eval(), "1 is in evaluation.*HINT"),
        ("ghost", None, "norm must be one of 'local', 'sync', 'ghost:32', 'group:8'; .*'ghost'"),
        ("ghost:0", None, "norm must be one of"),
        (None, None, "norm must be one of .*; this is None"),
        ("sync:2", None, "norm must be one of"),
        ("sync", lambda m: m.__delitem__(1), "has no batch normalization. HINT: norm='local'"),
        ("sync", lambda m: m.__setitem__(1, nn.LazyBatchNorm2d()), "without parameters.*HINT"),
    ],
)
def test_bad_norms_are_refused(norm, change, message):
    model = images()
    if change is not None:
        change(model)
    with pytest.raises(ValueError, match=message):
        convert_norms(model, norm)


def test_batch_that_ghosts_do_not_divide_is_refused():
    model = images()
    convert_norms(model, "ghost:4")
    with pytest.raises(ValueError, match=r"a batch of 6 samples.*multiple of 4. HINT: 3 or 6"):
        model(torch.randn(6, 3, 8, 8, dtype=torch.float64))


class CountedExchange:
    """Stands for one other rank with the same batch, and counts the exchanges."""

    def __init__(self):
        self.gathers, self.sums = [], []

    def gather(self, row):
        self.gathers.append(row.numel())
        return torch.stack([row, row])

    def sum(self, tensor):
        self.sums.append(tensor.numel())
        return 2 * tensor


def test_layer_has_one_small_exchange_forward_and_one_backward(monkeypatch):
    counted = CountedExchange()
    monkeypatch.setattr(GlobalBatchNorm, "exchange", lambda self: counted)
    model = nn.Sequential(images(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)).double()
    convert_norms(model, "sync")
    output = model(torch.randn(2, 3, 9, 9, dtype=torch.float64))
    assert (counted.gathers, counted.sums) == ([3 * 6, 3 * 4], [])
    output.square().sum().backward()
    assert (len(counted.gathers), counted.sums) == (2, [2 * 4, 2 * 6])


RUNNING = """
    import sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    out, layout = sys.argv[1], sys.argv[2]
    world = paceline.init(seed=3, progress=False)
    x = torch.randn(24, 5, generator=torch.Generator().manual_seed(1)) + torch.arange(24)[:, None]
    loader = world.shard(DataLoader(TensorDataset(x)), global_batch=8)  # ranks see other means
    validation = world.shard(DataLoader(TensorDataset(x), batch_size=5), every_sample_once=True)
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    options = {"broadcast_buffers": False} if sys.argv[3] == "off" else {}
    model, optimizer = world.distribute(model, optimizer, layout=layout, **options)
    for epoch in world.epochs(2, checkpoint=out):
        for (a,) in world.batches(loader):
            world.backward(model(a).square().mean())
            world.step(optimizer)
        for (a,) in world.batches(validation):
            model(a)
            mean = next(b for n, b in model.named_buffers() if n.endswith("running_mean")).clone()
        each = [torch.empty_like(mean) for _ in range(world.size)]
        dist.all_gather(each, mean)
        if world.rank == 0:
            print("MEANS", [one.tolist() for one in each], flush=True)
"""


@pytest.mark.parametrize(("layout", "broadcasts"), [("data", 1), ("zero3", 1), ("data", "off")])
def test_running_statistics_are_those_of_one_model_at_validation_and_in_checkpoints(
    tmp_path, layout, broadcasts
):
    script = ranks.write(tmp_path, RUNNING)
    done = ranks.run(script, tmp_path / "ckpt", layout, broadcasts)
    lines = [line for line in ranks.untagged(done.stdout) if line.startswith("MEANS")]
    means = [ast.literal_eval(line[6:]) for line in lines]
    assert len(means) == 2
    assert all(first == second for first, second in means)
    newest = max((tmp_path / "ckpt").glob("step-*"))
    saved = load_checkpoint(newest)[0]["models"][0]["0.running_mean"]
    saved = saved if isinstance(saved, torch.Tensor) else saved.whole()
    assert saved.tolist() in [first for first, _ in means]
