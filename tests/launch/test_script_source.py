"""The source files of a script, and whether it uses Horovod, without importing anything."""

import sys
from pathlib import Path

import pytest
import ranks

from paceline.launch import script_source
from paceline.launch.job import Job
from paceline.launch.script_source import read_source, uses_horovod


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A script, and a package with a module that -m starts."""
    files = {
        "train.py": """
            import os, torch.nn as nn, helpers
            from mine.models import (
                small,  # a comment, with a comma
                large as big,
            )
            import numpy.linalg
            """,
        "helpers.py": "def f():\n    import deep.er\n",
        "deep/er.py": "import yaml",
        "mine/__init__.py": "",
        "mine/models/__init__.py": "from . import common",
        "mine/models/small.py": "from ..other import x",
        "mine/models/large.py": "import sys",
        "mine/models/common.py": "",
        "mine/other.py": "from . import missing",
        "mine/unused.py": "import horovod",
        "mine/main.py": "from mine.models.small import x\nimport horovod.torch as hvd",
        "mine/__main__.py": "from .main import x",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        ranks.write((tmp_path / name).parent, text, name.rpartition("/")[2])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_local_modules_of_script_are_found_and_packages_named(tree):
    found = read_source("train.py", False)
    names = {str(path.relative_to(tree)) for path in found.texts}
    assert names == {
        *("train.py", "helpers.py", "deep/er.py", "mine/__init__.py", "mine/models/__init__.py"),
        *("mine/models/small.py", "mine/models/large.py", "mine/models/common.py", "mine/other.py"),
    }
    assert next(iter(found.texts)) == tree / "train.py"
    assert found.packages == {"torch", "numpy", "yaml"}
    assert found.complete


@pytest.mark.parametrize("module", ["mine.main", "mine"])
def test_local_modules_of_module_are_found(tree, monkeypatch, module):
    monkeypatch.setattr(sys, "path", [str(tree), *sys.path])
    found = read_source(module, True)
    names = {str(path.relative_to(tree)) for path in found.texts}
    assert {"mine/main.py", "mine/models/small.py", "mine/other.py"} <= names
    assert "horovod" in found.packages


@pytest.mark.parametrize(
    ("text", "used"),
    [
        ("import horovod.torch as hvd", True),
        ("import torch, horovod.torch as hvd", True),
        ("from importlib import import_module as horovod_import", False),
        ("try:\n    import horovod\nexcept ImportError: pass", True),
        ("from horovod import torch as hvd", True),
        ("import os; os.environ['HOROVOD_RANK']", True),
        ("# import horovod", False),
        ("print('as with horovod')", False),
        ("import torch", False),
        ("import ddl", True),
        ("import keras, ddl", True),
        ("from ddl import rank", True),
        ("import my_ddl", False),
        ("import beside", True),
    ],
)
def test_use_of_horovod_is_read_from_source(tmp_path, text, used):
    ranks.write(tmp_path, "import horovod.tensorflow", "beside.py")
    assert uses_horovod(Job(str(ranks.write(tmp_path, text)))) is used


def test_search_for_horovod_reads_no_file_after_the_first_match(tmp_path, monkeypatch):
    ranks.write(tmp_path, "", "beside.py")
    script = ranks.write(tmp_path, "import beside\nimport horovod.torch as hvd")
    read, read_text = [], Path.read_text

    def note(path, **options):
        read.append(path.name)
        return read_text(path, **options)

    monkeypatch.setattr(Path, "read_text", note)
    assert uses_horovod(Job(str(script)))
    assert read == [script.name]


def test_number_of_read_files_is_limited(tree, monkeypatch):
    monkeypatch.setattr(script_source, "MAX_FILES", 2)
    found = read_source("train.py", False)
    assert len(found.texts) == 2
    assert not found.complete
