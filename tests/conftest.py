import compileall
import ctypes.util
import os
import shutil
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "support"))

import flood
from needs import need

import bed
from durations import Durations

# A shell without job control starts commands in the background with Ctrl-C ignored, and what they
# start inherits that: tests that interrupt a process would wait for its end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Soak tests draw from this seed, which differs between runs. xdist workers inherit it.
os.environ.setdefault("PACELINE_SEED", str(int(time.time()) % 1_000_000))


# Where PYTHONDONTWRITEBYTECODE is set, every process that starts would compile the modules of
# Paceline that it imports, and every pytest process all test files.
NO_BYTECODE = sys.dont_write_bytecode
sys.dont_write_bytecode = False


def pytest_configure(config):
    if NO_BYTECODE and not hasattr(config, "workerinput"):
        compileall.compile_dir(Path(__file__).parents[1] / "src", quiet=2)
    config.pluginmanager.register(Durations(config))


def pytest_collection_finish():
    sys.dont_write_bytecode = NO_BYTECODE  # modules that tests write may change within a second


def pytest_report_header():
    return f"PACELINE_SEED={os.environ['PACELINE_SEED']} repeats the random choices of this run"


@pytest.fixture(autouse=True)
def tables_add_up(monkeypatch):
    """Fail a test whose report has tables that do not add up, which users see as a doubt."""
    report = sys.modules.get("paceline.analyze.figures.report")
    if report is None:
        return
    add_up = report._tables_add_up

    def check(*args):
        assert add_up(*args), report.TABLES_DIFFER
        return True

    monkeypatch.setattr(report, "_tables_add_up", check)


@pytest.fixture
def closing():
    """Close what a test opens when the test ends."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def flooded(closing, tmp_path):
    """Start unrelated connections from another process; return once they are open."""
    return lambda *where, **size: closing.enter_context(flood.running(tmp_path, *where, **size))


@pytest.fixture(scope="session")
def browser():
    """Start headless Chromium."""
    found = shutil.which("chromium")
    need([] if found else ["chromium"], "make test-packages")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture
def jemalloc():
    """Require jemalloc as a library that can be preloaded."""
    need([] if ctypes.util.find_library("jemalloc") else ["libjemalloc2"], "make test-packages")


@pytest.fixture(scope="session")
def hosts():
    """host0 to host4 with sshd, restored after each test; see bed/hosts.py."""
    need(bed.missing())
    made = bed.Hosts(4)
    yield made
    made.close()


@pytest.fixture(scope="session")
def slurm(hosts):
    """Slurm over the hosts; see bed/slurm.py. Its jobs are cancelled after each test."""
    need(bed.missing_slurm())
    return bed.Slurm(hosts)


@pytest.fixture(scope="session")
def mpi(hosts):
    """Open MPI and MPICH over the hosts; see bed/mpi.py."""
    need(bed.missing_mpi())
    return bed.MPI_VARIABLES


@pytest.fixture
def shared_folder(hosts):
    """A new folder that all hosts share, whereas tmp_path differs between hosts."""
    folder = hosts.new_folder()
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def _hosts_as_new(request):
    used = "hosts" in request.fixturenames
    made = request.getfixturevalue("hosts") if used else None
    yield
    if isinstance(made, bed.Hosts):  # other tests may have a parameter of this name
        made.restore()
