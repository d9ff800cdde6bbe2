"""Collectives of a phase: what they carry, and the line of the user's code that calls them."""

import json

import pytest
import ranks

from paceline.analyze.records.rank_lines import read_rank_lines
from paceline.security.files import InvalidFileError

SCRIPT = """
    import json, sys, time, torch, torch.distributed as dist
    from torch import nn
    import paceline
    from paceline.record.experiments.lines.rank_profile import RankProfile
    from paceline.record.experiments.observer import Observer
    from paceline.record.ring.resource_usage import FileOpenCounter

    world = paceline.init(progress=False)
    recorder, observer = world._recorder, Observer()
    observer.install()
    inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    model = nn.parallel.DistributedDataParallel(inner)
    second = nn.Linear(4, 300)
    parameters = [*model.parameters(), *second.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.01)

    def reduced(value):
        total = value.clone()
        dist.all_reduce(total)  # in a function for both
        return total

    def average(layer):
        for p in layer.parameters():
            dist.all_reduce(p.grad)  # loop

    def flat(layer):
        whole = torch.cat([p.grad.flatten() for p in parameters])
        dist.all_reduce(whole)  # flat

    def step(number):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 8)).sum()  # forward
        loss = loss + second(torch.randn(2, 4)).sum()
        loss.backward()  # backward
        average(second)
        flat(second)
        optimizer.step()
        reduced(loss.detach())
        dist.all_gather_object([None] * world.size, {"loss": number})  # objects
        dist.barrier()  # barrier
        dist.broadcast(second.weight.detach(), 0)  # weights
        dist.all_reduce(torch.zeros(500))  # else

    step(0)
    profile = RankProfile(recorder, FileOpenCounter(), observer.gradient_addresses)
    profile.start(is_kept=False, expected_s=0.1)
    step(1)
    profile.stop()
    step(2)
    profile.start(is_kept=True, expected_s=0.1)
    end = time.monotonic() + 10
    for number in range(3):
        step(number)
    while not profile._samples and time.monotonic() < end:
        sum(range(1000))
    profile.stop()
    profile.write()
    if world.rank == 0:
        with open(sys.argv[1], "wb") as file:
            file.write(recorder.path.with_suffix(".profile").read_bytes())
    dist.barrier()
    """


def test_collectives_are_named_by_what_they_carry_and_the_line_that_calls_them(tmp_path):
    script = ranks.write(tmp_path, SCRIPT)
    ranks.run(script, tmp_path / "found.profile")
    found = read_rank_lines(tmp_path / "found.profile")
    calls = [0] * len(found.collective_sites)
    for site in found.collectives[:, 2].tolist():
        calls[site] += 1
    by_line = {}
    for site, count in zip(found.collective_sites, calls, strict=True):
        code = found.lines[found.stacks[site.stack].lines[0]].code
        if count:
            line = by_line.setdefault(code.partition("# ")[2], [str(site.kind), 0])
            assert line[0] == site.kind
            line[1] += count
    assert by_line.pop("forward")[0] == "buffer"
    objects = by_line.pop("objects")
    assert objects == ["object", 6]  # their sizes, and the objects
    assert by_line == {
        "backward": ["gradient", 3],
        "loop": ["gradient", 6],
        "flat": ["gradient", 3],
        "in a function for both": ["metric", 3],
        "barrier": ["barrier", 3],
        "weights": ["parameter", 3],
        "else": ["other", 3],
    }
    (size,) = {s.bytes_per_call for s in found.collective_sites if s.kind == "metric"} - {0}
    assert size == 4
    whats = {found.stacks[site.stack].what for site in found.collective_sites}
    assert {"torch.distributed.distributed_c10d.barrier"} <= whats


def test_profile_with_a_call_of_an_unknown_place_is_refused(tmp_path):
    """And one without collectives, as of older versions, is read."""
    base = {
        "version": 1, "interval_ns": 1, "start_ns": 0, "frames": [], "stacks": [], "samples": [],
        "lost": 0, "executions": [], "workers": 0, "worker_ns": 0, "worker_times": [],
    }  # fmt: skip
    path = tmp_path / "rank-0.profile"
    path.write_text(json.dumps(base))
    assert not len(read_rank_lines(path).collectives)
    stack = {"frames": [], "activity": "collective", "what": ""}
    site = {"kind": "metric", "stack": 0, "count": 1, "bytes": 4}
    whole = base | {"stacks": [stack], "collective_sites": [site], "collectives": [[1, 7, 0]]}
    path.write_text(json.dumps(whole))
    assert read_rank_lines(path).collectives.tolist() == [[1, 7, 0]]
    for damaged in (
        whole | {"collectives": [[1, 7, 1]]},
        whole | {"collective_sites": [site | {"stack": 1}]},
        whole | {"collective_sites": [site | {"kind": "unheard"}]},
        whole | {"collectives": [[1, -7, 0]]},
    ):
        path.write_text(json.dumps(damaged))
        with pytest.raises(InvalidFileError, match=r"rank-0\.profile"):
            read_rank_lines(path)
