"""Broadcasts, objects and SyncBatchNorm on 1, 2 and 4 ranks; see functions_checks.py."""

import pytest
from horovod_checks import Results, names, passed

FILE = "functions_checks.py"


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    return Results(FILE, tmp_path_factory.mktemp("functions"))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", names(FILE))
def test_functions(results, name, size):
    passed(results, name, size)
