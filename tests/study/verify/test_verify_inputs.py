"""What ``paceline verify`` answers for scripts that it can compare only in part."""

import pytest
import ranks

from paceline.analyze.verification.find import judge
from paceline.study.trials import ScriptRequest
from paceline.study.verify import RunFailedError, run_verification

SCRIPT = """
    import os
    import numpy as np
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

    full = 1 << 60  # bytes, more than there are

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

        def forward(self, x):
            #FORWARD
            return self.body(x)

    dist.init_process_group("gloo")
    #START
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    model = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            optimizer.step()
            optimizer.zero_grad()
"""
CROWDED = SCRIPT.replace("#FORWARD", "if len(x) > 4: torch.empty(full)")
FOUR_GATHERED = "if dist.get_world_size() < 2: torch.empty(full)"
SHARDED = CROWDED.replace("#START", FOUR_GATHERED).replace(
    "model = nn.parallel.DistributedDataParallel(Net())",
    "from torch.distributed.fsdp import fully_shard\n    model = fully_shard(Net())",
)

# Sequences of different lengths, padded to the longest one of a batch.
PADDED = (
    SCRIPT.replace("#FORWARD", "x = x.sum(1)")
    .replace("batch_size=4, sampler=sampler", "batch_size=4, sampler=sampler, collate_fn=padded")
    .replace(
        "#START",
        """
    def padded(samples):
        longer = [x.expand(1 + int(10 * abs(x[0])), 4) for x, _ in samples]
        labels = torch.stack([y for _, y in samples])
        return nn.utils.rnn.pad_sequence(longer, batch_first=True), labels
    """,
    )
)


def verify(tmp_path, monkeypatch, text, size=2):
    monkeypatch.chdir(tmp_path)
    script = ranks.write(tmp_path, text)
    request = ScriptRequest(str(script), [], options=["--threads", "1"], ranks=size)
    runs = run_verification(request, lambda _: None)
    return runs, *judge(runs)


def note_with(seen, words):
    (note,) = [one for one in seen.notes if words in one]
    return note


@pytest.mark.long
def test_global_batch_that_one_rank_cannot_hold_is_accumulated(tmp_path, monkeypatch):
    runs, found, seen = verify(tmp_path, monkeypatch, CROWDED)
    assert [one.mistake.id for one in found if not one.is_question] == []
    assert runs.replay is not None
    assert runs.replay.parts == 2
    assert seen.replayed == seen.steps == 18
    assert len(seen.differences) == 4
    assert all(difference < 1e-5 for difference, _ in seen.differences.values())
    note = note_with(seen, "one rank can't hold the global batch")
    assert "can't allocate memory" in note
    assert "trained the batches of the 2 ranks one after the other" in note


@pytest.mark.long
def test_padded_batches_are_made_again_for_one_process(tmp_path, monkeypatch):
    runs, found, seen = verify(tmp_path, monkeypatch, PADDED)
    assert [one.mistake.id for one in found if not one.is_question] == []
    assert runs.replay is not None
    assert (runs.replay.parts, runs.replay.is_collated) == (1, True)
    assert seen.replayed == seen.steps == 18
    # The mean over what a rank has, and not over what all ranks have.
    tokens = "nn.functional.cross_entropy(model(x), y, reduction='sum') / (x != 0).sum() * 9"
    text = PADDED.replace("nn.functional.cross_entropy(model(x), y)", tokens)
    _, found, _ = verify(tmp_path, monkeypatch, text)
    assert [one.mistake.id for one in found if one.is_wrong] == ["uneven-batches-averaged"]


@pytest.mark.long
def test_batches_that_cannot_be_joined_are_accumulated(tmp_path, monkeypatch):
    drawn = PADDED.replace("x.expand(", "(x + 0.1 * torch.rand(1)).expand(")
    seeds = "torch.manual_seed(1 + dist.get_rank())\n    optimizer = torch"
    drawn = drawn.replace("optimizer = torch", seeds)
    runs, found, seen = verify(tmp_path, monkeypatch, drawn)
    assert [one.mistake.id for one in found if not one.is_question] == []
    assert runs.replay is not None
    assert runs.replay.parts == 2
    assert seen.replayed == seen.steps == 18
    assert all(difference < 1e-5 for difference, _ in seen.differences.values())
    note = note_with(seen, "can't be joined")
    assert "one rank trained the batches of the 2 ranks one after the other" in note


@pytest.mark.long
def test_wrong_gradient_is_found_by_accumulated_batches(tmp_path, monkeypatch):
    wrong = "loss = nn.functional.cross_entropy(model(x), y) * dist.get_world_size()"
    text = CROWDED.replace("loss = nn.functional.cross_entropy(model(x), y)", wrong)
    _, found, _ = verify(tmp_path, monkeypatch, text)
    assert [one.mistake.id for one in found if one.is_wrong]


@pytest.mark.long
def test_loss_that_may_count_batches_is_not_judged_by_accumulated_batches(tmp_path, monkeypatch):
    """Another factor on rank 1 looks like a loss that depends on the number of batches before."""
    other = "loss = nn.functional.cross_entropy(model(x), y) * (1 + dist.get_rank())"
    text = CROWDED.replace("loss = nn.functional.cross_entropy(model(x), y)", other)
    _, found, seen = verify(tmp_path, monkeypatch, text)
    assert not [one.mistake.id for one in found if one.is_wrong]
    assert "may depend on the number of batches" in seen.not_replayed
    assert seen.replayed == 0


@pytest.mark.long
def test_model_that_one_rank_cannot_hold_is_compared_with_two(tmp_path, monkeypatch):
    runs, found, seen = verify(tmp_path, monkeypatch, SHARDED, size=4)
    assert [one.mistake.id for one in found if not one.is_question] == []
    assert runs.replay is not None
    assert runs.replay.size == 2
    assert seen.replayed_by == "2 ranks"
    assert seen.replayed == seen.steps > 0
    assert all(difference < 1e-5 for difference, _ in seen.differences.values())
    assert "4 ranks were compared with 2" in note_with(seen, "one rank can't hold the model")


@pytest.mark.long
def test_two_ranks_of_a_model_that_one_cannot_hold_are_compared_with_each_other(
    tmp_path, monkeypatch
):
    runs, _, seen = verify(tmp_path, monkeypatch, SHARDED)
    assert runs.replay is None
    assert seen.related == seen.steps > 0
    note = note_with(seen, "one rank does not hold the sharded model")
    assert "HINT: paceline verify -n 4 compares 4 ranks with 2" in note


WORLD = """
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    import paceline

    world = paceline.init()
    torch.manual_seed(0)
    x = torch.randn(52, 4)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model, optimizer = world.distribute(net, optimizer, accumulate=2)
    torch.manual_seed(1 + world.rank)
    train = world.shard(DataLoader(data, batch_size=8, shuffle=True))
    held = world.shard(DataLoader(data, batch_size=8), every_sample_once=True)
    for epoch in world.epochs(3):
        for inputs, labels in world.batches(train):
            world.backward(nn.functional.cross_entropy(model(inputs), labels)) #FACTOR
            world.step(optimizer, clip=0.5)
        with torch.no_grad():
            for inputs, labels in world.batches(held):
                model(inputs)
"""


@pytest.mark.long
@pytest.mark.parametrize("factor", ["1", "(1 + world.rank)"])
def test_loop_of_a_world_that_draws_random_numbers_is_compared(tmp_path, monkeypatch, factor):
    text = WORLD.replace("labels)) #FACTOR", f"labels) * {factor})")
    runs, found, seen = verify(tmp_path, monkeypatch, text)
    assert runs.replay is not None
    assert runs.replay.parts == 2
    assert (seen.replayed, seen.steps) == (6 * (factor == "1"), 6)
    assert [one.mistake.id for one in found if one.is_wrong] == []


NUMPY = "torch.from_numpy(np.random.default_rng().normal(size=x.shape))"


@pytest.mark.long
@pytest.mark.parametrize(
    ("noise", "told"),
    [
        (NUMPY, "a value that does not come from torch (but from numpy, the time, ...) in {}"),
        ("own_noise(x)", "randn in {} draws other random numbers each time"),
    ],
)
def test_script_that_is_not_deterministic_is_named_with_its_line(
    tmp_path, monkeypatch, noise, told
):
    function = """
    def own_noise(x):
        generator = torch.Generator()
        generator.seed()
        return torch.randn(x.shape, generator=generator)

    class Net("""
    text = SCRIPT.replace("#FORWARD", f"x = (x + {noise}).float()")
    text = text.replace("\n    class Net(", function)
    lines = text.split("\n")
    searched = "return torch.randn" if "own" in noise else "np.random.default_rng()"
    line = next(at for at, one in enumerate(lines, 1) if searched in one)
    _, _, seen = verify(tmp_path, monkeypatch, text)
    note = note_with(seen, "the script is not deterministic")
    assert told.format(f"script.py:{line}") in note
    assert "no difference from one process is seen" in note


@pytest.mark.long
def test_script_without_a_loader_says_what_is_not_compared(tmp_path, monkeypatch):
    text = SCRIPT.replace("in loader:", "in data_of(epoch):").replace(
        "    dist.init_process_group",
        """    def data_of(epoch):
        for at in range(8):
            part = slice(8 * at + 4 * dist.get_rank(), 8 * at + 4 * dist.get_rank() + 4)
            yield data.tensors[0][part], data.tensors[1][part]

    dist.init_process_group""",
    )
    _, found, seen = verify(tmp_path, monkeypatch, text)
    assert [one.mistake.id for one in found if not one.is_question] == []
    assert seen.related == seen.steps > 0
    assert "the script reads no DataLoader" in note_with(seen, "one rank was not compared")


@pytest.mark.parametrize(
    ("text", "is_out_of_memory"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", True),
        ("RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory", True),
        ("numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8 GiB", True),
        ("paceline: rank 0 was killed by the kernel: out of memory. It had 12 GiB", True),
        ("RuntimeError: mat1 and mat2 shapes cannot be multiplied", False),
    ],
)
def test_lack_of_memory_is_recognized(text, is_out_of_memory):
    assert RunFailedError(text, text).is_out_of_memory is is_out_of_memory
