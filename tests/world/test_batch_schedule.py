"""Global batches that change between epochs: as one process that does the same, also resumed."""

import math
import re

import numpy as np
import pytest
import ranks
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import paceline
from paceline.data import pack
from paceline.data.sampling.sample_order import shuffled
from paceline.data.sampling.shard_loader import shard

SIZES = {0: 8, 1: 12, 3: 24}
SAMPLES, EPOCHS = 53, 4

TRAIN = """
    import os, signal, sys
    import numpy as np
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline
    from paceline.data import Loader

    folder, out, kind, sizes, rule, accumulate, epochs, die_at = sys.argv[1:]
    world = paceline.init(seed=5, progress=False)
    data = np.load(folder + "/data.npz")
    x, y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    schedule = eval(sizes)
    schedule = paceline.BatchSchedule(schedule) if isinstance(schedule, dict) else schedule
    if rule != "hold":
        world.scale_learning_rate(optimizer, global_batch=schedule, reference_batch=4, rule=rule)
    model, optimizer = world.distribute(model, optimizer, accumulate=int(accumulate))
    plain = (DataLoader(TensorDataset(x, y), batch_size=1, shuffle=True) if kind == "DataLoader"
             else Loader(folder + "/packed", shuffle=True))
    loader = world.shard(plain, global_batch=schedule)
    figures, rates = [], []
    for epoch in world.epochs(int(epochs), checkpoint=out + ".ckpt", every=3):
        meter = world.meter()
        for images, labels in world.batches(loader):
            loss = F.cross_entropy(model(images), labels)
            world.backward(loss)
            stepped = world.step(optimizer)
            meter.add(loss=loss * len(labels), count=len(labels))
            if stepped and world._recorder.step == int(die_at) and world.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        figures.append((meter.ratio("loss", "count"), *meter.sum("count"), len(loader)))
    if world.rank == 0:
        model = getattr(model, "module", model)
        torch.save({"model": model.state_dict(), "figures": figures,
                    "rate": optimizer.param_groups[0]["lr"]}, out)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("schedule")
    rng = np.random.default_rng(3)
    x = rng.normal(size=(SAMPLES, 4)).astype("float32")
    y = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0.5)
    np.savez(made / "data.npz", x=x, y=y)
    pack(x, made / "packed", y)
    ranks.write(made, TRAIN)
    return made


def train(
    folder,
    out,
    *,
    number=2,
    kind="DataLoader",
    sizes=SIZES,
    rule="linear",
    accumulate=1,
    epochs=EPOCHS,
    die_at=0,
    check=True,
):
    args = (folder, folder / out, kind, sizes, rule, accumulate, epochs, die_at)
    return ranks.run(folder / "script.py", *args, ranks=number, check=check)


def in_one_process(folder, order_of, accumulate=1, rule=float):
    """Train as the script says, in a loop of plain PyTorch."""
    data = np.load(folder / "data.npz")
    x, y = torch.from_numpy(data["x"]), torch.from_numpy(data["y"])
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for epoch in range(EPOCHS):
        size = SIZES[max(first for first in SIZES if first <= epoch)]
        optimizer.param_groups[0]["lr"] = 0.02 * rule(size / 4)
        for samples in order_of(epoch).split(size * accumulate):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[samples]), y[samples]).backward()
            optimizer.step()
    return model.state_dict()


def assert_close(one, other):
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("number", "accumulate"), [(1, 1), (2, 2), (4, 1)])
def test_ranks_with_a_schedule_equal_a_plain_loop_that_does_the_same(folder, number, accumulate):
    out = f"equal-{number}.pt"
    train(folder, out, number=number, accumulate=accumulate, rule="sqrt")
    found = torch.load(folder / out)
    plain = in_one_process(folder, lambda epoch: shuffled(SAMPLES, 5, epoch), accumulate, math.sqrt)
    assert_close(plain, found["model"])
    assert [figure[1:] for figure in found["figures"]] == [(SAMPLES, n) for n in (7, 5, 5, 3)]
    assert found["rate"] == pytest.approx(0.02 * math.sqrt(2))  # the factor holds in steps only


def test_packed_loader_and_dataloader_have_the_same_batches_per_rank(folder):
    data = np.load(folder / "data.npz")
    both = TensorDataset(torch.from_numpy(data["x"]), torch.from_numpy(data["y"]))
    schedule = paceline.BatchSchedule(SIZES)
    options = {"seed": 5, "agree": lambda *_: None, "count_all": lambda n: n}
    for rank in range(2):
        loaders = [
            shard(loader, rank=rank, ranks=2, global_batch=schedule, **options)
            for loader in (paceline.data.Loader(folder / "packed", 1), DataLoader(both, 1))
        ]
        for _ in range(EPOCHS):
            packed, plain = ([len(y) for _, y in loader] for loader in loaders)
            assert packed == plain


def test_killed_run_resumes_inside_an_epoch_on_another_number_of_ranks(folder):
    train(folder, "whole.pt")
    died = train(folder, "out.pt", die_at=12, check=False)
    assert died.returncode
    result = train(folder, "out.pt", number=4)
    assert re.search(r"resuming from .*\(inside epoch [12], step (6|9)\)", result.stderr)
    whole, resumed = torch.load(folder / "whole.pt"), torch.load(folder / "out.pt")
    assert_close(whole["model"], resumed["model"])
    assert resumed["figures"][-1] == pytest.approx(whole["figures"][-1])


def test_schedule_that_contradicts_the_checkpoint_is_refused_with_both(folder):
    train(folder, "short.pt", epochs=2)
    for sizes, value in (({0: 8, 1: 16}, 16), (24, 24)):
        result = train(folder, "short.pt", sizes=sizes, rule="hold", check=False)
        assert result.returncode
        before, epoch = (12, 2) if value == 16 else (8, 1)
        assert (
            f"the checkpoint was trained with a global batch of {before} in epoch {epoch}, and "
            f"this script has {value} there"
        ) in result.stderr
        assert "HINT: global_batch=paceline.BatchSchedule({0: 8, 1: 12, 3: 24})" in result.stderr


def test_epochs_that_had_not_begun_may_get_another_size_which_is_printed(folder):
    train(folder, "later.pt", epochs=2)
    result = train(folder, "later.pt", sizes={0: 8, 1: 12, 2: 40})
    assert "from epoch 3 on the global batch is 40 and not 12" in result.stderr
    assert [figure[-1] for figure in torch.load(folder / "later.pt")["figures"]] == [2, 2]


def sharded(loader, schedule, rank=0, number=1):
    options = {"seed": 7, "agree": lambda *_: None, "count_all": lambda n: n * number}
    return shard(loader, rank=rank, ranks=number, global_batch=schedule, **options)


def test_lengths_follow_the_schedule():
    data = TensorDataset(torch.arange(50))
    loader = sharded(DataLoader(data, 1, drop_last=True), paceline.BatchSchedule({0: 8, 1: 20}))
    assert loader.count_batches(3) == 6 + 2 + 2
    assert [(len(loader), len(list(loader)), len(loader)) for _ in range(3)] == [
        *((6, 6, 6), (6, 2, 2), (2, 2, 2))
    ]


def test_stream_follows_the_schedule():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(torch.arange(20))

        def shard(self, num_shards, index):
            return self

    loader = sharded(DataLoader(Stream(), 1), paceline.BatchSchedule({0: 4, 1: 8}), number=2)
    assert [[len(batch) for batch in loader] for _ in range(2)] == [[2] * 10, [4] * 5]


def test_outside_of_epochs_each_pass_is_an_epoch_of_the_schedule(world):
    loader = world.shard(
        DataLoader(TensorDataset(torch.arange(12)), 1),
        global_batch=paceline.BatchSchedule({0: 4, 1: 6}),
    )
    with torch.no_grad():
        found = [[len(batch) for (batch,) in world.batches(loader)] for _ in range(2)]
    assert found == [[4, 4, 4], [6, 6]]


def test_learning_rate_follows_in_the_step_only_and_a_plain_step_is_refused(world):
    schedule = paceline.BatchSchedule({0: 4, 1: 16})
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.scale_learning_rate(optimizer, global_batch=schedule, reference_batch=4, rule="sqrt")
    model, optimizer = world.distribute(model, optimizer)
    rates = []
    optimizer.register_step_pre_hook(lambda of, *_: rates.append(of.param_groups[0]["lr"]))
    loader = world.shard(DataLoader(TensorDataset(torch.ones(16, 1)), 1), global_batch=schedule)
    for _ in range(2):
        for (x,) in world.batches(loader):
            world.backward(model(x).square().mean())
            world.step(optimizer)
            assert optimizer.param_groups[0]["lr"] == 0.1
    assert rates == [0.1] * 4 + [0.2]
    world.backward(model(torch.ones(1, 1)).square().mean())
    with pytest.raises(ValueError, match=r"batch schedule's first size. HINT: world.step"):
        optimizer.step()


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({1: 8}, "epoch 0 has no size"),
        ({}, "epoch 0 has no size"),
        ({0: 8, -1: 4}, "epochs begin at 0"),
        ({0: 0}, "a batch has at least 1 sample"),
        ({0: 8.5}, "whole numbers"),
        ([64], "whole numbers"),
    ],
)
def test_wrong_schedules_are_refused(sizes, why):
    with pytest.raises(ValueError, match=rf"{why}.*HINT: BatchSchedule"):
        paceline.BatchSchedule(sizes)


def test_sizes_that_ranks_do_not_divide_are_refused_with_the_nearest():
    loader = DataLoader(TensorDataset(torch.arange(50)), 1)
    wrong = paceline.BatchSchedule({0: 8, 2: 15})
    with pytest.raises(ValueError, match=r"global_batch=15 can't.*epoch 2.*\{0: 8, 2: 16\}"):
        sharded(loader, wrong, number=4)
    with pytest.raises(ValueError, match=r"global_batch must be a number or a BatchSchedule"):
        sharded(loader, {0: 8})
