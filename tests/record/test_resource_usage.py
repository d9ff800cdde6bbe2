"""Resource usage of a process over an interval, measured inside it."""

import os
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest
import ranks

from paceline.record.experiments.observer import fit_cpu_time
from paceline.record.ring.resource_usage import (
    OtherThreads,
    measure_page_fault_s,
    read_usage,
    usage_between,
)


def busy(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_cpu_time_and_wait_time_are_distinguished():
    before = read_usage()
    busy(0.2)
    time.sleep(0.2)
    used = usage_between(before, read_usage())
    assert used["seconds"] >= 0.4
    assert used["thread"] == pytest.approx(0.2, abs=0.05)
    assert 0.2 <= used["process"] < 0.3
    assert 0 <= used["delayed"] <= used["seconds"] - 0.2
    assert used["host"] >= 0.1


def test_page_faults_are_counted_and_timed():
    before = read_usage()
    memory = np.ones(64 << 20, np.uint8)  # too large for memory that was freed before
    used = usage_between(before, read_usage())
    least = len(memory) // (2 << 20)  # with the largest page size
    assert least <= used["faults"] <= 1.2 * len(memory) / 4096 + 1000
    assert 1e-8 < measure_page_fault_s() < 1e-3


def test_busiest_other_thread_is_reported_with_its_line():
    end = threading.Event()

    def hold():
        while not end.is_set():
            pass

    others = OtherThreads()
    thread = threading.Thread(target=hold, name="monitor")
    thread.start()
    try:
        # On a busy machine the thread's share of a core is small.
        ranks.wait_until(lambda: others.busiest().get("seconds", 0.0) > 0.1)
        found = others.busiest()
    finally:
        end.set()
        thread.join()
    assert (found["name"], os.path.basename(found["file"])) == ("monitor", "test_resource_usage.py")
    assert found["line"] > hold.__code__.co_firstlineno


def test_files_opened_by_forked_workers_are_counted(tmp_path):
    script = tmp_path / "opens.py"
    (tmp_path / "data").write_text("x")
    script.write_text(
        textwrap.dedent(
            """
            import os, sys
            from paceline.record.ring.resource_usage import FileOpenCounter
            opens = FileOpenCounter()
            for _ in range(3):
                open(sys.argv[1]).close()
            open("/proc/self/stat").close()
            if os.fork() == 0:
                for _ in range(4):
                    open(sys.argv[1]).close()
                os._exit(0)
            os.wait()
            print(int(opens))
            """
        )
    )
    words = [sys.executable, str(script), str(tmp_path / "data")]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "7\n"


def test_cpu_time_is_fitted_to_batch_elements():
    found = fit_cpu_time([(float(n), 0.01 + 0.001 * n) for n in (10, 20, 30, 40)])
    assert found["mean"] == 25
    assert found["slope"] == pytest.approx(0.001)
    assert found["correlation"] == pytest.approx(1)
    assert fit_cpu_time([(10.0, t) for t in (0.1, 0.2, 0.3)])["correlation"] == 0
