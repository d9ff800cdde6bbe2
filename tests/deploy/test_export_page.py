"""The three commands of the page about export: train on two ranks, export, call from Fortran."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_commands_of_the_page(tmp_path):
    for package, hint in (("chemicals", "pip install 'paceline[examples]'"),):
        pytest.importorskip(package, reason=hint)
    if shutil.which("gfortran") is None:
        pytest.skip("no gfortran. HINT: make test-packages")
    page = (ROOT / "docs/how-to/run/export.md").read_text()
    block = re.search(r"```bash\n(.*?)```", page, re.DOTALL)[1]
    lines = re.sub(r"\\\n\s*|(?<=&&)\n\s*", " ", block.strip()).splitlines()
    assert [line.split()[0] for line in lines] == ["paceline", "paceline", "gfortran"]
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "run").mkdir()
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    lines[1] += " --backend builtin --backend onnxruntime"  # AOTInductor compiles for a minute
    for line in lines:
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, env=env, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
    error = re.search(r"error of the test vectors\s+(\S+)", done.stdout)
    assert float(error[1]) < 1e-5
    assert re.search(r"difference of the two orders\s+0.0E", done.stdout)
