"""Pickles in shards: only types that a state may contain are passed to torch."""

import io
import pickle
import random
import re
import struct
import warnings
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch

from paceline.checkpoint import checkpoint_folder, manifest
from paceline.checkpoint.manifest import DamagedCheckpointError, check_pickle
from paceline.checkpoint.pickle_stack import PickleError
from paceline.checkpoint.saver import CheckpointSaver, load_checkpoint
from paceline.checkpoint.shared_state import SharedState

WHOLE_BYTES = re.compile(r"torch\.(?!q|u?int[1-7]$)")
DTYPES = sorted(
    {
        value
        for value in vars(torch).values()
        if isinstance(value, torch.dtype) and WHOLE_BYTES.match(str(value))
    },
    key=str,
)
VALUES = {
    "numbers": [0, -1, 255, 1 << 16, -(1 << 40), 1 << 130, 0.5, float("inf"), 1.5 - 2j, True],
    "texts": ["", "text", "x" * 300, "\u00fc\ud800"],
    "bytes": [b"", b"a", b"a", b"\x00\xff" * 300],
    "containers": [[], (), {}, set(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {1, "a", (2, 3)}],
    "keys": {1: 1, 1.5: 1, "a": 1, b"a": 1, None: 1, (1, ("a", 2)): 1},
    "subclasses": [OrderedDict(a=1), Counter("aab"), defaultdict(list, a=[1]), deque([1, 2])],
    "torch": [*DTYPES, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 3])],
    "generators": [random.getstate(), torch.get_rng_state()],
    "numpy": [np.random.RandomState(3).get_state(legacy=False), np.float32(2), np.arange(3)],
    "pcg": np.random.default_rng(3).bit_generator.state,
    "unsigned": [np.arange(3, dtype=f"uint{bits}") for bits in (8, 16, 32, 64)],
    "parameter": torch.nn.Parameter(torch.ones(2, 3)),
    "strides": [
        torch.ones(4, 4)[:, 1:3].t(),
        torch.ones(1).expand(5),
        torch.empty(0),
        torch.ones(()),
    ],
    "views": [torch.ones(2, dtype=torch.complex64).conj(), torch.zeros(2).to_sparse()],
    "csr": torch.eye(3).to_sparse_csr(),
}


def saved(directory, own):
    saver = CheckpointSaver(directory, 0, 1, None, lambda line: pytest.fail(line))
    saver.save(1, SharedState({}), {"own": own}, {})
    saver.wait()
    return directory / "step-00000001"


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", VALUES)
def test_each_state_type_round_trips(tmp_path, kind):
    found = load_checkpoint(saved(tmp_path, VALUES[kind]))[1][0]["own"]
    if kind in ("numbers", "texts", "bytes", "containers", "keys", "subclasses", "torch"):
        assert found == VALUES[kind]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_each_dtype_round_trip(tmp_path, dtype):
    try:
        tensor = torch.zeros(16, dtype=torch.uint8).view(dtype)
    except (RuntimeError, TypeError):
        pytest.skip("no tensors of this dtype")
    found = load_checkpoint(saved(tmp_path, tensor))[1][0]["own"]
    assert (found.dtype, found.shape) == (dtype, tensor.shape)


@pytest.mark.filterwarnings("ignore")
def test_quantized_and_nested_tensors_round_trip(tmp_path):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    quantized_one = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    folder = saved(tmp_path, [quantized_one, nested])
    quantized, found = load_checkpoint(folder)[1][0]["own"]
    assert quantized.dtype == torch.qint8
    assert found.is_nested


def shard(path, data, content=None):
    """Write a shard of one tensor (storage "0" of 12 bytes) and replace its data.pkl."""
    file = io.BytesIO()
    torch.save(torch.ones(3) if content is None else content, file)
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, data if name.endswith("/data.pkl") else old.read(name))


def text(value):
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def integer(value):
    return b"J" + struct.pack("<i", value)


LARGE = 1 << 28
STORAGE = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
TENSOR = b"ctorch._utils\n_rebuild_tensor_v2\n("
END = b"\x89ccollections\nOrderedDict\n)RtR."
HEX = b"c_codecs\nencode\nq\x00" + text("aa") + text("latin1") + b"\x86R"
BOMBS = {
    "bytearray": b"cbuiltins\nbytearray\n" + integer(LARGE) + b"\x85R.",
    "bytearray of Python 2": b"c__builtin__\nbytearray\n" + integer(LARGE) + b"\x85R.",
    "bytes": b"c__builtin__\nbytes\n" + integer(LARGE) + b"\x85R.",
    "tensor class": b"ctorch\nFloatTensor\n" + integer(LARGE) + b"\x85R.",
    "storage class": b"ctorch.storage\nUntypedStorage\n" + integer(LARGE) + b"\x85R.",
    "new object": b"ctorch.storage\nUntypedStorage\n" + integer(LARGE) + b"\x85\x81.",
    "doubling encoding": HEX + (text("hex") + b"\x86q\x01h\x00h\x01R") * 3 + b".",
    "encoding": b"c_codecs\nencode\n" + text("a") + text("utf-32") + b"\x86R.",
    "repeated encoding": b"c_codecs\nencode\n" + text("a" * 200) + text("latin1") + b"\x86q\x01"
    b"c_codecs\nencode\nq\x00" + b"h\x00h\x01R" * 100 + b".",
    "storage over its record": STORAGE + integer(LARGE) + b"tQ.",
    "unknown storage": STORAGE.replace(text("0"), text("1")) + b"K\x03tQ.",
    "tensor over its storage": TENSOR
    + STORAGE
    + b"K\x03tQK\x00"
    + integer(LARGE)
    + b"\x85K\x01\x85"
    + END,
    "expanded tensor": TENSOR + STORAGE + b"K\x03tQK\x00" + integer(LARGE) + b"\x85K\x00\x85" + END,
    "deep tuple": b")" + b"\x85" * 100_000 + b".",
    "key of doubled tuples": b"})" + b"q\x00h\x00\x86" * 60 + b"K\x01s.",
    "equal hashes": b"}("
    + b"".join(pickle.dumps(i * ((1 << 61) - 1), 2)[2:-1] + b"N" for i in range(1, 1000))
    + b"u.",
    "memo": b"h\x05.",
    "empty": b".",
    "cut off": b"}",
    "no pickle": b"\xff\xff",
    "later protocol": pickle.dumps([b"a", {2}], 4),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_unexpected_pickle_is_rejected_before_torch_load(tmp_path, monkeypatch, bomb):
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was loaded"))
    data = BOMBS[bomb] if bomb == "later protocol" else b"\x80\x02" + BOMBS[bomb]
    shard(tmp_path / "rank-00000.pt", data)
    with pytest.raises(DamagedCheckpointError, match=r"rank-00000\.pt: can't be loaded \("):
        checkpoint_folder.read_shard(tmp_path, "rank-00000.pt")


def test_pickle_size_and_opcode_limits(tmp_path, monkeypatch):
    data = pickle.dumps(list(range(1000)), 2)
    check_pickle(data, {})
    monkeypatch.setattr(manifest, "MAX_OPCODES", 1000)
    with pytest.raises(PickleError, match="more than 1,000 opcodes"):
        check_pickle(data, {})
    monkeypatch.setattr(manifest, "MAX_PICKLE_BYTES", 1000)
    shard(tmp_path / "rank-00000.pt", data)
    with pytest.raises(DamagedCheckpointError, match="at most 1,000 bytes"):
        checkpoint_folder.read_shard(tmp_path, "rank-00000.pt")


def test_state_that_cannot_be_loaded_is_not_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest, "MAX_OPCODES", 1000)
    monkeypatch.setattr(manifest, "MAX_OPCODES", 1000)
    said = []
    saver = CheckpointSaver(tmp_path, 0, 1, None, said.append)
    saver.save(1, SharedState({}), {"own": list(range(2000))}, {})
    saver.wait()
    assert (
        "torch could not load the state again: its data.pkl has more than 1,000 opcodes" in said[0]
    )
    assert list(tmp_path.iterdir()) == []


def archive_after(data):
    file = io.BytesIO()
    torch.save({}, file)
    return data + file.getvalue()


def other_names(change):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as new:
        for name, data in change.items():
            new.writestr(name, data)
    return file.getvalue()


EMPTY = pickle.dumps({}, 2)
ARCHIVES = {
    "a plain pickle before it": archive_after(pickle.dumps({}, 2)),
    "bytes before it": archive_after(b"PK\x03\x04" * 5),
    "another data.pkl": other_names({"a/data.pkl": EMPTY, "a/DATA.PKL": b"", "a/version": b"3"}),
    "another folder": other_names({"a/data.pkl": EMPTY, "b/version": b"3"}),
    "no data.pkl": other_names({"a/version": b"3"}),
    "nothing": b"",
    "no part": other_names({}),
    "a control character": other_names({"a/data.pkl": EMPTY, "a/\x1b": b""}),
}


@pytest.mark.parametrize("kind", ARCHIVES)
def test_ambiguous_zip_archive_is_rejected(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was loaded"))
    (tmp_path / "rank-00000.pt").write_bytes(ARCHIVES[kind])
    with pytest.raises(DamagedCheckpointError, match=r"rank-00000\.pt: can't be loaded \("):
        checkpoint_folder.read_shard(tmp_path, "rank-00000.pt")


def test_random_corruption_raises_only_pickle_error():
    file = io.BytesIO()
    torch.save([torch.ones(3), {1, 2}, b"a", 1j, {"a": (1, 2)}, torch.Size([1])], file)
    whole = zipfile.ZipFile(file).read("archive/data.pkl")
    check_pickle(whole, {"0": 12})
    generator = random.Random(0)
    for _ in range(3000):
        data = bytearray(whole)
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                check_pickle(bytes(data), {"0": 12})
            except PickleError:
                pass
