"""``paceline diagnose`` of a script on a GPU with a planted fault."""

import json

import pytest
import ranks
from faults import SCRIPT, line_of
from on_gpu import CUDA, command, filled

pytestmark = [pytest.mark.gpu, pytest.mark.limit(170)]

MINUTES = "0.6" if CUDA else "1.5"  # of a rehearsal on few cores


def diagnosed(folder, fault, *more, minutes=MINUTES):
    script = ranks.write(folder, filled(SCRIPT))
    words = ["diagnose", "-n", "1", "--minutes", minutes, "--json", *more, script, fault, 100_000]
    done = command(folder, *words, timeout=160, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout)
    print(json.dumps({name: value for name, value in found.items() if name != "rungs"})[:20_000])
    return found, script.read_text()


def lines_in(value):
    """Return all numbers of lines in a part of a diagnosis."""
    if isinstance(value, dict):
        own = [value["line"]] if isinstance(value.get("line"), int) else []
        return own + [line for each in value.values() for line in lines_in(each)]
    if isinstance(value, list):
        return [line for each in value for line in lines_in(each)]
    return []


def causes(found):
    return [one["id"] for one in found["causes"]]


def test_input_stall(tmp_path):
    found, text = diagnosed(tmp_path, "input")
    assert any(one.startswith("input") for one in causes(found)), causes(found)
    near = line_of(text, "input")
    assert any(abs(line - near) <= 1 for line in lines_in(found)), lines_in(found)


@pytest.mark.only_gpu
def test_synchronization(tmp_path):
    found, text = diagnosed(tmp_path, "sync")
    assert {"synchronisation", "script", "line"} & set(causes(found)), causes(found)
    near = line_of(text, "sync")
    assert any(abs(line - near) <= 12 for line in lines_in(found)), lines_in(found)


@pytest.mark.only_gpu
def test_slow_kernel(tmp_path):
    found, text = diagnosed(tmp_path, "kernel", minutes="1.7")  # operators are profiled
    assert found["report"]["states"][0]["useful"] > 0.6
    assert line_of(text, "kernel") in lines_in(found), causes(found)
    assert "float64" in json.dumps(found)


@pytest.mark.only_gpu
def test_copy_without_pinned_memory(tmp_path):
    found, text = diagnosed(tmp_path, "copy")
    near = line_of(text, "copy")
    said = json.dumps(found)
    assert near in lines_in(found) or "pin" in said, causes(found)


def test_remedy_is_tried(tmp_path):
    found, _ = diagnosed(tmp_path, "input", "--try", "loader-workers=4")
    assert found["format"] == "paceline-diagnosis"
    assert "loader-workers" in json.dumps(found)


def test_nothing_is_planted(tmp_path):
    found, _ = diagnosed(tmp_path, "none")
    assert not any(one.startswith("input-") for one in causes(found)), causes(found)
