"""Short runs of every fuzzing target; ``make fuzz SECONDS=3600`` makes a long one."""

import os

import pytest
from needs import need

from fuzz import __main__ as fuzz

SECONDS = int(os.environ.get("PACELINE_FUZZ_SECONDS", "5"))


@pytest.mark.soak
@pytest.mark.parametrize("target", fuzz.names())
def test_fuzzing_finds_no_traceback_hang_or_memory_growth(target, tmp_path):
    try:
        import atheris  # noqa: F401
    except ImportError:
        need(["atheris"], "pip install 'atheris>=3' (x86-64, Python before 3.14)")
    process = fuzz.start(target, SECONDS, tmp_path / "corpus", tmp_path / "found")
    code = process.wait(timeout=SECONDS + 120)
    assert code == 0, f"{target}: {[path.name for path in (tmp_path / 'found').iterdir()]}"
