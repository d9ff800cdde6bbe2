"""Horovod's operations on 1, 2 and 4 ranks, from its documentation: see operation_cases.py."""

import json
from pathlib import Path

import pytest
import ranks
from operation_cases import CASES

SCRIPT = Path(__file__).parent / "operation_cases.py"


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """Return a function that returns the results of all cases, by rank; a job for each size."""
    known = {}

    def of_size(size):
        if size not in known:
            folder = tmp_path_factory.mktemp(f"cases-{size}")
            ranks.run(SCRIPT, folder, ranks=size, check=False, timeout=100)
            known[size] = [
                json.loads((folder / f"{rank}.json").read_text()) for rank in range(size)
            ]
        return known[size]

    return of_size


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_operation(name, size, results):
    for rank, found in enumerate(results(size)):
        assert found.get(name, "the job ended before") == "", f"rank {rank}"
