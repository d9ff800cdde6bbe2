"""Programs in the working directory are not executed, whatever PATH contains."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import paceline
from paceline.security.programs import find_program, program_command

SOURCE = Path(paceline.__file__).parent
STARTERS = {"run", "Popen", "call", "check_call", "check_output"}
SEARCHERS = {
    *("os.system", "os.popen", "os.execvp", "os.execlp", "os.posix_spawnp", "shutil.which"),
}
NAMED = ("program_command(", "python_command(")
# Other first arguments of a start, by module.
RIGHT = {
    "data/staging/staged_sets.py": {"words"},  # of python_command
    "launch/monitor/process_stack.py": {
        "shutil.which",  # in the environment's folder
        "[tool, 'dump', '--nonblocking', '--json', '--pid', str(pid)]",  # of find_program
    },
    "launch/requeue.py": {"words"},  # of program_command
    "study/bench_comm.py": {"command"},  # of find_program
    "study/environment/pack_environment.py": {"words"},  # of program_command
    "study/input_rate/run_loaders.py": {"feed.words()"},  # of python_command
    "study/probe/measure/import_time.py": {"words"},  # of find_program and python_command
    "study/script_runs/overlay.py": {"found.command(scratch, ())"},  # of python_command
    "study/script_runs/run_process.py": {"words"},  # of python_command
}


def starts(tree: ast.AST) -> list[str]:
    """Return what starts a program that ``security.programs`` did not find."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in SEARCHERS:
            found.append(ast.unparse(node))
        if not isinstance(node, ast.Call):
            continue
        text = ast.unparse(node.func)
        if text in {f"subprocess.{name}" for name in STARTERS}:
            found.append(ast.unparse(node.args[0]))
    return [one for one in found if not one.startswith(NAMED)]


def test_programs_are_started_only_by_program_command():
    for path in sorted(SOURCE.rglob("*.py")):
        name = str(path.relative_to(SOURCE))
        others = set(starts(ast.parse(path.read_text()))) - RIGHT.get(name, set())
        assert not others, f"{name}: {others}. HINT: paceline.security.programs.program_command"


def test_search_for_starts_finds_known_cases():
    tree = ast.parse("subprocess.run(['srun'])\nos.system('srun')\nshutil.which('srun')")
    assert starts(tree) == ["['srun']", "os.system", "shutil.which"]


@pytest.mark.parametrize("entry", ["", ".", "tools"])
def test_program_is_not_found_in_working_directory(tmp_path, monkeypatch, entry):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join([entry, "/usr/bin", "/bin"]))
    for folder in (tmp_path, tmp_path / "tools"):
        folder.mkdir(exist_ok=True)
        for name in ("env", "sbatch-of-another-user"):
            (folder / name).write_text("#!/bin/sh\necho executed\n")
            (folder / name).chmod(0o755)
    assert find_program("env") in ("/usr/bin/env", "/bin/env")
    assert find_program("./env") == "./env"  # named by the user
    with pytest.raises(FileNotFoundError, match="sbatch-of-another-user"):
        program_command("sbatch-of-another-user")


def test_submit_does_not_execute_program_of_working_directory(tmp_path):
    for name in ("sbatch", "qsub", "bsub"):
        (tmp_path / name).write_text("#!/bin/sh\ntouch executed\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "train.py").write_text("")
    environment = {**os.environ, "PATH": f":{os.environ['PATH']}"}
    words = [Path(sys.executable).with_name("paceline"), "submit", "train.py"]
    subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, timeout=60)
    assert not (tmp_path / "executed").exists()
