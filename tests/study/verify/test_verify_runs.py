"""The runs of ``paceline verify``."""

from dataclasses import replace

import numpy as np
import pytest
import ranks

from paceline.analyze.verification.joined_runs import JoinedRuns
from paceline.analyze.verification.runs_facts import VerifyRuns
from paceline.observe.facts.ranks import SKETCH_SIZE
from paceline.observe.settings import VerifySettings
from paceline.study import verify
from paceline.study.trials import ScriptRequest
from paceline.study.verify import run_verification, saves_every_some_steps
from trainings import Training, find, shuffled, total, train, verified

SCRIPT = """
    import os
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=4, sampler=sampler)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.0), nn.Linear(8, 2))
    start = 0
    if os.path.exists("state.pt"):
        state = torch.load("state.pt")
        net.load_state_dict(state["net"])
        start = state["epoch"]
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(start, 50):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            torch.save({"net": net.state_dict(), "epoch": epoch + 1}, "state.pt")
        dist.barrier()
"""


def gradient(facts, step, name):
    return facts.sketches[facts.steps[step].gradients[name]][:SKETCH_SIZE]


@pytest.mark.long
def test_all_runs_of_a_script_that_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = ranks.write(tmp_path, SCRIPT)
    said = []
    found = run_verification(ScriptRequest(str(script), [], ranks=2), said.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["script.py"]  # nothing was saved
    assert [len(one.steps) for one in found.ranks] == [18, 18]
    assert not found.notes
    assert found.replay is not None
    assert found.permuted is not None
    for step in range(18):
        for name in ("0/0.weight", "0/2.bias"):
            mine, other = gradient(found.ranks[0], step, name), gradient(found.replay, step, name)
            assert np.allclose(mine, other, rtol=1e-4, atol=1e-6)
    differs = [
        not np.array_equal(
            gradient(found.replay, step, "0/0.weight"), gradient(found.permuted, step, "0/0.weight")
        )
        for step in range(18)
    ]
    assert any(differs)  # rounding
    assert found.alone is not None
    assert found.alone.size == 1
    assert found.resumed is not None
    loads = [file for file in found.resumed[0].files if not file.is_save]
    assert [file.contains for file in loads] == [["model"]]
    resumed = found.resumed[0].loaders[0].passes[0]
    second = found.ranks[0].loaders[0].passes[1]
    assert resumed.planned == second.planned


@pytest.mark.long
def test_script_that_draws_in_its_forward_is_replayed_with_the_numbers_of_the_ranks(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    text = SCRIPT.replace("Dropout(0.0)", "Dropout(0.5)").replace("torch.save(", "print(")
    text = text.replace("start = 0", "start = 0; torch.manual_seed(1 + dist.get_rank())")
    script = ranks.write(tmp_path, text)
    found = run_verification(ScriptRequest(str(script), [], ranks=2), lambda _: None)
    assert found.replay is not None
    assert found.replay.parts == 2
    assert found.permuted is None
    for step in (0, 7, 17):
        mine, other = (gradient(x, step, "0/2.bias") for x in (found.ranks[0], found.replay))
        assert np.allclose(mine, other, rtol=1e-4, atol=1e-6)
    (note,) = found.notes
    assert "draws random numbers in script.py:26, others on each rank: one rank trained" in note
    assert JoinedRuns(found).comparison.meant == ["random-numbers"]


@pytest.mark.long
def test_script_that_fails_when_it_resumes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = SCRIPT.replace('state["net"])', 'state["model"])')
    script = ranks.write(tmp_path, text)
    found = run_verification(ScriptRequest(str(script), [], ranks=2), lambda _: None)
    assert found.resumed is None
    assert found.resume_error is not None
    assert "KeyError: 'model'" in found.resume_error.short
    assert found.resume_error.lines == ["script.py:18"]
    (one,) = [x for x in find(found) if x.mistake.id == "resume-differs"]
    assert one.is_question  # other failures may have to do with the observation


@pytest.mark.long
def test_script_that_fails_is_reported_with_its_error(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = ranks.write(tmp_path, "raise RuntimeError('no data')")
    with pytest.raises(ValueError, match=r"ended with exit code 1(.|\n)*RuntimeError: no data"):
        run_verification(ScriptRequest(str(script), [], ranks=2), lambda _: None)


EVERY = """
    import os
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset, DistributedSampler

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(160, 4)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False))
    net = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    start = {"step": 0}
    if os.path.exists("state.pt"):
        start = torch.load("state.pt")
        net.load_state_dict(start["net"])
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = start["step"]
    for epoch in range(9):
        for number, (x, y) in enumerate(loader):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            step += 1
            if dist.get_rank() == 0 and (number + 1) % INTERVAL == 0:
                torch.save({"net": net.state_dict(), "step": step}, "state.pt")
"""


@pytest.mark.long
def test_script_that_saves_every_some_steps_is_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = ranks.write(tmp_path, EVERY.replace("INTERVAL", "8"))
    found = run_verification(ScriptRequest(str(script), [], ranks=2), lambda _: None)
    assert max(len(one.steps) for one in found.ranks) == 18  # of shortened epochs
    assert found.is_continued
    repeats = [one for one in find(found) if one.mistake.id == "resume-repeats-samples"]
    assert "begins with batch 1 of epoch 1" in repeats[0].text
    assert "batch 17 of epoch 1 comes after" in repeats[0].text


@pytest.mark.long
def test_script_that_saves_too_late_is_said_not_to_be_resumed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = ranks.write(tmp_path, EVERY.replace("INTERVAL", "5000"))
    found = run_verification(ScriptRequest(str(script), [], ranks=2), lambda _: None)
    assert found.resumed is None
    (note,) = found.notes
    assert "saved no checkpoint in 20 steps, so that it was not resumed" in note


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("if step % 100 == 0: torch.save(state, path)", True),
        ("if rank == 0 and step % every == 0:\n    save_checkpoint(model)", True),
        ("if epoch % 10 == 0: print(epoch)", False),
        ("torch.save(model, path)", False),
        ("if x % 2: (", False),
    ],
)
def test_scripts_that_save_every_some_steps(tmp_path, line, wanted):
    (tmp_path / "script.py").write_text(line)
    assert saves_every_some_steps(tmp_path / "script.py") is wanted


def test_each_run_says_how_long_all_will_take(tmp_path, monkeypatch):
    said, now = [], [0.0]
    monkeypatch.setattr(verify.time, "monotonic", lambda: now[0])
    with verify.ObservedRuns(ScriptRequest("train.py", []), said.append) as runs:
        runs._announce("all ranks")
        now[0], runs.rest = 8.0, 3
        runs._announce("one rank")
        now[0] = 24.0
        runs._announce("another")
    assert said == [
        "all ranks (run 1 of about 4, at most 5 min 0 s to the end)",
        "one rank (run 2 of about 4, about 24 s to the end)",
        "another (run 3 of about 4, about 24 s to the end)",
    ]


@pytest.mark.parametrize("is_rounding", [True, False])
def test_small_difference_is_none_if_last_bits_change_as_much(is_rounding):
    """As that of another maximum of almost equal values."""
    change = lambda size: lambda rank, step, all_: {n: size * g for n, g in all_.items()}  # noqa: E731
    found = verified(Training(epochs=1))
    found.ranks = verified(Training(epochs=1, change=change(1.0004))).ranks
    one = JoinedRuns(found).comparison.whole
    assert one is not None
    assert one.size == pytest.approx(0.0004, rel=0.1)
    other = verified(Training(epochs=1, change=change(1.0002 if is_rounding else 1.000001)))
    asked, before = [], found.permuted

    class Runs:
        def run(self, name, what, settings, ranks):
            asked.append(settings)
            return [other.permuted]

    rest = verify._round(Runs(), found, VerifySettings(""), one)
    assert [(x.permutes, x.last_bits > 2) for x in asked] == [(True, True)]
    assert (rest is None) == is_rounding
    assert (found.permuted is before) != is_rounding
    assert ["other last bits" in note for note in found.notes] == [True] * is_rounding


@pytest.mark.parametrize("has_same_order", [True, False])
def test_accumulation_to_a_fixed_global_batch_is_compared_with_the_unchanged_script(has_same_order):
    """A script that accumulates fewer batches on more ranks: a replay has steps twice as large."""
    asked = Training(
        accumulate=2,
        root=lambda losses, rank, size, whole: losses.mean() / (4 // size),
        order=lambda rank, size, epoch: shuffled(rank, size, epoch, 32),
    )
    single = replace(asked, size=1, accumulate=4)
    if not has_same_order:
        single = replace(single, order=lambda rank, size, epoch: shuffled(0, 1, epoch + 9, 32))
    found = VerifyRuns(train(asked), replay=train(replace(single, batch=8))[0])
    found.alone, asked_for = train(single)[0], []

    class Runs:
        def run(self, name, what, settings, ranks):
            asked_for.append(settings.batches)
            return train(single)

    assert not verify._is_compared(found)
    verify._compare_with_alone(Runs(), found)
    assert (found.replay is found.alone) == has_same_order
    assert asked_for == [2 * VerifySettings("").batches] * has_same_order
    assert len(JoinedRuns(found).replayed) == (4 if has_same_order else 0)
    assert [one.mistake.id for one in find(found) if not one.is_question] == []
    found.ranks = train(replace(asked, exchange=total))
    wrong = [one.mistake.id for one in find(found) if one.difference is not None]
    assert wrong == ["gradients-summed"] * has_same_order


EVALUATED = """
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.utils.data import DataLoader, Subset, TensorDataset, DistributedSampler

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.randn(75, 4)
    data = TensorDataset(x, (x.sum(1) > 0).long())
    train, val = Subset(data, range(48)), Subset(data, range(48, 75))
    start, end = (0, 20) if world > 1 and rank == 0 else (20 * (world > 1), 27)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, batch_size=4, sampler=sampler)
    parts = DataLoader(Subset(val, range(start, end)), batch_size=4)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        sums = torch.zeros(2)
        with torch.no_grad():
            for x, y in parts:
                loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
                sums += torch.tensor([loss, len(x)])
        total = sums.clone()
        dist.all_reduce(total)
        means = sums[:1] / sums[1]
        dist.all_reduce(means)
        if rank == 0:
            print(f"epoch {epoch} exact {total[0] / total[1]:.5f}", flush=True)
            print(f"epoch {epoch} mean {means.item() / world:.5f}", flush=True)
"""


@pytest.mark.long
def test_mean_of_the_means_of_uneven_parts_differs_from_one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = ranks.write(tmp_path, EVALUATED)
    found = run_verification(ScriptRequest(str(script), [], ranks=2), lambda text: None)
    wrong = [one for one in find(found) if not one.is_question]
    assert [one.mistake.id for one in wrong] == ["metric-differs"]
    assert "'epoch 0 mean" in wrong[0].text
    lines = script.read_text().splitlines()
    assert "all_reduce(means)" in lines[int(wrong[0].lines[0].partition(":")[2]) - 1]
