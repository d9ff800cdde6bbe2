"""Taps: functions of modules that subscribers replace, before or after the modules are imported."""

import importlib
import importlib.util
import sys

import pytest

from paceline.record.hooks.taps import Tap, around

MODULE = """
def twice(x):
    return 2 * x

class Model:
    def forward(self, x):
        return x + 1
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Return the name of a package that exports a function of its module."""
    name = f"tapped_{tmp_path.name.replace('-', '_')}"
    (tmp_path / name).mkdir()
    (tmp_path / name / "__init__.py").write_text("from .inner import twice\n")
    (tmp_path / name / "inner.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for module in (name, f"{name}.inner"):
        sys.modules.pop(module, None)


@pytest.mark.parametrize("is_imported", [False, True])
def test_subscribers_see_calls_through_the_module_and_its_package(package, is_imported):
    if is_imported:
        importlib.import_module(package)
    seen = []
    twice, forward = Tap(f"{package}.inner", "twice"), Tap(f"{package}.inner", "Model.forward")
    twice.before(lambda *args, **options: seen.append(("first", args, options)))
    twice.after(lambda result, *args, **options: seen.append(("second", result)))
    forward.around(lambda function, model, x: 10 * function(model, x))
    outer, inner = importlib.import_module(package), importlib.import_module(f"{package}.inner")
    assert outer.twice is inner.twice
    assert outer.twice(3) == 6
    assert inner.twice(x=4) == 8
    assert inner.Model().forward(1) == 20
    assert seen == [
        *(("first", (3,), {}), ("second", 6)),
        *(("first", (), {"x": 4}), ("second", 8)),
    ]


def test_module_that_was_looked_for_before_its_import_is_patched(package):
    seen = []
    Tap(package, "twice").before(seen.append)
    assert importlib.util.find_spec(package) is not None  # as transformers looks for safetensors
    importlib.import_module(package).twice(5)
    assert seen == [5]


def test_function_that_is_missing_does_not_fail_the_import(package, monkeypatch, capsys):
    monkeypatch.setattr("paceline.record.hooks.hook_failures.failed_hooks", {})
    Tap(f"{package}.inner", "old_name", is_optional=True).before(print)
    Tap(f"{package}.inner", "new_name").before(print)
    assert importlib.import_module(package).twice(2) == 4
    said = capsys.readouterr().err
    assert said.count("is off") == 1
    assert "new_name" in said


def test_replaced_function_is_restored_where_it_was_replaced(package):
    outer, inner = importlib.import_module(package), importlib.import_module(f"{package}.inner")
    twice = inner.twice
    restore = around(inner, "twice", lambda function, x: -function(x))
    assert (outer.twice(3), inner.twice(3)) == (-6, -6)
    restore()
    assert outer.twice is inner.twice is twice
