"""The runner of the GPU tests: a hang or a crash is recorded, and the other tests go on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.long
GPU = Path(__file__).parent / "gpu"
FAKE = """
    import os, signal, time
    import pytest
    pytestmark = pytest.mark.gpu
    def test_first(): pass
    def test_wrong(): assert 1 == 2
    @pytest.mark.limit(0.3)
    def test_hung():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    def test_crash(): os._exit(11)
    @pytest.mark.only_gpu
    def test_skipped(): pass
    def test_last(): pass
"""


def test_hang_and_crash_do_not_stop_the_rest(tmp_path):
    folder = tmp_path / "tests" / "gpu"
    folder.mkdir(parents=True)
    for name in ("run.py", "conftest.py", "on_gpu.py"):
        (folder / name).write_text((GPU / name).read_text())
    lines = [line[4:] for line in FAKE.splitlines()]
    (folder / "test_gpu_knobs.py").write_text("\n".join(lines))
    config = "[pytest]\nmarkers =\n    gpu: fake\n"
    (tmp_path / "pytest.ini").write_text(config)
    support = os.pathsep.join([str(GPU.parent), str(GPU.parent / "support")])
    words = ["--device", "cpu", "--results", tmp_path / "results", "--only", "knobs"]
    done = subprocess.run(
        [sys.executable, str(folder / "run.py"), *map(str, words)],
        env={**os.environ, "PYTHONPATH": support},
        capture_output=True,
        text=True,
        timeout=200,
    )
    results = (tmp_path / "results/results.jsonl").read_text()
    rows = [json.loads(line) for line in results.splitlines()]
    found = {row["name"].partition("::")[2]: row["outcome"] for row in rows}
    assert found == {
        "test_first": "passed",
        "test_wrong": "failed",
        "test_hung": "timeout",
        "test_crash": "crashed",
        "test_skipped": "skipped",
        "test_last": "passed",
    }, results + done.stdout + done.stderr
    assert done.returncode == 1
    assert "assert 1 == 2" in next(r["reason"] for r in rows if r["outcome"] == "failed")
    assert "2 passed" in done.stdout


def test_plan_is_printed_without_a_gpu():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    command = [sys.executable, str(GPU / "run.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert "make gpu needs a GPU" in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if " s  " in line]
    counts = [int(row[row.index("240") - 1]) for row in rows if "measurement:" not in row]
    assert len(counts) == 15
    assert f"{sum(counts)} tests." in done.stdout  # each in one group
    assert all(counts)
    assert "at most 8 minutes" in done.stdout
