"""State that is equal on all ranks, of rank 0, or of each rank; folders of single nodes."""

import json

import pytest
import ranks

KEEP = """
    import json, os, sys, torch
    import paceline

    class Thing:
        def __init__(self, value):
            self.state = {"a": torch.full((4,), value), "b": torch.full((4,), value), "c": value}
        def state_dict(self):
            return self.state
        def load_state_dict(self, state):
            self.state = state
        def values(self):
            return [*self.state["a"].tolist(), *self.state["b"].tolist(), self.state["c"]]

    how, out, epochs, differs_at = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    world = paceline.init(progress=False)
    thing = Thing(1.0)
    kept = thing if how in ("plain", "on rank 0") else getattr(paceline, how)(thing)
    if how != "on rank 0" or world.rank == 0:
        world.keep(thing=kept)
    for epoch in world.epochs(epochs, checkpoint="ckpt"):
        if epoch >= differs_at:
            thing.state = Thing(10.0 * epoch + world.rank).state
    json.dump(thing.values(), open(f"{out}-{world.rank}", "w"))
"""


def run(folder, how, epochs, differs_at=0, number=2, check=True):
    script = folder / "script.py"
    if not script.exists():
        ranks.write(folder, KEEP)
    return ranks.run(script, how, folder / "out", epochs, differs_at, ranks=number, check=check)


def restored(folder, how, epochs, number=2):
    """Resume a finished run, and return the values that each rank restored and what was printed."""
    said = run(folder, how, epochs, number=number).stderr
    return [json.loads((folder / f"out-{rank}").read_text()) for rank in range(number)], said


def test_state_that_differs_between_ranks_is_an_error_unless_it_is_said(tmp_path):
    failed = run(tmp_path, "plain", 3, differs_at=1, check=False)
    assert failed.returncode == 1
    assert "world.keep(thing=...) differs on rank 1 from rank 0" in failed.stderr
    assert "HINT" in failed.stderr
    assert "paceline.per_rank(thing)" in failed.stderr
    assert "src/paceline" not in failed.stderr
    assert restored(tmp_path, "plain", 1)[0] == [[1.0] * 9] * 2  # of the first epoch, not a mixture


def test_state_per_rank_is_restored_on_its_rank(tmp_path):
    run(tmp_path, "per_rank", 3)
    values, _ = restored(tmp_path, "per_rank", 3)
    assert values == [[20.0] * 9, [21.0] * 9]
    values, said = restored(tmp_path, "per_rank", 3, number=3)
    assert values == [[20.0] * 9, [21.0] * 9, [1.0] * 9]
    assert said.count("the checkpoint contains the state of world.keep(thing=...) for 2 ranks") == 1
    values, said = restored(tmp_path, "per_rank", 3, number=1)
    assert values == [[20.0] * 9]
    failed = run(tmp_path, "plain", 3, check=False)
    assert failed.returncode == 1
    assert "HINT: world.keep(thing=paceline.per_rank(thing))" in failed.stderr


def test_state_of_rank_0_is_restored_on_all_ranks(tmp_path):
    run(tmp_path, "from_rank_0", 3)
    assert restored(tmp_path, "from_rank_0", 3)[0] == [[20.0] * 9] * 2
    assert restored(tmp_path, "plain", 3)[0] == [[20.0] * 9] * 2
    values, said = restored(tmp_path, "per_rank", 3)
    assert values == [[20.0] * 9] * 2
    assert (
        said.count("the checkpoint contains one state of world.keep(thing=...) for all ranks") == 1
    )


NODES = """
    import os, socket, sys
    import paceline
    from paceline.security import shared_folder
    shared_folder.SEEN_TIMEOUT_S = 0.2
    world = paceline.init(progress=False)
    socket.gethostname = lambda: f"node{world.rank // 2}"
    os.makedirs(f"node{world.rank // 2}", exist_ok=True)
    os.chdir(f"node{world.rank // 2}")   # the same path is another folder on each node
    for epoch in world.epochs(1, checkpoint="ckpt"):
        pass
"""


def test_folder_that_is_local_to_nodes_is_rejected_before_training(tmp_path):
    result = ranks.run(ranks.write(tmp_path, NODES), ranks=3, check=False)
    assert result.returncode == 1
    assert "rank 2 (node1)" in result.stderr
    assert "is not visible to rank" in result.stderr
    assert "HINT" in result.stderr
    assert not list(tmp_path.glob("node*/ckpt/*"))
    assert not list(tmp_path.glob("node*/ckpt/.*"))


def test_object_that_is_kept_on_some_ranks_only_is_rejected(tmp_path):
    failed = run(tmp_path, "on rank 0", 1, check=False)
    assert failed.returncode == 1
    assert "world.keep(thing=...) was called on some ranks only" in failed.stderr
    assert "HINT" in failed.stderr


DIVERGED = """
    import sys, torch
    from pathlib import Path
    from torch.utils.data import DataLoader, TensorDataset
    import paceline
    from paceline.checkpoint.saver import load_checkpoint
    how = sys.argv[1]
    world = paceline.init(progress=False, replicas="ignore")
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model, optimizer = world.distribute(model, optimizer)
    loader = world.shard(DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2))
    if how == "per_rank":
        world.keep(model=paceline.per_rank(model), optimizer=paceline.per_rank(optimizer))
    for epoch in world.epochs(2, checkpoint="ckpt"):
        for (x,) in world.batches(loader):
            world.backward(model(x).mean())
            world.step(optimizer)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float(world.rank))
    if world.rank == 0:
        shared, own, _ = load_checkpoint(Path("ckpt/step-00000004"))
        states = shared["models"] or [state["kept"]["model"] for state in own]
        print([[tensor.mean().item() for tensor in state.values()] for state in states])
"""


@pytest.mark.parametrize("how", ["replicated", "per_rank"])
def test_diverged_model_is_saved_from_rank_0_with_a_warning_or_per_rank(tmp_path, how):
    result = ranks.run(ranks.write(tmp_path, DIVERGED), how, ranks=2)
    warned = result.stderr.count("models[0] differs on rank 1 from rank 0")
    assert warned == (1 if how == "replicated" else 0)
    assert ("[[0.0, 0.0]]" if warned else "[[0.0, 0.0], [1.0, 1.0]]") in result.stdout


DIFFERENT = """
    import sys, torch
    import paceline
    world = paceline.init(progress=False, replicas="ignore")
    model = torch.nn.Linear(4, 1 + world.rank).requires_grad_(False)
    model = world.distribute(model)
    for epoch in world.epochs(1, checkpoint="ckpt"):
        pass
"""


def test_different_models_without_a_layout_that_divides_them_are_an_error(tmp_path):
    done = ranks.run(ranks.write(tmp_path, DIFFERENT), ranks=2, check=False)
    assert done.returncode == 1
    assert "models[0] has other parameters on rank 1 than on rank 0" in done.stderr
    assert "HINT: give the same model to world.distribute on every rank" in done.stderr
    assert not [path for path in (tmp_path / "ckpt").iterdir() if path.name.startswith("step")]


@pytest.mark.parametrize("how", ["per_rank", "from_rank_0"])
def test_kept_objects_need_state_dict(how):
    import paceline
    from paceline.world.training_state import KeptState

    with pytest.raises(ValueError, match=rf"paceline.{how}\(\.\.\.\).*this is of type int"):
        KeptState.of("thing", getattr(paceline, how)(3))
