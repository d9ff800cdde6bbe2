"""JSON and TOML whose parsed values take many times the memory of the text."""

import json
import re
import tomllib
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

import paceline
from paceline.analyze.records.load_run import _read_label
from paceline.analyze.reference.reference_file import read_reference
from paceline.checkpoint.manifest import (
    MAX_MANIFEST_BYTES,
    MAX_PARSED_MANIFEST_BYTES,
    read_manifest,
)
from paceline.checkpoint.other_formats import MAX_HEADER_BYTES, read_safetensors
from paceline.cost.machine import machine_file, toml_files
from paceline.data.format.shard_format import load_meta
from paceline.record.ring.header_schema import MAX_RANKS
from paceline.security.files import InvalidFileError
from paceline.security.schema import JSON_COSTS, check_parsed_size, load_json

MIB = 1 << 20


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the memory that Python allocates during a call, at its highest."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def lists(size: int, start: bytes = b"[", end: bytes = b"0]") -> bytes:
    return start + b"[]," * ((size - len(start) - len(end)) // 3) + end


@pytest.mark.parametrize(
    ("file", "head", "size", "read"),
    [
        ("manifest.json", b"[", MAX_MANIFEST_BYTES, lambda path: read_manifest(path.parent)),
        ("paceline.json", b"[", 30 * MIB, lambda path: load_meta(path.parent)),
        ("losses.json", b"[", 60 * MIB, read_reference),
        ("machine.toml", b"a = [", 31 * MIB, machine_file.load),
        ("a.safetensors", b'{"a": [', MAX_HEADER_BYTES, read_safetensors),
    ],
)
def test_large_file_of_empty_lists_is_rejected_before_it_is_parsed(
    tmp_path, file, head, size, read
):
    text = lists(size, head, b"0]" + b"}" * head.count(b"{"))
    if file == "a.safetensors":
        text = len(text).to_bytes(8, "little") + text
    (tmp_path / file).write_bytes(text)

    def rejected() -> None:
        with pytest.raises(ValueError, match="bytes of memory, more than the limit of"):
            read(tmp_path / file)

    assert peak_bytes(rejected) < 2.5 * size


def test_command_of_a_run_json_of_empty_lists_is_not_read(tmp_path):
    (tmp_path / "run.json").write_bytes(lists(15 * MIB, b'{"command": [', b"0]}"))
    assert peak_bytes(lambda: _read_label(tmp_path)) < 40 * MIB


@pytest.mark.parametrize(
    "part",
    [
        *("[],", "{},", "[0],", '{"":0},', '"ab",', "999,", "1.5,", "[[]],", '{"":{}},'),
        *("[[[[]]]],", '"é😀",', "[null],", '{"a":1,"b":[1.5]},'),
    ],
)
def test_estimate_of_json_is_not_below_its_memory(part):
    data = ("[" + part * (500_000 // len(part)) + "0]").encode()
    with pytest.raises(InvalidFileError, match="more than the limit"):
        check_parsed_size(data, JSON_COSTS, peak_bytes(lambda: json.loads(data)), "x")


@pytest.mark.parametrize(
    "part",
    [
        *("[a{0}]\n", "[[a]]\n", "a{0} = []\n", "a{0} = {{b = 1}}\n", "[{0}.b.c.d.e.f.g]\n"),
        *("{0}.b.c.d.e.f.g = 1\n", "[{0}.1.2.3]\n", "a{0} = [{{b.c = 1}}]\n"),
    ],
)
def test_estimate_of_toml_is_not_below_its_memory(part, monkeypatch):
    text = "".join(part.format(f"{k:x}") for k in range(2000))
    monkeypatch.setattr(toml_files, "MAX_PARSED_BYTES", peak_bytes(lambda: tomllib.loads(text)))
    with pytest.raises(InvalidFileError, match="more than the limit"):
        toml_files.check_size(text.encode(), "x.toml")


def test_manifest_of_many_ranks_is_below_the_limits():
    entry = {"name": f"rank-{MAX_RANKS}.pt", "bytes": 1 << 40, "crc32c": (1 << 32) - 1}
    text = json.dumps({**entry, "id": "0123456789abcdef"}) + ", "
    data = text.encode() * 400_000
    assert len(data) < MAX_MANIFEST_BYTES
    check_parsed_size(data, JSON_COSTS, MAX_PARSED_MANIFEST_BYTES, "manifest.json")


def test_large_machine_file_is_below_the_limits():
    figure = {"median": 2.0413684946750487e-05, "low": 2.02e-05, "high": 2.05e-05, "n": 5}
    text = toml_files.dumps({"pairs": [{"first": "a", "second": "b", "latency": figure}] * 10})
    toml_files.check_size(text.encode() * (31 * MIB // len(text)), "machine.toml")


def test_ordinary_json_is_parsed():
    tree = {"a": [1, 2.5, None, "x"], "b": {"c": float("inf")}}
    assert load_json(json.dumps(tree).encode(), "x") == tree


# What processes of one job tell each other, and files of Paceline itself. All other JSON and TOML
# passes through load_json and read_toml.
OF_ONE_JOB = {
    *("comm/", "world/", "study/", "knobs/", "launch/ranks/"),
    *("observe/", "record/experiments/", "checkpoint/saver.py"),
    *("data/staging/peer_transfer.py", "cost/catalogue.py", "security/overlay.py"),
}


def test_json_and_toml_of_others_are_parsed_in_one_place():
    source = Path(paceline.__file__).parent
    found = set()
    for path in source.rglob("*.py"):
        if re.search(r"json\.loads?\(|tomllib\.loads?\(", path.read_text()):
            found.add(str(path.relative_to(source)))
    known = {name for name in found if name.startswith(tuple(OF_ONE_JOB))}
    assert found - known == {"security/schema.py", "cost/machine/toml_files.py"}
