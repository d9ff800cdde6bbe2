"""A rank that is killed in any phase of a sharded save leaves a checkpoint that can be loaded."""

import pytest
from ranks import run, write

from paceline.checkpoint.saver import find_newest_valid, load_checkpoint
from paceline.checkpoint.sharded_tensor import whole

SCRIPT = """
    import os, signal, sys
    from pathlib import Path
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    import paceline
    from paceline.checkpoint import checkpoint_folder, saver as saving, unfinished_folder
    from paceline.checkpoint.shared_state import SharedState

    folder, victim, phase, after = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    world = paceline.init()
    mesh = init_device_mesh("cpu", (world.size,))

    def state(step):
        local = torch.full((2, 3), float(step * 10 + world.rank))
        return SharedState({"models": [{"weight": DTensor.from_local(local, mesh, [Shard(0)])}]})

    def kill_at(module, name):
        call = getattr(module, name)
        def killing(*args, **options):
            if after:
                call(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)
        setattr(module, name, killing)

    store = dist.PrefixStore("test", dist.distributed_c10d._get_default_store())
    saver = saving.CheckpointSaver(Path(folder), world.rank, world.size, store, print)
    saver.save(1, state(1), {}, {})
    saver.wait()
    dist.barrier()
    if world.rank == victim:
        kill_at(*{
            "copy": (saving.StagingMemory, "copy"),
            "shard": (torch, "save"),
            "flush": (os, "fsync"),
            "report": (saving.CheckpointSaver, "_gather"),
            "commit": (checkpoint_folder, "commit"),
            "flush_folder": (unfinished_folder, "flush_folder"),
            "rename": (unfinished_folder.UnfinishedFolder, "rename"),
            "remove": (checkpoint_folder, "remove_old"),
        }[phase])
    saver.save(2, state(2), {}, {})
    saver.wait()
    dist.barrier()
"""

OF_EACH_RANK = ("copy", "shard", "flush", "report")
OF_RANK_0 = ("commit", "flush_folder", "rename", "remove")


def kill(folder, victim, phase, after):
    """Kill a rank in the second save; return the step of the checkpoint that is loaded then."""
    place = folder / f"{victim}-{phase}-{after}"
    words = (place, victim, phase, after)
    result = run(write(folder, SCRIPT), *words, ranks=2, check=False)
    assert "SIGKILL" in result.stderr, result.stderr
    newest = find_newest_valid(place, pytest.fail)
    step = int(newest.name.removeprefix("step-"))
    weight = whole(load_checkpoint(newest)[0]["models"][0]["weight"])
    assert weight.tolist() == [[step * 10.0 + row // 2] * 3 for row in range(4)]
    return step


def test_rank_killed_while_it_writes_its_shard(tmp_path):
    assert kill(tmp_path, 1, "shard", 1) == 1


@pytest.mark.long
def test_rank_killed_in_each_phase(tmp_path):
    for victim in (0, 1):
        for phase in OF_EACH_RANK:
            for after in (0, 1):
                last = phase == "report" and after and victim == 1  # rank 0 completes the save
                assert kill(tmp_path, victim, phase, after) in ((1, 2) if last else (1,))
    steps = [kill(tmp_path, 0, phase, after) for phase in OF_RANK_0 for after in (0, 1)]
    assert steps == [1, 2, 1, 1, 1, 2, 2, 2]
