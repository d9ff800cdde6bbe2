"""Freed memory returns to the system where that was asked for, and the user has not set it."""

import subprocess
import sys

import pytest
import ranks

SCRIPT = """
import re, sys
import torch
from pathlib import Path
from paceline.knobs.process import return_freed_memory

def resident():
    return int(re.search(r"RssAnon:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) >> 10

torch.ones(8 << 20)  # freed: glibc takes blocks of up to 32 MiB from its heap from now on
changed = "return" in sys.argv and return_freed_memory()
before, kept = resident(), []
for _ in range(40):  # as FSDP does: a large block, then a small one that stays
    large = torch.ones(1 << 19)
    kept.append(torch.ones(1 << 16))
    del large
    kept.append(torch.ones(1 << 15))
print(changed, resident() - before)
"""


def found(*words, **variables):
    command = [sys.executable, "-c", SCRIPT, *words]
    env = ranks.environment(**variables)
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    changed, mib = done.stdout.split()
    return changed == "True", int(mib)


@pytest.mark.long
def test_freed_blocks_leave_no_gaps():
    changed, returned = found("return")
    assert changed
    assert returned <= 40 * (0.25 + 0.125) + 3  # MiB that are in use
    assert found()[1] > returned


@pytest.mark.long
def test_settings_of_the_user_remain():
    assert found("return", MALLOC_TRIM_THRESHOLD_="1000000")[0] is False
    assert found("return", GLIBC_TUNABLES="glibc.malloc.arena_max=2")[0] is False
