"""Huge pages of a process that forks often."""

import os
import platform
import re
import subprocess
import sys

import pytest

from paceline.study.tune import trial_server

CODE = """
import re
from pathlib import Path
from paceline.study.tune.trial_server import use_huge_pages

def huge_kib():
    return int(re.search(r"AnonHugePages: *(\\d+)", Path("/proc/self/smaps_rollup").read_text())[1])

held = [bytes([number % 256]) * 4000 for number in range(8000)]
before = huge_kib()
use_huge_pages()
assert held == [bytes([number % 256]) * 4000 for number in range(8000)]
print(before, huge_kib())
"""


def test_memory_moves_to_huge_pages_unchanged():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    before, after = map(int, done.stdout.split())
    release = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    if release < (6, 1) or not trial_server._SIZE_FILE.exists():
        pytest.skip("the kernel has no MADV_COLLAPSE")
    assert after - before >= 8 << 10


@pytest.mark.parametrize("size", ["", "x", str(512 << 20), str(os.sysconf("SC_PAGE_SIZE"))])
def test_a_system_without_fitting_pages_is_left_as_it_is(tmp_path, monkeypatch, size):
    file = tmp_path / "size"
    file.write_text(size)
    monkeypatch.setattr(trial_server, "_SIZE_FILE", file)
    monkeypatch.setattr(trial_server.ctypes, "CDLL", lambda *_: pytest.fail("madvise was called"))
    trial_server.use_huge_pages()
