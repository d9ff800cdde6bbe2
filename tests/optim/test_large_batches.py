"""Trainings of the study of large batches: one process stands for many ranks."""

import json
from pathlib import Path

import pytest
import ranks

import paceline

SCRIPT = Path(paceline.__file__).parents[2] / "benchmarks/scripts/large_batch/training.py"
RATES = {"sgd": 0.02, "nesterov": 0.005, "lars": 0.5, "adamw": 0.0005, "lamb": 0.001}


@pytest.mark.long
def test_one_process_and_four_ranks_train_the_same():
    """Batch normalization over all ranks, warm-up and decay, each optimizer."""
    shared = {"task": "digits", "batch": 128, "epochs": 2, "warmup": 0.25, "weight_decay": 0.01}
    words = [json.dumps({**shared, "optimizer": name, "lr": lr}) for name, lr in RATES.items()]
    found = {}
    for launcher in ("python", "paceline"):
        lines = ranks.run(SCRIPT, *words, ranks=4, launcher=launcher).stdout.splitlines()
        found[launcher] = [json.loads(line[line.index("{") :]) for line in lines if "{" in line]
    assert [one["optimizer"] for one in found["python"]] == list(RATES)
    for alone, together in zip(found["python"], found["paceline"], strict=True):
        assert together["losses"] == pytest.approx(alone["losses"], rel=1e-4)
        assert together["test"] == pytest.approx(alone["test"], abs=0.006)  # two images of 387
        assert alone["losses"][1] < alone["losses"][0]
