"""Folders of torch.distributed.checkpoint, and shards, that would take any amount of memory."""

import pickle
import struct
import tracemalloc

import pytest
import torch
import torch.distributed.checkpoint as dcp
from stores import KeyStore
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex

from paceline.checkpoint import other_formats
from paceline.checkpoint.manifest import DamagedCheckpointError
from paceline.checkpoint.other_formats import load_dcp, read_records
from paceline.checkpoint.pickle_stack import PickleError
from paceline.checkpoint.saver import CheckpointSaver, load_checkpoint
from paceline.checkpoint.shared_state import SharedState

LARGE = 1 << 33
RECORD = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\n)\x81"
BOMBS = {
    "memo": b"\x80\x04Nr" + struct.pack("<I", 0x3FFFFFFF) + b".",
    "bytearray": b"\x80\x05\x96" + struct.pack("<Q", LARGE) + b".",
    "bytes": b"\x80\x04\x8e" + struct.pack("<Q", LARGE) + b".",
    "text": b"\x80\x04\x8d" + struct.pack("<Q", LARGE) + b".",
    "frame": b"\x80\x04\x95" + struct.pack("<Q", LARGE) + b"N.",
    "long": b"\x80\x02\x8b" + struct.pack("<i", 0x7FFFFFFF) + b".",
    "key of doubled tuples": RECORD + b"})" + b"q\x00h\x00\x86" * 60 + b"K\x01s.",
    "key that is a number": RECORD + b"}K\x01K\x01sb.",
    "fields of a dict": b"\x80\x02}}b.",
    "other constructor": b"\x80\x02cpathlib\nPosixPath\n)\x81.",
    "call of a record": RECORD.replace(b")\x81", b")R."),
    "unknown function": b"\x80\x02cbuiltins\nbytearray\n" + b"J\x00\x00\x00\x40\x85R.",
    "two objects": RECORD + b"N.",
    "a number": b"\x80\x02K\x01.",
    "empty": b"",
    "cut off": RECORD,
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_hostile_metadata_is_refused_in_little_memory(bomb):
    tracemalloc.start()
    try:
        with pytest.raises(PickleError):
            read_records(BOMBS[bomb])
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_number_of_objects_in_metadata_is_limited(monkeypatch):
    monkeypatch.setattr(other_formats, "MAX_OBJECTS", 100)
    with pytest.raises(PickleError, match="100 objects"):
        read_records(b"\x80\x02" + b"}" * 200 + b".")


@pytest.fixture
def folder(tmp_path):
    dcp.save({"w": torch.arange(6.0), "b": torch.ones(2)}, checkpoint_id=tmp_path)
    return tmp_path


def change(folder, index, **fields):
    """Change where a piece is stored, or with ``name`` add a piece of a tensor."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (key,) = [one for one in metadata.storage_data if one.fqn == index]
    info = metadata.storage_data[key]
    changed = {"relative_path": info.relative_path, "offset": info.offset, "length": info.length}
    name = fields.pop("name", None)
    key = key if name is None else MetadataIndex(name, (6,))
    metadata.storage_data[key] = _StorageInfo(**{**changed, **fields})
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"offset": LARGE}, "__0_0.distcp: has only"),
        ({"length": -1}, "has an invalid position"),
        ({"offset": "0"}, "has an invalid position"),
        ({"relative_path": "../__0_0.distcp"}, "names the file"),
        ({"relative_path": "/dev/zero"}, "names the file"),
        ({"relative_path": "absent"}, "absent: can't be read"),
        ({"name": "w"}, "has two pieces in one place of __0_0.distcp"),
    ],
    ids=str,
)
def test_place_of_a_piece_outside_of_its_file_is_named(folder, fields, reason):
    assert load_dcp(folder)["w"].whole().tolist() == [0, 1, 2, 3, 4, 5]
    change(folder, "w", **fields)
    with pytest.raises(DamagedCheckpointError, match=reason):
        load_dcp(folder)


def saved(folder, monkeypatch, **changes):
    """Return a checkpoint whose shard was changed before it was written."""
    from paceline.checkpoint import checkpoint_folder

    write = checkpoint_folder.write_shard

    def changed(folder, rank, state):
        return write(folder, rank, {**state, **changes})

    monkeypatch.setattr(checkpoint_folder, "write_shard", changed)
    saver = CheckpointSaver(folder, 0, 1, KeyStore(), pytest.fail, 5.0)
    saver.save(1, SharedState({"w": torch.ones(1000)}), {}, {})
    saver.wait()
    return folder / "step-00000001"


def test_tensors_in_one_place_of_a_shard_are_refused(tmp_path, monkeypatch):
    one = torch.ones(1000)
    folder = saved(tmp_path, monkeypatch, own_tensors=[one] * 50)
    with pytest.raises(DamagedCheckpointError, match="has several tensors in one place"):
        load_checkpoint(folder)


def test_tensor_in_two_places_of_the_state_is_refused(tmp_path, monkeypatch):
    mark = {"__paceline_tensor__": 0}
    folder = saved(tmp_path, monkeypatch, shared={"w": mark, "x": dict(mark)})
    with pytest.raises(DamagedCheckpointError, match="tensor 0 in two places"):
        load_checkpoint(folder)
