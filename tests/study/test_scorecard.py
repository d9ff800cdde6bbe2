"""A part of the scorecard: strong faults that are planted in a real script are named first."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCORECARD = Path(__file__).parents[2] / "benchmarks" / "scorecard" / "scorecard.py"
pytestmark = pytest.mark.alone


@pytest.mark.long
def test_two_planted_faults_are_named_and_the_stronger_one_first(tmp_path):
    (case,) = score(tmp_path, "slow-rank+input-small-files")
    found = [name for name, _ in case["found"]]
    assert found[:1] == ["slow-rank"], case
    assert "input-small-files" in found, case


@pytest.mark.long
def test_more_planted_faults_are_named_first(tmp_path):
    kinds = ["exchange-latency", "binding"]
    cases = score(tmp_path, ",".join(kinds))
    assert [case["found"][:1] and case["found"][0][0] for case in cases] == kinds, cases


@pytest.mark.long
def test_faults_beside_the_script_are_named_first(tmp_path):
    cases = score(tmp_path, "noisy-machine,slow-host,slow-network")
    first = [case["found"][:1] and case["found"][0][0] for case in cases]
    assert first == ["noisy-machine", "slow-host", "exchange-bandwidth"], cases


def score(folder, kinds):
    """The cases as they were judged."""
    path = folder / "scorecard.json"
    words = [sys.executable, SCORECARD, "--kinds", kinds, "--strength", "1.2", "--step", "0.03"]
    done = subprocess.run(
        [*words, "--minutes", "0.3", "--json", path], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())
    assert found["benchmark"] == "scorecard"
    assert not any(case["error"] for case in found["cases"]), done.stdout
    return found["cases"]
