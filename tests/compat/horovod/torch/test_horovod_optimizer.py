"""DistributedOptimizer on 1, 2 and 4 ranks; see optimizer_checks.py."""

import pytest
from horovod_checks import Results, names, passed

FILE = "optimizer_checks.py"


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    return Results(FILE, tmp_path_factory.mktemp("optimizer"))


@pytest.mark.parametrize("size", [1, 2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", names(FILE))
def test_distributed_optimizer(results, name, size):
    passed(results, name, size)
