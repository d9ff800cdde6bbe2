"""GPU tests: skipped without a GPU, or rehearsed on the CPU with GPU_TESTS_DEVICE=cpu.

Under ``run.py`` each result is appended to a file when it is known, and a test that was recorded
there before is left out: the process was started again after a hang or a crash.
"""

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from on_gpu import CUDA, DEVICE

import paceline

RESULTS, CURRENT = os.environ.get("GPU_TESTS_RESULTS"), os.environ.get("GPU_TESTS_CURRENT")
GROUP = os.environ.get("GPU_TESTS_GROUP", "")
LIMIT_S = 60.0
MAX_REASON = 3000


def pytest_configure(config):
    config.addinivalue_line("markers", "limit(seconds): of one GPU test, under tests/gpu/run.py")
    config.addinivalue_line("markers", "only_gpu: has no meaning on the CPU")


def pytest_collection_modifyitems(items):
    if RESULTS and Path(RESULTS).exists():
        lines = map(json.loads, Path(RESULTS).read_text().splitlines())
        done = {line["name"] for line in lines if line["group"] == GROUP}
        items[:] = [item for item in items if item.nodeid not in done]


@pytest.fixture(autouse=True)
def _needs_a_gpu(request):
    if CUDA and not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    if not CUDA and request.node.get_closest_marker("only_gpu"):
        pytest.skip("it has no meaning on the CPU")


NO_GPU = "PyTorch finds no GPU. HINT: make gpu DEVICE=cpu rehearses on the CPU"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    if report.skipped and isinstance(report.longrepr, tuple) and NO_GPU in report.longrepr[2]:
        report.longrepr = (__file__, 1, report.longrepr[2])  # one line in the summary
    return report


def pytest_runtest_logstart(nodeid):
    if CURRENT:
        Path(CURRENT).write_text(f"{nodeid} {_limits.get(nodeid, LIMIT_S)}")


_limits = {}
_reports = {}


def pytest_collection_finish(session):
    for item in session.items:
        mark = item.get_closest_marker("limit")
        if mark:
            _limits[item.nodeid] = mark.args[0]


def pytest_runtest_logreport(report):
    _reports.setdefault(report.nodeid, []).append(report)
    if report.when == "teardown" and RESULTS:
        _write(report.nodeid, _reports.pop(report.nodeid))


def _write(nodeid, reports):
    worst = next((r for r in reports if r.failed), None)
    skipped = next((r for r in reports if r.skipped), None)
    outcome = "failed" if worst else "skipped" if skipped else "passed"
    reason = ""
    if worst is not None:
        reason = f"{worst.longreprtext}\n{worst.capstderr}"[-MAX_REASON:]
    elif skipped is not None:
        reason = skipped.longrepr[2] if isinstance(skipped.longrepr, tuple) else ""
    line = {
        "group": GROUP,
        "name": nodeid,
        "outcome": outcome,
        "seconds": round(sum(r.duration for r in reports), 2),
        "reason": reason,
    }
    with open(RESULTS, "a") as file:
        file.write(json.dumps(line) + "\n")
    if worst is not None and CUDA and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError:  # after a failed kernel this process cannot use the GPU any more
            os._exit(70)


@pytest.fixture
def device():
    return torch.device(DEVICE, 0) if CUDA else torch.device("cpu")


@pytest.fixture
def make_world(monkeypatch):
    """Return a function that makes a world of one rank in this process, closed at the end."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    made = []

    def make(**options):
        options = {"progress": False, "record": False, "device": DEVICE, **options}
        made.append(paceline.init(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def world(make_world):
    return make_world()
