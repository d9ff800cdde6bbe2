"""The solvers in ``examples/export``: trained, built and run as their users do."""

import csv
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bed.mpi import MPI_VARIABLES, MPIRUN

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "export"
BIN = Path(sys.executable).parent
WRAPPERS = {"MPIFC": "mpifort.openmpi", "MPICXX": "mpicxx.openmpi"}
SOLVERS = {"heat": "conductivity.paceline", "transport": "water_flux.paceline"}
pytestmark = pytest.mark.long


def execute(*words, **more):
    env = {**os.environ, **MPI_VARIABLES, "PACELINE_PROGRESS": "0", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        list(map(str, words)), capture_output=True, text=True, env=env, timeout=300, **more
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models that two ranks have trained, and the built solvers."""
    for program in (*WRAPPERS.values(), MPIRUN, "make"):
        if shutil.which(program) is None:
            pytest.skip(f"no {program}. HINT: make test-packages")
    folder = tmp_path_factory.mktemp("solvers")
    done = execute(BIN / "paceline", "run", "-n", 2, EXAMPLES / "closures.py", "--out", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    settings = [f"{key}={value}" for key, value in WRAPPERS.items()]
    settings += [f"OUT={folder}", f"PACELINE={BIN / 'paceline'}"]
    done = execute("make", "-C", EXAMPLES, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def mpirun(ranks, *command):
    words = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-n", ranks]
    return execute(*words, "--mca", "mpi_yield_when_idle", "1", *command)


def rows_of(folder, name, ranks, steps):
    done = mpirun(ranks, folder / name, folder / SOLVERS[name], steps)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("#")]
    return [{key: float(x) for key, x in row.items()} for row in csv.DictReader(lines)]


@pytest.mark.parametrize(("name", "size"), [("heat", 30), ("transport", 0.44)])
def test_10_000_steps_conserve_and_stay_near_the_exact_closure(folder, name, size):
    rows = rows_of(folder, name, 2, 10_000)
    step, learned, exact, difference = rows[0]
    assert [row[step] for row in rows] == [200 * (i + 1) for i in range(50)]
    assert max(abs(row[what]) for row in rows for what in (learned, exact)) < 1e-12
    drift = max(row[difference] for row in rows) / size
    assert 1e-6 < drift < 0.05  # the learned closure is another one, and near


@pytest.mark.parametrize("name", SOLVERS)
def test_solutions_are_the_same_on_one_and_two_ranks(folder, name):
    one, two = (rows_of(folder, name, ranks, 500) for ranks in (1, 2))
    *_, difference = one[0]
    for a, b in zip(one, two, strict=True):
        assert abs(a[difference] - b[difference]) <= 1e-9 * max(a[difference], 1e-3)


@pytest.mark.parametrize("name", SOLVERS)
def test_a_damaged_model_ends_all_ranks_with_a_message(folder, name, tmp_path):
    (tmp_path / "broken.paceline").write_bytes(b"no model" * 20)
    done = mpirun(2, folder / name, tmp_path / "broken.paceline", 10)
    assert done.returncode != 0
    assert "not a model file" in done.stderr
