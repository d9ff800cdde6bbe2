"""Checkpoints of any layout, on any number of ranks, are read by any other bit for bit."""

import json
import shutil
import zlib

import pytest
import torch
from ranks import run, write

from paceline.checkpoint import checkpoint_folder
from paceline.checkpoint.manifest import checksum
from paceline.checkpoint.other_formats import load_dcp
from paceline.checkpoint.saver import find_newest_valid, load_checkpoint
from paceline.checkpoint.sharded_tensor import PieceError, SavedTensor, whole
from paceline.checkpoint.shared_state import SharedState
from paceline.checkpoint.unfinished_folder import UnfinishedFolder

SCRIPT = """
    import hashlib, json, sys
    from pathlib import Path
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    import paceline
    from paceline.checkpoint.saver import CheckpointSaver, load_checkpoint
    from paceline.checkpoint.shared_state import SharedState
    from paceline.world.restoring import load_part

    world = paceline.init()
    rank, size = world.rank, world.size

    def build(layout, seed):
        torch.manual_seed(seed)
        # 5 and 7 rows do not divide by any number of ranks; a scalar bias has one row
        model = nn.Sequential(nn.Linear(3, 7), nn.BatchNorm1d(7), nn.Linear(7, 5), nn.Linear(5, 1))
        if layout != "plain" and size > 1:
            shape = (size,) if layout == "sharded" else (2, size // 2)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("a", "b")[: len(shape)])
            for part in (model[2], model):
                fully_shard(part, mesh=mesh)
                part.set_force_sum_reduction_for_comms(True)
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def full(value):
        if isinstance(value, DTensor):
            return value.full_tensor()
        return value

    def digest(model, optimizer):
        content = hashlib.sha256()
        states = optimizer.state_dict()["state"]
        tensors = [*model.state_dict().values(), *(t for s in states.values() for t in s.values())]
        for tensor in tensors:
            content.update(full(tensor).detach().numpy().tobytes())
        return content.hexdigest()

    def layouts():
        return ["plain", "sharded"] + (["hsdp"] if size in (2, 4) else [])

    mode, folder = sys.argv[1], Path(sys.argv[2])
    store = dist.distributed_c10d._get_default_store() if size > 1 else None
    if mode == "save":
        for layout in layouts():
            model, optimizer = build(layout, 0)
            for _ in range(2):
                torch.manual_seed(9)
                model(torch.randn(4, 3)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            path = folder / f"{layout}-{size}"
            key = dist.PrefixStore(layout, store) if store else None
            saver = CheckpointSaver(path, rank, size, key, print)
            state = {"models": [model.state_dict()], "optimizers": [optimizer.state_dict()]}
            saver.save(1, SharedState(state), {}, {})
            saver.wait()
            if layout != "plain" and size > 1:  # PyTorch's own format, from the same state
                dcp.save({"model": model.state_dict()}, checkpoint_id=folder.parent / path.name)
            found = digest(model, optimizer)
            if rank == 0:
                (path / "digest").write_text(found)
    else:
        for path in sorted(folder.iterdir()):
            shared, _, _ = load_checkpoint(path / "step-00000001")
            for layout in layouts():
                model, optimizer = build(layout, 1)
                load_part(model, shared["models"][0], "models")
                load_part(optimizer, shared["optimizers"][0], "optimizers")
                same = digest(model, optimizer) == (path / "digest").read_text()
                torch.manual_seed(9)
                model(torch.randn(4, 3)).sum().backward()
                optimizer.step()
                digest(model, optimizer)
                if rank == 0:
                    print("reads", path.name, layout, size, same)
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Checkpoints of two ranks, in three layouts."""
    folder = tmp_path_factory.mktemp("saved")
    run(write(folder, SCRIPT), "save", folder / "of", ranks=2)
    return folder / "of"


def reads(folder, script_folder, ranks):
    out = run(write(script_folder, SCRIPT), "load", folder, ranks=ranks).stdout
    return [line.split()[-4:] for line in out.splitlines() if "reads" in line]


@pytest.mark.long
def test_one_process_reads_what_sharded_ranks_wrote(saved):
    states = []
    for layout in ("plain", "sharded", "hsdp"):
        newest = find_newest_valid(saved / f"{layout}-2", pytest.fail)
        shared, _, _ = load_checkpoint(newest)
        states.append({name: whole(value) for name, value in shared["models"][0].items()})
    assert {name: tuple(value.shape) for name, value in states[0].items()}["2.weight"] == (5, 7)
    for other in states[1:]:
        assert list(other) == list(states[0])
        assert all(torch.equal(other[name], value) for name, value in states[0].items())


def test_each_rank_writes_its_piece_once(saved):
    sizes = {}
    for layout in ("plain", "sharded", "hsdp"):
        manifest = json.loads((saved / f"{layout}-2/step-00000001/manifest.json").read_text())
        sizes[layout] = sum(entry["bytes"] for entry in manifest["files"])
    assert sizes["hsdp"] < 1.6 * sizes["plain"]
    shard = torch.load(saved / "sharded-2/step-00000001/rank-00001.pt", weights_only=True)
    assert {tuple(piece["tensor"].shape) for piece in shard["pieces"].values()} >= {(3, 3), (2, 7)}


def test_other_layouts_on_other_ranks_read_it(saved, tmp_path):
    found = reads(saved, tmp_path, 3)
    assert len(found) == 6
    assert all(line[-1] == "True" for line in found), found


@pytest.mark.long
def test_every_layout_reads_every_other_on_one_to_four_ranks(tmp_path):
    for ranks in (1, 2, 3, 4):
        run(write(tmp_path, SCRIPT), "save", tmp_path / "of", ranks=ranks)
    found = [line for ranks in (1, 2, 3, 4) for line in reads(tmp_path / "of", tmp_path, ranks)]
    assert len(found) == 10 * 10
    assert all(line[-1] == "True" for line in found), found


def test_shard_of_another_run_or_rank_is_named(saved, tmp_path):
    folder = tmp_path / "run" / "step-00000001"
    shutil.copytree(saved / "sharded-2/step-00000001", folder)
    other = saved / "hsdp-2/step-00000001"
    warned = []
    shutil.copy(other / "rank-00001.pt", folder / "rank-00001.pt")
    with pytest.raises(ValueError, match="no valid checkpoint"):
        find_newest_valid(folder.parent, warned.append)
    assert "rank-00001.pt: is a part of another checkpoint or run (step 1)" in warned[0]
    shutil.copy(folder / "rank-00000.pt", folder / "rank-00001.pt")
    with pytest.raises(ValueError, match="no valid checkpoint"):
        find_newest_valid(folder.parent, warned.append)
    assert "rank-00001.pt: is the shard of rank 0, under the name of rank 1" in warned[1]
    (folder / "rank-00001.pt").unlink()
    with pytest.raises(ValueError, match="no valid checkpoint"):
        find_newest_valid(folder.parent, warned.append)
    assert "rank-00001.pt: can't be read (No such file or directory)" in warned[2]


@pytest.mark.parametrize("layout", ["sharded", "hsdp"])
def test_folder_of_torch_distributed_checkpoint_has_the_same_values(saved, layout):
    shared, _, _ = load_checkpoint(saved / f"{layout}-2/step-00000001")
    found = load_dcp(saved.parent / f"{layout}-2")
    expected = shared["models"][0]
    assert set(found) == {f"model.{name}" for name in expected}
    for name, value in expected.items():
        assert torch.equal(found[f"model.{name}"].whole(), whole(value)), name


def test_checkpoint_of_version_1_is_read(tmp_path):
    """As Paceline wrote it before shards had pieces."""
    folder = UnfinishedFolder(tmp_path / ".new")
    shared = SharedState({"models": [{"x": torch.ones(2)}]})
    shard = {"shared": shared.skeleton, "count": 1, "tensors": {0: torch.ones(2)}, "own": {}}
    entry = checkpoint_folder.write_shard(folder, 0, {**shard, "own_tensors": []})
    data = (tmp_path / ".new/rank-00000.pt").read_bytes()
    del entry["crc32c"]
    body = {"format": "paceline-checkpoint", "version": 1, "step": 4, "files": [entry]}
    body["files"][0]["crc32"] = zlib.crc32(data)
    body["check"] = checksum(body)
    (tmp_path / ".new/manifest.json").write_text(json.dumps(body))
    folder.rename(tmp_path / "step-00000004")
    folder.close()
    newest = find_newest_valid(tmp_path, pytest.fail)
    assert load_checkpoint(newest)[0]["models"][0]["x"].tolist() == [1.0, 1.0]


def piece(offset, tensor, shape=(4, 2)):
    return {"shape": shape, "offset": offset, "tensor": tensor}


@pytest.mark.parametrize(
    "pieces",
    [
        [piece((0, 0), torch.ones(2, 2))],
        [piece((0, 0), torch.ones(2, 2)), piece((1, 0), torch.ones(2, 2))],
        [piece((0, 0), torch.ones(2, 2)), piece((3, 0), torch.ones(2, 2))],
        [piece((0, 0), torch.ones(2, 2)), piece((2, 0), torch.ones(2, 2).double())],
        [piece((0, 0), torch.ones(4, 2)), piece((0, 0), torch.ones(0, 2), (1, 1))],
        [piece((0,), torch.ones(4, 2))],
    ],
    ids=["incomplete", "overlap", "outside", "dtypes", "shapes", "dimensions"],
)
def test_pieces_that_form_no_tensor_are_refused(pieces):
    with pytest.raises(PieceError):
        SavedTensor.of(pieces)


def test_part_of_a_tensor_is_read_from_all_pieces_that_have_it():
    full = torch.arange(24.0).view(4, 6)
    parts = [piece((r, c), full[r : r + 2, c : c + 3], (4, 6)) for r in (0, 2) for c in (0, 3)]
    tensor = SavedTensor.of(parts)
    assert torch.equal(tensor.part((1, 2), (2, 3)), full[1:3, 2:5])
    assert torch.equal(tensor.whole(), full)
    scalar = SavedTensor.of([piece((), torch.tensor(3.0), ())])
    assert scalar.whole().item() == 3.0


def test_sharded_state_is_of_another_model(saved):
    from torch import nn

    from paceline.world.restoring import load_part

    shared, _, _ = load_checkpoint(saved / "sharded-2/step-00000001")
    other = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(7), nn.Linear(7, 5, bias=False))
    with pytest.raises(ValueError, match="does not fit this script's models") as error:
        load_part(other, shared["models"][0], "models")
    assert "0.weight has shape (7, 3) in the checkpoint and (8, 3) in the model" in str(error.value)
    assert "and 2 more" in str(error.value) or "unknown to the model" in str(error.value)
