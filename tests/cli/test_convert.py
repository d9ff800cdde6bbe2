"""``paceline convert``: one file for other programs, from checkpoints of any layout."""

import json
import pickle
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

from paceline.checkpoint.saver import CheckpointSaver
from paceline.checkpoint.shared_state import SharedState
from paceline.cli import app

TENSORS = {
    "half": torch.arange(3, dtype=torch.bfloat16),
    "a.weight": torch.randn(3, 5),
    "flag": torch.tensor([True, False, True]),
    "count": torch.tensor(7),
    "empty": torch.empty(0, 4),
    "double": torch.randn(2, dtype=torch.float64),
    "transposed": torch.randn(4, 3).t(),
}


class Malicious:
    def __reduce__(self):
        import os

        return os.mkdir, ("executed",)


def load_file(path):
    """Read by the library, which says whether the file has its format."""
    return pytest.importorskip("safetensors.torch").load_file(path)


def convert(*words):
    return CliRunner().invoke(app, ["convert", *map(str, words)])


def save(folder, *models, step=3):
    saver = CheckpointSaver(folder, 0, 1, None, pytest.fail)
    saver.save(step, SharedState({"models": list(models)}), {}, {})
    saver.wait()
    return folder


def equal(found, expected=TENSORS):
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], value) and found[name].dtype == value.dtype
        for name, value in expected.items()
    )


def test_newest_checkpoint_becomes_a_safetensors_file(tmp_path):
    save(tmp_path / "of", {"x": torch.zeros(1)}, step=1)
    save(tmp_path / "of", {**TENSORS, "version": 2}, step=3)
    result = convert(tmp_path / "of", tmp_path / "model.safetensors", "--json")
    assert result.exit_code == 0, result.output
    assert equal(load_file(tmp_path / "model.safetensors"))
    report = json.loads(result.stdout)
    assert report["step"] == 3
    assert report["tensors"] == 7
    assert report["left_out"] == ["version"]
    assert report["bytes"] == (tmp_path / "model.safetensors").stat().st_size


def test_file_of_plain_pytorch(tmp_path):
    save(tmp_path / "of", TENSORS)
    result = convert(tmp_path / "of/step-00000003", tmp_path / "model.pt")
    assert "7 tensors" in result.output
    assert equal(torch.load(tmp_path / "model.pt", weights_only=True))


def test_one_of_several_models(tmp_path):
    save(tmp_path / "of", {"g": torch.ones(1)}, {"d.x": torch.zeros(2), "e": torch.ones(1)})
    result = convert(tmp_path / "of", tmp_path / "a.pt")
    assert result.exit_code == 2
    assert "contains 2 models. HINT: --model 0" in result.stderr
    assert "contains 2" in convert(tmp_path / "of", tmp_path / "a.pt", "--model", 2).stderr
    convert(tmp_path / "of", tmp_path / "a.pt", "--model", 1, "--prefix", "d.")
    assert equal(torch.load(tmp_path / "a.pt"), {"x": torch.zeros(2)})


def test_mistakes_are_named(tmp_path):
    save(tmp_path / "of", TENSORS)
    (tmp_path / "old.pt").touch()
    for words, reason in (
        ((tmp_path / "of", tmp_path / "m.bin"), "must end with one of .safetensors, .pt, .pth"),
        ((tmp_path / "of", tmp_path / "old.pt"), "old.pt exists"),
        ((tmp_path / "none", tmp_path / "m.pt"), "contains no checkpoint"),
        ((tmp_path / "of", tmp_path / "m.pt", "--prefix", "zz"), "names begin with zz"),
    ):
        result = convert(*words)
        assert (result.exit_code, reason in result.stderr) == (2, True), result.output
    shard = tmp_path / "of/step-00000003/rank-00000.pt"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    assert "rank-00000.pt: " in convert(tmp_path / "of", tmp_path / "m.pt").stderr
    assert not (tmp_path / "m.pt").exists()


def test_files_become_files_of_the_other_format(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    state = {"model": model.state_dict(), "epoch": 3, "ema": [torch.nn.Parameter(torch.ones(2))]}
    torch.save(state, tmp_path / "of.pth")
    result = convert(tmp_path / "of.pth", tmp_path / "m.safetensors", "--prefix", "model.")
    assert result.exit_code == 0, result.output
    assert equal(load_file(tmp_path / "m.safetensors"), model.state_dict())
    result = convert(tmp_path / "of.pth", tmp_path / "all.pt", "--json")
    assert json.loads(result.stdout)["left_out"] == ["epoch"]
    assert torch.equal(torch.load(tmp_path / "all.pt")["ema.0"], torch.ones(2))
    result = convert(tmp_path / "m.safetensors", tmp_path / "m.pt")
    assert "7 tensors" in result.output
    assert equal(torch.load(tmp_path / "m.pt", weights_only=True), model.state_dict())


def test_safetensors_file_of_the_library_is_read(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    save_file(tensors, tmp_path / "of.safetensors", metadata={"format": "pt"})
    assert convert(tmp_path / "of.safetensors", tmp_path / "m.pth").exit_code == 0
    assert equal(torch.load(tmp_path / "m.pth"), tensors)


def test_tied_weights_stay_tied_in_a_file_of_torch(tmp_path):
    weight = torch.ones(100_000)
    torch.save({"a": weight, "b": weight, "c": weight[:50_000]}, tmp_path / "of.pt")
    result = convert(tmp_path / "of.pt", tmp_path / "m.pt")
    assert "of.pt: has tensors that overlap in memory. HINT: save clones" in result.stderr
    torch.save({"a": weight, "b": weight}, tmp_path / "of.pt")
    assert convert(tmp_path / "of.pt", tmp_path / "m.pt").exit_code == 0
    assert (tmp_path / "m.pt").stat().st_size < 600_000
    found = torch.load(tmp_path / "m.pt")
    assert found["a"].data_ptr() == found["b"].data_ptr()


def header(entries, data=b"", length=None):
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
FILES = {
    "no length": (b"abc", "is not a safetensors file"),
    "length over the file": (header({}, length=1 << 60), "is not a safetensors file"),
    "no JSON": (header(b"{'a'}"), "a header that can't be read as JSON"),
    "deep JSON": (header(b"[" * 100_000), "a header that can't be read as JSON"),
    "no dict of tensors": (header({"a": 1}), "no shape or place of 'a'"),
    "negative shape": (header({"a": ONE | {"shape": [-2]}}, b"0" * 8), "no shape or place"),
    "dtype": (header({"a": ONE | {"dtype": "X"}}, b"0" * 8), "a dtype of 'a' that PyTorch lacks"),
    "size": (header({"a": ONE | {"shape": [3]}}, b"0" * 8), "another size than shape of 'a'"),
    "cut off": (header({"a": ONE}, b"0" * 7), "has only"),
    "overlap": (header({"a": ONE, "b": ONE}, b"0" * 8), "has two tensors in one place"),
}


@pytest.mark.parametrize("kind", FILES)
def test_invalid_safetensors_file_is_named(tmp_path, kind):
    data, reason = FILES[kind]
    (tmp_path / "of.safetensors").write_bytes(data)
    result = convert(tmp_path / "of.safetensors", tmp_path / "m.pt")
    assert (result.exit_code, reason in result.stderr) == (2, True), result.output
    assert "of.safetensors: " in result.stderr


def test_mistakes_with_files_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"a": Malicious()}, tmp_path / "code.pt")
    torch.save({"a": torch.ones(1)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    torch.save({"a": torch.ones(1)}, tmp_path / "of.pt")
    (tmp_path / "of.bin2").touch()
    for source, words, reason in (
        ("code.pt", (), "code.pt: can't be loaded (its data.pkl names 'posix.mkdir')"),
        ("old.pt", (), "old.pt: can't be loaded (it is not an archive)"),
        ("of.bin2", (), "must be a folder, or a file that ends with one of .safetensors, .pt"),
        ("of.pt", ("--model", 1), "of.pt is one file. HINT: --prefix"),
    ):
        result = convert(tmp_path / source, tmp_path / "m.pt", *words)
        assert (result.exit_code, reason in result.stderr) == (2, True), result.output
    assert not (tmp_path / "executed").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_folder_of_torch_distributed_checkpoint(tmp_path):
    dcp.save({"model": TENSORS, "step": 3}, checkpoint_id=tmp_path / "dcp")
    result = convert(tmp_path / "dcp", tmp_path / "m.safetensors", "--prefix", "model.")
    assert result.exit_code == 0, result.output
    assert equal(load_file(tmp_path / "m.safetensors"))
    (tmp_path / "dcp/__0_0.distcp").unlink()
    result = convert(tmp_path / "dcp", tmp_path / "n.pt")
    assert "__0_0.distcp: can't be read" in result.stderr


def test_metadata_with_code_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(pickle.dumps(Malicious()))
    result = convert(tmp_path / "dcp", tmp_path / "m.pt")
    assert "it names 'posix mkdir'" in result.stderr
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("tensor", "ends", "told"),
    [
        (
            lambda: torch.eye(3).to_sparse(),
            (".safetensors",),
            r"w is a sparse tensor .torch\.sparse_coo.,",
        ),
        (
            lambda: torch.eye(3).to_sparse_csr(),
            (".safetensors",),
            "w is a sparse tensor .*HINT: choose",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            (".safetensors", ".pt"),
            "w is a nested tensor, which can't be converted. HINT: save",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch: layouts in beta state
def test_tensors_of_other_layouts_are_named(tmp_path, tensor, ends, told):
    torch.save({"w": tensor(), "b": torch.zeros(2)}, tmp_path / "w.pt")
    for end in (".safetensors", ".pt"):
        result = convert(tmp_path / "w.pt", tmp_path / f"out{end}")
        assert result.exit_code == (2 if end in ends else 0), result.output
        if end in ends:
            assert re.search(told, result.output)
            assert not (tmp_path / f"out{end}").exists()
