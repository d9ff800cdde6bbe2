"""N ranks give the same result as one process with the same global batch size, to rounding."""

import pytest
import ranks
import torch
from scripts import TRAIN


def train(folder, number, *args, launcher="paceline"):
    script = folder / "script.py"
    if not script.exists():
        ranks.write(folder, TRAIN)
    out = folder / f"out-{number}-{launcher.split()[0]}.pt"
    ranks.run(script, out, *args, ranks=number, launcher=launcher)
    return torch.load(out)


def assert_equal(one, other, exact=False):
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-5}
    for name, tensor in one["model"].items():
        torch.testing.assert_close(other["model"][name], tensor, **tolerance)
    for a, b in zip(one["figures"], other["figures"], strict=True):
        assert b == pytest.approx(a, rel=1e-4)
        assert b[1] == a[1]  # each training sample is counted once
        assert b[3] == 53
    assert other["rate"] == pytest.approx(one["rate"])


CASES = {
    "uneven last batch": ["--samples", 203, "--batch", 16],
    "fewer samples than ranks at the end": ["--samples", 197, "--batch", 4, "--epochs", 1],
    "accumulation, uneven": ["--samples", 203, "--batch", 16, "--accumulate", 3],
    "clipping": ["--samples", 100, "--batch", 20, "--clip", 0.05, "--optimizer", "SGD"],
}


SLOW = {"fewer samples than ranks at the end", "clipping"}
CHOSEN = [pytest.param(name, marks=pytest.mark.long) if name in SLOW else name for name in CASES]


@pytest.mark.parametrize("case", CHOSEN)
def test_ranks_give_same_result_as_one_process(tmp_path, case):
    alone = train(tmp_path, 1, *CASES[case], launcher="python")
    assert alone["figures"][0][1] == CASES[case][1]
    for number in (2, 4) if case == "uneven last batch" else (4,):
        assert_equal(alone, train(tmp_path, number, *CASES[case]))


@pytest.mark.long
def test_torchrun_and_single_rank_give_same_result(tmp_path):
    alone = train(tmp_path, 1, launcher="python")
    assert_equal(alone, train(tmp_path, 1), exact=True)
    assert_equal(train(tmp_path, 2), train(tmp_path, 2, launcher="torchrun"), exact=True)


def test_gradient_accumulation_equals_one_large_batch(tmp_path):
    large = train(tmp_path, 1, "--samples", 192, "--batch", 48, "--optimizer", "SGD")
    small = train(
        tmp_path, 2, *("--samples", 192, "--batch", 16, "--accumulate", 3, "--optimizer", "SGD")
    )
    for name, tensor in large["model"].items():
        torch.testing.assert_close(small["model"][name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_bfloat16_autocast_loss_is_close_to_float32(tmp_path):
    full = train(tmp_path, 2)
    half = train(tmp_path, 2, "--precision", "bf16")
    assert half["figures"][-1][0] == pytest.approx(full["figures"][-1][0], rel=0.1)
    assert any(not torch.equal(t, full["model"][n]) for n, t in half["model"].items())
    assert all(t.dtype == torch.float32 for t in half["model"].values())


def test_batch_norm_and_uneven_validation_do_not_hang(tmp_path):
    result = train(tmp_path, 4, "--batch-norm", "--samples", 64, "--batch", 16)
    assert result["figures"][-1][3] == 53


@pytest.mark.long
def test_forked_and_fresh_interpreters_are_bitwise_equal(tmp_path):
    forked = train(tmp_path, 2)
    assert_equal(forked, train(tmp_path, 2, launcher="paceline --fresh"), exact=True)


STREAM = """
    import sys, torch
    import torch.nn.functional as F
    from torch.utils.data import DataLoader, IterableDataset
    import paceline

    g = torch.Generator().manual_seed(1)
    X = torch.randn(107, 10, generator=g)

    class Stream(IterableDataset):
        def __init__(self, index=0, shards=1):
            self.index, self.shards = index, shards
        def shard(self, num_shards, index):
            return Stream(index, num_shards)
        def __iter__(self):
            return iter(X[self.index::self.shards])

    world = paceline.init(seed=5, progress=False)
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = world.distribute(model, optimizer, accumulate=int(sys.argv[2]))
    loader = world.shard(DataLoader(Stream(), batch_size=8 // world.size))
    seen = world.meter()
    for epoch in world.epochs(2):
        for x in world.batches(loader):
            loss = (model(x) - x[:, :1]).square().mean()
            world.backward(loss)
            world.step(optimizer)
            seen.add(count=len(x))
    (count,) = seen.sum("count")
    if world.rank == 0:
        plain = model.module if hasattr(model, "module") else model
        torch.save([count, plain.state_dict()], sys.argv[1])
"""


@pytest.mark.parametrize("accumulate", [3, pytest.param(1, marks=pytest.mark.long)])
def test_iterable_dataset_with_uneven_shards_gives_exact_weights(tmp_path, accumulate):
    script = ranks.write(tmp_path, STREAM)
    results = []
    for number in (1, 2, 4):
        out = tmp_path / f"{number}.pt"
        ranks.run(script, out, accumulate, ranks=number)
        results.append(torch.load(out))
    # Sharding of the stream determines which samples share a step: 107 = 8 * 13 + 3 in each case.
    for count, state in results:
        assert count == 2 * 107
        for name, tensor in results[0][1].items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-4, atol=1e-5)
