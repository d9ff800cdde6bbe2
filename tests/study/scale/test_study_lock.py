"""One command at a time works on a study; the jobs of different sizes do not exclude each other."""

import subprocess
import sys

import pytest
from test_scale_study import runs, study  # noqa: F401  the fixture

from paceline.analyze.scaling.study_events import StudyListener
from paceline.analyze.scaling.study_model import Setup
from paceline.security.run_lock import FolderInUseError
from paceline.study.scale.run_study import run_study
from paceline.study.study_folder import locked_sizes, new_run_folder

HOLD = """
import sys
from pathlib import Path
from paceline.study.study_folder import locked_sizes
with locked_sizes(Path(sys.argv[1]), print, [int(n) for n in sys.argv[2:]] or None):
    print("has it", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def hold():
    """Return a function that works on a folder, in another process."""
    started = []

    def begin(folder, *sizes):
        words = [sys.executable, "-c", HOLD, folder, *map(str, sizes)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "has it\n"
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def test_a_second_command_is_refused_and_removes_no_running_run(tmp_path, runs, hold):  # noqa: F811
    folder = study(tmp_path)
    running, _ = new_run_folder(folder, Setup(2, 64))
    output = running / "log"
    output.touch()
    holder = hold(folder)
    with pytest.raises(FolderInUseError, match=rf"in use by .*process {holder.pid} on .*--show"):
        run_study(folder, StudyListener())
    assert output.exists()
    assert not runs.order
    holder.kill()
    holder.wait()
    run_study(folder, StudyListener())
    assert not output.exists()
    assert len(runs.order) == 9
    assert not list(folder.glob(".paceline*"))


def test_jobs_of_different_sizes_work_on_a_study_at_the_same_time(tmp_path, runs, hold):  # noqa: F811
    folder = study(tmp_path, global_batch=64)
    hold(folder, 2)
    run_study(folder, StudyListener(), only={1})
    with pytest.raises(FolderInUseError):
        run_study(folder, StudyListener(), only={2})
    assert set(runs.order) == {"n1-b64"}
    with locked_sizes(folder, print):  # --continue, which looks for jobs that are missing
        pass
