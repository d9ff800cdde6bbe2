"""Mismatched collectives: every rank reports which rank calls what, and at which line."""

import json
import subprocess
import sys

import pytest
import ranks

MISTAKES = """
    import json, sys, torch, torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    import paceline

    world = paceline.init(progress=False)
    rank, size = world.rank, world.size
    heard = {}

    def sizes(group):
        dist.all_reduce(torch.ones(1024 if rank == 0 else 512), group=group)  # the line

    def dtypes(group):
        kind = torch.float64 if rank == 1 else torch.float32
        dist.broadcast(torch.ones(8, dtype=kind), 0, group=group)

    def kinds(group):
        x = torch.ones(4)
        if rank == 2:
            dist.barrier(group=group)
        else:
            dist.all_reduce(x, group=group)

    def roots(group):
        dist.broadcast(torch.ones(4), rank if rank < 2 else 0, group=group)

    def operations(group):
        op = dist.ReduceOp.MAX if rank == 2 else dist.ReduceOp.SUM
        dist.all_reduce(torch.ones(4), op=op, group=group)

    def asynchronous(group):
        work = dist.all_gather([torch.zeros(rank + 1) for _ in range(size)],
                               torch.zeros(rank + 1), group=group, async_op=True)
        work.wait()

    def functionally(group):
        x = functional.reduce_scatter_tensor(torch.ones(6 * (1 + rank // 2)), "sum", 0, group)
        functional.wait_tensor(x)

    def after_five(group):
        for _ in range(5):
            dist.all_reduce(torch.ones(4), group=group)
        sizes(group)

    def backward(group):
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(4, 4), process_group=group)
        if rank == 1:  # its loop is over
            dist.barrier(group=group)
        else:
            model(torch.ones(2, 4)).sum().backward()

    for mistake in (sizes, dtypes, kinds, roots, operations, asynchronous, functionally,
                    after_five, backward):
        group = dist.new_group(list(range(size)))
        try:
            mistake(group)
        except ValueError as error:
            heard[mistake.__name__] = str(error)
    everybody = [None] * size
    dist.all_gather_object(everybody, heard)
    if rank == 0:
        json.dump(everybody, open(sys.argv[1], "w"))
"""


def test_mismatched_collectives_are_reported_on_every_rank_with_lines(tmp_path):
    script = ranks.write(tmp_path, MISTAKES)
    out = tmp_path / "out.json"
    ranks.run(script, out, ranks=3)
    heard = json.loads(out.read_text())
    assert heard[0] == heard[1] == heard[2]
    lines = script.read_text().splitlines()
    sizes = 1 + next(i for i, line in enumerate(lines) if "# the line" in line)
    said = heard[0]
    assert said["sizes"].partition(" of group ")[0] == "ranks disagree about collective 1"
    assert (
        f": rank 0 all-reduce of 1024 float32 (script.py:{sizes}), ranks 1-2 all-reduce of 512 "
        f"float32 (script.py:{sizes}). HINT: use the same shape"
    ) in said["sizes"]
    assert "ranks 0, 2 broadcast of 8 float32" in said["dtypes"]
    assert "rank 1 broadcast of 8 float64" in said["dtypes"]
    kinds = said["kinds"]
    assert f"ranks 0-1 all-reduce of 4 float32 (script.py:{sizes + 11})" in kinds
    assert f"rank 2 barrier (script.py:{sizes + 9}). HINT: call the same collectives" in kinds
    assert "rank 1 broadcast of 4 float32 from rank 1" in said["roots"]
    assert "ranks 0-1 all-reduce of 4 float32 with SUM" in said["operations"]
    assert "rank 1 all-gather of 2 float32" in said["asynchronous"]
    assert "rank 2 reduce-scatter of 4 float32" in said["functionally"]
    assert "disagree about collective 6" in said["after_five"]
    assert "ranks 0, 2 all-reduce of 20 float32 by DDP (script.py" in said["backward"]


RIGHT = """
    import sys, time, torch, torch.distributed as dist
    import paceline

    world = paceline.init(progress=False)
    rank = world.rank
    # Launched before a message that the other side waits for first: a check must not wait here.
    began = time.monotonic()
    for _ in range(3):
        x, token = torch.ones(4), torch.ones(1)
        if rank == 0:
            work = dist.all_reduce(x, async_op=True)
            dist.send(token, 1)
        else:
            dist.recv(token, 0)
            work = dist.all_reduce(x, async_op=True)
        work.wait()
        assert x.tolist() == [2.0] * 4
    assert time.monotonic() - began < 4  # once, not each time
    # Sizes that differ by rank on purpose.
    mine, other = ([1, 2], [1, 3]) if rank == 0 else ([3, 1], [2, 1])
    got = torch.zeros(sum(other))
    dist.all_to_all_single(got, torch.ones(sum(mine)), other, mine)
    assert got.sum() == sum(other)
    sparse = torch.sparse_coo_tensor([[0, 1][: rank + 1]], torch.ones(rank + 1), (4,))
    dist.all_reduce(sparse)
    assert sparse.to_dense().tolist() == [2.0, 1.0, 0.0, 0.0]
    parts = [torch.zeros(4), torch.zeros(4)] if rank == 0 else None
    dist.gather(torch.ones(4), parts, dst=0)
    with torch.inference_mode(), torch.device("meta"):
        dist.barrier()
    for i in range(600):
        dist.all_reduce(x)
    if rank == 0:
        print("all well", x[0].item() == 2.0 ** 601)
"""


@pytest.mark.long
def test_correct_script_passes_collective_check(tmp_path):
    script = ranks.write(tmp_path, RIGHT)
    assert "all well" in ranks.run(script).stdout


ONE_SIDED = """
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    sub = dist.new_group([0, 1])
    for group in (dist.group.WORLD, sub):
        for i in range(70):
            dist.all_reduce(torch.ones(4), group=group)
        print(getattr(group, "_checks", None) is not None)
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    "recorded", [[True, False], pytest.param([True, True], marks=pytest.mark.long)]
)
def test_check_runs_only_if_all_group_members_are_recorded(tmp_path, recorded):
    """A rank that is not recorded does not check, and the other ranks do not wait for it."""
    script = ranks.write(tmp_path, ONE_SIDED)
    port, started = str(ranks.free_port()), []
    for rank, with_record in enumerate(recorded):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
        variables = {name: str(value) for name, value in place.items()}
        prefix = (
            [ranks.PACELINE, "record", str(tmp_path / "r")] if with_record else [sys.executable]
        )
        started.append(
            subprocess.Popen(
                [*prefix, str(script)],
                env=ranks.environment(MASTER_ADDR="127.0.0.1", **variables),
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    checked = all(recorded)
    for process in started:
        assert process.communicate(timeout=60)[0].split() == [f"{checked}"] * 2
        assert process.returncode == 0
