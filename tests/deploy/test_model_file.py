"""Model files: what is written, and what damaged ones do."""

import json
import random
import struct

import exported_models as models
import pytest
import torch
from exported_models import export

from paceline.deploy.model_file import HEADER, encode_model_file
from paceline.deploy.native_model import NativeModel, NativeModelError
from paceline.deploy.specification import FieldValues


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.paceline"
    export(models.mlp(), path, "x: float32[batch,6]", bounds={"batch": (1, 64)})
    return path.read_bytes()


def load_error(path, data):
    path.write_bytes(data)
    with pytest.raises(NativeModelError) as caught:
        NativeModel(path)
    return caught.value


def split(content):
    """Return the manifest and the sections."""
    _, _, size, _, _ = HEADER.unpack(content[: HEADER.size])
    manifest = json.loads(content[HEADER.size : HEADER.size + size])
    sections = manifest.pop("sections")
    return manifest, {s["name"]: content[s["offset"] : s["offset"] + s["bytes"]] for s in sections}


@pytest.mark.parametrize("flips", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_every_flipped_byte_is_noticed(tmp_path, content, flips):
    generator = random.Random(0)
    places = [*range(HEADER.size), *(generator.randrange(len(content)) for _ in range(flips))]
    for place in places:
        flipped = bytearray(content)
        flipped[place] ^= 1 << generator.randrange(8)
        error = load_error(tmp_path / "flipped", bytes(flipped))
        assert error.code in ("PACELINE_ERROR_DAMAGED", "PACELINE_ERROR_VERSION"), place


def test_shortened_and_lengthened_files_are_noticed(tmp_path, content):
    for data in (b"", content[:10], content[:63], content[:64], content[:-1], content + b"\0"):
        assert load_error(tmp_path / "cut", data).code == "PACELINE_ERROR_DAMAGED"


def test_newer_format_is_refused_by_name(tmp_path, content):
    newer = content[:8] + struct.pack("<I", 2) + content[12:]
    error = load_error(tmp_path / "newer", newer)
    assert error.code == "PACELINE_ERROR_VERSION"
    assert "format 2" in str(error)
    assert "HINT" in str(error)


@pytest.mark.parametrize("seed", range(4))
def test_hostile_lists_of_operations_are_refused_or_harmless(tmp_path, content, seed):
    """With right hashes: words of the list are replaced by others."""
    manifest, sections = split(content)
    generator = random.Random(seed)
    words = [w[0] for w in struct.iter_unpack("<q", sections["program"])]
    interesting = [-1, 0, 1, 2, 7, 1 << 20, 1 << 40, (1 << 62) + 1, -(1 << 63), (1 << 63) - 1]
    refused = 0
    for _ in range(150):
        changed = list(words)
        for _ in range(generator.choice((1, 1, 3))):
            changed[generator.randrange(len(words))] = generator.choice(interesting)
        program = struct.pack(f"<{len(changed)}q", *changed)
        path = tmp_path / "hostile"
        path.write_bytes(encode_model_file(manifest, {**sections, "program": program}))
        try:
            with NativeModel(path) as model:
                model.run([torch.zeros(3, 6)], [torch.zeros(3, 3)])
        except NativeModelError:
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("symbols", [{"name": "batch", "min": 5, "max": 1}]),
        ("inputs", [{"name": "x", "shape": ["batch", 7]}]),
        ("inputs", [{"name": "x", "shape": [1] * 9}]),
        ("inputs", []),
        ("outputs", [{"name": "y" * 100, "shape": ["batch", 3]}]),
        ("vectors", [[1, 2]]),
        ("vectors", [[65]]),
        ("dtype", "float16"),
        ("backend", "../../evil"),
        ("tolerance", "none"),
    ],
)
def test_hostile_manifests_are_refused(tmp_path, content, key, value):
    manifest, sections = split(content)
    error = load_error(tmp_path / "hostile", encode_model_file({**manifest, key: value}, sections))
    assert error.code in ("PACELINE_ERROR_DAMAGED", "PACELINE_ERROR_VERSION")


def test_too_short_test_vectors_are_an_error(tmp_path, content):
    manifest, sections = split(content)
    path = tmp_path / "short"
    path.write_bytes(encode_model_file(manifest, {**sections, "vectors": b"1234"}))
    with NativeModel(path) as model, pytest.raises(NativeModelError, match="test vectors"):
        model.test()


def test_wrong_weights_fail_the_test_vectors(tmp_path, content):
    manifest, sections = split(content)
    path = tmp_path / "wrong"
    weights = bytes(len(sections["weights"]))
    path.write_bytes(encode_model_file(manifest, {**sections, "weights": weights}))
    with NativeModel(path) as model, pytest.raises(NativeModelError, match="differ"):
        model.test()


def test_nan_in_the_first_element_fails_the_test_vectors(tmp_path):
    """And is not hidden by right elements behind it."""
    path = tmp_path / "model.paceline"
    export(models.scale(), path, "x: float64[batch,3]")
    manifest, sections = split(path.read_bytes())
    bias = struct.pack("<d", 10.0)
    assert sections["weights"].count(bias) == 1
    sections["weights"] = sections["weights"].replace(bias, struct.pack("<d", float("nan")))
    path.write_bytes(encode_model_file(manifest, sections))
    x, y = (torch.zeros(1, n, dtype=torch.float64) for n in (3, 2))
    with NativeModel(path) as model:
        model.run([x], [y])
        assert y.isnan().tolist() == [[True, False]]
        with pytest.raises(NativeModelError, match="differ by nan"):
            model.test()


def test_manifest_says_what_a_solver_needs(tmp_path):
    path = tmp_path / "model.paceline"
    fields = {
        "x": FieldValues("K", [300.0, 1.0, 2.0], [10.0, 2.0, 1.0]),
        "y": FieldValues("W/m2", 5, 100.0),
    }
    export(models.scale(), path, "x: float64[batch,3]", fields=fields, bounds={"batch": (1, 8)})
    x = torch.tensor([[310.0, 3.0, 2.0]], dtype=torch.float64)
    y = torch.zeros(1, 2, dtype=torch.float64)
    with NativeModel(path) as model:
        model.run([x], [y])
        described = json.loads(model.describe())
        assert model.test() < 1e-13
    assert y.tolist() == [[(10 + 1 + 2) * 100 + 5, (20 + 1 + 2) * 100 + 5]]
    assert described["symbols"] == [{"name": "batch", "min": 1, "max": 8}]
    assert described["inputs"][0]["unit"] == "K"
    assert described["outputs"][0]["std"] == 100
    assert {s["name"] for s in described["sections"]} == {"program", "weights", "vectors"}
