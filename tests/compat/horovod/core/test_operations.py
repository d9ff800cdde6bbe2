"""Horovod's operations on 1, 2 and 4 ranks, and on process sets, from its documentation.

The cases of operation_cases.py and process_set_cases.py run in one job for each number of ranks.
"""

import json
import subprocess
from pathlib import Path

import operation_cases
import process_set_cases
import pytest
import ranks

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """Return a function that returns the results of a script's cases on each rank."""
    known = {}

    def of_script(name, size):
        if (name, size) not in known:
            folder = tmp_path_factory.mktemp(f"cases-{size}")
            try:
                ranks.run(HERE / name, folder, ranks=size, check=False, timeout=60)
            except subprocess.TimeoutExpired:
                pass  # the cases after the one that hangs have no result
            files = [folder / f"{rank}.json" for rank in range(size)]
            known[name, size] = [
                json.loads(file.read_text()) if file.exists() else {} for file in files
            ]
        return known[name, size]

    return of_script


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", operation_cases.CASES)
def test_operation(name, size, results):
    for rank, found in enumerate(results("operation_cases.py", size)):
        assert found.get(name, "the job ended before") == "", f"rank {rank}"


@pytest.mark.parametrize("name", process_set_cases.CASES)
def test_process_sets(name, results):
    for rank, found in enumerate(results("process_set_cases.py", 4)):
        assert found.get(name, "the job ended before") == "", f"rank {rank}"
