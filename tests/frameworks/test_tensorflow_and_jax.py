"""Scripts of TensorFlow and JAX find their ranks and peers under paceline run.

They need an environment with both packages: ``make test-frameworks``.
"""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import ranks

SCRIPTS = Path(__file__).parent
# Ranks are forks of a process that has imported torch, or start with a new interpreter.
LAUNCHERS = pytest.mark.parametrize("launcher", ["paceline", "paceline --fresh"])


def needs(name):
    there = importlib.util.find_spec(name) is not None
    return pytest.mark.skipif(not there, reason=f"{name} is not installed: make test-frameworks")


def results(script, launcher="paceline", number=2, **env):
    """Return the result that each rank prints at its end, in rank order."""
    said = ranks.run(SCRIPTS / script, ranks=number, launcher=launcher, **env).stdout
    found = [json.loads(text) for text in re.findall(r"RESULT (\{.*\})", said)]
    assert len(found) == number, said
    return sorted(found, key=lambda result: result.get("worker", result.get("process")))


@needs("tensorflow")
@LAUNCHERS
def test_tensorflow_workers_are_ranks(launcher):
    first, second = results("train_tf.py", launcher)
    assert (first.pop("worker"), second.pop("worker")) == (0, 1)
    assert first == second
    assert first["replicas"] == 2
    assert first["slope"] == pytest.approx(0.75, abs=0.01)


@needs("jax")
@LAUNCHERS
def test_jax_finds_processes_without_arguments(launcher):
    first, second = results("train_jax.py", launcher)
    assert (first.pop("process"), second.pop("process")) == (0, 1)
    assert first == second
    assert (first["processes"], first["devices"], first["total"]) == (2, 2, 10 + 11)
    assert first["slope"] == pytest.approx(0.75, abs=0.01)


@needs("jax")
def test_jax_in_slurm_step_uses_ranks_not_slurm_tasks():
    step = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }
    assert [result["processes"] for result in results("train_jax.py", **step)] == [2, 2]


@needs("jax")
def test_jax_with_one_rank_has_one_process():
    (only,) = results("train_jax.py", number=1)
    assert only["processes"] == 1
