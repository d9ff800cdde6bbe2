"""``paceline check --data SET``: what limits how fast a dataset can be read on this machine."""

import contextlib
import io
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import ranks
import sets
from rich.console import Console

from paceline.data import pack
from paceline.predict.input_rate import INTERPRETER_LIMIT_SHARE
from paceline.report.terminal.check import input_rate_blocks
from paceline.report.terminal.draw import draw
from paceline.study import input_rate
from paceline.study.input_rate import LoadRankConfig, advise

SLOW = """
import numpy as np

def slow(x):
    for _ in range(30):
        x = np.sort(x + 1, axis=None).reshape(x.shape)
    return x
"""


def told(source, **options):
    """Return the result as --json prints it, from short measurements."""
    return advise(LoadRankConfig(str(source), seconds=0.2, **options), lambda what: None).as_json()


def now(found, state):
    return next(one for one in found["rates"][state] if one["ranks"] == found["ranks"])


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set") / "packed"
    pack(sets.arrays(4000, (32, 32)), folder, shard_bytes=4 << 20)
    return folder


@pytest.mark.long
def test_predicted_input_rate_is_minimum_of_measured_terms(packed):
    words = [ranks.PACELINE, "check", "--quick", "--json", "--data", str(packed), "-n", "2"]
    done = subprocess.run(
        [*words, "--threads", "1"], capture_output=True, text=True, timeout=120,
        env=ranks.environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["threads"], found["terms"]["samples"]) == (2, 1, 4000)
    assert found["terms"]["bytes"] == 4096
    for state, rates in found["rates"].items():
        assert [one["ranks"] for one in rates][:2] == [1, 2]
        for one in rates:
            least = min(one["terms"].values())
            assert INTERPRETER_LIMIT_SHARE * one["terms"][one["limit"]] <= least
            assert (
                one["samples_s"] == least
                if state == "memory"
                else 0.5 < one["samples_s"] / least <= 1
            )
        assert found["measured"][state] > 0
    assert "memory" in found["rates"]
    in_memory = found["terms"]["bandwidth"] is None
    assert in_memory == ("storage" not in found["rates"])
    assert in_memory == any("in memory" in note for note in found["notes"])


@pytest.mark.long
def test_slow_transform_is_reported_with_remedies(packed, tmp_path, monkeypatch):
    (tmp_path / "feeding_slow.py").write_text(SLOW)
    monkeypatch.chdir(tmp_path)
    found = told(packed, transform="feeding_slow:slow")
    terms = found["terms"]
    assert terms["transform_s"] > 5 * (terms["read_s"] + terms["decode_s"])
    offline = {one["id"]: one for one in found["remedies"]}["offline"]
    state = "memory" if terms["bandwidth"] is None else "storage"
    assert offline["samples_s"] > 3 * now(found, state)["samples_s"]
    assert "--apply" in offline["sentence"]


@pytest.mark.long
def test_input_rate_of_hdf5_with_labels(tmp_path, monkeypatch):
    monkeypatch.setattr(input_rate, "memory_left", lambda: 1000)  # as in a small control group
    h5py = pytest.importorskip("h5py")
    x, y = sets.arrays(2000, (16, 16))
    with h5py.File(tmp_path / "tiles.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(50, 16, 16), compression="gzip")
        file["y"] = y
    found = told(f"{tmp_path / 'tiles.h5'}:x", labels="y", ranks=1)
    assert found["terms"]["kind"] == "store"
    assert not found["fits"]
    assert found["measured"]["memory"] > 0


@pytest.mark.long
def test_input_rate_of_image_files_of_several_sizes(tmp_path):
    folder = sets.images(tmp_path / "images", 200)
    sets.images(folder / "ant" / "large", 10, size=(30, 30))
    found = told(folder, ranks=1)
    assert found["terms"]["kind"] == "files"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(*draw(input_rate_blocks(found)), sep="\n")
    text = console.export_text()
    assert "210 samples of" in text
    assert f"{found['measured']['memory']:,.0f} (" in text


@pytest.mark.long
def test_loader_processes_exit_when_check_is_killed(packed):
    words = [ranks.PACELINE, "check", "--data", str(packed), "-n", "2", "--json"]
    checking = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=ranks.environment())
    ranks.wait_until(lambda: loading(packed))
    checking.kill()
    checking.wait()
    ranks.wait_until(lambda: not loading(packed))


def loading(folder):
    """Return the processes that load this dataset."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = path.read_bytes()
            if b"paceline.study.input_rate" in line and str(folder).encode() in line:
                found.append(path)
    return found


MISTAKES = [
    ("few", None, "too few samples to measure. HINT"),
    ("set", "nowhere:f", "HINT: MODULE:FUNCTION"),
    (
        "set",
        "math:pi",
        "--transform math:pi must be a function; this is a float. HINT: --transform MODULE",
    ),
    ("set", "math:sqrt", "; in the transform of sample 0"),
    ("words.tfrecord", None, "HINT: paceline pack"),
    ("nowhere", None, "is not a folder. HINT"),
]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--transform", "math:sqrt"], "--transform needs a dataset. HINT: add --data DATASET"),
        (["--data", "SET", "-H", "a,b"], "-H: Paceline measures a dataset on this node only. HINT"),
    ],
)
def test_options_without_effect_are_rejected(packed, words, said):
    words = [str(packed) if word == "SET" else word for word in words]
    done = subprocess.run([ranks.PACELINE, "check", *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(("source", "transform", "said"), MISTAKES)
def test_invalid_arguments_are_reported(tmp_path, packed, source, transform, said):
    (tmp_path / "set").symlink_to(packed)
    (tmp_path / "words.tfrecord").write_bytes(b"")
    pack(np.zeros((3, 4), np.float32), tmp_path / "few")
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        told(tmp_path / source, transform=transform)
