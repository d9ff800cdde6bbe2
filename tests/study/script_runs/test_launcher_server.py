"""The process from which runs are forked, so that torch is imported once for all of them."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from paceline.security.processes import python_command
from paceline.study.script_runs.launcher_server import LauncherServer
from paceline.study.script_runs.run_process import run_processes


@pytest.fixture
def server(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("modules")
    (folder / "execute.py").write_text("import sys; exec(sys.argv.pop(1))")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    found = LauncherServer(["json", "planted"])
    yield found
    found.close()


def python(text, *words):
    return python_command("-m", "execute", text, *words)


def test_commands_are_forks_with_their_own_output_arguments_and_exit_codes(
    server, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shown = "import os, sys; print(os.getppid(), 'json' in sys.modules, os.getcwd(), sys.argv[1:3])"
    commands = [
        (python(shown, "a", "-b"), tmp_path / "1.log"),
        (python(shown, "a", "-b"), tmp_path / "2.log"),
        (python("raise SystemExit(7)"), tmp_path / "3.log"),
        (python("raise SystemExit('no data')"), tmp_path / "4.log"),
        (python("1 / 0"), tmp_path / "5.log"),
    ]
    codes = [code for code, _ in run_processes(commands, 60, server)]
    assert codes == [0, 0, 7, 1, 1]
    first, second = ((tmp_path / f"{n}.log").read_text() for n in (1, 2))
    assert first == second  # forks of one process
    assert first.split(" ", 1)[1] == f"True {tmp_path} ['a', '-b']\n"
    assert (tmp_path / "4.log").read_text() == "no data\n"
    assert "ZeroDivisionError" in (tmp_path / "5.log").read_text()


def test_command_of_any_length_is_run(server, tmp_path):
    words = ["x" * 100_000] * 5
    text = "import sys; print(sum(map(len, sys.argv[1:])))"
    assert [
        code for code, _ in run_processes([(python(text, *words), tmp_path / "log")], 60, server)
    ] == [0]
    assert (tmp_path / "log").read_text() == "500000\n"


def test_error_of_a_start_is_raised_where_the_run_was_asked_for(server, tmp_path):
    with pytest.raises(TypeError, match="not JSON serializable"):
        run_processes([(python("pass", object()), tmp_path / "log")], 60, server)


def test_run_that_cannot_be_started_is_one_line_in_its_log(server, tmp_path, capfd):
    for number, log, folder in ((1, tmp_path / "log", tmp_path / "no"), (2, tmp_path, tmp_path)):
        server.send_start(
            number, {"words": python("pass"), "output": str(log), "folder": str(folder)}
        )
        assert server.code(number, 60) == 1
    start = "paceline: a run can't be started: "
    assert (tmp_path / "log").read_text().startswith(start)
    assert (tmp_path / "log").read_text().count("\n") == 1
    said = capfd.readouterr().err  # of the run without a log
    assert said.startswith(start)
    assert said.count("\n") == 1


def test_commands_end_by_a_signal_and_with_the_server(server, tmp_path):
    pid = tmp_path / "pid"
    text = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    running = server.start_command(python(text), str(tmp_path / "1.log"))
    while not (pid.exists() and pid.read_text()):
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.01)
    running.send_signal(signal.SIGINT)
    assert running.wait(60) == 1
    assert "KeyboardInterrupt" in (tmp_path / "1.log").read_text()
    kill = "import os, time; os.kill(os.getppid(), 9); time.sleep(600)"
    assert run_processes([(python(kill), tmp_path / "3.log")], 60, server)[0][0] == -signal.SIGKILL
    with pytest.raises(ValueError, match="the process that starts the runs has ended"):
        run_processes([(python("pass"), tmp_path / "4.log")], 60, server)


def test_commands_end_with_the_process_that_asked_for_them(server, tmp_path):
    """Also if that is killed."""
    pid = tmp_path / "pid"
    text = f"import os, time; open({str(pid)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    words = python(
        "import pathlib, sys, time\n"
        "from paceline.study.script_runs.launcher_server import LauncherServer\n"
        "server = LauncherServer([])\n"
        f"server.start_command({python(text)!r}, {str(tmp_path / 'log')!r})\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen(words)
    while not (pid.exists() and pid.read_text()):
        time.sleep(0.01)
    process.kill()
    process.wait()
    until = time.monotonic() + 60
    while time.monotonic() < until and Path("/proc", pid.read_text()).exists():
        time.sleep(0.01)
    assert not Path("/proc", pid.read_text()).exists()


def test_server_imports_no_module_of_the_working_directory(server, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "planted.py").write_text("open('ran', 'w').close()")
    assert run_processes([(python("import json"), tmp_path / "log")], 60, server)[0][0] == 0
    assert not (tmp_path / "ran").exists()
