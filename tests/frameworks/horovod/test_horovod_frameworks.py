"""Horovod's interface for TensorFlow and Keras, from its documentation.

The cases of tensorflow_cases.py and keras_cases.py run in one job of two ranks each, those of Keras
with both backends. They need an environment with TensorFlow: ``make test-frameworks``.
"""

import ast
import importlib.util
import json
import subprocess
from pathlib import Path

import pytest
import ranks

HERE = Path(__file__).parent
BACKENDS = ("torch", "tensorflow")
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="tensorflow is not installed: make test-frameworks",
)


def names(file):
    """Return the cases of a file. Its text is read: importing it would import TensorFlow."""
    found = []
    for one in ast.parse((HERE / file).read_text()).body:
        if isinstance(one, ast.FunctionDef):
            decorators = {getattr(each, "id", "") for each in one.decorator_list}
            found += [one.name] if "case" in decorators else []
            if "both" in decorators:
                found += [f"{one.name}_eagerly", f"{one.name}_in_graph"]
    return found


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """Return a function that returns the results of a file's cases on each rank."""
    known = {}

    def of_file(file, backend):
        if (file, backend) not in known:
            folder = tmp_path_factory.mktemp("cases")
            variables = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
            variables["TF_NUM_INTEROP_THREADS"] = "4"  # also where a rank has one core
            if backend == "torch":  # each gradient is exchanged in its own memory
                variables["HOROVOD_FUSION_THRESHOLD"] = "0"
            try:
                ranks.run(HERE / file, folder, check=False, timeout=500, **variables)
            except subprocess.TimeoutExpired:
                pass  # the cases after the one that hangs have no result
            files = [folder / f"{rank}.json" for rank in range(2)]
            known[file, backend] = [
                json.loads(one.read_text()) if one.exists() else {} for one in files
            ]
        return known[file, backend]

    return of_file


@pytest.mark.parametrize("name", names("tensorflow_cases.py"))
def test_tensorflow(results, name):
    for rank, found in enumerate(results("tensorflow_cases.py", "tensorflow")):
        assert found.get(name, "the job ended before") == "", f"rank {rank}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", names("keras_cases.py"))
def test_keras(results, name, backend):
    for rank, found in enumerate(results("keras_cases.py", backend)):
        assert found.get(name, "the job ended before") == "", f"rank {rank}"
